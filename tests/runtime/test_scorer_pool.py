"""The pool of scorers: responses are scored as they finish, by whatever scorer there is, and once."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import pytest

from forgeasync.config import ScorerSection
from forgeasync.environments import Response
from forgeasync.rollouts import FinishReason, Score, Task, VerifierCounts
from forgeasync.runtime import GroupScoring, ProcessLost, ScoredResponses, ScoreQueue, Unavailable, Unscored
from tests.support.buffer_world import make_task

Call = Callable[[Task, Sequence[Response], int], Awaitable[ScoredResponses | Unavailable]]
TASK = make_task(0)


def response(text: str) -> Response:
    return Response(text, 1, FinishReason.STOP)


def scored(responses: Sequence[Response]) -> ScoredResponses:
    scores = tuple(Score(float(one.text), False) for one in responses)
    return ScoredResponses(scores=scores, counts=VerifierCounts())


def responses(num: int) -> list[Response]:
    return [response(str(index)) for index in range(num)]


def scores(num: int) -> tuple[Score, ...]:
    """Of those responses."""
    return tuple(Score(float(index), False) for index in range(num))


def pool_of(*calls: Call, **section: float) -> tuple[ScoreQueue, GroupScoring]:
    config = ScorerSection(**section)  # type: ignore[arg-type]
    pool = ScoreQueue(list(calls), config, retry_wait_s=0.0, isolation="walls")
    return pool, GroupScoring(pool, config)


class Scorers:
    """Scorers whose calls wait until they are told to go on; they keep what they were asked for."""

    def __init__(self, num_replicas: int = 1, **section: int) -> None:
        self.asked: list[tuple[int, str]] = []
        """Replica and text."""
        self.is_open = asyncio.Event()
        self.is_lost = [asyncio.Event() for _ in range(num_replicas)]
        self.pool, self.groups = pool_of(*map(self._call, range(num_replicas)), **section)

    def _call(self, rank: int) -> Call:
        async def call(task: Task, responses: Sequence[Response], first: int) -> ScoredResponses:
            self.asked += [(rank, one.text) for one in responses]
            lost = asyncio.ensure_future(self.is_lost[rank].wait())
            opened = asyncio.ensure_future(self.is_open.wait())
            await asyncio.wait([lost, opened], return_when=asyncio.FIRST_COMPLETED)
            if lost.done():
                raise ProcessLost(f"scorer {rank} was gone before it answered")
            return scored(responses)

        return call

    def finished(self, *texts: str) -> None:
        """Responses of group 7 end, at the places that their texts name."""
        for text in texts:
            self.groups.finished(7, TASK, int(text), response(text))

    def lose(self, rank: int) -> None:
        self.is_lost[rank].set()
        self.pool.set_up(rank, False)

    def replace(self, rank: int) -> None:
        self.is_lost[rank] = asyncio.Event()
        self.pool.set_up(rank, True)

    async def until(self, is_reached: Callable[[], bool]) -> None:
        while not is_reached():
            await asyncio.sleep(0)


async def test_responses_are_scored_while_others_of_their_group_are_sampled() -> None:
    scorers = Scorers()
    scorers.is_open.set()
    scorers.finished("2", "0")
    await scorers.until(lambda: scorers.pool.metrics()["score/num_in_flight"] == 0)
    assert scorers.asked == [(0, "2"), (0, "0")]
    assert await scorers.groups.score_group(7, TASK, responses(3)) == scores(3)
    assert scorers.asked == [(0, "2"), (0, "0"), (0, "1")], "no response twice"
    assert scorers.groups.metrics()["score/num_early"] == 2


async def test_a_score_counts_only_for_the_response_that_the_group_ends_with() -> None:
    """Its generator was lost after the response had ended, and sampled another one."""
    scorers = Scorers()
    scorers.is_open.set()
    scorers.finished("0", "1")
    await scorers.until(lambda: len(scorers.asked) == 2)
    found = await scorers.groups.score_group(7, TASK, [response("5"), response("1")])
    assert found == (Score(5.0, False), Score(1.0, False))
    assert scorers.groups.metrics()["score/num_early"] == 1


async def test_a_group_that_is_given_up_withdraws_its_responses() -> None:
    scorers = Scorers(max_in_flight=2)
    scorers.finished(*"012345")
    await scorers.until(lambda: len(scorers.asked) == 2)
    scorers.groups.forget(7)
    await scorers.until(lambda: scorers.pool.metrics()["score/num_queued"] == 0)
    assert len(scorers.asked) == 2 and scorers.pool.metrics()["score/num_in_flight"] == 0
    scorers.groups.forget(7)


async def test_a_full_queue_leaves_responses_to_the_end_of_their_group() -> None:
    scorers = Scorers(max_in_flight=1, max_queued=2)
    scorers.finished(*"01234567")
    assert scorers.pool.metrics()["score/num_queued"] == 2
    group = asyncio.create_task(scorers.groups.score_group(7, TASK, responses(8)))
    scorers.is_open.set()
    assert await group == scores(8)
    assert len(scorers.asked) == 8
    assert scorers.groups.metrics()["score/num_early"] == 3


async def test_a_replica_that_is_lost_gives_its_responses_to_others_and_gets_none() -> None:
    scorers = Scorers(num_replicas=2)
    group = asyncio.create_task(scorers.groups.score("group 7", TASK, responses(4)))
    await scorers.until(lambda: len(scorers.asked) == 4)
    of_first = [text for rank, text in scorers.asked if rank == 0]
    scorers.lose(0)
    await scorers.until(lambda: len(scorers.asked) == 6)
    assert scorers.asked[4:] == [(1, text) for text in of_first]
    scorers.is_open.set()
    assert await group == scores(4)
    scorers.replace(0)
    await scorers.groups.score("group 8", TASK, responses(4))
    assert {rank for rank, _ in scorers.asked[6:]} == {0, 1}
    metrics = scorers.pool.metrics()
    assert metrics["scoring/num_lost_calls"] == metrics["score/num_retried"] == 2
    assert metrics["scoring/num_failed_attempts"] == metrics["score/num_failed"] == 0


async def test_responses_wait_while_no_scorer_is_there() -> None:
    scorers = Scorers()
    scorers.is_open.set()
    scorers.lose(0)
    group = asyncio.create_task(scorers.groups.score("group 7", TASK, responses(1)))
    for _ in range(20):
        await asyncio.sleep(0)
    assert not group.done() and not scorers.asked
    scorers.replace(0)
    assert await group == scores(1)


@pytest.mark.parametrize("num_away", [5, None])
async def test_what_is_not_available_is_asked_for_again_for_a_while_and_costs_no_attempt(
    num_away: int | None,
) -> None:
    """It is away for some calls, or for good: the group is given up with the reason."""
    num_calls = 0

    async def call(task: Task, responses: Sequence[Response], first: int) -> ScoredResponses | Unavailable:
        nonlocal num_calls
        num_calls += 1
        if num_away is None or num_calls <= num_away:
            return Unavailable(reason="the judge is down", retry_after_s=0.01)
        return scored(responses)

    limit = {} if num_away else {"max_unavailable_s": 0.1}
    pool, groups = pool_of(call, max_attempts=1, **limit)
    found = await groups.score("group 7", TASK, responses(1))
    assert pool.metrics()["scoring/num_failed_attempts"] == 0
    if num_away:
        assert found == scores(1)
        assert pool.metrics()["score/num_deferred"] == num_away
    else:
        words = "group 7 was not scored within scorer.max_unavailable_s = 0.1 s: the judge is down"
        assert isinstance(found, Unscored) and words in found.reason


async def test_one_response_without_a_score_costs_the_group_and_ends_the_others_calls() -> None:
    num_ended = 0

    async def call(task: Task, responses: Sequence[Response], first: int) -> ScoredResponses:
        nonlocal num_ended
        if first == 1:
            raise ConnectionRefusedError("nobody listens")
        try:
            await asyncio.Event().wait()
        finally:
            num_ended += 1
        raise AssertionError

    pool, groups = pool_of(call, max_attempts=2)
    result = await groups.score("group 7", TASK, responses(3))
    assert isinstance(result, Unscored)
    assert "response 1 of group 7 was not scored in 2 attempts" in result.reason
    while num_ended < 2:
        await asyncio.sleep(0)
    assert pool.metrics()["score/num_failed"] == 1
    assert pool.metrics()["score/num_in_flight"] == 0
