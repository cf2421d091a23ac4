"""Processes that work for this one: JSON lines in and out, a limit for each reply, and a kill that ends all.

Such a process verifies answers or runs a reward. It leads a session of its own, so it can be killed together
with what it has started, and Ctrl-C does not reach it. It ends when its standard input ends, and so with its
parent.
"""

import itertools
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import IO, Any

from forgeasync.isolation.bubblewrap import program_command, start_filtered

logger = logging.getLogger(__name__)

MAX_REPLY_BYTES = 1 << 16
"""Longest reply that ``ContainedProcess.ask`` reads."""
_END_LIMIT_S = 10.0
"""How long a process may live after its output has ended."""


class ProcessGone(RuntimeError):
    """A process has not replied: it was killed at its limit, has ended, or has replied with no line."""

    def __init__(self, exit_code: int, *, is_late: bool) -> None:
        super().__init__(f"no reply (exit code {exit_code})")
        self.exit_code = exit_code
        """As of ``subprocess``."""
        self.is_late = is_late
        """It was killed because the limit had passed."""


class ContainedProcess:
    """A process with pipes to its standard input and output. It is stopped when this object is garbage."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        bubblewrap: str | None = None,
        folder: str | None = None,
        scratch: str | None = None,
    ) -> None:
        """Start ``command``, inside of bubblewrap if the path of its program is given.

        ``folder`` is its working directory; by default that of this process. The folder ``scratch`` of the
        host is removed when the process is stopped.
        """
        start = subprocess.Popen if bubblewrap is None else start_filtered
        self._process = process = start(
            [*([] if bubblewrap is None else program_command(bubblewrap)), *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=env,
            cwd=folder,
            # The session is also a process group, which is killed as one.
            start_new_session=True,
        )
        assert process.stdin is not None and process.stdout is not None
        self._stdin = process.stdin
        self.replies: IO[bytes] = process.stdout
        """Its standard output; whoever reads it must not use ``ask`` as well."""
        # Runs at exit too, and when this object is garbage.
        self.stop = weakref.finalize(self, _stop, process, scratch)
        """Kills the process and waits for its end."""

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """As of ``subprocess``; None while it runs."""
        return self._process.poll()

    def wait(self) -> int:
        """Wait for its end; returns the exit code."""
        return self._process.wait()

    def kill(self) -> None:
        """Kill it with all that it has started; does not wait."""
        _kill_group(self._process)

    def send(self, message: Mapping[str, Any]) -> None:
        """Write one line. That the process has died shows in its replies, not here."""
        with suppress(BrokenPipeError):
            write_line(self._stdin, message)

    def ask(self, request: Mapping[str, Any], *, limit_s: float) -> dict[str, Any]:
        """Send a request and return the reply to it. Not thread-safe.

        Raises:
            ProcessGone: there is none within ``limit_s`` seconds. The process has been stopped.
        """
        is_late = threading.Event()

        def kill() -> None:
            is_late.set()
            self.kill()

        # The kill ends a blocked write as well as a blocked read.
        with KILL_WATCH.limit(limit_s, kill):
            self.send(request)
            line = self.replies.readline(MAX_REPLY_BYTES)
        if not line.endswith(b"\n"):
            if len(line) < MAX_REPLY_BYTES:
                # Its output has ended: wait for its own exit code before it is killed.
                with KILL_WATCH.limit(_END_LIMIT_S, self.kill):
                    self.wait()
            self.stop()
            raise ProcessGone(self.wait(), is_late=is_late.is_set())
        return json.loads(line)


def open_channel() -> tuple[IO[bytes], IO[bytes]]:
    """In a contained process: return the streams of requests and of replies.

    Replies get a descriptor of their own, so that nothing that a library prints can end up among them.
    """
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return sys.stdin.buffer, replies


def write_line(stream: IO[bytes], message: Mapping[str, Any]) -> None:
    """Write a message as one line of JSON, at once."""
    stream.write(json.dumps(message).encode() + b"\n")
    stream.flush()


class KillWatch:
    """Calls ``kill`` of everything that takes longer than its limit. Its thread starts with the first one."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._deadlines: dict[int, tuple[float, Callable[[], None]]] = {}
        """By number: when to kill (``time.monotonic``), and how."""
        self._numbers = itertools.count()
        self._wakes_at = 0.0
        """When the thread looks again by itself."""
        self._thread: threading.Thread | None = None

    @contextmanager
    def limit(self, limit_s: float, kill: Callable[[], None]) -> Iterator[None]:
        """Have ``kill`` called, in another thread, if the block takes longer; never after the block."""
        deadline = time.monotonic() + limit_s
        with self._changed:
            number = next(self._numbers)
            self._deadlines[number] = deadline, kill
            if self._thread is None:
                self._thread = threading.Thread(target=self._watch, name="kill-watch", daemon=True)
                self._thread.start()
            elif deadline < self._wakes_at:
                # Only then: limits are long and blocks short, so the thread sleeps through nearly all.
                self._changed.notify()
        try:
            yield
        finally:
            with self._changed:
                self._deadlines.pop(number, None)

    def _watch(self) -> None:
        with self._changed:
            while True:
                now = time.monotonic()
                due = [
                    (deadline, number) for number, (deadline, _) in self._deadlines.items() if deadline <= now
                ]
                # The one that was due first is killed first, also where this thread was late for both.
                for _, number in sorted(due):
                    # With the lock held: a block that ends now waits for it, and nothing is killed after it.
                    _, kill = self._deadlines.pop(number)
                    try:
                        kill()
                    except Exception:
                        # The others still have to be watched.
                        logger.exception("what has taken too long cannot be killed")
                first = min((deadline for deadline, _ in self._deadlines.values()), default=None)
                self._wakes_at = float("inf") if first is None else first
                self._changed.wait(None if first is None else max(0.0, first - now))


KILL_WATCH = KillWatch()
"""Of this process."""


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _stop(process: subprocess.Popen[bytes], scratch: str | None) -> None:
    """Kill a process, wait for its end, and remove its folder."""
    assert process.stdin is not None and process.stdout is not None
    _kill_group(process)
    process.wait()
    with suppress(BrokenPipeError):  # a request that it never read is still buffered
        process.stdin.close()
    process.stdout.close()
    if scratch is not None:
        shutil.rmtree(scratch, ignore_errors=True)
