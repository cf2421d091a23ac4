"""Ends a process when another one is gone, in whatever state either of them is."""

import fcntl
import os
import select
import signal

_F_SETSIG = 10
"""The number of fcntl's F_SETSIG, which Python 3.11 does not name."""

FREE_NUMBERS = 256
"""Descriptors with this and later numbers are given to nobody: those below may be asked for by number."""


def die_with(descriptor: int) -> None:
    """Have the kernel kill this process as soon as nobody has the other end of a pipe any more.

    ``descriptor`` is the end for reading, to which nobody writes; it is left open. The kernel signals the end
    of a pipe to the owner of its file, so that no thread has to wait for it, and SIGKILL ends a stopped
    process too. Parents' deaths, as ``prctl(PR_SET_PDEATHSIG)`` tells them, are those of the thread that
    forked, and a fork of a server has the server for its parent.
    """
    # An open file has one owner, and this process may share it with the one that it was forked from.
    opened = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    own = fcntl.fcntl(opened, fcntl.F_DUPFD_CLOEXEC, FREE_NUMBERS)
    os.close(opened)
    fcntl.fcntl(own, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(own, _F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(own, fcntl.F_SETFL, fcntl.fcntl(own, fcntl.F_GETFL) | os.O_ASYNC)
    ended = select.poll()
    ended.register(own, 0)
    if ended.poll(0):
        # It was gone before the kernel was asked.
        os.kill(os.getpid(), signal.SIGKILL)
