"""Traces of processes that never were, for what reads them."""

from pathlib import Path

from forgeasync.observability import Alive, Changed, Facts, Line, Opened, Span, State, encode
from tests.support.viewer_runs import STEP_S

TRACE_BEGIN_S = 1.8e9
"""When the first process of ``write_traces`` began, in seconds since 1970; steps follow 10 s later."""


def write_traces(folder: Path, *, num_steps: int) -> None:
    """Write traces of the controller, and of a generator that was killed and came back, into a run."""
    loop: list[Line] = [_opened("controller", 1, 0.0), _changed(10.0, State.COMPUTING)]
    for step in range(1, num_steps + 1):
        begin_s = 10.0 + STEP_S * (step - 1)
        loop += [_changed(begin_s, State.WAITING_FOR_BATCH), _changed(begin_s + 0.5, State.COMPUTING)]
        loop.append(_span(begin_s, 0.5, "wait for a batch", {"step": step}))
        loop.append(_span(begin_s + 0.5, 1.5, "train", {"step": step}))
        loop.append(_span(begin_s + STEP_S, 0.0, "record", {"step": step}))
    end_s = 10.0 + STEP_S * num_steps
    first = [
        _opened("generator-0", 2, 1.0),
        _changed(4.0, State.COMPUTING),
        _span(4.0, 5.0, "sample group", {"group": 0}),
        _span(6.0, 5.0, "sample group", {"group": 1}),
        Alive(at_s=TRACE_BEGIN_S + 11.0, num_lost=0),
    ]
    second = [_opened("generator-0", 3, 12.0), _changed(13.0, State.WAITING_FOR_ROOM)]
    logs = folder / "logs"
    logs.mkdir(exist_ok=True)
    for name, lines in (("controller-1", loop), ("generator-0-2", first), ("generator-0-3", second)):
        last = Alive(at_s=TRACE_BEGIN_S + end_s, num_lost=0)
        written = lines if name == "generator-0-2" else [*lines, last]
        (logs / f"{name}.trace.jsonl").write_bytes(b"".join(map(encode, written)))


def _opened(proc: str, pid: int, at_s: float) -> Line:
    return Opened(at_s=TRACE_BEGIN_S + at_s, proc=proc, pid=pid, host="here", state=State.STARTING)


def _changed(at_s: float, state: State) -> Line:
    return Changed(at_s=TRACE_BEGIN_S + at_s, state=state)


def _span(at_s: float, took_s: float, name: str, facts: Facts) -> Line:
    return Span(begin_s=TRACE_BEGIN_S + at_s, took_s=took_s, name=name, facts=facts)
