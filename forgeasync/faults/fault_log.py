"""What has failed in a run and what came back: counted, told, and kept in ``faults.jsonl``.

Whoever looks after a role reports here: that something of it is gone or does not answer, and that the role
has all that it had again. Nobody waits for this file: lines that the disk refuses are kept and written later.
"""

import contextlib
import json
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from forgeasync.faults.appended_file import AppendedFile


class Role(StrEnum):
    """Something of a run that can fail by itself."""

    CONTROLLER = "controller"
    TRAINER = "trainer"
    GENERATOR = "generator"
    SCORER = "scorer"
    ENVIRONMENT = "environment"
    BUFFER = "buffer"
    HOST = "host"
    STORAGE = "storage"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One failure, from when it was noticed."""

    number: int
    role: Role
    who: str
    """Such as "generator 2 (process 4711)"."""
    what: str
    """What is wrong with it, as the rest of a sentence: "has died"."""
    detected_s: float
    """When it was noticed, by ``time.monotonic``."""


class FaultLog:
    """All faults since the command started."""

    def __init__(self, file: Path | None = None, tell: Callable[[str], None] = lambda line: None) -> None:
        """``file`` gets a line for each event; ``tell`` is called with a line for people."""
        self._file = file
        self._tell = tell
        self._unwritten: list[str] = []
        self._opened: AppendedFile | None = None
        self._open: dict[int, Fault] = {}
        self._num_detected: Counter[Role] = Counter()
        self._num_recovered: Counter[Role] = Counter()

    def detected(self, role: Role, who: str, what: str) -> Fault:
        """Take note of a failure, once for each; ``recovered`` ends it."""
        number = sum(self._num_detected.values())
        fault = Fault(number=number, role=role, who=who, what=what, detected_s=time.monotonic())
        self._num_detected[role] += 1
        self._open[number] = fault
        self._write({"event": "detected", "number": number, "role": role.value, "who": who, "what": what})
        self._tell(f"{who} {what}")
        return fault

    def recovered(self, fault: Fault, how: str) -> None:
        """Take note that the role has all that it had before the fault.

        ``how`` says it in words, such as "was replaced by process 4712".
        """
        assert self._open.pop(fault.number, None) is fault, "a fault is recovered from once"
        took_s = time.monotonic() - fault.detected_s
        self._num_recovered[fault.role] += 1
        self._write(
            {
                "event": "recovered",
                "number": fault.number,
                "role": fault.role.value,
                "who": fault.who,
                "how": how,
                "took_s": round(took_s, 3),
            }
        )
        self._tell(f"{fault.who} {how} after {took_s:.1f} s")

    @property
    def open(self) -> tuple[Fault, ...]:
        """Faults that the run has not recovered from."""
        return tuple(self._open.values())

    def metrics(self) -> dict[str, float]:
        """Return counts since the command started, under their names in metrics.jsonl."""
        if self._unwritten or self._opened is not None:
            self._flush()
        counts: dict[str, float] = {}
        for role in Role:
            counts[f"faults/detected_{role}"] = self._num_detected[role]
            counts[f"faults/recovered_{role}"] = self._num_recovered[role]
        return counts

    def _write(self, event: dict[str, object]) -> None:
        self._unwritten.append(json.dumps({"time_s": round(time.time(), 3), **event}) + "\n")
        self._flush()

    def _flush(self) -> None:
        if self._file is None:
            return
        # A full disk is a fault of its own, which others report: these lines are kept, and written later.
        with contextlib.suppress(OSError):
            if self._opened is None:
                self._opened = AppendedFile.open(self._file)
            lines, self._unwritten = "".join(self._unwritten), []
            self._opened.write(lines.encode())
