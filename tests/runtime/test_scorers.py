"""What scorers count, how long they may take, which losses are one too many, and kills under load."""

import asyncio
from contextlib import AbstractAsyncContextManager
from types import SimpleNamespace

import pytest

from forgeasync.environments import Response
from forgeasync.rollouts import FinishReason, Score, VerifierCounts
from forgeasync.runtime import ProcessLost, RestartsFail, ScoredResponses
from tests.runtime.supervised_world import Process, SupervisedWorld, answers, scorers
from tests.runtime.supervised_world import started as started_pool
from tests.support.buffer_world import make_task
from tests.support.loops import Endpoint
from tests.support.scorer_kills import kill_scorers

RESPONSES = [Response("4", 1, FinishReason.STOP)]
SCORE = Score(value=1.0, is_correct=True)


def started(
    *, limit_s: float = 60.0, max_restarts: int = 3, hangs: bool = False
) -> AbstractAsyncContextManager[SupervisedWorld]:
    """One scorer, each process of which counts the responses that it has scored."""

    def script(process: Process) -> SimpleNamespace:
        num_scored = 0

        async def score(task: object, responses: object, first: int) -> ScoredResponses:
            nonlocal num_scored
            if hangs:
                await asyncio.Event().wait()
            num_scored += 1
            return ScoredResponses(scores=(SCORE,), counts=VerifierCounts(num_timeouts=num_scored))

        return SimpleNamespace(beat=answers(process), score=Endpoint(score))

    section = {"max_restarts": max_restarts, "max_in_flight": 2}
    return started_pool(lambda world: scorers(world, limit_s=limit_s, **section), 1, script=script)


async def score(world: SupervisedWorld) -> int:
    """What the scorers have counted after one more response."""
    scored = await world.pool.score(0, make_task(0), RESPONSES, 0)
    assert isinstance(scored, ScoredResponses) and scored.scores == (SCORE,)
    return scored.counts.num_timeouts


async def replace(world: SupervisedWorld) -> None:
    """Kill the process that there is, and wait for its replacement."""
    pids = world.pids()
    world.kill()
    await world.until(lambda: world.pids() != pids and not world.faults.open)


async def test_a_scorer_that_scores_nothing_for_too_long_is_replaced() -> None:
    """It answers its heartbeats: only its calls hang."""
    async with started(limit_s=0.1, hangs=True) as world:
        with pytest.raises(ProcessLost):
            await score(world)
        limits = "2 times its limit: scorer.max_in_flight, scorer.num_workers"
        assert f"the scorer (process {world.started[0].process.pid}) has not scored" in world.told[0]
        assert f"within 0.2 s ({limits})" in world.told[0]
        assert "; the controller waits in ScorerProcesses.score (forgeasync/" in world.told[0]


async def test_counts_of_lost_scorers_stay() -> None:
    async with started() as world:
        assert [await score(world) for _ in range(3)] == [1, 2, 3]
        await replace(world)
        assert await score(world) == 4


async def test_losses_without_a_scored_response_between_them_end_the_run() -> None:
    async with started(max_restarts=2) as world:
        for _ in range(2):
            await replace(world)
        world.kill()
        with pytest.raises(RestartsFail, match=r"restarted 2 times in a row .*has died") as raised:
            await world.watching
        assert "scorer.max_restarts" in str(raised.value)
        with pytest.raises(ProcessLost):
            await score(world)


async def test_a_scored_response_gives_the_budget_back_and_a_failed_start_takes_of_it() -> None:
    async with started(max_restarts=2) as world:
        world.fails_to_start = lambda number: number in (1, 3)
        for _ in range(2):
            await score(world)
            await replace(world)
        await score(world)
        assert world.num_spawned == 5
        world.fails_to_start = lambda number: True
        world.kill()
        with pytest.raises(RestartsFail, match="could not be started: no such module"):
            await world.watching
        assert len(world.faults.open) == 1, "it was not recovered from"


@pytest.mark.exhaustive
def test_scorers_that_are_killed_under_load_lose_no_group_and_score_none_twice() -> None:
    killed = kill_scorers(8)
    assert killed.lost == () and killed.wrong == ()
    assert set(killed.num_ended) == set(range(killed.num_groups)), "every group has ended"
    assert set(killed.num_ended.values()) == {1}, "once"
    assert killed.metrics["faults/recovered_scorer"] == killed.metrics["faults/detected_scorer"] == 8
    assert killed.metrics["scoring/num_lost_calls"] > 0, "they had responses"
    assert killed.metrics["score/num_failed"] == 0
    assert killed.metrics["score/num_early"] > 0
