"""Waiting: calls that take too long or fail elsewhere say so, and whoever waits for a state is woken."""

import asyncio
import re
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forgeasync.observability import describe_error
from forgeasync.testing import VirtualTime
from forgeasync.waiting import DeadlineExceeded, Monitor, deadline


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


async def settle() -> None:
    """Let every task go on as far as it can."""
    for _ in range(20):
        await asyncio.sleep(0)


async def test_a_change_answers_and_wakes_and_one_that_fails_spoils_nothing() -> None:
    monitor = Monitor(Account())
    waiting = asyncio.create_task(monitor.until(lambda account: account.take(3)))
    await settle()
    assert monitor.change(lambda account: account.add(2)) == 2
    await settle()
    with pytest.raises(ValueError, match="not negative"):
        monitor.change(lambda account: account.add(-1))
    assert not waiting.done()
    monitor.change(lambda account: account.add(1))
    assert await waiting is True
    # What holds already is not waited for, and zero is an answer.
    assert await monitor.until(lambda account: account.left) == 0


async def test_an_attempt_that_fails_with_an_error_raises_it_where_it_is_waited_for() -> None:
    monitor = Monitor(Account(1))
    waiting = asyncio.create_task(monitor.until(lambda account: 1 // account.left > 1))
    await settle()
    monitor.change(lambda account: account.take(1))
    with pytest.raises(ZeroDivisionError):
        await waiting


async def test_what_one_waiter_changes_wakes_the_next() -> None:
    monitor = Monitor(Account(1))
    emptied = asyncio.create_task(monitor.until(lambda account: account.left == 0))
    taken = asyncio.create_task(monitor.until(lambda account: account.take(6)))
    await settle()
    monitor.change(lambda account: account.add(5))
    await asyncio.gather(taken, emptied)


async def test_it_looks_again_when_the_time_has_come(virtual_time: VirtualTime) -> None:
    monitor = Monitor(Account())
    now_s = asyncio.get_running_loop().time
    at_s = now_s() + 50.0
    await monitor.until(lambda account: now_s() >= at_s, look_at_s=lambda account: at_s)
    assert now_s() == at_s


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

    asyncio.run(scenario())


REPOSITORY = Path(__file__).parents[1]
PLAIN_TIMEOUT = re.compile(r"asyncio\.timeout\(")


async def late_body(limit_s: float, body: Callable[[], Awaitable[object]]) -> None:
    async with deadline(limit_s, call="scoring group 17", key="timeouts.score_s"):
        await body()


async def test_a_late_body_is_told_by_call_limit_and_key() -> None:
    with pytest.raises(DeadlineExceeded) as caught:
        await late_body(0.01, lambda: asyncio.sleep(60))
    message = "scoring group 17 took longer than 0.01 s; timeouts.score_s sets this limit"
    assert str(caught.value) == message == describe_error(caught.value)


@pytest.mark.parametrize("is_inner_late", [True, False])
async def test_of_nested_deadlines_the_passed_speaks(virtual_time: VirtualTime, is_inner_late: bool) -> None:
    with pytest.raises(DeadlineExceeded, match="^the inner" if is_inner_late else "^the outer"):
        async with deadline(60 if is_inner_late else 0.01, call="the outer", key="timeouts.outer_s"):
            async with deadline(0.01 if is_inner_late else 60, call="the inner", key="timeouts.inner_s"):
                await asyncio.sleep(60)


async def test_another_timeout_of_the_body_passes_unchanged() -> None:
    own = TimeoutError("the verifier's own")

    async def body() -> None:
        raise own

    with pytest.raises(TimeoutError) as caught:
        await late_body(60, body)
    assert caught.value is own


async def test_cancelling_passes() -> None:
    task = asyncio.create_task(late_body(60, lambda: asyncio.sleep(60)))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_no_plain_timeout_is_left() -> None:
    files = [file for folder in ("forgeasync", "apps") for file in (REPOSITORY / folder).rglob("*.py")]
    # What runs out of time in an environment or a box becomes a result or an ending there: no call fails.
    outside = [file for file in files if not {"environments", "isolation"} & set(file.parts)]
    plain = {file.name for file in outside if PLAIN_TIMEOUT.search(file.read_text(encoding="utf-8"))}
    # What cannot be seen of a process in time is said in its stead.
    assert plain == {"waiting.py", "supervised.py"}


def raised(error: Exception) -> Exception:
    with pytest.raises(type(error)) as caught:
        raise error
    return caught.value


REMOTE = """Actor call t.fail failed.
 Traceback of where the remote call failed (most recent call last):
  File "actor_mesh.py", line 1754, in handle
    result = await the_method(*args, **kwargs)
  File "scorer.py", line 6, in score
    assert len(rewards) == len(responses)
{}
"""


@pytest.mark.parametrize(
    ("last", "words"),
    [
        ("AssertionError", "AssertionError in score at scorer.py:6"),
        ("TimeoutError: ", "TimeoutError: in score at scorer.py:6"),
        ("asyncio.exceptions.CancelledError", "asyncio.exceptions.CancelledError in score at scorer.py:6"),
        ("ValueError: 3 rewards", "ValueError: 3 rewards"),
    ],
)
def test_a_remote_error_is_named_by_its_place_unless_it_has_a_message(last: str, words: str) -> None:
    assert describe_error(raised(RuntimeError(REMOTE.format(last)))) == words


def test_an_error_without_a_message_is_named_by_its_place() -> None:
    assert re.search(r"in raised at .*test_waiting\.py:\d+$", describe_error(raised(TimeoutError())))


@given(st.text())
def test_no_last_words_are_empty(message: str) -> None:
    assert describe_error(RuntimeError(message)).strip()
