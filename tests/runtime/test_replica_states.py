"""States of generators, whatever happens in whatever order."""

from hypothesis import settings
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

from forgeasync.runtime import ReplicaState, ReplicaTable

HOSTS = ("a", "b")
NUM_RANKS = 4
LIVE = (ReplicaState.STALE, ReplicaState.HEALTHY)


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
        self.ended: dict[int, ReplicaState] = {}
        self.served = 0
        self.num_started = 0

    @initialize(target=numbers)
    def start_all(self) -> object:
        numbers = list(map(self.begin, range(NUM_RANKS)))
        for number in numbers[: NUM_RANKS // 2]:
            self.table.ready(number)
        return multiple(*numbers)

    @rule(target=numbers, rank=st.integers(0, NUM_RANKS - 1))
    def start(self, rank: int) -> object:
        if any(one.rank == rank for one in self.table.present):
            return multiple()
        return self.begin(rank)

    def begin(self, rank: int) -> int:
        number = self.table.start(rank, HOSTS[rank % 2])
        assert number not in self.used, "numbers are never reused"
        self.used.add(number)
        self.num_started += 1
        self.weights[number], self.groups[number] = 0, []
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

    @rule(num_rollouts=st.integers(1, 5))
    def assign(self, num_rollouts: int) -> None:
        able = [one for one in self.table.present if one.state is ReplicaState.HEALTHY]
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
