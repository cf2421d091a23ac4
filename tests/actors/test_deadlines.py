"""Calls that take too long: what their errors say, when their time begins, and whose time it is."""

import asyncio
import re
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forgeasync.actors import TrainerMesh, trainer_mesh
from forgeasync.config import TimeoutSection
from forgeasync.observability import last_words
from forgeasync.testing import VirtualTime
from forgeasync.trainer import StepResult
from forgeasync.waiting import DeadlineExceeded, deadline

REPOSITORY = Path(__file__).parents[2]
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


class Calls:
    """An endpoint of every rank: answers after a while."""

    def __init__(self, rank: "Rank", name: str) -> None:
        self._rank = rank
        self._name = name

    async def call_one(self, *arguments: object) -> object:
        return await asyncio.shield(asyncio.ensure_future(self._rank.answer(self._name)))


class Rank:
    """A trainer rank in this process; ``slice`` makes it its own mesh.

    It works on one call after the other, and finishes to stage beside them.
    """

    def __init__(self, **durations_s: float) -> None:
        self._durations_s = durations_s
        self._queue = asyncio.Lock()
        self.log: list[str] = []

    def slice(self, *, procs: int) -> "Rank":
        return self

    async def answer(self, name: str) -> object:
        async with nullcontext() if name == "finish_staging" else self._queue:
            self.log.append(f"{name} begins")
            await asyncio.sleep(self._durations_s[name])
            self.log.append(f"{name} ends")
        if name == "train_rows":
            return StepResult(
                policy_version=3,
                num_targets=1,
                num_padding_tokens=0,
                train_s=0.1,
                metrics={},
                skip_reason=None,
                memory=None,
            )
        if name == "begin_staging":
            return 0.25
        return SimpleNamespace(version=1, checksums=(), staging_s=0.5, rank=0)

    def __getattr__(self, name: str) -> Calls:
        return Calls(self, name)


def make_mesh(rank: Rank, **timeouts: float) -> TrainerMesh:
    mesh = TrainerMesh(rank, 1, TimeoutSection(**timeouts))  # type: ignore[arg-type]
    mesh._data_ranks = [0]
    mesh._layout = SimpleNamespace(digest="")  # type: ignore[assignment]
    return mesh


def test_staging_behind_a_long_step_does_not_use_up_its_own_time() -> None:
    async def scenario() -> None:
        rank = Rank(train_rows=0.4, begin_staging=0.01, finish_staging=0.01)
        mesh = make_mesh(rank, train_step_s=60.0, weights_s=0.2)
        step = asyncio.create_task(mesh.train_rows([[]], step=3))
        await asyncio.sleep(0)
        manifest = await mesh.stage_weights(0)
        await step
        assert rank.log == [
            "train_rows begins",
            "train_rows ends",
            "begin_staging begins",
            "begin_staging ends",
            "finish_staging begins",
            "finish_staging ends",
        ]
        assert (manifest.waited_s, manifest.staging_s) == (0.25, 0.5)

    VirtualTime().run(scenario())


def test_the_next_step_begins_once_staging_has_begun() -> None:
    async def scenario() -> None:
        rank = Rank(train_rows=0.01, begin_staging=0.01, finish_staging=60.0)
        mesh = make_mesh(rank)
        begun = asyncio.Event()
        staging = asyncio.create_task(mesh.stage_weights(0, when_begun=begun.set))
        await begun.wait()
        await mesh.train_rows([[]], step=3)
        assert rank.log == [
            "begin_staging begins",
            "begin_staging ends",
            "finish_staging begins",
            "train_rows begins",
            "train_rows ends",
        ]
        staging.cancel()

    VirtualTime().run(scenario())


def test_late_staging_is_told_by_its_version() -> None:
    async def scenario() -> None:
        mesh = make_mesh(Rank(begin_staging=0.0, finish_staging=60.0), weights_s=0.1)
        with pytest.raises(
            DeadlineExceeded, match=r"^the trainer staging the initial weights .* timeouts\.weights_s sets"
        ):
            await mesh.stage_weights(0)

    VirtualTime().run(scenario())


def test_a_call_after_a_cancelled_one_waits_until_the_ranks_are_free() -> None:
    async def scenario() -> None:
        rank = Rank(train_rows=0.4, save_hf=0.01)
        mesh = make_mesh(rank, train_step_s=0.5)
        step = asyncio.create_task(mesh.train_rows([[]], step=3))
        never_begun = asyncio.create_task(mesh.train_rows([[]], step=4))
        await asyncio.sleep(0.2)
        for task in (step, never_begun):
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        await mesh.save_hf(Path("final"), source=Path("model"))
        assert rank.log == ["train_rows begins", "train_rows ends", "save_hf begins", "save_hf ends"]

    VirtualTime().run(scenario())


def test_late_ranks_are_told_by_their_step_and_hold_nobody_up() -> None:
    async def scenario() -> None:
        mesh = make_mesh(Rank(train_rows=60.0, save_hf=60.0), train_step_s=0.1)
        with pytest.raises(
            DeadlineExceeded, match=r"^the trainer making step 3 .* timeouts\.train_step_s sets"
        ):
            await mesh.train_rows([[]], step=3)
        with pytest.raises(DeadlineExceeded, match=r"^the trainer writing final"):
            await mesh.save_hf(Path("final"), source=Path("model"))

    VirtualTime().run(scenario())


def test_ranks_that_wait_for_one_that_has_failed_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer_mesh, "PEERS_S", 0.05)

    async def fails() -> None:
        raise ValueError("one row")

    async def scenario(other: Coroutine[None, None, None]) -> bool:
        mesh = make_mesh(Rank())
        with pytest.raises(ValueError, match="one row"):
            await mesh._together([asyncio.ensure_future(one) for one in (fails(), other)])
        return mesh.is_stuck

    assert not asyncio.run(scenario(fails()))
    assert asyncio.run(scenario(asyncio.sleep(60)))


def test_ranks_in_a_collective_of_one_call_are_not_sent_into_those_of_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A rank that reads from a lost host fails in the step; the call that saves the weights comes next."""
    monkeypatch.setattr(trainer_mesh, "PEERS_S", 0.05)

    async def fails() -> None:
        raise ValueError("its payload is on a host that is gone")

    async def scenario() -> None:
        mesh = make_mesh(rank := Rank())
        with pytest.raises(ValueError, match="its payload"):
            await mesh._together([asyncio.ensure_future(one) for one in (fails(), asyncio.sleep(60))])
        for _ in range(2):
            with pytest.raises(ValueError, match="its payload"):
                await mesh.save_hf(Path("final"), source=Path("model"))
        assert rank.log == []

    asyncio.run(scenario())


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
