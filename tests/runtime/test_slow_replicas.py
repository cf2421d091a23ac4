"""Which generators count as slow, at whatever loads, pauses and times."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forgeasync.runtime import REPLACE_S, SUSPECT_S, WINDOW_S, Pace, SlowReplicas

FACTOR = 3.0


class Fleet:
    """Generators whose steps take ``pace`` times what they should at their load, heard of every second."""

    def __init__(self, paces: list[float]) -> None:
        self.slow = SlowReplicas(FACTOR)
        self.paces = paces
        self.counts: list[dict[int, tuple[int, float]]] = [{} for _ in paces]
        self.begun_s = [0.0 for _ in paces]
        """Of the step that each one is in the middle of."""
        self.now_s = 0.0

    def second(self, loads: list[int], *, busy_share: float = 1.0, judges: bool = True) -> None:
        """A second in which each has sequences; load 0: none."""
        self.now_s += 1.0
        for number, (pace, load) in enumerate(zip(self.paces, loads, strict=True)):
            if load:
                step_s = 0.01 * (1.0 + load / 32) * pace
                num_steps = int((self.begun_s[number] + busy_share) / step_s)
                self.begun_s[number] += busy_share - num_steps * step_s
                bits = load.bit_length()
                known = self.counts[number].get(bits, (0, 0.0))
                self.counts[number] = self.counts[number] | {
                    bits: (known[0] + num_steps, known[1] + num_steps * step_s)
                }
            self.slow.heard(number, self.counts[number], now_s=self.now_s)
        if judges:
            self.slow.judge(now_s=self.now_s)

    def seconds(self, num: float, loads: list[int], **changes: float) -> None:
        for _ in range(round(num)):
            self.second(loads, **changes)

    @property
    def found(self) -> list[Pace]:
        return [self.slow.pace(number) for number in range(len(self.paces))]


def test_one_that_is_slow_becomes_suspect_and_then_slow() -> None:
    fleet = Fleet([1.0, 5.0])
    fleet.seconds(SUSPECT_S, [20, 20])
    assert fleet.found == [Pace.LIKE_PEERS] * 2
    fleet.seconds(2, [20, 20])
    assert fleet.found == [Pace.LIKE_PEERS, Pace.SUSPECT]
    assert fleet.slow.ratio(1) == pytest.approx(5.0) and fleet.slow.ratio(0) == pytest.approx(0.2)
    fleet.seconds(REPLACE_S - SUSPECT_S, [20, 20])
    assert fleet.found == [Pace.LIKE_PEERS, Pace.SLOW]
    fleet.slow.forget(1)
    fleet.slow.judge(now_s=fleet.now_s)
    assert fleet.found[1] is Pace.LIKE_PEERS and fleet.slow.ratio(0) is None, "nobody to compare with"


def test_one_that_is_far_too_slow_is_found_at_other_loads_too() -> None:
    fleet = Fleet([1.0, 12.0])
    fleet.seconds(REPLACE_S + 12, [10, 20])
    assert fleet.found == [Pace.LIKE_PEERS, Pace.SLOW]


def test_one_that_is_quick_again_is_cleared_and_begins_anew() -> None:
    fleet = Fleet([1.0, 5.0, 1.0])
    fleet.seconds(30, [20, 20, 20])
    assert fleet.found[1] is Pace.SUSPECT
    fleet.paces[1] = 1.0
    fleet.seconds(WINDOW_S + 1, [20, 20, 20])
    assert fleet.found == [Pace.LIKE_PEERS] * 3
    fleet.paces[1] = 5.0
    fleet.seconds(REPLACE_S, [20, 20, 20])
    assert fleet.found[1] is Pace.SUSPECT, "what was before does not count"


def test_one_long_step_makes_nobody_suspect() -> None:
    fleet = Fleet([1.0, 1.0])
    fleet.seconds(20, [20, 20])
    known = fleet.counts[1][5]
    fleet.counts[1] = {5: (known[0] + 1, known[1] + 60.0)}
    for _ in range(30):
        fleet.second([20, 20])
        assert fleet.found == [Pace.LIKE_PEERS] * 2


def test_time_without_evidence_stands_still() -> None:
    fleet = Fleet([1.0, 5.0])
    fleet.seconds(25, [20, 20])
    fleet.seconds(500, [20, 0])
    assert fleet.found[1] is Pace.SUSPECT
    assert fleet.slow.ratio(1) is None
    fleet.seconds(500, [4, 60])
    assert fleet.found[1] is Pace.SUSPECT, "so many sequences may take so much longer"
    fleet.seconds(REPLACE_S, [20, 20])
    assert fleet.found[1] is Pace.SLOW


def test_whoever_stood_still_compares_nothing_from_before() -> None:
    fleet = Fleet([1.0, 1.0])
    fleet.seconds(20, [20, 20])
    # For the steps of one of them the same pause of the machine counts, for the other's it does not.
    fleet.now_s += 1000.0
    known = fleet.counts[1][5]
    fleet.counts[1] = {5: (known[0] + 1, known[1] + 1000.0)}
    fleet.slow.restart()
    fleet.seconds(REPLACE_S, [20, 20])
    assert fleet.found == [Pace.LIKE_PEERS] * 2


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_there_is_no_false_alarm(data: st.DataObject) -> None:
    """At whatever loads, with pauses for updates and prompts, and with times that differ by less than half
    the factor. Within a load's factor of two a step takes less than twice as long."""
    paces = data.draw(st.lists(st.floats(1.0, FACTOR / 2), min_size=1, max_size=5))
    fleet = Fleet(paces)
    load = st.sampled_from([0, 0, 1, 2, 7, 8, 15, 16, 31, 64, 127, 128])
    for _ in range(data.draw(st.integers(10, 60))):
        loads = [data.draw(load) for _ in paces]
        fleet.second(loads, busy_share=data.draw(st.sampled_from([0.0, 0.1, 1.0])))
        assert set(fleet.found) == {Pace.LIKE_PEERS}


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_one_that_is_far_too_slow_is_found_among_any_number_of_peers(data: st.DataObject) -> None:
    num_peers = data.draw(st.integers(1, 6))
    paces = [data.draw(st.floats(1.0, 1.2)) for _ in range(num_peers)]
    place = data.draw(st.integers(0, num_peers))
    paces.insert(place, data.draw(st.floats(2.6 * FACTOR, 30.0)))
    fleet = Fleet(paces)
    load = data.draw(st.sampled_from([1, 9, 16, 40]))
    for _ in range(round(REPLACE_S) + 20):
        fleet.second([load] * len(paces), busy_share=data.draw(st.sampled_from([0.8, 1.0])))
    assert [number for number, pace in enumerate(fleet.found) if pace is Pace.SLOW] == [place]
