"""What scorers count, how long they may take, and which of their losses are one too many."""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from forgeasync.config import ScorerSection
from forgeasync.environments import Response
from forgeasync.observability import FaultLog, ProcessListFile
from forgeasync.rollouts import FinishReason, Score, VerifierCounts
from forgeasync.runtime import ProcessLost, RestartsFail, ScoredResponses, Scorers, Spawned, supervised
from tests.support.buffer_world import make_task
from tests.support.loops import Endpoint
from tests.support.standing_still import standing_still

RESPONSES = [Response("4", 1, FinishReason.STOP)]
SCORE = Score(value=1.0, is_correct=True)


class World:
    """One scorer, each process of which counts the responses that it has scored."""

    def __init__(self, *, limit_s: float, max_restarts: int) -> None:
        section = ScorerSection(max_restarts=max_restarts, max_in_flight=2)
        self.told: list[str] = []
        self.faults = FaultLog(tell=self.told.append)
        self.scorers = Scorers(
            self._spawn, section, limit_s=limit_s, faults=self.faults, listing=ProcessListFile()
        )
        self.processes: list[Any] = []
        self.num_spawned = 0
        self.fails_to_start: Callable[[int], bool] = lambda number: False
        self.hangs = False
        self.watching: asyncio.Task[None]

    async def _spawn(self, rank: int, number: int) -> "Spawned[Any]":
        self.num_spawned += 1
        if self.fails_to_start(number):
            raise ValueError("no such module")
        process, num_scored = standing_still(), 0
        self.processes.append(process)

        async def beat() -> None:
            return None

        async def score(task: object, responses: object, first: int) -> ScoredResponses:
            nonlocal num_scored
            if self.hangs:
                await asyncio.Event().wait()
            num_scored += 1
            return ScoredResponses(scores=(SCORE,), counts=VerifierCounts(num_timeouts=num_scored))

        actor = SimpleNamespace(beat=Endpoint(beat), score=Endpoint(score))
        return Spawned(actor=actor, pid=process.pid, stop=beat)

    async def score(self) -> int:
        """What the scorers have counted after one more response."""
        scored = await self.scorers.score(0, make_task(0), RESPONSES, 0)
        assert isinstance(scored, ScoredResponses) and scored.scores == (SCORE,)
        return scored.counts.num_timeouts

    async def kill(self) -> None:
        """Kill the process that there is, and wait for its replacement."""
        os.kill(self.scorers.replicas[0].pid, signal.SIGKILL)
        num = len(self.faults.open) + sum(self.faults.metrics().values())
        while sum(self.faults.metrics().values()) < num + 2 or self.faults.open:
            assert not self.watching.done(), self.watching
            await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def started(*, limit_s: float = 60.0, max_restarts: int = 3) -> AsyncIterator[World]:
    world = World(limit_s=limit_s, max_restarts=max_restarts)
    try:
        await world.scorers.start(1)
        world.watching = asyncio.create_task(world.scorers.watch())
        yield world
    finally:
        world.watching.cancel()
        await world.scorers.close()
        for process in world.processes:
            process.wait()


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervised, "LOOK_S", 0.01)
    monkeypatch.setattr(supervised, "RETRY_S", 0.0)


async def test_a_scorer_that_scores_nothing_for_too_long_is_replaced() -> None:
    """It answers its heartbeats: only its calls hang."""
    async with started(limit_s=0.1) as world:
        world.hangs = True
        with pytest.raises(ProcessLost):
            await world.score()
        limits = "2 times its limit: scorer.max_in_flight, scorer.num_workers"
        assert f"the scorer (process {world.processes[0].pid}) has not scored" in world.told[0]
        assert f"within 0.2 s ({limits})" in world.told[0]
        assert "; the controller waits in Scorers.score (forgeasync/" in world.told[0]


async def test_counts_of_lost_scorers_stay() -> None:
    async with started() as world:
        assert [await world.score() for _ in range(3)] == [1, 2, 3]
        await world.kill()
        assert await world.score() == 4


async def test_losses_without_a_scored_response_between_them_end_the_run() -> None:
    async with started(max_restarts=2) as world:
        for _ in range(2):
            await world.kill()
        os.kill(world.scorers.replicas[0].pid, signal.SIGKILL)
        with pytest.raises(RestartsFail, match=r"restarted 2 times in a row .*has died") as raised:
            await world.watching
        assert "scorer.max_restarts" in str(raised.value)
        with pytest.raises(ProcessLost):
            await world.score()


async def test_a_scored_response_gives_the_budget_back_and_a_failed_start_takes_of_it() -> None:
    async with started(max_restarts=2) as world:
        world.fails_to_start = lambda number: number in (1, 3)
        for _ in range(2):
            await world.score()
            await world.kill()
        await world.score()
        assert world.num_spawned == 5
        world.fails_to_start = lambda number: True
        os.kill(world.scorers.replicas[0].pid, signal.SIGKILL)
        with pytest.raises(RestartsFail, match="could not be started: no such module"):
            await world.watching
        assert len(world.faults.open) == 1, "it was not recovered from"
