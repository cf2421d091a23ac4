"""A run as one file for ui.perfetto.dev and chrome://tracing, from what its files say.

The form is Chrome's JSON ("Trace Event Format"). Times are microseconds since the first process began, or on
the run's own clock (``time/elapsed_s``) where no process has left a trace. Times of groups are those of the
steps around them (``forgeasync.viewer.run_clock``).
"""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec
import numpy as np

from forgeasync.faults import Role
from forgeasync.viewer.definitions import HEADLINES
from forgeasync.viewer.group_lives import Fate, GroupLife
from forgeasync.viewer.metric_table import ELAPSED_S, STEP
from forgeasync.viewer.perfetto_procs import FileClock, proc_events
from forgeasync.viewer.run_clock import RunClock
from forgeasync.viewer.run_reader import RunReader

TRAINER, GROUPS, FAULTS = 1, 2, 3
"""Numbers of what the viewers call processes."""

_STEPS, _VERSIONS, _EVALUATIONS = 1, 2, 3

STEP_S = "time/step_s"
POLICY_VERSION = "policy_version"
ACCURACY = "eval/accuracy"

Event = dict[str, object]


def write_trace(run: RunReader, file: Path) -> int:
    """Write the trace, in place of a file that is there; returns how many events it has.

    Raises:
        OSError: it cannot be written; what was there before is left.
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
    """All events: names first, then steps, counters, groups and faults."""
    names = ((TRAINER, f"run {run.name}"), (GROUPS, "groups"), (FAULTS, "faults"))
    for process, name in names:
        yield {"ph": "M", "pid": process, "tid": 0, "name": "process_name", "args": {"name": name}}
    for thread, name in ((_STEPS, "steps"), (_VERSIONS, "weight versions"), (_EVALUATIONS, "evaluations")):
        yield {"ph": "M", "pid": TRAINER, "tid": thread, "name": "thread_name", "args": {"name": name}}
    file_clock = FileClock(_by_step(run, ELAPSED_S), run.traces.lanes)
    times = {step: file_clock.of_run(at_s) for step, at_s in _by_step(run, ELAPSED_S).items()}
    yield from _steps(run, times)
    yield from _counters(run, times)
    clock, lives = RunClock(run.ledger.lives, run.metrics), run.ledger.lives
    end_s = max(times.values(), default=0.0)
    for row in range(len(lives)):
        yield from _group(row, lives.at(row), clock, file_clock, end_s)
    yield from _faults(run, times, file_clock)
    yield from proc_events(run.traces.lanes, file_clock)


def _by_step(run: RunReader, key: str) -> dict[int, float]:
    column = run.metrics.column(key)
    return dict(zip(column.steps_N.tolist(), column.values_N.tolist(), strict=True))


def _steps(run: RunReader, times: dict[int, float]) -> Iterator[Event]:
    took, headlines = _by_step(run, STEP_S), {key: _by_step(run, key) for key in HEADLINES}
    versions, accuracies = _by_step(run, POLICY_VERSION), _by_step(run, ACCURACY)
    for step, end_s in times.items():
        if step in took:
            yield {
                "ph": "X",
                "pid": TRAINER,
                "tid": _STEPS,
                "cat": "step",
                "name": f"step {step}",
                "ts": _microseconds(end_s - took[step]),
                "dur": _microseconds(took[step]),
                "args": {key: values[step] for key, values in headlines.items() if step in values},
            }
        if step in versions:
            yield _instant(_VERSIONS, f"version {versions[step]:.0f}", end_s, {STEP: step})
        if step in accuracies:
            yield _instant(_EVALUATIONS, f"accuracy {accuracies[step]:.4g}", end_s, {STEP: step})


def _instant(thread: int, name: str, at_s: float, args: dict[str, object]) -> Event:
    return {
        "ph": "i",
        "s": "t",
        "pid": TRAINER,
        "tid": thread,
        "name": name,
        "ts": _microseconds(at_s),
        "args": args,
    }


def _counters(run: RunReader, times: dict[int, float]) -> Iterator[Event]:
    for key in HEADLINES:
        for step, value in _by_step(run, key).items():
            if step in times:
                at = _microseconds(times[step])
                yield {"ph": "C", "pid": TRAINER, "tid": 0, "name": key, "ts": at, "args": {"value": value}}


def _group(
    row: int, life: GroupLife, clock: RunClock, file_clock: FileClock, end_s: float
) -> Iterator[Event]:
    """The parts of a group's life, nested in the whole. One that goes on ends where the metrics do.

    A group whose start has no time, since there was no step around it, is left out.
    """

    def placed(line: int | None) -> float | None:
        about_s = clock.about_s(line)
        return None if about_s is None else file_clock.of_run(about_s)

    started_s = placed(life.started_line)
    if started_s is None:
        return
    sampled_s, scored_s = placed(life.sampled_line), placed(life.scored_line)
    # What follows the last step has no time.
    stopped_s = placed(life.ended_line or life.undone_line)
    stopped_s = max(started_s, end_s) if stopped_s is None else stopped_s
    what = life.fate.word if life.reason is None else f"{life.fate.word}: {life.reason}"
    args = {"prompt": life.prompt, "attempt": life.attempt, "fate": what, "step": life.step}
    yield from _part(row, f"group {life.group}", started_s, stopped_s, args)
    phases = [(Fate.SAMPLING, started_s), (Fate.SCORING, sampled_s), (Fate.WAITING, scored_s)]
    if life.is_restored:
        phases = [(Fate.WAITING, started_s)]
    known = [(phase, begin_s) for phase, begin_s in phases if begin_s is not None]
    ends = [begin_s for _, begin_s in known[1:]] + [stopped_s]
    for (phase, begin_s), phase_end_s in zip(known, ends, strict=True):
        yield from _part(row, phase.word, begin_s, phase_end_s, {})


def _part(row: int, name: str, begin_s: float, end_s: float, args: dict[str, object]) -> Iterator[Event]:
    # The row, not the group's number: that comes again when a run is resumed.
    common: Event = {"cat": "group", "id": row, "pid": GROUPS, "tid": 0, "name": name}
    yield {"ph": "b", **common, "ts": _microseconds(begin_s), "args": args}
    yield {"ph": "e", **common, "ts": _microseconds(max(begin_s, end_s))}


def _faults(run: RunReader, times: dict[int, float], file_clock: FileClock) -> Iterator[Event]:
    """Each fault when it was noticed; without traces at the end of the first step whose metrics count it."""
    counts: dict[int, float] = dict.fromkeys(times, 0.0)
    for role in Role:
        for step, value in _by_step(run, f"faults/detected_{role}").items():
            counts[step] = counts.get(step, 0.0) + value
    steps = sorted(set(counts) & set(times))
    counts_N = np.array([counts[step] for step in steps])
    for place, fault in enumerate(run.faults.faults):
        counted = np.flatnonzero(counts_N > place)
        at_s = file_clock.of_unix(fault.detected_s)
        if at_s is None:
            at_s = times[steps[int(counted[0])]] if len(counted) else max(times.values(), default=0.0)
        yield {
            "ph": "X",
            "pid": FAULTS,
            "tid": 1,
            "cat": "fault",
            "name": f"{fault.who} {fault.what}",
            "ts": _microseconds(at_s),
            "dur": _microseconds(fault.took_s or 0.0),
            "args": {"role": fault.role, "how": fault.how, "detected_unix_s": fault.detected_s},
        }


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 1)
