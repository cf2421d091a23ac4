"""States of generators, whatever happens in whatever order; which ones count as slow, at whatever loads."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
)

from forgeasync.runtime import (
    REPLACE_S,
    SUSPECT_S,
    WINDOW_S,
    Pace,
    ReplicaState,
    ReplicaTable,
    SlowReplicas,
)

HOSTS = ("a", "b")
NUM_RANKS = 4
LIVE = (ReplicaState.STALE, ReplicaState.HEALTHY, ReplicaState.SUSPECT)


class Generators(RuleBasedStateMachine):
    """Beside the table runs a model of what every generator really has."""

    numbers = Bundle("numbers")

    def __init__(self) -> None:
        super().__init__()
        self.table = ReplicaTable()
        self.weights: dict[int, int] = {}
        """The version that each generator samples under."""
        self.updating: dict[int, int] = {}
        self.groups: dict[int, list[int]] = {}
        self.used: set[int] = set()
        self.spares: set[int | None] = set()
        self.ended: dict[int, ReplicaState] = {}
        self.served = 0
        self.num_started = 0

    @initialize(target=numbers, are_spares=st.tuples(*[st.booleans()] * NUM_RANKS))
    def start_all(self, are_spares: tuple[bool, ...]) -> object:
        numbers = list(map(self.begin, range(NUM_RANKS), are_spares))
        for number in numbers[: NUM_RANKS // 2]:
            self.table.ready(number)
        return multiple(*numbers)

    @rule(target=numbers, rank=st.integers(0, NUM_RANKS - 1), is_spare=st.booleans())
    def start(self, rank: int, is_spare: bool) -> object:
        if any(one.rank == rank for one in self.table.present):
            return multiple()
        return self.begin(rank, is_spare)

    def begin(self, rank: int, is_spare: bool) -> int:
        number = self.table.start(rank, HOSTS[rank % 2], is_spare=is_spare)
        assert number not in self.used, "numbers are never reused"
        self.used.add(number)
        self.num_started += 1
        self.weights[number], self.groups[number] = 0, []
        if is_spare:
            self.spares.add(number)
        return number

    @precondition(lambda self: self.table.count(ReplicaState.STARTING) or self.ended)
    @rule(data=st.data())
    def ready(self, data: st.DataObject) -> None:
        starting = {one.number for one in self.table.present if one.state is ReplicaState.STARTING}
        number = data.draw(st.sampled_from(sorted(starting | self.ended.keys())))
        self.table.ready(number)
        is_healthy = self.table.of(number).state is ReplicaState.HEALTHY
        if number not in self.ended:
            assert is_healthy == (self.table.newest == 0), "only the first version needs no update"

    @rule(jump=st.integers(1, 3))
    def publish(self, jump: int) -> None:
        self.table.published(self.table.newest + jump)

    @rule(host=st.sampled_from(HOSTS))
    def begin_update(self, host: str) -> None:
        behind = self.table.behind(host, self.table.newest)
        assert self.table.is_behind(host) == bool(behind)
        for number in behind:
            assert self.table.lowest_version(host) <= self.weights[number] < self.table.newest
            if number not in self.updating:
                self.table.begin_update(number, self.table.newest)
                self.updating[number] = self.table.newest

    @rule(host=st.sampled_from(HOSTS), jump=st.integers(0, 2))
    def take_a_version(self, host: str, jump: int) -> None:
        """All of a host do, and whoever has an update in flight ends it."""
        self.publish(jump)
        self.begin_update(host)
        for number in sorted(self.updating):
            self.take(number)

    @precondition(lambda self: self.updating)
    @rule(data=st.data())
    def end_update(self, data: st.DataObject) -> None:
        self.take(data.draw(st.sampled_from(sorted(self.updating))))

    def take(self, number: int) -> None:
        version = self.updating.pop(number)
        before, served = self.table.of(number).state, self.table.served
        if number not in self.ended:
            self.weights[number] = version
        self.table.updated(number)
        now = self.table.of(number).state
        if before is ReplicaState.STALE:
            assert (now is ReplicaState.HEALTHY) == (version >= served)
        else:
            assert now is before

    @precondition(lambda self: self.updating)
    @rule(data=st.data())
    def abandon_update(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.updating)))
        del self.updating[number]
        self.table.abandon_update(number)

    @rule(number=numbers)
    def suspect(self, number: int) -> None:
        before = self.table.of(number).state
        self.table.suspect(number)
        is_suspect = before is ReplicaState.HEALTHY
        assert self.table.of(number).state is (ReplicaState.SUSPECT if is_suspect else before)

    @rule(number=numbers)
    def clear(self, number: int) -> None:
        before = self.table.of(number).state
        self.table.clear(number)
        cleared = ReplicaState.HEALTHY if self.weights[number] >= self.served else ReplicaState.STALE
        assert self.table.of(number).state is (cleared if before is ReplicaState.SUSPECT else before)

    @rule(number=numbers)
    def drain(self, number: int) -> None:
        self.table.drain(number)
        assert self.table.of(number).state not in LIVE

    @rule(number=numbers)
    def remove(self, number: int) -> None:
        if self.table.of(number).state is ReplicaState.DRAINING:
            self.table.remove(number)
            self.ended[number] = ReplicaState.REMOVED

    @rule(number=numbers)
    def lose(self, number: int) -> None:
        self.table.lose(number)
        self.ended.setdefault(number, ReplicaState.DEAD)

    @precondition(lambda self: self.spares)
    @rule()
    def promote(self) -> None:
        healthy = [one for one in self.table.present if one.state is ReplicaState.HEALTHY]
        able = sorted((one.rank, one.number) for one in healthy if one.number in self.spares)
        number = self.table.promote()
        assert number == (able[0][1] if able else None)
        self.spares.discard(number)

    @rule(num_rollouts=st.integers(1, 5))
    def assign(self, num_rollouts: int) -> None:
        healthy = [one for one in self.table.present if one.state is ReplicaState.HEALTHY]
        able = [one for one in healthy if one.number not in self.spares]
        number = self.table.assign(num_rollouts)
        assert (number is None) == (not able)
        if number is not None:
            assert number in {one.number for one in able}, "only healthy ones get work"
            fewest = min(sum(self.groups[one.number]) for one in able)
            assert sum(self.groups[number]) == fewest
            self.groups[number].append(num_rollouts)

    @rule(number=numbers)
    def end_group(self, number: int) -> None:
        if self.groups[number]:
            self.table.ended(number, self.groups[number].pop())

    @invariant()
    def counts_add_up(self) -> None:
        assert sum(map(self.table.count, ReplicaState)) == self.num_started == len(self.used)
        for number, groups in self.groups.items():
            assert self.table.of(number).num_live == sum(groups)
        assert set(self.table.ended_numbers) == set(self.ended)
        for number, state in self.ended.items():
            assert self.table.of(number).state is state, "nothing comes back"

    @invariant()
    def nobody_is_told_a_wrong_version(self) -> None:
        healthy = [self.weights[o.number] for o in self.table.present if o.state is ReplicaState.HEALTHY]
        assert self.table.served >= self.served, "what is served never goes back"
        self.served = self.table.served
        assert not healthy or min(healthy) == self.served
        assert all(self.table.all_have(v) == (bool(healthy) and min(healthy) == v) for v in range(20))
        assert self.table.has_healthy == bool(healthy)
        for one in self.table.present:
            assert one.version == self.weights[one.number]


Generators.TestCase.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
TestGenerators = Generators.TestCase


def healthy_table(num: int) -> ReplicaTable:
    table = ReplicaTable()
    for rank in range(num):
        table.ready(table.start(rank, "a"))
    return table


def take(table: ReplicaTable, number: int, version: int) -> None:
    table.published(version)
    table.begin_update(number, version)
    table.updated(number)


def test_a_newcomer_waits_for_the_update_that_runs_meanwhile() -> None:
    table = healthy_table(2)
    take(table, 0, 5)
    take(table, 1, 5)
    table.lose(1)
    table.ready(table.start(1, "a"))
    assert table.of(2).state is ReplicaState.STALE and table.assign(1) == 0
    table.begin_update(2, 5)
    table.published(6)
    table.updated(2)
    assert table.of(2).state is ReplicaState.HEALTHY, "the newest when its update began"
    assert table.served == 5 and table.all_have(5)


def test_a_newcomer_that_is_older_than_what_is_served_takes_one_more_update() -> None:
    table = healthy_table(2)
    take(table, 0, 5)
    table.lose(1)
    assert table.served == 5, "the slowest has gone"
    table.ready(table.start(1, "a"))
    table.begin_update(2, 5)
    take(table, 0, 6)
    table.updated(2)
    assert (table.of(2).state, table.served) == (ReplicaState.STALE, 6)
    take(table, 2, 6)
    assert table.of(2).state is ReplicaState.HEALTHY


# --- Which ones are slow ---


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

    def second(self, loads: list[int], *, busy_share: float = 1.0) -> None:
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
        self.slow.judge(now_s=self.now_s)

    def seconds(self, num: float, loads: list[int]) -> None:
        for _ in range(round(num)):
            self.second(loads)

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
