"""The mark that everything which a run starts on this machine carries, so that a later start finds it.

Once a controller is dead, the kernel no longer says what it had started. The mark is an environment variable,
which programs inherit, and a part of the names of what they make in shared memory.
"""

import multiprocessing.process
import multiprocessing.shared_memory
import os
import re
import secrets
import tempfile
from collections.abc import Iterator
from pathlib import Path

RUN_MARK = "FORGEASYNC_RUN"
"""The variable that holds the mark."""

_SHARED_MEMORY = Path("/dev/shm")

_NAMES = "forgeasync-"

_MARK = re.compile(r"[0-9a-f]{32}")

_NUM_RANDOM_CHARACTERS = 16


def mark_this_run() -> str:
    """Put a new mark into the environment of this process, and return it."""
    mark = secrets.token_hex(16)
    os.environ[RUN_MARK] = mark
    name_shared_memory()
    return mark


def own_prefix() -> str | None:
    """With what the names of this run's files in shared memory begin; None: this process has no mark."""
    mark = os.environ.get(RUN_MARK)
    return None if mark is None else f"{_NAMES}{mark}-"


def name_shared_memory() -> None:
    """Have this process name its semaphores and shared memory after the mark, if there is one.

    Python removes both when a process ends in order, or by a process that outlives it: SIGKILL of all of them
    leaves ``/dev/shm/sem.mp-...`` and ``/dev/shm/psm_...``, which nobody could tell from another program's.
    Processes that are spawned inherit the names of semaphores, not those of shared memory. Python 3.11 has no
    public way to name either.
    """
    if (prefix := own_prefix()) is None:
        return
    process = multiprocessing.process.current_process()
    # typeshed declares public attributes alone.
    process._config["semprefix"] = f"/{prefix.removesuffix('-')}"  # type: ignore[attr-defined]
    memory = multiprocessing.shared_memory
    memory._SHM_NAME_PREFIX = f"/{prefix}"  # type: ignore[attr-defined]
    memory._SHM_SAFE_NAME_LENGTH = len(f"/{prefix}") + _NUM_RANDOM_CHARACTERS  # type: ignore[attr-defined]


def files_of(mark: str) -> Iterator[Path]:
    """Find what a run has left in shared memory, and what its engines have in the folder for temporary files.

    Folders in which a process holds a lock are no part of it (``forgeasync.rollouts.run_folder``).
    """
    if _MARK.fullmatch(mark) is None:
        return
    yield from _SHARED_MEMORY.glob(f"sem.{_NAMES}{mark}-*")
    yield from _SHARED_MEMORY.glob(f"{_NAMES}{mark}-*")
    yield from Path(tempfile.gettempdir()).glob(f"{_NAMES}{mark}-*")


def remove_files_of(mark: str) -> list[Path]:
    """Remove what a run has left, all of whose processes but this one have ended; returns what it was.

    What this process still uses, it removes itself when it ends.
    """
    used = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    removed = []
    for file in files_of(mark):
        if str(file) not in used:
            file.unlink(missing_ok=True)
            removed.append(file)
    return removed
