"""What a fork of the server does before it is a proc: it becomes what the program would be that a proxy
stands for."""

import atexit
import contextlib
import ctypes
import fcntl
import importlib
import os
import random
import runpy
import signal
import site
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from forgeasync.faults import RUN_MARK
from forgeasync.launch.forking.life import FREE_NUMBERS, die_with

NO_MARK = "0" * 32
"""Stands in a server's environment in the place of the mark of a run."""

PROC = "forgeasync.launch.bootstrap_main"
"""The module of a Monarch proc."""

NO_PARENT = {"HYPERACTOR_MESH_BOOTSTRAP_ENABLE_PDEATHSIG": "false"}
"""For procs: Monarch 0.7 has the kernel kill a proc whose parent is gone. That is the server here, which a
proc can do without; the proxy stands for the parent (``life``)."""

PASSED_ON = (signal.SIGINT, signal.SIGTERM)
"""Signals that a proxy passes on."""

COMM = Path("/proc/self/comm")
"""The name of this process, as ps shows it."""

_ENV_START = 49
"""Place of ``env_start`` among the fields of /proc/self/stat, counted from 0 (proc_pid_stat(5): field 50)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What a proxy asks for."""

    environment: Mapping[str, str]
    folder: str
    arguments: Sequence[str]
    """``-m``, the name of a module, and its own arguments."""
    starter: int
    """Process id of what has started the proxy."""
    leads_group: bool
    """Whether the proxy leads a process group."""
    group: int
    """The proxy's process group. If the proxy leads it, the fork leads one of its own, so that Ctrl-C reaches
    neither. A shell also has what it starts lead a group; the server is in that one too, and the fork stays
    there: it may read from the terminal, and Ctrl-Z stops it."""
    descriptors: Mapping[int, int]
    """What it gets, by the number under which it is to have it: standard input, output and error, and
    others."""
    lives: Sequence[int]
    """Descriptors of pipes; it is killed when one of them ends."""

    def close(self) -> None:
        """Close all descriptors, in the server, which has forked a process with them or has not."""
        for descriptor in (*self.descriptors.values(), *self.lives):
            os.close(descriptor)


_starter: int | None = None
"""What has started the proxy; None in a process that is no fork."""


def starter_pid() -> int:
    """The process that has started this one; for a fork it is the one that has started its proxy."""
    return os.getppid() if _starter is None else _starter


def become(request: Request, *, set_by_imports: Mapping[str, str]) -> NoReturn:
    """Run the module that was asked for as Python's main program, and end this process as Python would.

    ``set_by_imports`` are environment variables that importing has set, as it would in a program of its own.
    """
    global _starter
    _starter = request.starter
    for life in request.lives:
        die_with(life)
        os.close(life)
    if request.leads_group and os.getpgrp() != request.group:
        os.setpgid(0, 0)
    COMM.write_text("python")
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    # What has come since the fork counts now.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
    _place(request.descriptors)
    show_mark(request.environment.get(RUN_MARK, NO_MARK))
    flag, module, *arguments = request.arguments
    assert flag == "-m", request.arguments
    os.environ.clear()
    os.environ.update({**set_by_imports, **request.environment, **(NO_PARENT if module == PROC else {})})
    if sys.path[0] == os.getcwd():
        sys.path[0] = request.folder
    os.chdir(request.folder)
    sys.argv = [module, *arguments]
    sys.orig_argv = [sys.executable, *request.arguments]
    _seed_anew()
    # Python does so when a program begins.
    for name in ("sitecustomize", "usercustomize"):
        if name in sys.modules and (name != "usercustomize" or site.ENABLE_USER_SITE):
            importlib.reload(sys.modules[name])
    _end_as(_run(module))


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
    with the server and its other forks: at the end of a run its processes would take more memory than ever
    before. ``multiprocessing`` ends its forks without that too.
    """
    # Not public: it waits for threads that are no daemons.
    threading._shutdown()  # type: ignore[attr-defined]
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
    # As Python begins where its output is a terminal.
    sys.stdout.reconfigure(line_buffering=os.isatty(1))  # type: ignore[union-attr]  # not declared by TextIO


def _seed_anew() -> None:
    """Python seeds its own generator again in a fork, numpy does not."""
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(random.SystemRandom().getrandbits(32))


def show_mark(mark: str) -> None:
    """Put the mark of a run where others look for it: into what /proc shows of this process's environment.

    That is the memory in which the kernel has put the variables when the server's program began.
    ``os.environ`` changes its own copies only.
    """
    shown = Path("/proc/self/environ").read_bytes()
    line = f"{RUN_MARK}={NO_MARK}".encode()
    assert len(mark) == len(NO_MARK), mark
    place = (b"\0" + shown).find(b"\0" + line + b"\0")
    assert place >= 0, "the server was started with a variable for the mark"
    fields = Path("/proc/self/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    # The first two fields are in front of the parenthesis.
    start = int(fields[_ENV_START - 2])
    offset = place + len(RUN_MARK) + 1
    ctypes.memmove(start + offset, mark.encode(), len(mark))
