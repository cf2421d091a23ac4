"""The namespaces of a box, made by bubblewrap and held by its first process."""

import os
import select
import subprocess
import time
from collections.abc import Sequence

from forgeasync.environments.sandboxes.inside import seccomp
from forgeasync.environments.sandboxes.results import SandboxUnavailable

_START_LIMIT_S = 20.0
_END_LIMIT_S = 0.5
_MAX_TEXT_BYTES = 4096
_READY = b"ready\n"

HOLD = ["/bin/sh", "-c", "echo ready; read line"]
"""The first process of a box: it is there until the host closes its standard input. Signals from the box do
not reach it, and with it the kernel ends everything else in the box."""


class Holder:
    """A running bubblewrap."""

    def __init__(self, command: Sequence[str]) -> None:
        """Start it and wait until the namespaces are there; blocks.

        The first process gets the filter of system calls too: where it has the user of the box, the box's
        code may write to its memory.

        Raises:
            SandboxUnavailable: it cannot be started, or fails; the text has its last message.
            OSError: there is no filter for this machine.
        """
        info, info_of_child = os.pipe()
        filtered = _pipe_with(seccomp.program(os.uname().machine))
        options = ["--info-fd", str(info_of_child), "--seccomp", str(filtered)]
        try:
            try:
                self._process = subprocess.Popen(
                    [command[0], *options, *command[1:], *HOLD],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    env={"PATH": os.defpath},
                    cwd="/",
                    pass_fds=(info_of_child, filtered),
                    start_new_session=True,
                )
            except OSError as error:
                raise SandboxUnavailable(f"{command[0]} could not be started: {error}") from error
            finally:
                os.close(info_of_child)
                os.close(filtered)
            self.pid = self._wait_until_ready(info)
            """The first process of the box, as the host sees it."""
        finally:
            os.close(info)

    def _wait_until_ready(self, info: int) -> int:
        assert self._process.stdout is not None and self._process.stderr is not None
        text = _read_until(self._process.stdout.fileno(), _READY)
        described = _read_until(info, b"}")
        if text != _READY:
            problem = _read_until(self._process.stderr.fileno(), b"").decode(errors="replace").strip()
            self.close()
            lines = problem.splitlines() or ["no message"]
            raise SandboxUnavailable(
                f"bubblewrap failed with exit code {self._process.returncode}: {lines[-1][:300]}"
            )
        return int(described.partition(b'"child-pid":')[2].split(b",")[0].split(b"}")[0])

    def close(self) -> None:
        """End the box; returns when all its processes are gone. May be called again."""
        process = self._process
        if process.returncode is not None:
            return
        for pipe in (process.stdin, process.stdout, process.stderr):
            assert pipe is not None
            pipe.close()
        # Popen's own wait with a timeout sleeps between its looks.
        ended = os.pidfd_open(process.pid)
        try:
            poll = select.poll()
            poll.register(ended, select.POLLIN)
            if not poll.poll(_END_LIMIT_S * 1000):
                process.kill()
            process.wait()
        finally:
            os.close(ended)


def _pipe_with(data: bytes) -> int:
    """The end to read of a pipe that holds ``data``, which is less than a pipe takes."""
    reading, writing = os.pipe()
    with open(writing, "wb") as file:
        file.write(data)
    return reading


def _read_until(fd: int, ending: bytes) -> bytes:
    """Read up to an ending, the end of the stream, or the time limit; an empty ending is the end."""
    end, text = time.monotonic() + _START_LIMIT_S, b""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    while not (ending and ending in text) and len(text) < _MAX_TEXT_BYTES:
        if not poll.poll(max(0.0, end - time.monotonic()) * 1000):
            break
        part = os.read(fd, _MAX_TEXT_BYTES)
        if not part:
            break
        text += part
    return text
