"""States, lines and what stands between them and the file: for any order of events."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forgeasync.tracing import (
    ORDER,
    SHORTEST_S,
    Changed,
    Ended,
    Line,
    Lived,
    Opened,
    Pending,
    State,
    StateClock,
    UnknownTrace,
    decode,
    encode,
)

STATES = st.sampled_from(ORDER)
MOMENTS = st.floats(min_value=0.0, max_value=2e9).map(lambda value: round(value, 6))
WORDS = st.text(max_size=20)
LINES = st.one_of(
    st.builds(Opened, at_s=MOMENTS, proc=WORDS, pid=st.integers(1, 1 << 30), host=WORDS, state=STATES),
    st.builds(Changed, at_s=MOMENTS, state=STATES),
    st.builds(
        Ended,
        at_s=MOMENTS,
        took_s=MOMENTS,
        name=WORDS,
        facts=st.dictionaries(WORDS, st.one_of(WORDS, st.integers(-(1 << 60), 1 << 60)), max_size=3),
    ),
    st.builds(Lived, at_s=MOMENTS, num_lost=st.integers(0, 1 << 40)),
)


@given(st.lists(st.tuples(STATES, st.booleans()), max_size=60))
def test_the_state_is_the_first_of_all_that_is_under_way(steps: list[tuple[State, bool]]) -> None:
    clock, under_way = StateClock(State.WAITING_FOR_ROOM), []
    for state, begins in steps:
        if begins:
            clock.begin(state)
            under_way.append(state)
        elif state in under_way:
            clock.end(state)
            under_way.remove(state)
        assert clock.state is min(under_way, key=ORDER.index, default=State.WAITING_FOR_ROOM)


@given(LINES)
def test_a_line_says_what_was_written(line: Line) -> None:
    data = encode(line)
    assert data.count(b"\n") == 1 and data.endswith(b"\n")
    assert decode(data[:-1]) == line


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "no line"),
        (b"[1]", "no line"),
        (b'{"at": "now"}', "no line"),
        (b'{"at": 1, "state": "asleep"}', "asleep"),
        (b'{"at": 1, "trace": 2, "proc": "x", "state": "starting"}', "format 2; this version reads 1"),
        (b'{"at": 1, "trace": 1, "state": "starting"}', "without proc"),
        (b"[" * 100_000, "no line"),
    ],
)
def test_other_lines_are_refused_with_their_reason(data: bytes, words: str) -> None:
    with pytest.raises(UnknownTrace, match=words):
        decode(data)


@given(st.lists(st.tuples(st.floats(0.0, 3 * SHORTEST_S), STATES, st.booleans(), st.booleans()), max_size=80))
def test_only_states_that_are_too_short_are_left_out(
    events: list[tuple[float, State, bool, bool]],
) -> None:
    pending, now_s = Pending(State.STARTING, max_lines=1000), 100.0
    true: list[tuple[float, State]] = [(0.0, State.STARTING)]
    written: list[Line] = []
    num_spans = 0
    for passed_s, state, has_span, is_taken in events:
        now_s += passed_s
        pending.change(now_s, state)
        true.append((now_s, state))
        if has_span:
            pending.add(Ended(at_s=now_s, took_s=0.0, name="x", facts={}))
            num_spans += 1
        if is_taken:
            written += pending.take(now_s, says_lived=False)
    written += pending.take(now_s, says_lived=False)
    changes = [line for line in written if isinstance(line, Changed)]
    assert sum(isinstance(line, Ended) for line in written) == num_spans
    assert [line.at_s for line in changes] == sorted(line.at_s for line in changes)
    said = [State.STARTING, *(line.state for line in changes)]
    assert all(one is not other for one, other in itertools.pairwise(said))
    assert said[-1] is true[-1][1], "the newest state is never left out"
    # Wherever a state has lasted for long enough, the lines say it at the end of that time.
    true.append((now_s + 1.0, State.STARTING))
    for (begin_s, state), (end_s, _) in itertools.pairwise(true):
        if end_s - begin_s > 2 * SHORTEST_S:
            moment_s = math.nextafter(end_s, 0.0)
            at_then = [line.state for line in changes if line.at_s <= moment_s]
            assert (at_then or [State.STARTING])[-1] is state


def test_a_state_that_is_too_short_counts_as_the_one_after_it() -> None:
    pending = Pending(State.STARTING, max_lines=10)
    pending.change(1.0, State.COMPUTING)
    pending.change(1.0 + SHORTEST_S / 2, State.FETCHING)
    pending.change(2.0, State.COMPUTING)
    pending.change(2.0 + SHORTEST_S / 2, State.FETCHING)
    assert pending.take(3.0, says_lived=True) == [Changed(at_s=1.0, state=State.FETCHING)]


def test_what_is_too_much_is_counted_and_the_newest_state_is_said() -> None:
    pending = Pending(State.STARTING, max_lines=3)
    for number in range(10):
        pending.change(float(number), ORDER[number % 2 + 1])
        pending.add(Ended(at_s=float(number), took_s=0.5, name="x", facts={}))
    *kept, newest, lost = pending.take(20.0, says_lived=False)
    assert [type(line) for line in kept] == [Changed] * 3 + [Ended] * 3
    assert newest == Changed(at_s=20.0, state=ORDER[2])
    assert lost == Lived(at_s=20.0, num_lost=7 + 7)
    assert pending.take(21.0, says_lived=True) == [Lived(at_s=21.0, num_lost=0)]
