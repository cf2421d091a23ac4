"""What a fork of the server does before it runs a module: it becomes what the program would be."""

import atexit
import contextlib
import ctypes
import fcntl
import os
import random
import runpy
import select
import signal
import site
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from tests.support.warm_python.executable import PASSED_ON

FREE_NUMBERS = 256
"""Descriptors with this and later numbers are given to nobody: those below may be asked for by number."""

_F_SETSIG = 10
"""The number of fcntl's F_SETSIG, which Python 3.11 does not name."""

_ENV_START = 49
"""Place of ``env_start`` among the fields of /proc/self/stat, counted from 0 (proc_pid_stat(5): field 50)."""


def become(
    request: Mapping[str, Any],
    life: int,
    files: Sequence[int],
    *,
    folder: Path,
    set_by_imports: Mapping[str, str],
) -> NoReturn:
    """Run the module that was asked for as Python's main program, and end this process as Python would.

    ``request`` is that of ``executable.py``, with the ``files`` for it; ``life`` is a pipe that ends when the
    process that asks does. ``folder`` is that of the test session. ``set_by_imports`` are variables of the
    environment that importing has set, as it would in a program of its own.
    """
    environment: dict[str, str] = request["environment"]
    die_with(life)
    os.close(life)
    _lead_session(request, folder / "sessions")
    Path("/proc/self/comm").write_text("python")
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    # What has come since the fork counts now.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
    _place(dict(zip(request["numbers"], files, strict=True)))
    _show_environment(environment)
    os.environ.clear()
    os.environ.update({**set_by_imports, **environment})
    os.getppid = lambda: request["starter"]
    sys.executable = request["executable"]
    os.chdir(request["folder"])
    _, module, *arguments = request["arguments"]
    # As "python -m" begins it; the server was started in the same way.
    own = [one for one in environment.get("PYTHONPATH", "").split(os.pathsep) if one]
    sys.path[:] = [request["folder"], *(one for one in own if one not in sys.path), *sys.path[1:]]
    sys.argv = [module, *arguments]
    sys.orig_argv = [sys.executable, *request["arguments"]]
    if (numpy := sys.modules.get("numpy")) is not None:
        # Python seeds its own generator again in a fork, numpy does not.
        numpy.random.seed(random.SystemRandom().getrandbits(32))
    # Another folder may come first on its path.
    for name in ("sitecustomize", "usercustomize"):
        sys.modules.pop(name, None)
    site.execsitecustomize()
    if site.ENABLE_USER_SITE:
        site.execusercustomize()
    _end_as(_run(module))


def _lead_session(request: Mapping[str, Any], sessions: Path) -> None:
    """Lead a session, and note which one has started it: a fork cannot be put into that one."""
    os.setsid()
    ended = list(sessions.glob(f"{os.getpid()}-*"))
    if request["leads_session"]:
        # Processes of earlier sessions had the same ids.
        ended += sessions.glob(f"{request['session']}-*")
    for file in ended:
        file.unlink(missing_ok=True)
    (sessions / f"{request['session']}-{os.getpid()}").touch()


def _run(module: str) -> int | signal.Signals:
    """Run a module as the main program; returns its exit code, or the signal that it is to end by."""
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        return signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    return 0


def _end_as(ending: int | signal.Signals) -> NoReturn:
    """End this process as Python ends a program, but take nothing apart.

    Python would visit every object that was imported, and with that copy all pages that this process shares
    with the server and its other forks. ``multiprocessing`` ends its forks without that too.
    """
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are no daemons
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            # Nobody may read it any more.
            stream.flush()
    if isinstance(ending, signal.Signals):
        signal.signal(ending, signal.SIG_DFL)
        os.kill(os.getpid(), ending)
    os._exit(ending & 0xFF)


def _place(descriptors: Mapping[int, int]) -> None:
    """Give descriptors the numbers that they are to have."""
    # Some may have the number of another one at this moment.
    moved = {
        number: fcntl.fcntl(one, fcntl.F_DUPFD_CLOEXEC, FREE_NUMBERS) for number, one in descriptors.items()
    }
    for descriptor in descriptors.values():
        os.close(descriptor)
    for number, descriptor in moved.items():
        os.dup2(descriptor, number)
        os.close(descriptor)
    # As Python begins: whether output can seek, and is a terminal, is looked up once.
    buffering, encoding = 1 if os.isatty(1) else -1, sys.stdout.encoding
    sys.stdout = open(1, "w", buffering, encoding, sys.stdout.errors, closefd=False)


def _show_environment(environment: Mapping[str, str]) -> None:
    """Put the environment where others look for it: into /proc/PID/environ.

    That is the memory in which the kernel has put the variables when the server's program began.
    ``os.environ`` changes its own copies only. The server's last variable makes room for all of them.
    """
    shown = Path("/proc/self/environ").read_bytes()
    place = shown.rindex(b"\0WARM_ROOM=") + 1
    text = b"\0".join(os.fsencode(f"{name}={value}") for name, value in environment.items())
    room = len(shown) - 1 - place
    assert len(text) <= room, f"an environment of {len(text)} bytes"
    fields = Path("/proc/self/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    # The first two fields are in front of the parenthesis.
    ctypes.memmove(int(fields[_ENV_START - 2]) + place, text.ljust(room, b"\0"), room)


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
