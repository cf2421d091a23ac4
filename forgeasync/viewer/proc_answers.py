"""What the page is told of the processes' time."""

from collections.abc import Sequence

import numpy as np

from forgeasync.tracing import NOT_THERE, ORDER, Lane, Span, named_lanes, shares, states_between
from forgeasync.viewer.run_reader import RunReader

MAX_SPANS = 400
"""Most spans of one lane in an answer, the longest."""

RECORD = "record"
"""The controller's span that begins when a step's metrics are made."""

Answer = dict[str, object]


def lanes_answer(run: RunReader, *, first_step: int | None, last_step: int | None, width: int) -> Answer:
    """Return the lanes of all procs over some steps, or the whole run, in ``width`` bars each at most.

    Times are seconds since the first process began.
    """
    lanes = run.traces.lanes
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
    """Return when each step began and ended by the controller's spans, in seconds since 1970; the newest."""
    found: dict[int, tuple[float, float]] = {}
    for lane in named_lanes(lanes).get("controller", ()):
        of_lane: dict[int, tuple[float, float]] = {}
        for span in lane.spans:
            step = span.facts.get("step")
            if isinstance(step, int):
                begin_s, end_s = of_lane.get(step, (span.begin_s, span.begin_s))
                of_lane[step] = (min(begin_s, span.begin_s), max(end_s, span.begin_s + span.took_s))
        # A later process makes steps again.
        found |= of_lane
    return dict(sorted(found.items()))


def recorded_at(lanes: Sequence[Lane]) -> dict[int, float]:
    """Return when the metrics of each step were made (their ``time/elapsed_s``), in seconds since 1970."""
    return {
        step: span.begin_s
        for lane in named_lanes(lanes).get("controller", ())
        for span in lane.spans
        if span.name == RECORD and isinstance(step := span.facts.get("step"), int)
    }


def _is_in(step: int, first: int | None, last: int | None) -> bool:
    return (first is None or step >= first) and (last is None or step <= last)


def _bars(states_N: np.ndarray) -> list[list[int]]:
    """Return [first bin, number of bins, state] of every stretch; none where nobody was there."""
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
