"""``procs.json`` of a run folder: which process fills which role at this moment.

It is for people (which process is generator 2?), for programs that look at a run from outside, and for a
later start that has to end what a killed run has left.
"""

import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path


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


class ProcsFile:
    """The processes of a run as they come and go."""

    def __init__(self, file: Path | None = None) -> None:
        """Without a file they are kept in memory only."""
        self._file = file
        self._entries: dict[tuple[str, int], ProcEntry] = {}

    def put(self, role: str, rank: int, *, pid: int, host: str) -> None:
        """List a process, in place of the one that had its role and rank."""
        self._entries[role, rank] = ProcEntry(role=role, rank=rank, pid=pid, host=host, since_s=time.time())
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
            {"controller": os.getpid(), "procs": [asdict(one) for one in self.entries]}, indent=1
        )
        partial = self._file.with_name(f".{self._file.name}.partial")
        try:
            partial.write_text(text + "\n", encoding="utf-8")
            partial.replace(self._file)
        except OSError:
            # A full disk must not end a role that has just been started; the next change writes all of it.
            return
