"""Which losses are one too many, and kills under load."""

from collections import Counter
from contextlib import AbstractAsyncContextManager
from types import SimpleNamespace

import pytest

from forgeasync.environments import Response
from forgeasync.rollouts import FinishReason, Score
from forgeasync.runtime import ProcessLost, RestartsFail, ScoredResponses
from tests.runtime.supervised_world import Process, SupervisedWorld, answers, scorers
from tests.runtime.supervised_world import started as started_pool
from tests.support.buffer_world import make_task
from tests.support.loops import Endpoint
from tests.support.scorer_kills import kill_scorers

RESPONSES = [Response("4", 1, FinishReason.STOP)]
SCORE = Score(value=1.0, is_correct=True)


def started(*, max_restarts: int = 3) -> AbstractAsyncContextManager[SupervisedWorld]:
    """One scorer."""

    def script(process: Process) -> SimpleNamespace:
        async def score(task: object, responses: object, first: int) -> ScoredResponses:
            return ScoredResponses(scores=(SCORE,), counts=Counter())

        return SimpleNamespace(beat=answers(process), score=Endpoint(score))

    return started_pool(lambda world: scorers(world, max_restarts=max_restarts), 1, script=script)


async def score(world: SupervisedWorld) -> None:
    scored = await world.pool.score(0, make_task(0), RESPONSES, 0)
    assert isinstance(scored, ScoredResponses) and scored.scores == (SCORE,)


async def replace(world: SupervisedWorld) -> None:
    """Kill the process that there is, and wait for its replacement."""
    pids = world.pids()
    world.kill()
    await world.until(lambda: world.pids() != pids and not world.faults.open)


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
