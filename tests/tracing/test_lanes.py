"""What is read of traces: seconds by state, stretches, steps, damage."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forgeasync.tracing import (
    NOT_THERE,
    ORDER,
    Changed,
    Ended,
    Lane,
    Line,
    Lived,
    Opened,
    State,
    encode,
    named_lanes,
    shares,
    states_between,
)

IDLE, BUSY = State.WAITING_FOR_BATCH, State.COMPUTING


def lane_of(*lines: Line, proc: str = "trainer-0", begin_s: float = 10.0) -> Lane:
    lane = Lane()
    opened = Opened(at_s=begin_s, proc=proc, pid=7, host="here", state=State.STARTING)
    for line in (opened, *lines):
        lane.add(encode(line)[:-1])
    return lane


def test_seconds_by_state_between_edges() -> None:
    lane = lane_of(
        Changed(at_s=12.0, state=BUSY), Changed(at_s=13.0, state=IDLE), Lived(at_s=20.0, num_lost=0)
    )
    seconds = lane.seconds_N(np.array([0.0, 11.0, 12.5, 30.0]))
    rows = {state: seconds[ORDER.index(state)].tolist() for state in (State.STARTING, BUSY, IDLE)}
    assert rows == {State.STARTING: [1.0, 1.0, 0.0], BUSY: [0.0, 0.5, 0.5], IDLE: [0.0, 0.0, 7.0]}
    assert seconds.sum() == pytest.approx(10.0)


@given(
    st.lists(st.tuples(st.floats(0.001, 5.0), st.sampled_from(ORDER)), min_size=1, max_size=30),
    st.lists(st.floats(0.0, 200.0), min_size=2, max_size=20, unique=True),
)
def test_each_second_lies_in_exactly_one_state(
    changes: list[tuple[float, State]], edges: list[float]
) -> None:
    now_s, lines = 10.0, []
    for passed_s, state in changes:
        now_s += passed_s
        lines.append(Changed(at_s=round(now_s, 6), state=state))
    lane = lane_of(*lines)
    seconds = lane.seconds_N(np.array(sorted(edges)))
    lived = np.diff(np.clip(sorted(edges), lane.begin_s, lane.end_s))
    assert seconds.min() >= 0.0
    assert seconds.sum(axis=0) == pytest.approx(lived, abs=1e-6)
    assert sum(end - begin for _, begin, end in lane.stretches()) == pytest.approx(lane.end_s - lane.begin_s)


def test_processes_that_follow_each_other_are_one_lane_with_a_gap() -> None:
    first = lane_of(Changed(at_s=11.0, state=BUSY), Lived(at_s=14.0, num_lost=2), proc="generator-0")
    second = lane_of(
        Changed(at_s=21.0, state=IDLE), Lived(at_s=24.0, num_lost=0), proc="generator-0", begin_s=20.0
    )
    other = lane_of(proc="generator-10")
    loop = lane_of(proc="controller")
    lanes = named_lanes([second, other, first, loop])
    assert list(lanes) == ["controller", "generator-0", "generator-10"]
    assert lanes["generator-0"] == [first, second]
    states = states_between([first, second], np.arange(10.0, 25.0)).tolist()
    starting, busy, idle = (ORDER.index(one) for one in (State.STARTING, BUSY, IDLE))
    assert states == [starting, *[busy] * 3, *[NOT_THERE] * 6, starting, *[idle] * 3]
    found = shares([first, second], 0.0, 100.0)
    assert found[BUSY] == pytest.approx(3 / 8) and sum(found.values()) == pytest.approx(1.0)
    assert first.num_lost == 2 and shares([first], 50.0, 60.0) == {}


def test_damage_is_counted_and_the_rest_is_read() -> None:
    lane = lane_of(Ended(at_s=11.0, took_s=2.0, name="train", facts={"version": 3}))
    lane.add(b'{"at": 12, "sta')
    lane.add(encode(Changed(at_s=13.5, state=BUSY))[:-1])
    assert lane.num_damaged == 1 and lane.first_damage is not None and "no line" in lane.first_damage
    assert lane.state is BUSY and lane.end_s == 13.5
    assert [(one.name, one.facts) for one in lane.spans] == [("train", {"version": 3})]


def test_a_file_without_its_first_line_is_no_lane() -> None:
    lane = Lane()
    lane.add(encode(Changed(at_s=1.0, state=BUSY))[:-1])
    assert lane.opened is None and lane.num_damaged == 1
    assert named_lanes([lane]) == {}
