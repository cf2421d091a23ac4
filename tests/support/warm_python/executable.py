"""What the script of the warm Python runs for ``-m MODULE``; standard library alone.

It sends its environment, its folder and its open files to the server, which forks a process with these. The
two live and die together: the kernel kills the fork when this process is gone, and this one ends by the same
signal or with the same exit code as the fork. It passes SIGINT and SIGTERM on, also those that come before
there is a fork.
"""

import ctypes
import json
import os
import resource
import signal
import socket
import sys
from pathlib import Path
from typing import NoReturn

PROC = "forgeasync.runtime.bootstrap_main"
"""The module of a Monarch proc."""

APPS = {"apps.distill", "apps.evaluate", "apps.grpo", "apps.serve"}

CALL = "tests.support.warm_python.call"

PROGRAM = "tests.support.warm_python.program"

LINK = (socket.AF_UNIX, socket.SOCK_SEQPACKET)
"""The kind of socket that connects it with the server."""

PASSED_ON = (signal.SIGINT, signal.SIGTERM)
"""Signals that are passed on to the fork."""

_PR_SET_PDEATHSIG = 1
"""Number of prctl(2)'s operation, which Python does not name."""


def kind_of(arguments: list[str]) -> "str | None":
    """Which server is asked for a fork; None: the real Python is to run this."""
    if arguments[:1] != ["-m"] or len(arguments) == 1:
        return None
    module = arguments[1]
    if module == CALL:
        return arguments[2]
    if Path("/dev/nvidiactl").exists():
        # Importing may ask for GPUs, which no fork can use then.
        return None
    if module == PROC:
        return kind_of_role(os.environ["HYPERACTOR_PROCESS_NAME"])
    # A supervisor replaces the process that was started, by another program.
    if module == PROGRAM or (module in APPS and "--supervise" not in arguments):
        return "torchtitan"
    return None


def kind_of_role(name: str) -> str:
    """Which server is asked for a proc of that name."""
    return "vllm" if name.startswith(("generator-", "teacher-")) else "torchtitan"


def main() -> NoReturn:
    """Be the Python that was started."""
    _, script, *arguments = sys.argv
    kind = kind_of(arguments)
    if kind is None:
        os.execv(sys.executable, [sys.executable, *arguments])
    session = Path(script).parents[1]
    if arguments[1] == PROC:
        # As Monarch has its processes do, whose parent here is the server.
        _die_with_parent()
    # They wait for a fork that they can be passed on to.
    unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)
    with socket.socket(*LINK) as link:
        try:
            link.connect(str(session / kind))
            _ask(link, script, arguments)
            pid = _receive(link)
            for number in PASSED_ON:
                signal.signal(number, lambda number, frame: _send(pid, number))
            signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
            status = _receive(link)
        except OSError as error:
            log = session / f"{kind}.log"
            print(f"the server of the warm Python is gone ({error}):", file=sys.stderr)
            print(log.read_text()[-4000:] if log.exists() else "and its folder too", file=sys.stderr)
            os._exit(1)
    _end_as(status)


def _ask(link: socket.socket, script: str, arguments: list[str]) -> None:
    # Nobody writes: the fork is killed when this process, which alone has the other end, is gone.
    life, _ = os.pipe()
    numbers = map(int, os.listdir("/proc/self/fd"))
    # The one of the list itself is closed.
    inherited = [
        one for one in numbers if os.path.lexists(f"/proc/self/fd/{one}") and os.get_inheritable(one)
    ]
    request = {
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "arguments": arguments,
        # What the fork takes for its Python, and for its parent.
        "executable": script,
        "starter": os.getppid(),
        "session": os.getsid(0),
        "leads_session": os.getsid(0) == os.getpid(),
        "numbers": inherited,
    }
    socket.send_fds(link, [json.dumps(request).encode()], [life, *inherited])
    os.close(life)


def _receive(link: socket.socket) -> int:
    """Receive a number: the fork's process id, and then how it has ended."""
    if not (answer := link.recv(4)):
        raise ConnectionResetError("it has ended")
    return int.from_bytes(answer, "big")


def _send(pid: int, number: int) -> None:
    """Send a signal to the fork, which may be gone."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


def _end_as(status: int) -> NoReturn:
    """End this process as another one has ended."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if number not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status))


def _die_with_parent() -> None:
    """Have the kernel kill this process when the thread that started it ends, as Monarch's processes do."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent or parent == 1:
        # It was gone before the kernel was asked.
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
