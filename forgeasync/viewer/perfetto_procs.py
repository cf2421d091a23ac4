"""The processes of a run as events of a trace file: a lane of states, and spans below it.

The file's clock begins with the first process. What a run's files know only by its own clock
(``time/elapsed_s``) is placed by the steps, of which both clocks have the end.
"""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from forgeasync.tracing import Lane, Span, named_lanes
from forgeasync.viewer.proc_answers import recorded_at

FIRST_PROC = 10
"""Number of the first proc in the file; smaller ones are steps, groups and faults."""

Event = dict[str, object]


class FileClock:
    """Seconds in the file, of moments on the run's clock and of moments since 1970."""

    def __init__(self, elapsed_by_step: Mapping[int, float], lanes: Sequence[Lane]) -> None:
        """Without traces the file's clock is the run's own, and other moments cannot be placed."""
        self._zero_s = min((lane.begin_s for lane in lanes), default=None)
        ends = recorded_at(lanes)
        known = sorted(set(ends) & set(elapsed_by_step))
        self._elapsed_N = np.maximum.accumulate([elapsed_by_step[step] for step in known]) if known else None
        self._unix_N = np.array([ends[step] for step in known])

    def of_run(self, elapsed_s: float) -> float:
        """Return the moment at which the run's clock said so."""
        if self._zero_s is None or self._elapsed_N is None:
            return elapsed_s
        # Beyond the steps that are known both clocks go alike.
        inside_s = float(np.clip(elapsed_s, self._elapsed_N[0], self._elapsed_N[-1]))
        unix_s = float(np.interp(inside_s, self._elapsed_N, self._unix_N))
        return unix_s - self._zero_s + (elapsed_s - inside_s)

    def of_unix(self, unix_s: float) -> float | None:
        """Return a moment that is given in seconds since 1970; None: the file does not have that clock."""
        return None if self._zero_s is None else unix_s - self._zero_s


def proc_events(lanes: Sequence[Lane], clock: FileClock) -> Iterator[Event]:
    """All procs: one of the file's processes each, with its states in the first row."""
    for place, (name, processes) in enumerate(named_lanes(lanes).items(), FIRST_PROC):
        yield _name(place, 0, "process_name", name)
        yield _name(place, 0, "thread_name", "state")
        yield {"ph": "M", "pid": place, "tid": 0, "name": "process_sort_index", "args": {"sort_index": place}}
        for process in processes:
            assert process.opened is not None
            facts = {"process": process.opened.pid, "host": process.opened.host}
            for state, begin_s, end_s in process.stretches():
                yield _bar(place, 0, str(state), begin_s, end_s - begin_s, facts, clock)
        rows: list[float] = []
        for span in sorted((one for each in processes for one in each.spans), key=_by_begin):
            row = _free_row(rows, span)
            yield _bar(place, row + 1, span.name, span.begin_s, span.took_s, span.facts, clock)
        for row in range(len(rows)):
            yield _name(place, row + 1, "thread_name", "spans" if row == 0 else f"spans {row + 1}")


def _by_begin(span: Span) -> tuple[float, float]:
    return span.begin_s, -span.took_s


def _free_row(rows: list[float], span: Span) -> int:
    """Return the first row in which nothing overlaps the span, and note that it is there now."""
    for row, end_s in enumerate(rows):
        if end_s <= span.begin_s:
            rows[row] = span.begin_s + span.took_s
            return row
    rows.append(span.begin_s + span.took_s)
    return len(rows) - 1


def _name(process: int, thread: int, what: str, name: str) -> Event:
    return {"ph": "M", "pid": process, "tid": thread, "name": what, "args": {"name": name}}


def _bar(
    process: int,
    thread: int,
    name: str,
    begin_s: float,
    took_s: float,
    facts: Mapping[str, object],
    clock: FileClock,
) -> Event:
    at_s = clock.of_unix(begin_s)
    assert at_s is not None, "there are traces"
    return {
        "ph": "X",
        "pid": process,
        "tid": thread,
        "cat": "proc",
        "name": name,
        "ts": round(at_s * 1e6, 1),
        "dur": round(took_s * 1e6, 1),
        "args": dict(facts),
    }
