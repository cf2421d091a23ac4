"""The bound on payloads' bytes, on random histories."""

import asyncio

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from forgeasync.rollouts import AsyncPayloadBudget, PayloadBudget, largest_excess


class BudgetHistory(RuleBasedStateMachine):
    """Any order of calls that a run could make, against sums kept here."""

    @initialize(groups_per_step=st.integers(1, 4), worst=st.integers(1, 50), spare=st.integers(0, 120))
    def start(self, groups_per_step: int, worst: int, spare: int) -> None:
        self.groups_per_step, self.worst = groups_per_step, worst
        self.capacity = groups_per_step * worst + spare
        self.excess = largest_excess(self.capacity, groups_per_step, worst)
        assert self.excess == spare
        self.budget = PayloadBudget(self.capacity, excess_bytes=self.excess)
        self.beyond: dict[int, int] = {}
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
        reserved = self.reserved[group]
        actual = data.draw(st.integers(0, reserved) | st.integers(0, 3 * self.worst))
        others = sum(self.reserved.values()) - reserved + sum(self.held.values())
        beyond = max(0, actual - reserved)
        fits = others + actual <= self.capacity and sum(self.beyond.values()) + beyond <= self.excess
        may_stay = fits or not beyond
        assert self.budget.settle(group, actual) == may_stay
        if may_stay:
            del self.reserved[group]
            self.held[group] = actual
            self.beyond[group] = beyond

    @precondition(lambda self: self.reserved or self.held)
    @rule(data=st.data())
    def finish_or_drop(self, data: st.DataObject) -> None:
        group = data.draw(st.sampled_from(sorted(self.reserved | self.held)))
        self.budget.release(group)
        self.reserved.pop(group, None)
        self.held.pop(group, None)
        self.beyond.pop(group, None)

    @invariant()
    def sums_are_right_and_bounded(self) -> None:
        assert self.budget.num_bytes_reserved == sum(self.reserved.values())
        assert self.budget.num_bytes_held == sum(self.held.values())
        used = self.budget.num_bytes_reserved + self.budget.num_bytes_held
        assert used <= self.capacity
        num_free = self.budget.num_bytes_free // self.worst
        assert used + num_free * self.worst <= self.capacity < used + (num_free + 1) * self.worst


BudgetHistory.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
test_budget_on_random_histories = BudgetHistory.TestCase


@pytest.mark.parametrize("makes_room", ["release", "settle"])
async def test_a_group_that_waits_for_room_is_woken_by_what_makes_it(makes_room: str) -> None:
    """A group that ends, or one that takes less than was reserved for it, but none that may not stay."""
    budget = AsyncPayloadBudget(PayloadBudget(300, excess_bytes=0), largest_group_bytes=200)
    await budget.reserve(0)
    waiting = asyncio.create_task(budget.reserve(1))
    assert not await budget.settle(0, 201)
    await asyncio.sleep(0)
    assert not waiting.done() and budget.num_waits == 1
    assert (budget.state.num_bytes_reserved, budget.state.num_bytes_held) == (200, 0)
    if makes_room == "release":
        await budget.release(0)
    else:
        assert await budget.settle(0, 100)
    await waiting
    assert budget.state.num_bytes_reserved == 200
