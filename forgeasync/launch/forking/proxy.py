"""The process that is started for one that is forked from a server; imports the standard library alone.

    python -I -S proxy.py ADDRESS LIVES KEPT ARGUMENT ...

It sends its environment, its folder and its standard streams to the server at the abstract socket
``ADDRESS``, which forks a process with these. The two live and die together: the fork is killed by the kernel
when this process is gone, or when one of the pipes ``LIVES`` ends, and this one ends by the same signal or
with the same exit code as the fork. It passes SIGINT and SIGTERM on,
also those that come before there is a fork. If there is no fork to be had, it says
why and becomes the Python program with the arguments itself, which imports everything. ``LIVES`` and
``KEPT``, descriptors that the fork has under the same numbers, are numbers with commas between them, or
``-``. With ``parent`` for ``LIVES`` this process ends with the one that has started it.
"""

import ctypes
import json
import os
import resource
import select
import signal
import socket
import struct
import sys
from typing import NoReturn

STREAMS = (0, 1, 2)

PARENT = "parent"
"""In the place of ``LIVES``."""

_PR_SET_PDEATHSIG = 1
"""Number of prctl(2)'s operation, which Python does not name."""

PATIENCE_S = 20.0
"""Seconds for the server to fork. Monarch 0.7 waits 30 s for a proc."""


class NoFork(Exception):
    """The server is gone, or does not fork; says why."""


def ask(link: socket.socket, lives: list[int], kept: list[int], arguments: list[str]) -> int:
    """Ask for a fork, and return its process id.

    Raises:
        NoFork: there is none.
    """
    _, user, _ = struct.unpack("3i", link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    if user != os.getuid():
        raise NoFork(f"its socket is one of user {user}")
    # Nobody writes: the fork ends when this process, which alone has the other end, is gone.
    own, _ = os.pipe()
    lives = [own, *lives]
    request = json.dumps(
        {
            "environment": dict(os.environ),
            "folder": os.getcwd(),
            "arguments": arguments,
            "starter": os.getppid(),
            "leads_group": os.getpgrp() == os.getpid(),
            "group": os.getpgrp(),
            "num_lives": len(lives),
            "kept": kept,
        }
    ).encode()
    try:
        link.settimeout(PATIENCE_S)
        socket.send_fds(link, [len(request).to_bytes(4, "big")], [*STREAMS, *lives, *kept])
        link.sendall(request)
        answer = receive(link)
        link.settimeout(None)
    except OSError as error:
        raise NoFork(f"it does not answer ({error})") from error
    os.close(own)
    if answer is None:
        raise NoFork("it has ended")
    if "refused" in answer:
        raise NoFork(answer["refused"])
    return int(answer["pid"])


def receive(link: socket.socket) -> "dict[str, int | str] | None":
    """Receive one line of JSON; None if the server has ended."""
    text = b""
    while not text.endswith(b"\n"):
        if not (part := link.recv(4096)):
            return None
        text += part
    return json.loads(text)


def wait(link: socket.socket, pid: int) -> int:
    """Wait until the fork has ended, and return its wait status."""
    try:
        fork = os.pidfd_open(pid)
    except ProcessLookupError:
        fork = None
    try:
        # A server that imports answers later. The end of one that is gone is closed: no fork has it.
        answer = receive(link)
    except OSError:
        answer = None
    if answer is not None:
        return int(answer["status"])
    # The server is gone, and its forks go on.
    if fork is not None:
        select.select([fork], [], [])
    print(f"process {pid} has ended, and so has the server that it was forked from", file=sys.stderr)
    return 1 << 8


def end_as(status: int) -> NoReturn:
    """End this process as another one has ended."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if number not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status))


def die_with_parent() -> None:
    """Have the kernel kill this process when the thread that has started it ends, as Monarch's procs do."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent or parent == 1:
        # It was gone before the kernel was asked.
        os.kill(os.getpid(), signal.SIGKILL)


def descriptors(text: str) -> list[int]:
    """Read numbers with commas between them, or ``-`` for none."""
    return [] if text == "-" else [int(part) for part in text.split(",")]


def stand_for(address: str, *, lives: list[int], kept: list[int], arguments: list[str]) -> int:
    """Have a fork be the program with ``arguments``; returns its wait status. Signals are passed on.

    Raises:
        NoFork: there is none. Signals that came meanwhile have been handled as before the call.
    """
    fork: list[int] = []
    early: list[int] = []

    def pass_on(number: int, frame: object) -> None:
        if not fork:
            early.append(number)
        for pid in fork:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                pass

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
    with socket.socket(socket.AF_UNIX) as link:
        try:
            try:
                link.connect("\0" + address)
            except OSError as error:
                raise NoFork(f"it is not there ({error})") from error
            fork.append(ask(link, lives, kept, arguments))
        except NoFork:
            for number, handler in before.items():
                signal.signal(number, handler)
            for one in early:
                os.kill(os.getpid(), one)
            raise
        for one in early:
            pass_on(one, None)
        return wait(link, fork[0])


def main() -> None:
    address, lives, kept, *arguments = sys.argv[1:]
    if lives == PARENT:
        die_with_parent()
        lives = "-"
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        status = stand_for(address, lives=descriptors(lives), kept=descriptors(kept), arguments=arguments)
    except NoFork as reason:
        print(f"no fork of {address}: {reason}; this process imports its libraries itself", file=sys.stderr)
        os.execv(sys.executable, [sys.executable, *arguments])
    end_as(status)


if __name__ == "__main__":
    main()
