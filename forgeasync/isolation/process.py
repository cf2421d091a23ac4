"""Worker processes that exchange JSON lines with this one, with a time limit for each reply.

A contained process verifies answers or runs a reward. It leads its own session, so it can be killed together
with the processes that it started, and Ctrl-C does not reach it. It exits when its standard input is closed,
and so also when its parent exits.
"""

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import IO, Any

from forgeasync.isolation.bubblewrap import program_command, start_filtered

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
        """Process id on this host."""
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
        reply, is_late = self._exchange(_line(request), limit_s)
        if not reply.endswith(b"\n"):
            if not is_late and len(reply) < MAX_REPLY_BYTES:
                # The output has ended: wait for the process's own exit code before killing it.
                with suppress(subprocess.TimeoutExpired):
                    self._process.wait(_END_LIMIT_S)
            self.stop()
            raise ProcessExited(self.wait(), is_late=is_late)
        return json.loads(reply)

    def _exchange(self, request: bytes, limit_s: float) -> tuple[bytes, bool]:
        """Write a request and read until the end of a line, the end of the output or ``MAX_REPLY_BYTES``.

        Returns what was read, and whether ``limit_s`` ended it.
        """
        end_s = time.monotonic() + limit_s
        stdin, stdout = self._stdin.fileno(), self.replies.fileno()
        poll = select.poll()
        poll.register(stdin, select.POLLOUT)
        poll.register(stdout, select.POLLIN)
        reply = b""
        # The process may not read a request that is larger than the pipe.
        os.set_blocking(stdin, False)
        try:
            while not reply.endswith(b"\n") and len(reply) < MAX_REPLY_BYTES:
                ready = [descriptor for descriptor, _ in poll.poll(max(0.0, end_s - time.monotonic()) * 1000)]
                if not ready:
                    return reply, True
                if stdin in ready:
                    try:
                        request = request[os.write(stdin, request) :]
                    except BrokenPipeError:
                        request = b""
                    if not request:
                        poll.unregister(stdin)
                if stdout in ready:
                    part = os.read(stdout, MAX_REPLY_BYTES - len(reply))
                    if not part:
                        break
                    reply += part
        finally:
            os.set_blocking(stdin, True)
        return reply, False


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
    stream.write(_line(message))
    stream.flush()


def _line(message: Mapping[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"


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
