"""Calls that take too long, or fail elsewhere: what their errors say."""

import asyncio
import re
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forgeasync.observability import last_words
from forgeasync.testing import VirtualTime
from forgeasync.waiting import DeadlineExceeded, deadline

REPOSITORY = Path(__file__).parents[1]
PLAIN_TIMEOUT = re.compile(r"asyncio\.timeout\(")


async def late_body(limit_s: float, body: Callable[[], Awaitable[object]]) -> None:
    async with deadline(limit_s, call="scoring group 17", key="timeouts.score_s"):
        await body()


def test_a_late_body_is_told_by_call_limit_and_key() -> None:
    with pytest.raises(DeadlineExceeded) as caught:
        asyncio.run(late_body(0.01, lambda: asyncio.sleep(60)))
    message = "scoring group 17 took longer than 0.01 s; timeouts.score_s sets this limit"
    assert str(caught.value) == message == last_words(caught.value)


@pytest.mark.parametrize("is_inner_late", [True, False])
def test_of_nested_deadlines_the_one_that_passed_speaks(is_inner_late: bool) -> None:
    async def nested() -> None:
        async with deadline(60 if is_inner_late else 0.01, call="the outer", key="timeouts.outer_s"):
            async with deadline(0.01 if is_inner_late else 60, call="the inner", key="timeouts.inner_s"):
                await asyncio.sleep(60)

    with pytest.raises(DeadlineExceeded, match="^the inner" if is_inner_late else "^the outer"):
        VirtualTime().run(nested())


def test_another_timeout_of_the_body_passes_unchanged() -> None:
    own = TimeoutError("the verifier's own")

    async def body() -> None:
        raise own

    with pytest.raises(TimeoutError) as caught:
        asyncio.run(late_body(60, body))
    assert caught.value is own


def test_cancelling_passes() -> None:
    async def scenario() -> None:
        task = asyncio.create_task(late_body(60, lambda: asyncio.sleep(60)))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(scenario())


def test_no_plain_timeout_is_left() -> None:
    files = [file for folder in ("forgeasync", "apps") for file in (REPOSITORY / folder).rglob("*.py")]
    # What runs out of time in an environment or a box becomes a result or an ending there: no call fails.
    outside = [file for file in files if not {"environments", "isolation"} & set(file.parts)]
    plain = {file.name for file in outside if PLAIN_TIMEOUT.search(file.read_text(encoding="utf-8"))}
    # What cannot be seen of a process in time is said in its stead.
    assert plain == {"waiting.py", "supervised.py"}


def raised(error: Exception) -> Exception:
    try:
        raise error
    except Exception as caught:
        return caught


REMOTE = """Actor call t.fail failed.
 Traceback of where the remote call failed (most recent call last):
  File "actor_mesh.py", line 1754, in handle
    result = await the_method(*args, **kwargs)
  File "scorer.py", line 6, in score
    assert len(rewards) == len(responses)
{}
"""


@pytest.mark.parametrize("last", ["AssertionError", "TimeoutError: ", "asyncio.exceptions.CancelledError"])
def test_a_remote_error_without_a_message_is_named_by_its_place(last: str) -> None:
    assert last_words(raised(RuntimeError(REMOTE.format(last)))) == f"{last.strip()} in score at scorer.py:6"


def test_a_remote_error_with_a_message_is_left_as_it_is() -> None:
    assert last_words(raised(RuntimeError(REMOTE.format("ValueError: 3 rewards")))) == "ValueError: 3 rewards"


def test_an_error_without_a_message_is_named_by_its_place() -> None:
    assert re.search(r"in raised at .*test_deadlines\.py:\d+$", last_words(raised(TimeoutError())))


@given(st.text())
def test_no_last_words_are_empty(message: str) -> None:
    assert last_words(RuntimeError(message)).strip()
