"""``procs.json`` of a run folder: which process fills which role at this moment.

It is for people (which process is generator 2?), for programs that look at a run from outside, and for a
later start that has to end what a killed run has left.
"""

import contextlib
import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from forgeasync.rollouts import start_ticks

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
"""Says another thing after every boot of a machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcEntry:
    """One process of a run."""

    role: str
    rank: int
    """Its place in its role; a process that replaces another has the other's."""
    pid: int
    """Its id on its host."""
    host: str
    since_s: float
    """When it was listed, as ``time.time`` says it."""
    start_ticks: int | None
    """Clock ticks from the boot of the controller's machine to the start of the process, which has no other
    process's id and time; None: it is on another machine, whose agent ends it."""


class ProcsFile:
    """The processes of a run as they come and go."""

    def __init__(self, file: Path | None = None) -> None:
        """Without a file they are kept in memory only."""
        self._file = file
        self._entries: dict[tuple[str, int], ProcEntry] = {}

    def put(self, role: str, rank: int, *, pid: int, host: str) -> None:
        """List a process, in place of the one that had its role and rank."""
        self._entries[role, rank] = ProcEntry(
            role=role,
            rank=rank,
            pid=pid,
            host=host,
            since_s=time.time(),
            start_ticks=start_ticks(pid) if _is_own(pid) else None,
        )
        self._write()

    def remove(self, role: str, rank: int) -> None:
        """Take a process off the list; no error if it is not there."""
        if self._entries.pop((role, rank), None) is not None:
            self._write()

    @property
    def entries(self) -> tuple[ProcEntry, ...]:
        return tuple(self._entries.values())

    def _write(self) -> None:
        if self._file is None:
            return
        text = json.dumps(
            {
                "controller": os.getpid(),
                "boot": _boot(),
                "procs": [asdict(one) for one in self.entries],
            },
            indent=1,
        )
        partial = self._file.with_name(f".{self._file.name}.partial")
        try:
            partial.write_text(text + "\n", encoding="utf-8")
            partial.replace(self._file)
        except OSError:
            # A full disk must not end a role that has just been started; the next change writes all of it.
            return


def left_processes(file: Path) -> Iterator[psutil.Process]:
    """Find the processes in the list of a controller that is gone which still run on this machine.

    A process that only has the id of one of them is none: ids are used again.
    """
    try:
        listed = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return
    if listed["boot"] != _boot():
        return
    for one in listed["procs"]:
        with contextlib.suppress(psutil.Error):
            # First: what takes the id from now on is another process to psutil.
            process = psutil.Process(one["pid"])
            if one["start_ticks"] is not None and start_ticks(one["pid"]) == one["start_ticks"]:
                yield process


def _boot() -> str:
    return BOOT_ID.read_text(encoding="utf-8").strip()


def _is_own(pid: int) -> bool:
    """Whether this process has started it, directly or not; an id of another machine says nothing here."""
    with contextlib.suppress(psutil.Error):
        return any(one.pid == os.getpid() for one in psutil.Process(pid).parents())
    return False
