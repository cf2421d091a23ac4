"""Scoring of groups: response by response as they finish, retried, and given up one by one."""

import asyncio
import dataclasses
import math
import re
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from forgeasync.config import SamplingSection, ScorerSection
from forgeasync.controller import ProblemSet, evaluate
from forgeasync.environments import Response
from forgeasync.processes import MemoryPeak
from forgeasync.rollouts import FinishReason, SampledTurn, Score, Task
from forgeasync.runtime import (
    GroupScoring,
    ProcessLost,
    ResponseGroups,
    ResponseScoring,
    ScoredResponses,
    ScoreQueue,
    Unavailable,
    Unscored,
)
from forgeasync.testing import HandTime, tiny_config
from forgeasync.waiting import DeadlineExceeded
from tests.support.buffer_world import make_task
from tests.support.loops import Prompts, make_problem

MAX_LOST = ScorerSection().max_lost
Answer = ScoredResponses | Unavailable
Call = Callable[[Task, Sequence[Response], int], Awaitable[Answer]]
TASK = make_task(0)
AWAY = Unavailable(reason="the judge is down", retry_after_s=0.01)


def response(text: str) -> Response:
    return Response(text, 1, FinishReason.STOP)


def responses(num: int) -> list[Response]:
    return [response(str(index)) for index in range(num)]


def scores(num: int) -> tuple[Score, ...]:
    """Of those responses."""
    return tuple(Score(float(index), False) for index in range(num))


def scored(*values: float, num_timeouts: int = 0) -> ScoredResponses:
    given = tuple(Score(value=value, is_correct=value >= 2.0) for value in values)
    return ScoredResponses(scores=given, counts=Counter({"scoring/num_timeouts": num_timeouts}))


def pool_of(*calls: Call, is_whole: bool = False, **section: float) -> tuple[ScoreQueue, GroupScoring]:
    """Scorers that are called; with ``is_whole`` by one call for each group."""
    config = ScorerSection(**section)  # type: ignore[arg-type]
    pool = ScoreQueue(list(calls), config, retry_wait_s=0.0)
    return pool, GroupScoring(pool, compares=lambda task: is_whole)


class Answers:
    """A scorer whose calls have the given answers, the last one again and again; an exception is raised."""

    def __init__(self, *answers: Answer | Exception) -> None:
        self._answers = answers
        self.asked: list[Sequence[Response]] = []

    async def __call__(self, task: Task, responses: Sequence[Response], first: int) -> Answer:
        self.asked.append(responses)
        answer = self._answers[min(len(self.asked), len(self._answers)) - 1]
        if isinstance(answer, Exception):
            raise answer
        return answer


async def some_turns(num: int = 5) -> None:
    for _ in range(num):
        await asyncio.sleep(0)


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
            given = tuple(Score(float(one.text), False) for one in responses)
            return ScoredResponses(scores=given, counts=Counter())

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

    def metric(self, name: str) -> float:
        return self.groups.metrics()[name]

    async def until(self, is_reached: Callable[[], bool]) -> None:
        while not is_reached():
            await asyncio.sleep(0)


class TestGroupScoring:
    async def test_responses_are_scored_while_others_of_their_group_are_sampled(self) -> None:
        scorers = Scorers()
        scorers.is_open.set()
        scorers.finished("2", "0")
        await scorers.until(lambda: scorers.metric("score/num_in_flight") == 0)
        assert scorers.asked == [(0, "2"), (0, "0")]
        assert await scorers.groups.score_group(7, TASK, responses(3)) == scores(3)
        assert scorers.asked == [(0, "2"), (0, "0"), (0, "1")], "no response twice"
        assert scorers.metric("score/num_early") == 2

    async def test_a_score_counts_only_for_the_response_that_the_group_ends_with(self) -> None:
        """Its generator was lost after the response had ended, and sampled another one."""
        scorers = Scorers()
        scorers.is_open.set()
        scorers.finished("0", "1")
        await scorers.until(lambda: len(scorers.asked) == 2)
        found = await scorers.groups.score_group(7, TASK, [response("5"), response("1")])
        assert found == (Score(5.0, False), Score(1.0, False))
        assert scorers.metric("score/num_early") == 1

    async def test_a_group_that_is_given_up_withdraws_its_responses(self) -> None:
        scorers = Scorers(max_in_flight=2)
        scorers.finished(*"012345")
        await scorers.until(lambda: len(scorers.asked) == 2)
        scorers.groups.forget(7)
        await scorers.until(lambda: scorers.metric("score/num_queued") == 0)
        assert len(scorers.asked) == 2 and scorers.metric("score/num_in_flight") == 0
        assert scorers.metric("scoring/num_failed_attempts") == 0
        scorers.groups.forget(7)

    async def test_a_replica_that_is_lost_gives_its_responses_to_others_and_gets_none(self) -> None:
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
        assert scorers.metric("scoring/num_lost_calls") == scorers.metric("score/num_retried") == 2
        assert scorers.metric("scoring/num_failed_attempts") == scorers.metric("score/num_failed") == 0

    async def test_responses_wait_while_no_scorer_is_there(self) -> None:
        scorers = Scorers()
        scorers.is_open.set()
        scorers.lose(0)
        group = asyncio.create_task(scorers.groups.score("group 7", TASK, responses(1)))
        await some_turns(20)
        assert not group.done() and not scorers.asked
        scorers.replace(0)
        assert await group == scores(1)

    @pytest.mark.parametrize(
        ("failures", "max_attempts", "metric"),
        [
            pytest.param([ConnectionRefusedError()], 2, "scoring/num_failed_attempts", id="fails"),
            # These cost no attempt.
            pytest.param([ProcessLost("gone")] * (MAX_LOST - 1), 1, "scoring/num_lost_calls", id="is lost"),
            pytest.param([AWAY] * 5, 1, "score/num_deferred", id="is not available"),
        ],
    )
    async def test_the_same_responses_are_scored_again_after_one_that(
        self, failures: list[Answer | Exception], max_attempts: int, metric: str
    ) -> None:
        judge = Answers(*failures, scored(0.5, 2.0))
        _, groups = pool_of(judge, is_whole=True, max_attempts=max_attempts)
        given = responses(2)
        found = await groups.score("group 7", TASK, given)
        assert found == (Score(value=0.5, is_correct=False), Score(value=2.0, is_correct=True))
        assert judge.asked == [given] * (len(failures) + 1)
        metrics = groups.metrics()
        assert metrics[metric] == len(failures)
        assert metrics["scoring/num_failed_attempts"] == max_attempts - 1 and not metrics["score/num_failed"]

    @pytest.mark.parametrize(
        ("answer", "reason"),
        [
            (ConnectionRefusedError("nobody"), "in 4 attempts.* ConnectionRefusedError: nobody"),
            (TimeoutError(), "in 4 attempts.* TimeoutError"),
            (RuntimeError("Traceback\n  line 1\nValueError: deep down"), "in 4 attempts.*ValueError: deep"),
            (scored(1.0), "group 17 has 2 responses, and the scorer gave 1 scores"),
            (scored(1.0, 1.0, 1.0), "group 17 has 2 responses, and the scorer gave 3 scores"),
            (ScoredResponses(scores=(1.0, math.nan), counts=Counter()), "1.0, which is not a Score"),
            (ProcessLost("process 7 was gone"), f"lost its scorer {MAX_LOST} times.*: process 7 was gone"),
            (AWAY, "scorer.max_unavailable_s = 0.1 s: the judge is down"),
        ],
        ids=["refused", "late", "remote", "too_few", "too_many", "no_score", "lost", "unavailable"],
    )
    async def test_what_always_fails_is_given_up_with_group_and_reason(
        self, answer: Answer | Exception, reason: str
    ) -> None:
        judge = Answers(answer)
        _, groups = pool_of(judge, is_whole=True, max_attempts=4, max_unavailable_s=0.1)
        result = await groups.score("group 17", TASK, responses(2))
        assert isinstance(result, Unscored)
        assert re.match(f"group 17 .*{reason}", result.reason), result.reason
        metrics = groups.metrics()
        num_lost = MAX_LOST if isinstance(answer, ProcessLost) else 0
        num_failed = 0 if num_lost or answer is AWAY else 4
        assert metrics["scoring/num_lost_calls"] == num_lost
        assert metrics["scoring/num_failed_attempts"] == num_failed
        assert len(judge.asked) == num_lost + num_failed or answer is AWAY

    async def test_one_response_without_a_score_costs_the_group_and_ends_the_others_calls(self) -> None:
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

        _, groups = pool_of(call, max_attempts=2)
        result = await groups.score("group 7", TASK, responses(3))
        assert isinstance(result, Unscored)
        assert "response 1 of group 7 was not scored in 2 attempts" in result.reason
        while num_ended < 2:
            await asyncio.sleep(0)
        assert groups.metrics()["score/num_failed"] == 1

    async def test_counts_and_the_peak_of_memory_never_fall_if_answers_overtake_each_other(self) -> None:
        answers = [
            dataclasses.replace(scored(0.0, num_timeouts=one), memory=MemoryPeak(resident_bytes=one * 2**30))
            for one in (2, 5, 3)
        ]
        _, groups = pool_of(Answers(*answers))
        assert "memory/scorer_gib" not in groups.metrics()
        for index in range(3):
            await groups.score(f"group {index}", TASK, responses(1))
        assert groups.metrics()["scoring/num_timeouts"] == 5
        assert groups.metrics()["memory/scorer_gib"] == 5.0

    async def test_counts_of_lost_scorers_stay(self) -> None:
        """A process counts from 0."""
        pool, groups = pool_of(Answers(*(scored(0.0, num_timeouts=number) for number in (1, 3, 1))))
        for expected in (1, 3):
            await groups.score("group 7", TASK, responses(1))
            assert groups.metrics()["scoring/num_timeouts"] == expected
        pool.set_up(0, False)
        pool.set_up(0, True)
        await groups.score("group 8", TASK, responses(1))
        assert groups.metrics()["scoring/num_timeouts"] == 4


class Judge:
    """A scorer in threads: calls ``work`` for each response."""

    def __init__(self, work: Callable[[], object]) -> None:
        self.work = work
        self.most = 0
        self.responses: list[str] = []
        self.error: Exception | None = None
        self._num_running = 0
        self._lock = threading.Lock()

    def score(self, task: Task, response: str) -> Score:
        with self._lock:
            self._num_running += 1
            self.most = max(self.most, self._num_running)
            self.responses.append(response)
        self.work()
        with self._lock:
            self._num_running -= 1
        if self.error is not None:
            raise self.error
        return Score(value=float(len(response)), is_correct=False)


def let_work(loop: asyncio.AbstractEventLoop) -> None:
    """Have a loop do, from another thread, all that it can do by now."""
    asyncio.run_coroutine_threadsafe(some_turns(20), loop).result()


def taking(seconds: float, clock: HandTime, loop: asyncio.AbstractEventLoop) -> Callable[[], None]:
    """Work that takes so long by a clock, whose loop misses nothing of it."""

    def work() -> None:
        let_work(loop)
        clock.advance(seconds)
        let_work(loop)

    return work


class TestResponseScoring:
    def test_responses_are_scored_side_by_side_in_their_order(self) -> None:
        judge = Judge(threading.Barrier(3).wait)
        scoring = ResponseScoring(judge.score, num_workers=3, limit_s=300.0)
        scores = asyncio.run(scoring.score(make_task(0), ["a" * length for length in (5, 1, 3, 2, 4, 6)]))
        assert [score.value for score in scores] == [5.0, 1.0, 3.0, 2.0, 4.0, 6.0]
        assert judge.most == 3
        scoring.close()

    async def test_groups_before_it_do_not_count_against_a_groups_deadline(self, hand_time: HandTime) -> None:
        judge = Judge(taking(0.2, hand_time, asyncio.get_running_loop()))
        scoring = ResponseScoring(judge.score, num_workers=1, limit_s=1.0)
        # Each takes 0.8 s, all together 4.8 s.
        found = await asyncio.gather(*(scoring.score(make_task(i), ["a"] * 4) for i in range(6)))
        await asyncio.to_thread(scoring.close)
        assert len(found) == 6

    async def test_after_an_error_or_a_cancellation_nothing_more_of_a_group_is_scored(self) -> None:
        gate = threading.Event()
        loop = asyncio.get_running_loop()
        judge = Judge(gate.wait)
        scoring = ResponseScoring(judge.score, num_workers=1, limit_s=300.0)
        before = asyncio.create_task(scoring.score(make_task(0), ["before"] * 2))
        await asyncio.sleep(0)
        queued = asyncio.create_task(scoring.score(make_task(1), ["queued"] * 8))
        await asyncio.sleep(0)
        queued.cancel()
        await asyncio.wait([queued])
        gate.set()
        assert len(await before) == 2
        judge.error = ConnectionRefusedError("nobody listens")
        judge.work = lambda: let_work(loop)
        with pytest.raises(ConnectionRefusedError):
            await scoring.score(make_task(2), ["failing"] * 8)
        judge.error = None
        assert await scoring.score(make_task(3), ["after"])
        await asyncio.to_thread(scoring.close)
        responses = judge.responses
        assert responses.count("queued") == 0
        assert responses.count("failing") <= 2

    async def test_a_group_past_its_deadline_fails_and_gives_its_place_away(
        self, hand_time: HandTime
    ) -> None:
        judge = Judge(taking(0.1, hand_time, asyncio.get_running_loop()))
        scoring = ResponseScoring(judge.score, num_workers=1, limit_s=0.25)
        with pytest.raises(DeadlineExceeded, match=r"8 responses to task 0.*0\.25 s.*timeouts\.score_s"):
            await scoring.score(make_task(0), ["long"] * 8)
        assert await scoring.score(make_task(1), ["b"])
        await asyncio.to_thread(scoring.close)
        assert judge.responses.count("long") <= 4, "what had not begun was not scored"


class Generators:
    """Answers each problem with its own text."""

    async def respond(
        self, prompt_ids_P: np.ndarray, *, num_samples: int, sampling: SamplingSection, seed: int
    ) -> tuple[SampledTurn, ...]:
        turn = SampledTurn(
            turn=0,
            ids_T=np.zeros(4, np.int32),
            text=f"response {seed}",
            finish_reason=FinishReason.STOP,
            first_version=seed,
            version=seed + 1,
        )
        return (turn,)


async def test_accuracy_is_the_mean_over_all_responses_that_were_scored() -> None:
    """Of several samples of each problem; the last problem is never scored."""
    answered: list[tuple[int, str]] = []

    async def judge(task: Task, responses: Sequence[Response], first: int) -> ScoredResponses:
        (one,) = responses
        answered.append((task.source_index, one.text))
        if task.source_index == 2:
            raise ConnectionRefusedError
        # As with a judge that gives up to 5 points: 4.5 is a correct answer, 1.0 a bad one.
        return scored(4.5 if one.text == "response 6" else 1.0)

    sampling = tiny_config(Path("unused")).sampling
    _, groups = pool_of(judge, max_attempts=1)
    result = await evaluate(
        ProblemSet(tasks=[make_problem(number) for number in range(3)], sampling=sampling, num_samples=4),
        ResponseGroups(Generators(), groups, Prompts(), group_size=1, sampling=sampling),
    )
    assert (result.accuracy, result.score_mean) == (1 / 8, (4.5 + 7.0) / 8)
    assert (result.num_scored, result.num_unscored) == (8, 4)
    # Every sample has a seed of its own; the first ones are those of a single sample.
    expected = [(problem, f"response {3 * sample + problem}") for problem in range(3) for sample in range(4)]
    assert sorted(answered) == sorted(expected)
    # The n-th response was sampled under versions n and n + 1.
    assert result.metrics()["eval/version_min"] == 0 and result.metrics()["eval/version_max"] == 12
