"""Finds what a worker has started when the worker itself is gone.

Once a process is dead, the kernel no longer says whose children were its own. So a worker of an environment,
or a scorer, puts a mark into its environment variables, which everything that it starts inherits.
"""

import contextlib
import os
import secrets
from pathlib import Path

import psutil

from forgeasync.faults import RUN_MARK

WORKER_MARK = "FORGEASYNC_ENVIRONMENT_WORKER"
"""The variable that holds the mark."""


def mark_this_process() -> str:
    """Put a new mark into the environment of this process, and return it."""
    mark = secrets.token_hex(16)
    os.environ[WORKER_MARK] = mark
    return mark


def own_mark() -> dict[str, str]:
    """Return the variables with the marks of this process and of its run, for programs that get an
    environment of their own."""
    return {name: os.environ[name] for name in (WORKER_MARK, RUN_MARK) if name in os.environ}


def marked_processes(mark: str, variable: str = WORKER_MARK) -> list[psutil.Process]:
    """Return the processes of this machine that carry a mark in a variable of their environment, with all
    that they have started; takes some milliseconds.
    """
    wanted = f"{variable}={mark}".encode()
    found: dict[int, psutil.Process] = {}
    for pid in psutil.pids():
        # Those of other users cannot be read, and others end meanwhile.
        with contextlib.suppress(OSError, psutil.Error):
            if wanted in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                process = psutil.Process(pid)
                # Children that have another environment are found by their parents.
                found |= {one.pid: one for one in (*process.children(recursive=True), process)}
    return list(found.values())
