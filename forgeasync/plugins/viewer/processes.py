"""The processes of a run: faults and recoveries, live processes, and the state of each one over time."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np

from forgeasync.observability import NOT_THERE, ORDER, SUFFIX, Lane, Span, named_lanes, shares, states_between
from forgeasync.plugins.viewer.followed_file import FollowedFile

MAX_SPANS = 400
"""Maximum number of one lane's spans in an answer; the longest are kept."""

RECORD = "record"
"""Name of the controller's span that begins when a step's metrics are computed."""

Answer = dict[str, object]


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """One fault, and its recovery if there was one; a line of the file has one of the two events."""

    event: Literal["detected", "recovered"]
    number: int
    role: str
    who: str
    what: str = ""
    detected_s: float = msgspec.field(name="time_s")
    """Time of the detection, in seconds since 1970."""
    how: str | None = None
    """Description of the recovery; None if there was none."""
    took_s: float | None = None


_FAULT_DECODER = msgspec.json.Decoder(Fault)


class FaultLines:
    """All faults so far, from faults.jsonl."""

    def __init__(self) -> None:
        self.num_damaged = 0
        """Number of lines that do not belong in such a file, or that end a fault that did not begin."""
        self._faults: dict[int, Fault] = {}

    def add(self, line: bytes, offset: int) -> None:
        """Add the next line; damaged lines are counted and skipped."""
        try:
            fault = _FAULT_DECODER.decode(line)
            if fault.event == "recovered":
                begun = self._faults[fault.number]
                fault = msgspec.structs.replace(begun, how=fault.how, took_s=fault.took_s)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, KeyError):
            self.num_damaged += 1
        else:
            self._faults[fault.number] = fault

    @property
    def faults(self) -> list[Fault]:
        """All faults in the order of their detection."""
        return list(self._faults.values())

    @property
    def num_open(self) -> int:
        """Number of faults that the run has not recovered from."""
        return sum(one.how is None for one in self._faults.values())


def faults_answer(faults: FaultLines, procs_file: Path) -> Answer:
    """Return all faults, and the processes that the run lists in ``procs.json``."""
    return {"faults": [msgspec.structs.asdict(one) for one in faults.faults], "procs": _processes(procs_file)}


def _processes(file: Path) -> list[Answer]:
    """Return each process with role, rank, pid, host and start; empty if there is no such file."""
    try:
        listed = json.loads(file.read_bytes())["procs"]
        return [{key: one[key] for key in ("role", "rank", "pid", "host", "since_s")} for one in listed]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return []


class _TraceLines:
    """The lines of one process's trace."""

    def __init__(self) -> None:
        self.lane = Lane()

    def add(self, line: bytes, offset: int) -> None:
        self.lane.add(line)


class Traces:
    """The traces of all processes, ``logs/*.trace.jsonl``, read while they are written."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[Path, FollowedFile[_TraceLines]] = {}
        self._problem: str | None = None
        """Why the folder cannot be searched for traces; None if it can, or does not exist."""

    @property
    def lanes(self) -> list[Lane]:
        """Processes whose first line was read."""
        lanes = [file.contents.lane for file in self._files.values()]
        return [lane for lane in lanes if lane.opened is not None]

    def read_some(self) -> bool:
        """Read a piece of the first file that has anything new; return whether one had."""
        self._problem = None
        try:
            paths = sorted(self._folder.glob(f"*{SUFFIX}"))
        except OSError as error:
            self._problem, paths = f"{self._folder} cannot be read: {error.strerror}", []
        for path in paths:
            if path not in self._files:
                self._files[path] = FollowedFile(path, _TraceLines)
        return any(file.read_some() for file in self._files.values())

    @property
    def problems(self) -> list[str]:
        """Messages about parts of the traces that could not be read or written."""
        found = [] if self._problem is None else [self._problem]
        found += [file.problem for file in self._files.values() if file.problem is not None]
        for path, file in self._files.items():
            lane = file.contents.lane
            if lane.num_damaged:
                found.append(
                    f"{path.name}: {lane.num_damaged} damaged lines were left out; the first: "
                    f"{lane.first_damage}"
                )
            if lane.num_lost:
                found.append(f"{path.name}: the process could not write {lane.num_lost} lines")
        return found


def lanes_answer(
    lanes: Sequence[Lane], *, first_step: int | None, last_step: int | None, width: int
) -> Answer:
    """Return the lanes of all processes over some steps, or the whole run, in at most ``width`` bars each.

    Times are seconds since the first process began.
    """
    answer: Answer = {"states": [str(state) for state in ORDER], "lanes": [], "steps": []}
    if not lanes:
        return answer
    zero_s = min(lane.begin_s for lane in lanes)
    steps = step_times(lanes)
    shown = {step: times for step, times in steps.items() if _is_in(step, first_step, last_step)}
    begin_s, end_s = zero_s, max(lane.end_s for lane in lanes)
    if first_step is not None or last_step is not None:
        if not shown:
            return answer
        begin_s = min(begin for begin, _ in shown.values())
        end_s = max(end for _, end in shown.values())
    edges = np.linspace(begin_s, max(end_s, begin_s + 1e-3), width + 1)
    answer["begin_s"], answer["end_s"] = begin_s - zero_s, float(edges[-1]) - zero_s
    answer["lanes"] = [
        {
            "proc": name,
            "pids": [one.opened.pid for one in processes if one.opened is not None],
            "bars": _bars(states_between(processes, edges)),
            "shares": list(shares(processes, begin_s, float(edges[-1])).values()),
            "spans": _longest([span for one in processes for span in one.spans], begin_s, end_s, zero_s),
        }
        for name, processes in named_lanes(lanes).items()
    ]
    answer["steps"] = [[step, begin - zero_s, end - zero_s] for step, (begin, end) in shown.items()][-width:]
    return answer


def step_times(lanes: Sequence[Lane]) -> dict[int, tuple[float, float]]:
    """Return the begin and end of each step by the controller's spans, in seconds since 1970.

    If a step was repeated, the newest times count.
    """
    found: dict[int, tuple[float, float]] = {}
    for lane in named_lanes(lanes).get("controller", ()):
        of_lane: dict[int, tuple[float, float]] = {}
        for span in lane.spans:
            step = span.facts.get("step")
            if isinstance(step, int):
                begin_s, end_s = of_lane.get(step, (span.begin_s, span.begin_s))
                of_lane[step] = (min(begin_s, span.begin_s), max(end_s, span.begin_s + span.took_s))
        # A later process repeats steps.
        found |= of_lane
    return dict(sorted(found.items()))


def recorded_at(lanes: Sequence[Lane]) -> dict[int, float]:
    """Return when each step's metrics were computed (``time/elapsed_s``), in seconds since 1970."""
    return {
        step: span.begin_s
        for lane in named_lanes(lanes).get("controller", ())
        for span in lane.spans
        if span.name == RECORD and isinstance(step := span.facts.get("step"), int)
    }


def _is_in(step: int, first: int | None, last: int | None) -> bool:
    return (first is None or step >= first) and (last is None or step <= last)


def _bars(states_N: np.ndarray) -> list[list[int]]:
    """Return [first bin, number of bins, state] of every stretch in which the process existed."""
    cuts = np.flatnonzero(np.diff(states_N)) + 1
    begins, ends = np.append(0, cuts), np.append(cuts, len(states_N))
    return [
        [int(begin), int(end - begin), int(states_N[begin])]
        for begin, end in zip(begins, ends, strict=True)
        if states_N[begin] != NOT_THERE
    ]


def _longest(spans: Sequence[Span], begin_s: float, end_s: float, zero_s: float) -> list[Answer]:
    inside = [one for one in spans if one.begin_s < end_s and one.begin_s + one.took_s > begin_s]
    inside = sorted(inside, key=lambda one: one.took_s, reverse=True)[:MAX_SPANS]
    return [
        {
            "name": one.name,
            "begin_s": one.begin_s - zero_s,
            "took_s": one.took_s,
            "facts": dict(one.facts),
        }
        for one in sorted(inside, key=lambda one: one.begin_s)
    ]
