"""Worker processes that exchange JSON lines with this one, with a time limit for each reply.

A contained process verifies answers or runs a reward. It leads its own session, so it can be killed together
with the processes that it started, and Ctrl-C does not reach it. It exits when its standard input is closed,
and so also when its parent exits.
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
"""Maximum length of a reply that ``ContainedProcess.ask`` reads."""
_END_LIMIT_S = 10.0
"""Time limit for a process to exit after it has closed its output."""


class ProcessExited(RuntimeError):
    """Raised when a process gave no valid reply: it was killed at its limit, exited, or sent no complete
    line."""

    def __init__(self, exit_code: int, *, is_late: bool) -> None:
        super().__init__(f"no reply (exit code {exit_code})")
        self.exit_code = exit_code
        """Exit code as in ``subprocess``."""
        self.is_late = is_late
        """True if the process was killed because its time limit had passed."""


class ContainedProcess:
    """Process with pipes to its standard input and output; stopped when this object is garbage-collected."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        bubblewrap: str | None = None,
        folder: str | None = None,
        scratch: str | None = None,
    ) -> None:
        """Start ``command``, inside bubblewrap if ``bubblewrap``, the path of ``bwrap``, is given.

        ``folder`` is the working directory; the default is that of this process. ``scratch``, a folder on the
        host, is removed when the process is stopped.
        """
        start = subprocess.Popen if bubblewrap is None else start_filtered
        self._process = process = start(
            [*([] if bubblewrap is None else program_command(bubblewrap)), *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=env,
            cwd=folder,
            # The session's leader also leads a process group, which is killed as a whole.
            start_new_session=True,
        )
        assert process.stdin is not None and process.stdout is not None
        self._stdin = process.stdin
        self.replies: IO[bytes] = process.stdout
        """Standard output of the process; do not read it if you use ``ask``."""
        # The finalizer also runs at interpreter exit and when this object is garbage-collected.
        self.stop = weakref.finalize(self, _stop, process, scratch)
        """Function that kills the process, waits for its exit and removes ``scratch``."""

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """Exit code as in ``subprocess``; None while the process runs."""
        return self._process.poll()

    def wait(self) -> int:
        """Wait for the process to exit; returns the exit code."""
        return self._process.wait()

    def kill(self) -> None:
        """Kill the process group of the process; does not wait."""
        _kill_group(self._process)

    def send(self, message: Mapping[str, Any]) -> None:
        """Write one line. Does not raise if the process has died; its replies then end."""
        with suppress(BrokenPipeError):
            write_line(self._stdin, message)

    def ask(self, request: Mapping[str, Any], *, limit_s: float) -> dict[str, Any]:
        """Send a request and return the reply to it. Not thread-safe.

        Raises:
            ProcessExited: no valid reply arrived within ``limit_s`` seconds. The process has been stopped.
        """
        is_late = threading.Event()

        def kill() -> None:
            is_late.set()
            self.kill()

        # The kill unblocks a blocked write as well as a blocked read.
        with KILL_WATCH.limit(limit_s, kill):
            self.send(request)
            line = self.replies.readline(MAX_REPLY_BYTES)
        if not line.endswith(b"\n"):
            if len(line) < MAX_REPLY_BYTES:
                # The output has ended: wait for the process's own exit code before killing it.
                with KILL_WATCH.limit(_END_LIMIT_S, self.kill):
                    self.wait()
            self.stop()
            raise ProcessExited(self.wait(), is_late=is_late.is_set())
        return json.loads(line)


def open_channel() -> tuple[IO[bytes], IO[bytes]]:
    """Return the streams of requests and of replies; called in a contained process.

    Replies get their own descriptor and standard output is redirected to standard error, so that text that a
    library prints cannot get between the replies.
    """
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return sys.stdin.buffer, replies


def write_line(stream: IO[bytes], message: Mapping[str, Any]) -> None:
    """Write a message as one line of JSON and flush."""
    stream.write(json.dumps(message).encode() + b"\n")
    stream.flush()


class KillMonitor:
    """Watches blocks of code and calls the ``kill`` of each one that exceeds its time limit.

    The watching thread starts with the first block.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._deadlines: dict[int, tuple[float, Callable[[], None]]] = {}
        """Deadline (``time.monotonic``) and ``kill`` of each block in progress, by number."""
        self._numbers = itertools.count()
        self._wakes_at = 0.0
        """Time (``time.monotonic``) at which the thread next wakes up by itself."""
        self._thread: threading.Thread | None = None

    @contextmanager
    def limit(self, limit_s: float, kill: Callable[[], None]) -> Iterator[None]:
        """Call ``kill`` in another thread if the block exceeds ``limit_s`` seconds; never after the block."""
        deadline = time.monotonic() + limit_s
        with self._changed:
            number = next(self._numbers)
            self._deadlines[number] = deadline, kill
            if self._thread is None:
                self._thread = threading.Thread(target=self._watch, name="kill-watch", daemon=True)
                self._thread.start()
            elif deadline < self._wakes_at:
                # Only an earlier deadline wakes the thread: most blocks are short and end while it sleeps.
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
                # Kill in the order of the deadlines, even if this thread wakes up late for several.
                for _, number in sorted(due):
                    # The lock is held during the kill, so a block that ends now waits, and no kill follows
                    # it.
                    _, kill = self._deadlines.pop(number)
                    try:
                        kill()
                    except Exception:
                        # The thread must continue to watch the other blocks.
                        logger.exception("what has taken too long cannot be killed")
                first = min((deadline for deadline, _ in self._deadlines.values()), default=None)
                self._wakes_at = float("inf") if first is None else first
                self._changed.wait(None if first is None else max(0.0, first - now))


KILL_WATCH = KillMonitor()
"""The process-wide watch."""


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _stop(process: subprocess.Popen[bytes], scratch: str | None) -> None:
    """Kill a process group, wait for the process to exit, and remove the folder ``scratch``."""
    assert process.stdin is not None and process.stdout is not None
    _kill_group(process)
    process.wait()
    with suppress(BrokenPipeError):  # A request that the process never read may still be buffered.
        process.stdin.close()
    process.stdout.close()
    if scratch is not None:
        shutil.rmtree(scratch, ignore_errors=True)
