"""Which scorer gets which response: every response ends once, whatever scorers do meanwhile."""

from collections import Counter

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from forgeasync.config import ScorerSection
from forgeasync.scoring import Assignment, Dispatcher, DispatchOutcome

NUM_REPLICAS = 3
SECTION = ScorerSection(max_in_flight=4, max_attempts=2, max_lost=4, max_unavailable_s=5.0)


def make(num_replicas: int = 1, **fields: object) -> Dispatcher:
    return Dispatcher(num_replicas, ScorerSection(**fields), retry_wait_s=0.25)


def submitted(dispatcher: Dispatcher, num: int) -> list[int]:
    return [dispatcher.submit(0.0) for _ in range(num)]


def assigned(dispatcher: Dispatcher, now_s: float = 0.0) -> list[Assignment]:
    found = []
    while (assignment := dispatcher.next(now_s)) is not None:
        found.append(assignment)
    return found


class Scoring(RuleBasedStateMachine):
    """Replicas come and go, answer, fail, answer late; a model counts what every item has been through."""

    def __init__(self) -> None:
        super().__init__()
        self.dispatcher = Dispatcher(NUM_REPLICAS, SECTION, retry_wait_s=0.5)
        self.now_s = 0.0
        self.up = set(range(NUM_REPLICAS))
        self.current: dict[int, Assignment] = {}
        self.stale: list[Assignment] = []
        self.open: set[int] = set()
        self.ended: dict[int, DispatchOutcome] = {}
        self.failures, self.losses = Counter[int](), Counter[int]()
        self.num_discarded = 0

    def note(self, assignment: Assignment, fate: DispatchOutcome) -> None:
        assert fate is not DispatchOutcome.DISCARDED, "it was current"
        self.stale.append(self.current.pop(assignment.item))
        if fate is not DispatchOutcome.AGAIN:
            assert assignment.item not in self.ended, "it ends once"
            self.ended[assignment.item] = fate
            self.open.discard(assignment.item)

    @rule()
    def submit(self) -> None:
        self.open.add(self.dispatcher.submit(self.now_s))

    @rule()
    def assign(self) -> None:
        assignment = self.dispatcher.next(self.now_s)
        if assignment is not None:
            assert assignment.replica in self.up
            assert assignment.item in self.open and assignment.item not in self.current
            self.current[assignment.item] = assignment

    @precondition(lambda self: self.current)
    @rule(data=st.data(), answer=st.sampled_from(["scored", "failed", "deferred"]))
    def answer(self, data: st.DataObject, answer: str) -> None:
        one = self.current[data.draw(st.sampled_from(sorted(self.current)))]
        match answer:
            case "scored":
                fate = self.dispatcher.scored(one)
                assert fate is DispatchOutcome.SCORED
            case "failed":
                self.failures[one.item] += 1
                fate = self.dispatcher.failed(one, self.now_s)
                assert (fate is DispatchOutcome.GIVEN_UP) == (self.failures[one.item] == SECTION.max_attempts)
            case _:
                fate = self.dispatcher.deferred(one, self.now_s, 1.0)
        self.note(one, fate)

    @precondition(lambda self: self.stale)
    @rule(data=st.data())
    def answer_late(self, data: st.DataObject) -> None:
        one = data.draw(st.sampled_from(self.stale))
        self.num_discarded += 2
        assert (
            self.dispatcher.scored(one)
            is self.dispatcher.failed(one, self.now_s)
            is DispatchOutcome.DISCARDED
        )

    @rule(rank=st.integers(0, NUM_REPLICAS - 1))
    def lose_or_replace(self, rank: int) -> None:
        if rank not in self.up:
            self.up.add(rank)
            self.dispatcher.replica_up(rank)
            return
        self.up.discard(rank)
        there = [one for one in self.current.values() if one.replica == rank]
        given_up = self.dispatcher.replica_down(rank, self.now_s)
        for one in there:
            self.losses[one.item] += 1
            is_over = self.losses[one.item] == SECTION.max_lost
            assert (one.item in given_up) == is_over
            self.note(one, DispatchOutcome.GIVEN_UP if is_over else DispatchOutcome.AGAIN)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        item = data.draw(st.sampled_from(sorted(self.open)))
        self.dispatcher.withdraw(item)
        self.open.discard(item)
        if item in self.current:
            self.stale.append(self.current.pop(item))

    @rule(seconds=st.floats(0.0, 2.0))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds

    @invariant()
    def nothing_is_lost_and_bounds_hold(self) -> None:
        dispatcher = self.dispatcher
        assert dispatcher.num_assigned == len(self.current)
        assert dispatcher.num_waiting == len(self.open) - len(self.current)
        for rank in range(NUM_REPLICAS):
            there = [one.item for one in self.current.values() if one.replica == rank]
            for item in there:
                assert len(there) <= max(1, SECTION.max_in_flight >> self.losses[item])
        assert dispatcher.counts.num_discarded == self.num_discarded

    def teardown(self) -> None:
        """Whatever has happened: once all replicas are there, all that is open is scored."""
        for rank in range(NUM_REPLICAS):
            self.dispatcher.replica_up(rank)
        for _ in range(1000):
            for one in list(self.current.values()):
                self.note(one, self.dispatcher.scored(one))
            for one in assigned(self.dispatcher, self.now_s):
                self.current[one.item] = one
            self.now_s += 1.0
            if not self.open:
                return
        raise AssertionError(f"never scored: {self.open}")


TestScoring = Scoring.TestCase
# A busy machine makes examples slowly.
TestScoring.settings = settings(suppress_health_check=[HealthCheck.too_slow])


def test_an_item_goes_to_the_replica_with_the_least_to_do() -> None:
    dispatcher = make(3)
    submitted(dispatcher, 7)
    assert sorted(one.replica for one in assigned(dispatcher)) == [0, 0, 0, 1, 1, 2, 2]


def test_waits_before_further_attempts_double() -> None:
    dispatcher = make(max_attempts=4)
    submitted(dispatcher, 1)
    now_s = 0.0
    for wait_s in (0.25, 0.5, 1.0):
        (one,) = assigned(dispatcher, now_s)
        assert dispatcher.failed(one, now_s) is DispatchOutcome.AGAIN
        assert dispatcher.next_due_s(now_s) == now_s + wait_s
        assert assigned(dispatcher, now_s + 0.9 * wait_s) == []
        now_s += wait_s
    (one,) = assigned(dispatcher, now_s)
    assert dispatcher.failed(one, now_s) is DispatchOutcome.GIVEN_UP
    assert dispatcher.counts.num_retried == 3 and dispatcher.counts.num_given_up == 1


def test_one_that_ends_replicas_is_found_out_and_others_are_not_given_up() -> None:
    """Item 5 of 16 ends every replica that has it; all of the others are scored."""
    dispatcher = make(2, max_in_flight=16, max_lost=6)
    items = submitted(dispatcher, 16)
    fates: dict[int, DispatchOutcome] = {}
    for _ in range(100):
        current = assigned(dispatcher)
        killer = next((one for one in current if one.item == 5), None)
        if killer is not None:
            fates |= dict.fromkeys(dispatcher.replica_down(killer.replica, 0.0), DispatchOutcome.GIVEN_UP)
            dispatcher.replica_up(killer.replica)
        for one in current:
            if killer is None or one.replica != killer.replica:
                fates[one.item] = dispatcher.scored(one)
    assert fates.pop(5) is DispatchOutcome.GIVEN_UP
    assert fates == dict.fromkeys(set(items) - {5}, DispatchOutcome.SCORED)


def test_what_is_deferred_holds_up_no_other() -> None:
    dispatcher = make(max_in_flight=1, max_unavailable_s=60.0)
    submitted(dispatcher, 2)
    (away,) = assigned(dispatcher)
    assert dispatcher.deferred(away, 0.0, 1.0) is DispatchOutcome.AGAIN
    (other,) = assigned(dispatcher)
    assert other.item != away.item and dispatcher.scored(other) is DispatchOutcome.SCORED
