"""A scorer that dies, stops, hangs and cannot be started: real processes, scripted actors."""

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import psutil
import pytest
from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError

from forgeasync.actors import (
    ScoredResponses,
    ScorerFails,
    ScorerLost,
    SpawnedScorer,
    WatchedScorer,
    scorer_pool,
    supervised,
)
from forgeasync.config import ScorerSection
from forgeasync.environments import WORKER_MARK, Response, marked_processes
from forgeasync.faults import FaultLog
from forgeasync.observability import ProcsFile
from forgeasync.rollouts import FinishReason, Score, VerifierCounts
from tests.support.buffer_world import make_task
from tests.support.loops import Endpoint
from tests.support.standing_still import CALL, standing_still

RESPONSES = [Response("4", 1, FinishReason.STOP)]
SCORE = Score(value=1.0, is_correct=True)


class ScriptedScorer:
    """An actor beside a process of its own: it answers only while that runs."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self.beat = Endpoint(self._answering)
        self.score = Endpoint(self._score)
        self.is_released = asyncio.Event()
        self.num_asked = 0

    async def _answering(self) -> None:
        status = psutil.STATUS_ZOMBIE
        with contextlib.suppress(psutil.Error):
            status = psutil.Process(self.process.pid).status()
        if status in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE):
            await asyncio.Event().wait()

    async def _score(self, task: object, responses: object, first: int) -> ScoredResponses:
        self.num_asked += 1
        await self.is_released.wait()
        await self._answering()
        return ScoredResponses(scores=(SCORE,), counts=VerifierCounts(num_timeouts=self.num_asked))


@dataclass
class World:
    scorer: WatchedScorer
    faults: FaultLog
    listing: ProcsFile
    told: list[str]
    actors: dict[int, ScriptedScorer] = field(default_factory=dict)
    num_stopped: int = 0
    fails_to_start: Callable[[int], bool] = lambda number: False
    watching: "asyncio.Task[None] | None" = None

    async def until(self, is_reached: Callable[[], bool]) -> None:
        while not is_reached():
            assert self.watching is None or not self.watching.done(), self.watching
            await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def started(
    *, heartbeat_s: float = 60.0, limit_s: float = 60.0, max_restarts: int = 3
) -> AsyncIterator[World]:
    world: World

    async def spawn(number: int) -> SpawnedScorer:
        if world.fails_to_start(number):
            raise ValueError("no such module")
        mark = f"scorer-{os.getpid()}-{number}"
        # The second one is what the scorer has started, and does not end with it.
        process = standing_still(child=True, env=os.environ | {WORKER_MARK: mark})
        world.actors[number] = ScriptedScorer(process)

        async def stop() -> None:
            world.num_stopped += 1

        actor = world.actors[number]
        return SpawnedScorer(actor=actor, pid=process.pid, mark=mark, isolation="by walls", stop=stop)  # type: ignore[arg-type]

    section = ScorerSection(heartbeat_s=heartbeat_s, max_restarts=max_restarts, max_in_flight=2)
    told: list[str] = []
    faults, listing = FaultLog(tell=told.append), ProcsFile()
    scorer = WatchedScorer(spawn, section, limit_s=limit_s, faults=faults, listing=listing)
    world = World(scorer=scorer, faults=faults, listing=listing, told=told)
    try:
        assert await scorer.start() == "by walls"
        world.watching = asyncio.create_task(scorer.watch())
        yield world
    finally:
        if world.watching is not None:
            world.watching.cancel()
        await scorer.close()
        for number, actor in world.actors.items():
            assert actor.process.wait() is not None
            # No orphan is left.
            while marked_processes(f"scorer-{os.getpid()}-{number}"):
                await asyncio.sleep(0.01)


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scorer_pool, "LOOK_S", 0.01)
    monkeypatch.setattr(supervised, "BEAT_S", 0.01)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGSTOP])
def test_a_scorer_that_is_gone_is_named_and_replaced(number: signal.Signals) -> None:
    async def go() -> None:
        async with started(heartbeat_s=0.5 if number is signal.SIGSTOP else 60.0) as world:
            calls = [
                asyncio.create_task(world.scorer.score(make_task(one), RESPONSES, 0)) for one in range(2)
            ]
            first = world.actors[0]
            await world.until(lambda: first.num_asked == 2)
            os.kill(first.process.pid, number)
            await asyncio.wait(calls)
            for call in calls:
                with pytest.raises(ScorerLost, match=rf"process {first.process.pid}\) was gone"):
                    call.result()
            # A call that comes meanwhile waits for the next scorer.
            again = asyncio.create_task(world.scorer.score(make_task(0), RESPONSES, 0))
            await world.until(lambda: not world.faults.open)
            second = world.actors[1]
            second.is_released.set()
            assert (await again).scores == (SCORE,)
            counts = world.faults.metrics()
            assert counts["faults/detected_scorer"] == counts["faults/recovered_scorer"] == 1
            silent = "has not answered for scorer.heartbeat_s = 0.5 s"
            assert (silent if number is signal.SIGSTOP else "has died") in world.told[0]
            assert (f"MainThread in {CALL} (" in world.told[0]) == (number is signal.SIGSTOP)
            if number is signal.SIGSTOP:
                assert "; the controller waits in WatchedScorer.score (forgeasync/" in world.told[0]
                assert "(2 of these)" in world.told[0]
            assert f"was replaced by process {second.process.pid}" in world.told[1]
            assert [(one.role, one.pid) for one in world.listing.entries] == [("scorer", second.process.pid)]
            await world.until(lambda: world.num_stopped == 1)
            assert not marked_processes(f"scorer-{os.getpid()}-0"), "nothing of it is left"

    asyncio.run(go())


def test_a_scorer_that_scores_nothing_for_too_long_is_replaced() -> None:
    """It answers its heartbeats: only its calls hang."""

    async def go() -> None:
        async with started(limit_s=0.1) as world:
            with pytest.raises(ScorerLost):
                await world.scorer.score(make_task(0), RESPONSES, 0)
            assert (
                "within 0.2 s (2 times its limit: scorer.max_in_flight, scorer.num_workers)" in world.told[0]
            )
            await world.until(lambda: not world.faults.open)

    asyncio.run(go())


def test_a_call_that_the_end_cuts_off_is_no_loss() -> None:
    async def go() -> None:
        async with started() as world:
            assert world.watching is not None
            world.watching.cancel()
            has_ended = asyncio.Event()

            async def cut_off(task: object, responses: object, first: int) -> ScoredResponses:
                await has_ended.wait()
                raise SupervisionError("the proc has stopped")

            world.actors[0].score = Endpoint(cut_off)
            call = asyncio.create_task(world.scorer.score(make_task(0), RESPONSES, 0))
            await asyncio.sleep(0)
            closing = asyncio.create_task(world.scorer.close())
            await asyncio.sleep(0)
            has_ended.set()
            with pytest.raises(ScorerLost):
                await call
            await closing
            assert not world.told and list(world.actors) == [0], "no fault, and no other scorer"

    asyncio.run(go())


def test_counts_of_lost_scorers_stay() -> None:
    async def go() -> None:
        async with started() as world:
            world.actors[0].is_released.set()
            for _ in range(3):
                scored = await world.scorer.score(make_task(0), RESPONSES, 0)
            assert scored.counts.num_timeouts == 3
            os.kill(world.actors[0].process.pid, signal.SIGKILL)
            await world.until(lambda: 1 in world.actors)
            world.actors[1].is_released.set()
            assert (await world.scorer.score(make_task(0), RESPONSES, 0)).counts.num_timeouts == 4

    asyncio.run(go())


def test_losses_without_a_scored_group_between_them_end_the_run() -> None:
    async def go() -> None:
        async with started(max_restarts=2) as world:
            for number in range(2):
                os.kill(world.actors[number].process.pid, signal.SIGKILL)
                await world.until(lambda number=number: number + 1 in world.actors and not world.faults.open)
            os.kill(world.actors[2].process.pid, signal.SIGKILL)
            assert world.watching is not None
            with pytest.raises(ScorerFails, match=r"restarted 2 times in a row .*has died") as raised:
                await world.watching
            with pytest.raises(ScorerFails):
                await world.scorer.score(make_task(0), RESPONSES, 0)
            assert "scorer.max_restarts" in str(raised.value)

    asyncio.run(go())


def test_a_scored_group_gives_the_budget_back_and_a_failed_start_takes_of_it() -> None:
    async def go() -> None:
        async with started(max_restarts=2) as world:
            world.fails_to_start = lambda number: number in (1, 3)
            for number in (0, 2):
                world.actors[number].is_released.set()
                await world.scorer.score(make_task(0), RESPONSES, 0)
                os.kill(world.actors[number].process.pid, signal.SIGKILL)
                await world.until(lambda number=number: number + 2 in world.actors and not world.faults.open)
            world.actors[4].is_released.set()
            await world.scorer.score(make_task(0), RESPONSES, 0)
            world.fails_to_start = lambda number: True
            os.kill(world.actors[4].process.pid, signal.SIGKILL)
            assert world.watching is not None
            with pytest.raises(ScorerFails, match="could not be started: no such module"):
                await world.watching
            assert len(world.faults.open) == 1, "it was not recovered from"

    asyncio.run(go())
