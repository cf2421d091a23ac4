"""Exports a run as one file for ui.perfetto.dev and chrome://tracing.

The format is Chrome's JSON ("Trace Event Format"). Times are microseconds since the first process began, or
on the run's own clock (``time/elapsed_s``) if no process left a trace. Groups have the times of ``RunClock``.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
import numpy as np

from forgeasync.observability import Lane, Span, named_lanes
from forgeasync.plugins.viewer.groups import Fate, GroupHistory
from forgeasync.plugins.viewer.processes import recorded_at
from forgeasync.plugins.viewer.run_reader import ELAPSED_S, MAIN_METRICS, STEP, RunClock, RunReader

TRAINER, GROUPS, FAULTS = 1, 2, 3
"""Process numbers in the file for steps, groups and faults, which are not processes."""

FIRST_PROC = 10
"""Process number in the file of the first real process."""

_STEPS, _VERSIONS, _EVALUATIONS = 1, 2, 3

STEP_S = "time/step_s"
POLICY_VERSION = "policy_version"
ACCURACY = "eval/accuracy"

Event = dict[str, object]
Facts = Mapping[str, object]


class FileClock:
    """Converts times of the run's clock and of the host's clock to seconds in the file.

    The ends of the steps are known on both clocks. The file's time begins with the first process.
    """

    def __init__(self, elapsed_by_step: Mapping[int, float], lanes: Sequence[Lane]) -> None:
        """Without traces, the file uses the run's own clock, and times of the host cannot be converted."""
        self._zero_s = min((lane.begin_s for lane in lanes), default=None)
        ends = recorded_at(lanes)
        known = sorted(set(ends) & set(elapsed_by_step))
        self._elapsed_N = np.maximum.accumulate([elapsed_by_step[step] for step in known]) if known else None
        self._unix_N = np.array([ends[step] for step in known])

    def of_run(self, elapsed_s: float) -> float:
        """Convert a time of the run's clock."""
        if self._zero_s is None or self._elapsed_N is None:
            return elapsed_s
        # Before the first and after the last known step, both clocks have the same pace.
        inside_s = float(np.clip(elapsed_s, self._elapsed_N[0], self._elapsed_N[-1]))
        unix_s = float(np.interp(inside_s, self._elapsed_N, self._unix_N))
        return unix_s - self._zero_s + (elapsed_s - inside_s)

    def of_unix(self, unix_s: float) -> float | None:
        """Convert seconds since 1970; None if no process left a trace."""
        return None if self._zero_s is None else unix_s - self._zero_s


def write_trace(run: RunReader, file: Path) -> int:
    """Write the trace, replacing an existing file; return the number of its events.

    Raises:
        OSError: it cannot be written. An existing file is left unchanged.
    """
    partial = file.with_name(f".{file.name}.partial")
    num_events = 0
    try:
        with partial.open("wb") as out:
            out.write(b'{"displayTimeUnit":"ms","traceEvents":[')
            for event in trace_events(run):
                out.write((b",\n" if num_events else b"\n") + msgspec.json.encode(event))
                num_events += 1
            out.write(b"\n]}\n")
        partial.replace(file)
    except OSError:
        with suppress(OSError):
            partial.unlink()
        raise
    return num_events


def trace_events(run: RunReader) -> Iterator[Event]:
    """Yield all events: names first, then steps, counters, groups, faults and processes."""
    for process, name in ((TRAINER, f"run {run.name}"), (GROUPS, "groups"), (FAULTS, "faults")):
        yield _name(process, 0, "process_name", name)
    for thread, name in ((_STEPS, "steps"), (_VERSIONS, "weight versions"), (_EVALUATIONS, "evaluations")):
        yield _name(TRAINER, thread, "thread_name", name)
    elapsed = run.metrics.by_step(ELAPSED_S)
    file_clock = FileClock(elapsed, run.traces.lanes)
    times = {step: file_clock.of_run(at_s) for step, at_s in elapsed.items()}
    yield from _steps(run, times)
    yield from _counters(run, times)
    clock, end_s = RunClock(run.groups, run.metrics), max(times.values(), default=0.0)
    for row, group in enumerate(run.groups):
        yield from _group(row, group, clock, file_clock, end_s)
    yield from _faults(run, file_clock)
    yield from _processes(run.traces.lanes, file_clock)


def _steps(run: RunReader, times: Mapping[int, float]) -> Iterator[Event]:
    by_step = run.metrics.by_step
    took, versions, accuracies = by_step(STEP_S), by_step(POLICY_VERSION), by_step(ACCURACY)
    for step, end_s in times.items():
        if step in took:
            yield _bar(TRAINER, _STEPS, "step", f"step {step}", end_s - took[step], took[step], {})
        if step in versions:
            yield _instant(_VERSIONS, f"version {versions[step]:.0f}", end_s, step)
        if step in accuracies:
            yield _instant(_EVALUATIONS, f"accuracy {accuracies[step]:.4g}", end_s, step)


def _instant(thread: int, name: str, at_s: float, step: int) -> Event:
    at = _microseconds(at_s)
    return {"ph": "i", "s": "t", "pid": TRAINER, "tid": thread, "name": name, "ts": at, "args": {STEP: step}}


def _counters(run: RunReader, times: Mapping[int, float]) -> Iterator[Event]:
    for key in MAIN_METRICS:
        for step, value in run.metrics.by_step(key).items():
            if step in times:
                at = _microseconds(times[step])
                yield {"ph": "C", "pid": TRAINER, "tid": 0, "name": key, "ts": at, "args": {"value": value}}


def _group(
    row: int, group: GroupHistory, clock: RunClock, file_clock: FileClock, end_s: float
) -> Iterator[Event]:
    """Yield the phases of a group, nested in the whole; a group in flight ends where the metrics end.

    A group whose start has no time, because no steps surround it, is left out.
    """

    def placed(line: int | None) -> float | None:
        about_s = clock.about_s(line)
        return None if about_s is None else file_clock.of_run(about_s)

    started_s = placed(group.started_line)
    if started_s is None:
        return
    sampled_s, scored_s = placed(group.sampled_line), placed(group.scored_line)
    # Lines after the last step have no time.
    stopped_s = placed(group.ended_line or group.undone_line)
    stopped_s = max(started_s, end_s) if stopped_s is None else stopped_s
    what = group.fate if group.reason is None else f"{group.fate}: {group.reason}"
    args = {"prompt": group.prompt, "attempt": group.attempt, "fate": what, "step": group.step}
    yield from _part(row, f"group {group.group}", started_s, stopped_s, args)
    phases = [(Fate.SAMPLING, started_s), (Fate.SCORING, sampled_s), (Fate.WAITING, scored_s)]
    if group.is_restored:
        phases = [(Fate.WAITING, started_s)]
    known = [(phase, begin_s) for phase, begin_s in phases if begin_s is not None]
    ends = [begin_s for _, begin_s in known[1:]] + [stopped_s]
    for (phase, begin_s), phase_end_s in zip(known, ends, strict=True):
        yield from _part(row, phase, begin_s, phase_end_s, {})


def _part(row: int, name: str, begin_s: float, end_s: float, args: dict[str, object]) -> Iterator[Event]:
    # The id is the row, because a resumed run can reuse a group's number.
    common: Event = {"cat": "group", "id": row, "pid": GROUPS, "tid": 0, "name": name}
    yield {"ph": "b", **common, "ts": _microseconds(begin_s), "args": args}
    yield {"ph": "e", **common, "ts": _microseconds(max(begin_s, end_s))}


def _faults(run: RunReader, file_clock: FileClock) -> Iterator[Event]:
    """Yield each fault. Without traces their times on the run's clock are unknown: they are left out."""
    for fault in run.faults.faults:
        if (at_s := file_clock.of_unix(fault.detected_s)) is not None:
            facts = {"role": fault.role, "how": fault.how, "detected_unix_s": fault.detected_s}
            yield _bar(FAULTS, 1, "fault", f"{fault.who} {fault.what}", at_s, fault.took_s or 0.0, facts)


def _processes(lanes: Sequence[Lane], clock: FileClock) -> Iterator[Event]:
    """Yield all processes, each with its states in the first row and its spans in the rows below."""

    def bar(place: int, row: int, name: str, begin_s: float, took_s: float, facts: Facts) -> Event:
        at_s = clock.of_unix(begin_s)
        assert at_s is not None, "there are traces"
        return _bar(place, row, "proc", name, at_s, took_s, facts)

    for place, (name, processes) in enumerate(named_lanes(lanes).items(), FIRST_PROC):
        yield _name(place, 0, "process_name", name)
        yield _name(place, 0, "thread_name", "state")
        yield {"ph": "M", "pid": place, "tid": 0, "name": "process_sort_index", "args": {"sort_index": place}}
        for process in processes:
            assert process.opened is not None
            facts = {"process": process.opened.pid, "host": process.opened.host}
            for state, begin_s, end_s in process.stretches():
                yield bar(place, 0, str(state), begin_s, end_s - begin_s, facts)
        rows: list[float] = []
        for span in sorted((one for each in processes for one in each.spans), key=_by_begin):
            row = _free_row(rows, span)
            yield bar(place, row + 1, span.name, span.begin_s, span.took_s, span.facts)
        for row in range(len(rows)):
            yield _name(place, row + 1, "thread_name", "spans" if row == 0 else f"spans {row + 1}")


def _by_begin(span: Span) -> tuple[float, float]:
    return span.begin_s, -span.took_s


def _free_row(rows: list[float], span: Span) -> int:
    """Return the first row in which nothing overlaps the span, and occupy it."""
    for row, end_s in enumerate(rows):
        if end_s <= span.begin_s:
            rows[row] = span.begin_s + span.took_s
            return row
    rows.append(span.begin_s + span.took_s)
    return len(rows) - 1


def _name(process: int, thread: int, what: str, name: str) -> Event:
    return {"ph": "M", "pid": process, "tid": thread, "name": what, "args": {"name": name}}


def _bar(
    process: int, thread: int, category: str, name: str, at_s: float, took_s: float, args: Facts
) -> Event:
    return {
        "ph": "X",
        "pid": process,
        "tid": thread,
        "cat": category,
        "name": name,
        "ts": _microseconds(at_s),
        "dur": _microseconds(took_s),
        "args": dict(args),
    }


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 1)
