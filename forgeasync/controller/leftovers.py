"""Ends what a run that is over has left on this machine: its processes, and its files in shared memory.

Almost all of a run ends by itself when its controller is killed. This finds what does not: what carries the
run's mark, and what the run has listed (``procs.json``). A process that only has the same id is left alone.
"""

import os
import time
from collections.abc import Callable, Iterable
from functools import partial
from multiprocessing import resource_tracker
from pathlib import Path

import psutil

from forgeasync.config import RunConfig
from forgeasync.environments import kill, marked_processes
from forgeasync.faults import RUN_MARK, FaultLog, Role, remove_files_of
from forgeasync.observability import Holder, RunDir, claimed_marks, left_processes
from forgeasync.rollouts import SHARED_MEMORY, sweep_stale_folders

END_S = 10.0
"""Time for killed processes to be gone."""

LINGER_S = 5.0
"""Time for what a run that ends has started to end by itself, before it is killed."""

LOOK_AGAIN_S = 0.02
"""Seconds between two looks for processes."""


class NotEnded(RuntimeError):
    """A process of a run that is over does not end, although it was killed."""


def take_over(config: RunConfig) -> list[str]:
    """Claim the folder that a config names, if a run was there before, and end what that has left.

    Returns what was done, in words.

    Raises:
        ConfigError: a run goes on in the folder.
        NotEnded: something of the run before does not end.
    """
    if config.run_dir is None:
        return []
    run_dir = RunDir(path=Path(config.run_dir))
    if not run_dir.lock.exists():
        return []
    run_dir.claim()
    if (before := run_dir.before) is None:
        return []
    words = []
    if not before.has_ended:
        words.append(f"the controller of this run has died: {before}")
        FaultLog(run_dir.faults).detected(Role.CONTROLLER, f"controller ({before})", "has died")
    return [*words, *end_leftovers(run_dir, before)]


def end_leftovers(run_dir: RunDir, before: Holder) -> list[str]:
    """Kill what a controller that is gone has left, and remove its files in shared memory; says what it was.

    Raises:
        NotEnded: a process does not end.
    """

    def find() -> Iterable[psutil.Process]:
        yield from marked_processes(before.mark, RUN_MARK)
        yield from left_processes(run_dir.procs)

    words = []
    if num_killed := end_all(find):
        words.append(f"{num_killed} processes that it had left were killed")
    removed = [*sweep_stale_folders(), *remove_files_of(before.mark)]
    if removed:
        words.append(f"{len(removed)} files and folders of dead runs in {SHARED_MEMORY} were removed")
    return words


def end_own_run() -> None:
    """End what runs of this process have left, which ends now, in whatever way: processes, and files.

    Raises:
        NotEnded: a process does not end.
    """
    for mark in claimed_marks():
        find = partial(_started, mark)
        end_s = time.monotonic() + LINGER_S
        while find() and time.monotonic() < end_s:
            time.sleep(LOOK_AGAIN_S)
        end_all(find)
        remove_files_of(mark)


def _started(mark: str) -> list[psutil.Process]:
    """The processes of a run but Python's own, which removes what this one leaves and ends after it."""
    # Not public.
    tracker: int | None = resource_tracker._resource_tracker._pid  # type: ignore[attr-defined]
    return [one for one in marked_processes(mark, RUN_MARK) if one.pid not in (os.getpid(), tracker)]


def end_all(find: Callable[[], Iterable[psutil.Process]]) -> int:
    """Kill what ``find`` finds, until it finds nothing twice in a row; returns how many processes that were.

    One that is just becoming another program has no mark for a moment, and one that is killed may have
    started another.

    Raises:
        NotEnded: a process does not end.
    """
    killed: set[int] = set()
    num_empty_looks = 0
    end_s = time.monotonic() + END_S
    while num_empty_looks < 2:
        running = [one for one in find() if one.pid != os.getpid() and kill([one])]
        killed |= {one.pid for one in running}
        num_empty_looks = 0 if running else num_empty_looks + 1
        if time.monotonic() > end_s:
            pids = ", ".join(str(one.pid) for one in running)
            raise NotEnded(f"processes {pids} of a run that is over do not end within {END_S:g} s of SIGKILL")
        time.sleep(LOOK_AGAIN_S)
    return len(killed)
