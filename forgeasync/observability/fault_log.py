"""The faults of a run and its recoveries: counted, printed, and written to ``faults.jsonl``.

The supervisor of a role reports that a part of it has ended or does not answer, and later that the role is
complete again. A run has one file for all of its starts, with continuous numbers and counts. Nothing waits
for this file: lines that the disk refuses are kept and written later.

An outage of a disk is a fault too (``StorageFaults``), and what needs a file on the disk waits for its end.
"""

import asyncio
import contextlib
import json
import os
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

from forgeasync.files import AppendedFile, JsonLines, Refusal, whole_lines

T = TypeVar("T")

RETRY_S = 1.0
"""Seconds between two attempts to write what was refused."""

PATIENCE_S = 2.0
"""Seconds after which a call that may wait for a disk is asked whether it does."""


class Role(StrEnum):
    """A part of a run that can fail on its own."""

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
    """One failure, from the moment it was detected."""

    number: int
    role: Role
    who: str
    """Name such as "generator 2 (process 4711)"."""
    what: str
    """Predicate of a sentence about ``who``, such as "has died"."""
    detected_s: float
    """Time of detection, by ``time.monotonic``."""


class FaultLog:
    """All faults of a run."""

    def __init__(self, file: Path | None = None, tell: Callable[[str], None] = lambda line: None) -> None:
        """Append a line to ``file`` for each event; earlier starts may have written to it.

        ``tell`` is called with a message for each event.

        Raises:
            ValueError: the file has a line of another kind.
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
        """Count the events of earlier starts. A last line that a crash has cut is removed."""
        lines = whole_lines(file)
        if (end := sum(map(len, lines))) < file.stat().st_size:
            os.truncate(file, end)
        for number, line in enumerate(lines, start=1):
            try:
                self._count(json.loads(line))
            except (ValueError, LookupError, TypeError) as error:
                raise ValueError(
                    f"{file}: line {number} is not a line of faults.jsonl ({error!r}); move the file"
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
        """Report that the open faults of earlier starts are recovered."""
        earlier, self._earlier = self._earlier, ()
        for fault in earlier:
            self.recovered(fault, how)

    def detected(self, role: Role, who: str, what: str, *, evidence: str | None = None) -> Fault:
        """Report a failure, once, and return the open fault. ``recovered`` ends it.

        Args:
            role: Role that has failed.
            who: Name such as "generator 2 (process 4711)".
            what: Predicate of a sentence about ``who``, such as "has died".
            evidence: What a process that hung was doing before it was killed.
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
        """Report that the role is complete again. ``how`` is such as "was replaced by process 4712"."""
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
        """Return counts since the run began, by their names in metrics.jsonl."""
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
        # A full disk is a fault of its own, which others report. These lines are kept and written later.
        with contextlib.suppress(OSError):
            if self._opened is None:
                self._opened = AppendedFile.open(self._file)
            lines, self._unwritten = "".join(self._unwritten), []
            self._opened.write(lines.encode())


class StorageFaults:
    """Outages of a run's disks. One fault lasts from the first refusal until nothing is refused.

    Times are those of the event loop.
    """

    def __init__(
        self, faults: FaultLog, consequence: str = "the data is kept, and the write repeated"
    ) -> None:
        """``consequence`` ends the description of an outage."""
        self._faults = faults
        self._consequence = consequence
        self._refused: set[str] = set()
        self._fault: Fault | None = None
        self.waited_s = 0.0
        """Seconds that callers have waited for disks."""

    def refused(self, refusal: Refusal) -> None:
        """Report that a write was refused."""
        self._refused.add(refusal.path)
        if self._fault is None:
            what = f"cannot be written ({refusal.reason}): {self._consequence}"
            self._fault = self._faults.detected(Role.STORAGE, refusal.path, what)

    def accepted(self, path: str) -> None:
        """Report that everything was written to a file. Has no effect if nothing was refused."""
        self._refused.discard(path)
        if not self._refused and self._fault is not None:
            self._faults.recovered(self._fault, "was written")
            self._fault = None

    async def until_written(self, files: Sequence[JsonLines]) -> None:
        """Wait until no line of the files is kept in memory."""
        paths: set[str] = set()
        start_s = _now_s()
        while found := [refusal for one in files if (refusal := one.flush()) is not None]:
            for refusal in found:
                paths.add(refusal.path)
                self.refused(refusal)
            await asyncio.sleep(RETRY_S)
        if paths:
            self.waited_s += _now_s() - start_s
        for path in paths:
            self.accepted(path)

    async def while_waiting(self, call: Awaitable[T], refusal: Callable[[], Awaitable[Refusal | None]]) -> T:
        """Wait for a call that may itself wait for a disk, and report it.

        ``refusal`` asks the other side which write is refused. It is called only while the call waits.
        """
        waiting = asyncio.ensure_future(call)
        path, start_s = "", _now_s()
        try:
            while not (await asyncio.wait([waiting], timeout=PATIENCE_S))[0]:
                if (found := await refusal()) is not None:
                    path = found.path
                    self.refused(found)
            return waiting.result()
        finally:
            waiting.cancel()
            if path:
                self.waited_s += _now_s() - start_s
                self.accepted(path)

    def metrics(self) -> dict[str, float]:
        """Return ``waited_s`` by its name in metrics.jsonl."""
        return {"faults/storage_wait_s": self.waited_s}


def _now_s() -> float:
    return asyncio.get_running_loop().time()
