"""The mark that everything which a run starts on this machine carries, so that a later start finds it.

Once a controller is dead, the kernel no longer says what it had started. The mark is an environment variable,
which programs inherit, and a part of the names of semaphores in shared memory.
"""

import multiprocessing.process
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

RUN_MARK = "FORGEASYNC_RUN"
"""The variable that holds the mark."""

_SEMAPHORES = "forgeasync-"


def mark_this_run() -> str:
    """Put a new mark into the environment of this process, and return it."""
    mark = secrets.token_hex(16)
    os.environ[RUN_MARK] = mark
    name_semaphores()
    return mark


def name_semaphores() -> None:
    """Have this process and those that it spawns name their semaphores after the mark, if there is one.

    Python removes semaphores when a process ends in order, or by a process that outlives it: SIGKILL of all
    of them leaves ``/dev/shm/sem.mp-...``, which nobody could tell from another program's. Python 3.11 has no
    public way to name them.
    """
    if (mark := os.environ.get(RUN_MARK)) is not None:
        multiprocessing.process.current_process()._config["semprefix"] = f"/{_SEMAPHORES}{mark}"  # type: ignore[attr-defined]


def semaphores(mark: str, shared_memory: Path) -> Iterator[Path]:
    """Find the semaphores of a run."""
    yield from shared_memory.glob(f"sem.{_SEMAPHORES}{mark}-*")
