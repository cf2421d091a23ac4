"""The process that watches over one call: it starts the command, passes its output on and ends it in time.

It is a subreaper, so everything that the command starts, however detached, stays below it and can be ended.
Its exit code is 0 if nothing is left; after any other, or if the box's code kills it, the supervisor ends all
processes of the box.
"""

from __future__ import annotations

import _signal
import marshal
import os
import select
import time

from . import setup, tree, wire
from .outbox import Outbox, Output, Reader
from .session import Session

TYPE_CHECKING = False  # typing itself takes 13 ms to import
if TYPE_CHECKING:
    from typing import Any

_END_LIMIT_S = 0.3
_EXIT_CODE_NOT_STARTED = 127
_ENOENT = 2
_MOST_DESCRIPTORS = 1 << 20
_SIGNALS_THAT_PYTHON_IGNORES = (13, 25)


def serve(sock: Any, settings: dict[str, Any]) -> None:
    """Serve the call at the other end of a socket; after an exception processes of it may still run."""
    setup.become_watcher()
    reader = Reader(sock)
    frames = reader.wait()
    if not frames:
        return
    request = marshal.loads(frames[0][1])
    outbox = Outbox(sock)
    try:
        command = Command(request, settings, outbox)
    except OSError as error:
        outbox.put(wire.FAILED, f"{type(error).__name__}: {error}".encode())
        outbox.send_all()
        reader.discard()
        return
    if request["session"]:
        Session(command, reader, outbox).run(frames[1:])
    else:
        _run(command, reader, outbox, frames[1:], request)


class Command:
    """A command that has been started, and what it has started."""

    def __init__(self, request: dict[str, Any], settings: dict[str, Any], outbox: Outbox) -> None:
        self.started = time.monotonic()
        stdin, self.stdin = os.pipe2(os.O_CLOEXEC)
        out, stdout = os.pipe2(os.O_CLOEXEC)
        err, stderr = os.pipe2(os.O_CLOEXEC)
        self.pid = os.fork()
        if self.pid == 0:
            _become(request, settings, (stdin, stdout, stderr))
        for fd in (stdin, stdout, stderr):
            os.close(fd)
        os.set_blocking(self.stdin, False)
        self.outputs = (Output(out, wire.STDOUT, outbox), Output(err, wire.STDERR, outbox))
        self.ended_fd = os.pidfd_open(self.pid)

    def exit_code(self) -> int:
        """Wait for the end of the command itself."""
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def end(self) -> None:
        """Kill the command and all that it has started; raises StillRunning if that takes too long."""
        tree.end_descendants(_END_LIMIT_S)


def _become(request: dict[str, Any], settings: dict[str, Any], fds: tuple[int, int, int]) -> None:
    """In the new process: become the command. Does not return."""
    try:
        os.setsid()
        for target, fd in enumerate(fds):
            os.dup2(fd, target)
        # Also what nobody thought of: a socket of ours in a command would be a way to the host.
        os.closerange(len(fds), _MOST_DESCRIPTORS)
        for number in _SIGNALS_THAT_PYTHON_IGNORES:
            _signal.signal(number, _signal.SIG_DFL)
        setup.limit_resources(settings)
        os.chdir(request["folder"])
        _execute(request["argv"], request["env"])
    except OSError as error:
        os.write(2, f"{request['argv'][0]}: {error.strerror}\n".encode())
    finally:
        os._exit(_EXIT_CODE_NOT_STARTED)


def _execute(argv: list[str], env: dict[str, str]) -> None:
    """As os.execvpe, which imports for 2 ms first."""
    name = argv[0]
    found = OSError(_ENOENT, os.strerror(_ENOENT))
    for folder in [""] if "/" in name else env.get("PATH", os.defpath).split(os.pathsep):
        try:
            os.execve(os.path.join(folder, name), argv, env)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            found = error
    raise found


def _run(
    command: Command,
    reader: Reader,
    outbox: Outbox,
    frames: list[tuple[int, bytes]],
    request: dict[str, Any],
) -> None:
    """Run a command to its end or its deadline; what it leaves running ends with it."""
    deadline = command.started + request["timeout_s"]
    for output in command.outputs:
        output.start(request["output_bytes"])
    stdin = [payload for _, payload in frames]
    timed_out = False
    sock_fd = reader.fileno()
    while True:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            timed_out = True
            break
        poll = select.poll()
        poll.register(command.ended_fd, select.POLLIN)
        # A host that has gone is seen even while it is not read from.
        poll.register(sock_fd, (0 if stdin else select.POLLIN) | (0 if outbox.is_empty else select.POLLOUT))
        if stdin:
            poll.register(command.stdin, select.POLLOUT)
        if not outbox.is_full:
            for output in command.outputs:
                if not output.ended:
                    poll.register(output.fd, select.POLLIN)
        ready = dict(poll.poll(left_s * 1000 + 1))
        if command.ended_fd in ready:
            break
        for output in command.outputs:
            if output.fd in ready:
                output.pass_on(output.pump())
        if command.stdin in ready:
            _feed(command, stdin)
        if sock_fd in ready:
            outbox.send()
            if ready[sock_fd] & (select.POLLIN | select.POLLHUP):
                stdin += [payload for _, payload in reader.receive()]
                if reader.ended:
                    command.end()
                    return
    exit_code = -tree.KILL if timed_out else command.exit_code()
    command.end()
    for output in command.outputs:
        output.drain()
    seconds = time.monotonic() - command.started
    cut = [output.num_cut for output in command.outputs]
    outbox.put(wire.DONE, wire.RESULT.pack(exit_code, timed_out, False, *cut, seconds))
    outbox.send_all()
    reader.discard()


def _feed(command: Command, stdin: list[bytes]) -> None:
    """Write to the command's standard input; an empty part closes it."""
    if not stdin[0]:
        stdin.clear()
        os.close(command.stdin)
        return
    try:
        stdin[0] = stdin[0][os.write(command.stdin, stdin[0]) :]
    except BlockingIOError:
        return
    except BrokenPipeError:
        # The command does not read: take what comes, as a pipe without a reader would.
        stdin[0] = b""
    if not stdin[0]:
        del stdin[0]
