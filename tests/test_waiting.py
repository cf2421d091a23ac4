"""A shared state: whoever waits is woken by what makes the condition hold, and is never forgotten."""

import asyncio
from collections.abc import Coroutine

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forgeasync.testing import VirtualTime
from forgeasync.waiting import Monitor


class Account:
    """A sum that may not fall below 0."""

    def __init__(self, left: int = 0) -> None:
        self.left = left

    def take(self, amount: int) -> bool:
        if amount > self.left:
            return False
        self.left -= amount
        return True

    def add(self, amount: int) -> int:
        if amount < 0:
            raise ValueError("amounts are not negative")
        self.left += amount
        return self.left


def run(scenario: Coroutine[None, None, None]) -> None:
    asyncio.run(scenario)


async def settle() -> None:
    """Let every task go on as far as it can."""
    for _ in range(20):
        await asyncio.sleep(0)


def test_a_change_answers_and_wakes() -> None:
    async def scenario() -> None:
        monitor = Monitor(Account())
        waiting = asyncio.create_task(monitor.until(lambda account: account.take(3)))
        await settle()
        assert monitor.change(lambda account: account.add(2)) == 2
        await settle()
        assert not waiting.done()
        monitor.change(lambda account: account.add(2))
        assert await waiting is True
        assert monitor.state.left == 1

    run(scenario())


def test_what_holds_already_is_not_waited_for_and_zero_is_an_answer() -> None:
    async def scenario() -> None:
        monitor = Monitor(Account(0))
        assert await monitor.until(lambda account: account.left) == 0

    run(scenario())


def test_a_change_that_fails_says_so_and_spoils_nothing() -> None:
    async def scenario() -> None:
        monitor = Monitor(Account())
        waiting = asyncio.create_task(monitor.until(lambda account: account.take(1)))
        await settle()
        with pytest.raises(ValueError, match="not negative"):
            monitor.change(lambda account: account.add(-1))
        monitor.change(lambda account: account.add(1))
        assert await waiting

    run(scenario())


def test_an_attempt_that_fails_with_an_error_raises_it_where_it_is_waited_for() -> None:
    async def scenario() -> None:
        monitor = Monitor(Account(1))
        waiting = asyncio.create_task(monitor.until(lambda account: 1 // account.left > 1))
        await settle()
        monitor.change(lambda account: account.take(1))
        with pytest.raises(ZeroDivisionError):
            await waiting

    run(scenario())


def test_what_one_waiter_changes_wakes_the_next() -> None:
    async def scenario() -> None:
        monitor = Monitor(Account(1))
        emptied = asyncio.create_task(monitor.until(lambda account: account.left == 0))
        taken = asyncio.create_task(monitor.until(lambda account: account.take(6)))
        await settle()
        monitor.change(lambda account: account.add(5))
        await asyncio.gather(taken, emptied)

    run(scenario())


def test_it_looks_again_when_the_time_has_come() -> None:
    async def scenario() -> None:
        monitor = Monitor(Account())
        now_s = asyncio.get_running_loop().time
        at_s = now_s() + 50.0
        await monitor.until(lambda account: now_s() >= at_s, look_at_s=lambda account: at_s)
        assert now_s() == at_s

    VirtualTime().run(scenario())


@given(
    amounts=st.lists(st.integers(1, 5), min_size=1, max_size=8),
    cancelled=st.sets(st.integers(0, 7)),
    deposits=st.lists(st.integers(1, 4), max_size=30),
)
def test_nobody_who_could_go_on_still_waits(
    amounts: list[int], cancelled: set[int], deposits: list[int]
) -> None:
    """This holds whichever tasks were cancelled; and no task takes an amount twice, or after its end."""

    async def scenario() -> None:
        monitor = Monitor(Account())
        tasks = [
            asyncio.create_task(monitor.until(lambda account, amount=amount: account.take(amount)))
            for amount in amounts
        ]
        await settle()
        for index, deposit in enumerate(deposits):
            monitor.change(lambda account, deposit=deposit: account.add(deposit))
            if index in cancelled and index < len(tasks):
                # In the same moment as it is woken.
                tasks[index].cancel()
            await settle()
            waiting = [amount for amount, task in zip(amounts, tasks, strict=True) if not task.done()]
            assert not waiting or monitor.state.left < min(waiting)
        through = [
            amount
            for amount, task in zip(amounts, tasks, strict=True)
            if task.done() and not task.cancelled()
        ]
        assert monitor.state.left == sum(deposits) - sum(through)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert not monitor._waiting

    run(scenario())
