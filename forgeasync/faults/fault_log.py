"""What has failed in a run and what came back: counted, told, and kept in ``faults.jsonl``.

Whoever looks after a role reports here: that something of it is gone or does not answer, and that the role
has all that it had again. Nobody waits for this file: lines that the disk refuses are kept and written later.

A run has one file, over all its starts: numbers and counts go on where the start before has ended.
"""

import contextlib
import json
import os
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from forgeasync.faults.appended_file import AppendedFile


class Role(StrEnum):
    """Something of a run that can fail by itself."""

    CONTROLLER = "controller"
    TRAINER = "trainer"
    GENERATOR = "generator"
    SCORER = "scorer"
    TEACHER = "teacher"
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
    """All faults of a run so far."""

    def __init__(self, file: Path | None = None, tell: Callable[[str], None] = lambda line: None) -> None:
        """``file`` gets a line for each event, behind those of the starts before; ``tell`` is called with a
        line for people.

        Raises:
            ValueError: a line of the file is none of these.
        """
        self._file = file
        self._tell = tell
        self._unwritten: list[str] = []
        self._opened: AppendedFile | None = None
        self._open: dict[int, Fault] = {}
        self._num_detected: Counter[Role] = Counter()
        self._num_recovered: Counter[Role] = Counter()
        if file is not None and file.exists():
            self._take_in(file)
        self._earlier = self.open

    def _take_in(self, file: Path) -> None:
        """Count what the starts before have written. A last line that was cut by a crash is removed."""
        lines = file.read_bytes().splitlines(keepends=True)
        if lines and not lines[-1].endswith(b"\n"):
            os.truncate(file, sum(map(len, lines[:-1])))
            del lines[-1]
        for number, line in enumerate(lines, start=1):
            try:
                self._count(json.loads(line))
            except (ValueError, LookupError, TypeError) as error:
                raise ValueError(
                    f"{file}: line {number} is no line of faults.jsonl ({error!r}); move the file away"
                ) from None

    def _count(self, event: dict[str, Any]) -> None:
        role = Role(event["role"])
        if event["event"] == "recovered":
            del self._open[event["number"]]
            self._num_recovered[role] += 1
            return
        self._num_detected[role] += 1
        self._open[event["number"]] = Fault(
            number=event["number"],
            role=role,
            who=event["who"],
            what=event["what"],
            detected_s=time.monotonic() - max(0.0, time.time() - event["time_s"]),
        )

    def recover_earlier(self, how: str) -> None:
        """Take note that everything which had failed in the starts before has come back with this one."""
        earlier, self._earlier = self._earlier, ()
        for fault in earlier:
            self.recovered(fault, how)

    def detected(self, role: Role, who: str, what: str, *, evidence: str | None = None) -> Fault:
        """Take note of a failure, once for each; ``recovered`` ends it.

        ``evidence`` is what was seen of something that stood still, before it was killed.
        """
        number = sum(self._num_detected.values())
        fault = Fault(number=number, role=role, who=who, what=what, detected_s=time.monotonic())
        self._num_detected[role] += 1
        self._open[number] = fault
        event: dict[str, object] = {"event": "detected", "number": number, "role": role.value}
        event |= {"who": who, "what": what}
        self._write(event if evidence is None else event | {"evidence": evidence})
        self._tell(f"{who} {what}" if evidence is None else f"{who} {what}; {evidence}")
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
        """Return counts since the run began, under their names in metrics.jsonl."""
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
