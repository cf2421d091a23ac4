"""The bound on payloads' bytes, on random histories."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from forgeasync.payload.budget import PayloadBudget, fits


class BudgetHistory(RuleBasedStateMachine):
    """Any order of calls that a run could make, against sums kept here."""

    @initialize(groups_per_step=st.integers(1, 4), worst=st.integers(1, 50), spare=st.integers(0, 120))
    def start(self, groups_per_step: int, worst: int, spare: int) -> None:
        self.groups_per_step, self.worst = groups_per_step, worst
        self.capacity = groups_per_step * worst + spare
        assert fits(self.capacity, groups_per_step, worst)
        assert not fits(groups_per_step * worst - 1, groups_per_step, worst)
        self.budget = PayloadBudget(self.capacity)
        self.reserved: dict[int, int] = {}
        self.held: dict[int, int] = {}
        self.next_id = 0

    @rule(data=st.data())
    def admit(self, data: st.DataObject) -> None:
        asked = data.draw(st.integers(0, self.worst))
        used = sum(self.reserved.values()) + sum(self.held.values())
        fitted = self.budget.reserve(self.next_id, asked)
        assert fitted == (used + asked <= self.capacity)
        if fitted:
            self.reserved[self.next_id] = asked
            self.next_id += 1
        else:
            num_present = len(self.reserved) + len(self.held)
            assert num_present >= self.groups_per_step, "refused while the trainer cannot take a step"

    @precondition(lambda self: self.reserved)
    @rule(data=st.data())
    def write(self, data: st.DataObject) -> None:
        group = data.draw(st.sampled_from(sorted(self.reserved)))
        actual = data.draw(st.integers(0, self.reserved.pop(group)))
        self.budget.settle(group, actual)
        self.held[group] = actual

    @precondition(lambda self: self.reserved or self.held)
    @rule(data=st.data())
    def finish_or_drop(self, data: st.DataObject) -> None:
        group = data.draw(st.sampled_from(sorted(self.reserved | self.held)))
        self.budget.release(group)
        self.reserved.pop(group, None)
        self.held.pop(group, None)

    @invariant()
    def sums_are_right_and_bounded(self) -> None:
        assert self.budget.num_bytes_reserved == sum(self.reserved.values())
        assert self.budget.num_bytes_held == sum(self.held.values())
        assert self.budget.num_bytes_reserved + self.budget.num_bytes_held <= self.capacity


BudgetHistory.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
test_budget_on_random_histories = BudgetHistory.TestCase


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_a_run_with_capacity_for_one_step_never_deadlocks(data: st.DataObject) -> None:
    groups_per_step, worst = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 30))
    budget = PayloadBudget(groups_per_step * worst + data.draw(st.integers(0, 60)))
    num_steps = data.draw(st.integers(1, 5))
    admitted, unfinished, complete, num_done = 0, [], [], 0
    while num_done < num_steps * groups_per_step:
        if admitted < num_steps * groups_per_step and budget.reserve(admitted, worst):
            unfinished.append(admitted)
            admitted += 1
        elif unfinished:
            group = unfinished.pop(data.draw(st.integers(0, len(unfinished) - 1)))
            budget.settle(group, data.draw(st.integers(0, worst)))
            complete.append(group)
        else:
            assert len(complete) >= groups_per_step, "nothing to generate, and no step to take"
            for group in complete[:groups_per_step]:
                budget.release(group)
            del complete[:groups_per_step]
            num_done += groups_per_step
    assert budget.num_bytes_held == 0 == budget.num_bytes_reserved


def test_misuse_of_the_budget_is_a_bug() -> None:
    budget = PayloadBudget(100)
    assert budget.reserve(0, 60)
    with pytest.raises(AssertionError, match="only 60 were reserved"):
        budget.settle(0, 61)
    with pytest.raises(AssertionError, match="never to start"):
        budget.reserve(1, 101)
    budget = PayloadBudget(100)
    assert budget.reserve(0, 60)
    with pytest.raises(AssertionError, match="is present"):
        budget.reserve(0, 1)
    assert not budget.reserve(1, 41)
    budget.settle(0, 59)
    assert budget.reserve(1, 41)
