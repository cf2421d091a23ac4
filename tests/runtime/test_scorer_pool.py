"""The pool of scorers: responses are scored as they finish, by whatever scorer there is, and once."""

import asyncio
from collections.abc import Callable, Sequence

from forgeasync.config import ScorerSection
from forgeasync.environments import Response
from forgeasync.rollouts import FinishReason, Score, Task, VerifierCounts
from forgeasync.runtime import GroupScoring, ProcessLost, ScoredResponses, ScorerPool, Unavailable, Unscored
from tests.support.buffer_world import make_task


def response(text: str) -> Response:
    return Response(text, 1, FinishReason.STOP)


def scored(responses: Sequence[Response]) -> ScoredResponses:
    scores = tuple(Score(float(one.text), False) for one in responses)
    return ScoredResponses(scores=scores, counts=VerifierCounts())


class Scorers:
    """Scorers whose calls wait until they are told to go on; they keep what they were asked for."""

    def __init__(self, num_replicas: int, section: ScorerSection) -> None:
        self.asked: list[tuple[int, str]] = []
        """Replica and text."""
        self.is_open = asyncio.Event()
        self.is_lost = [asyncio.Event() for _ in range(num_replicas)]
        self.pool = ScorerPool(
            [self._call(rank) for rank in range(num_replicas)], section, retry_wait_s=0.0, isolation="walls"
        )
        self.groups = GroupScoring(self.pool, section)

    def _call(self, rank: int) -> Callable[[Task, Sequence[Response], int], object]:
        async def call(task: Task, responses: Sequence[Response], first: int) -> ScoredResponses:
            self.asked += [(rank, one.text) for one in responses]
            lost = asyncio.ensure_future(self.is_lost[rank].wait())
            opened = asyncio.ensure_future(self.is_open.wait())
            await asyncio.wait([lost, opened], return_when=asyncio.FIRST_COMPLETED)
            if lost.done():
                raise ProcessLost(f"scorer {rank} was gone before it answered")
            return scored(responses)

        return call

    def lose(self, rank: int) -> None:
        self.is_lost[rank].set()
        self.pool.set_up(rank, False)

    def replace(self, rank: int) -> None:
        self.is_lost[rank] = asyncio.Event()
        self.pool.set_up(rank, True)

    async def until(self, is_reached: Callable[[], bool]) -> None:
        while not is_reached():
            await asyncio.sleep(0)


def run(body: Callable[[Scorers], object], *, num_replicas: int = 1, **fields: object) -> None:
    async def go() -> None:
        await body(Scorers(num_replicas, ScorerSection(**fields)))

    asyncio.run(go())


def test_responses_are_scored_while_others_of_their_group_are_sampled() -> None:
    async def body(scorers: Scorers) -> None:
        scorers.is_open.set()
        for index in (2, 0):
            scorers.groups.finished(7, make_task(0), index, response(str(index)))
        await scorers.until(lambda: scorers.pool.metrics()["score/num_in_flight"] == 0)
        assert scorers.asked == [(0, "2"), (0, "0")]
        scores = await scorers.groups.score_group(7, make_task(0), [response(str(one)) for one in range(3)])
        assert scores == tuple(Score(float(one), False) for one in range(3))
        assert scorers.asked == [(0, "2"), (0, "0"), (0, "1")], "no response twice"
        assert scorers.groups.metrics()["score/num_early"] == 2

    run(body)


def test_a_score_counts_only_for_the_response_that_the_group_ends_with() -> None:
    """Its generator was lost after the response had ended, and sampled another one."""

    async def body(scorers: Scorers) -> None:
        scorers.is_open.set()
        scorers.groups.finished(7, make_task(0), 0, response("1"))
        scorers.groups.finished(7, make_task(0), 1, response("2"))
        await scorers.until(lambda: len(scorers.asked) == 2)
        scores = await scorers.groups.score_group(7, make_task(0), [response("5"), response("2")])
        assert scores == (Score(5.0, False), Score(2.0, False))
        assert scorers.groups.metrics()["score/num_early"] == 1

    run(body)


def test_a_group_that_is_given_up_withdraws_its_responses() -> None:
    async def body(scorers: Scorers) -> None:
        for index in range(6):
            scorers.groups.finished(7, make_task(0), index, response("1"))
        await scorers.until(lambda: len(scorers.asked) == 2)
        scorers.groups.forget(7)
        await scorers.until(lambda: scorers.pool.metrics()["score/num_queued"] == 0)
        assert len(scorers.asked) == 2 and scorers.pool.metrics()["score/num_in_flight"] == 0
        scorers.groups.forget(7)

    run(body, max_in_flight=2)


def test_a_full_queue_leaves_responses_to_the_end_of_their_group() -> None:
    async def body(scorers: Scorers) -> None:
        texts = [response(str(index)) for index in range(8)]
        for index, one in enumerate(texts):
            scorers.groups.finished(7, make_task(0), index, one)
        assert scorers.pool.metrics()["score/num_queued"] == 2
        group = asyncio.create_task(scorers.groups.score_group(7, make_task(0), texts))
        scorers.is_open.set()
        assert await group == tuple(Score(float(one), False) for one in range(8))
        assert len(scorers.asked) == 8
        assert scorers.groups.metrics()["score/num_early"] == 3

    run(body, max_in_flight=1, max_queued=2)


def test_a_replica_that_is_lost_gives_its_responses_to_others_and_gets_none() -> None:
    async def body(scorers: Scorers) -> None:
        texts = [response(str(index)) for index in range(4)]
        group = asyncio.create_task(scorers.groups.score("group 7", make_task(0), texts))
        await scorers.until(lambda: len(scorers.asked) == 4)
        of_first = [text for rank, text in scorers.asked if rank == 0]
        scorers.lose(0)
        await scorers.until(lambda: len(scorers.asked) == 6)
        assert scorers.asked[4:] == [(1, text) for text in of_first]
        scorers.is_open.set()
        assert await group == tuple(Score(float(one), False) for one in range(4))
        scorers.replace(0)
        await scorers.groups.score("group 8", make_task(0), texts)
        assert {rank for rank, _ in scorers.asked[6:]} == {0, 1}
        metrics = scorers.pool.metrics()
        assert metrics["scoring/num_lost_calls"] == metrics["score/num_retried"] == 2
        assert metrics["scoring/num_failed_attempts"] == metrics["score/num_failed"] == 0

    run(body, num_replicas=2)


def test_responses_wait_while_no_scorer_is_there() -> None:
    async def body(scorers: Scorers) -> None:
        scorers.is_open.set()
        scorers.lose(0)
        group = asyncio.create_task(scorers.groups.score("group 7", make_task(0), [response("1")]))
        for _ in range(20):
            await asyncio.sleep(0)
        assert not group.done() and not scorers.asked
        scorers.replace(0)
        assert await group == (Score(1.0, False),)

    run(body)


async def test_what_is_not_available_is_asked_for_again_and_costs_no_attempt() -> None:
    answers = iter([Unavailable(reason="the judge is down", retry_after_s=0.01)] * 5)

    async def call(task: Task, responses: Sequence[Response], first: int) -> ScoredResponses | Unavailable:
        return next(answers, None) or scored(responses)

    section = ScorerSection(max_attempts=1)
    pool = ScorerPool([call], section)
    group = GroupScoring(pool, section).score("group 7", make_task(0), [response("1")])
    assert await group == (Score(1.0, False),)
    assert pool.metrics()["score/num_deferred"] == 5
    assert pool.metrics()["scoring/num_failed_attempts"] == 0


async def test_what_never_becomes_available_is_given_up_with_the_reason() -> None:
    async def call(task: Task, responses: Sequence[Response], first: int) -> Unavailable:
        return Unavailable(reason="the judge is down", retry_after_s=0.01)

    section = ScorerSection(max_unavailable_s=0.1)
    group = GroupScoring(ScorerPool([call], section), section).score("group 7", make_task(0), [response("1")])
    result = await group
    assert isinstance(result, Unscored)
    assert (
        "group 7 was not scored within scorer.max_unavailable_s = 0.1 s: the judge is down" in result.reason
    )


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

    section = ScorerSection(max_attempts=2)
    pool = ScorerPool([call], section, retry_wait_s=0.0)
    group = GroupScoring(pool, section).score("group 7", make_task(0), [response("1")] * 3)
    result = await group
    assert isinstance(result, Unscored)
    assert "response 1 of group 7 was not scored in 2 attempts" in result.reason
    while num_ended < 2:
        await asyncio.sleep(0)
    assert pool.metrics()["score/num_failed"] == 1
    assert pool.metrics()["score/num_in_flight"] == 0
