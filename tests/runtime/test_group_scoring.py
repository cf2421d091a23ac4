"""Scoring of groups: side by side, under the right deadlines, retried, and given up one by one."""

import asyncio
import dataclasses
import math
import threading
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from forgeasync.config import SamplingSection, ScorerSection
from forgeasync.controller import ProblemSet, evaluate
from forgeasync.environments import Response
from forgeasync.observability import HeldOutScores
from forgeasync.processes import MemoryPeak
from forgeasync.rollouts import FinishReason, Score, Task, VerifierCounts, VersionRange
from forgeasync.runtime import (
    GroupScoring,
    ProcessLost,
    ResponseGroups,
    ResponseScoring,
    SampledResponse,
    ScoredResponses,
    ScoreQueue,
    Unscored,
)
from forgeasync.scoring import MathProblem, MathVerifierChoice, VerifierPool
from forgeasync.testing import HandTime, tiny_config
from forgeasync.waiting import DeadlineExceeded
from tests.support.buffer_world import make_task
from tests.support.loops import Prompts, make_problem

MAX_LOST = ScorerSection().max_lost
ENDLESS = r"\boxed{\Gamma(1000000000)}"
Call = Callable[[Task, Sequence[Response]], Awaitable[ScoredResponses]]


def some(num: int) -> list[Response]:
    return [Response("a", 1, FinishReason.STOP)] * num


def scored(*values: float, num_timeouts: int = 0) -> ScoredResponses:
    scores = tuple(Score(value=value, is_correct=value >= 2.0) for value in values)
    return ScoredResponses(scores=scores, counts=VerifierCounts(num_timeouts=num_timeouts))


def make_scoring(call: Call, **section: int) -> GroupScoring:
    """Whole groups are scored by one call each; ``test_scorer_pool`` has those that are not."""

    async def with_place(task: Task, responses: Sequence[Response], first: int) -> ScoredResponses:
        assert first == 0
        return await call(task, responses)

    config = ScorerSection(**({"max_concurrent": 8, "max_attempts": 3, "max_in_flight": 16} | section))
    pool = ScoreQueue([with_place], config, retry_wait_s=0.0, isolation="landlock")
    return GroupScoring(pool, config, compares=lambda task: True)


class Answers:
    """A scorer whose calls have the given answers, the last one again and again; an exception is raised."""

    def __init__(self, *answers: ScoredResponses | Exception) -> None:
        self._answers = answers
        self.asked: list[tuple[Task, Sequence[Response]]] = []

    async def __call__(self, task: Task, responses: Sequence[Response]) -> ScoredResponses:
        self.asked.append((task, responses))
        answer = self._answers[min(len(self.asked), len(self._answers)) - 1]
        if isinstance(answer, Exception):
            raise answer
        return answer


class Busy:
    """How many calls run at once."""

    def __init__(self) -> None:
        self.num_running = self.most = 0

    async def __call__(self, task: Task, responses: Sequence[Response]) -> ScoredResponses:
        self.num_running += 1
        self.most = max(self.most, self.num_running)
        await some_turns()
        self.num_running -= 1
        return scored(0.5)


async def some_turns(num: int = 5) -> None:
    for _ in range(num):
        await asyncio.sleep(0)


async def score_groups(scoring: GroupScoring, *numbers: int) -> list[object]:
    """Groups of one response, side by side."""
    return await asyncio.gather(*(scoring.score(f"group {i}", make_task(i), some(1)) for i in numbers))


class TestScore:
    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"value": math.nan}, "nan"),
            ({"value": math.inf}, "inf"),
            ({"value": "1.0"}, "'1.0'"),
            ({"value": None}, "None"),
            ({"value": True}, "True"),
            # What no float can hold, and what none in 32 bits can.
            ({"value": 10**400}, "finite"),
            ({"value": 1e39}, "a score must be finite, at most 1e"),
            # Correctness is said, and not guessed from the value.
            ({"value": 1.0, "is_correct": 1}, "is_correct"),
            *(
                (
                    {"value": 1.0, "penalties": {"tools": 0.5, "format": one}},
                    "penalties.*'format'|'format' in p",
                )
                for one in (-0.1, math.nan, math.inf, True, "1")
            ),
        ],
    )
    def test_what_is_no_score_is_refused_by_name(self, fields: dict[str, object], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            Score(**({"is_correct": False} | fields))

    def test_numbers_of_numpy_are_numbers_and_a_low_score_may_be_correct(self) -> None:
        assert type(Score(value=np.float32(0.5), is_correct=False).value) is float, "as files are written"
        assert Score(value=-3, is_correct=True).is_correct


class TestGroupScoring:
    async def test_groups_are_scored_side_by_side_up_to_the_bound(self) -> None:
        busy = Busy()
        await score_groups(make_scoring(busy, max_concurrent=3), *range(10))
        assert busy.most == 3

    async def test_a_slow_group_holds_up_no_other(self) -> None:
        slow = asyncio.Event()

        async def judge(task: Task, responses: Sequence[Response]) -> ScoredResponses:
            if task.source_index == 0:
                await slow.wait()
            return scored(0.0)

        scoring = make_scoring(judge, max_concurrent=2)
        first = asyncio.create_task(score_groups(scoring, 0))
        await score_groups(scoring, *range(1, 6))
        assert not first.done()
        slow.set()
        await first

    async def test_one_refused_connection_costs_an_attempt_and_no_group(self) -> None:
        scoring = make_scoring(Answers(ConnectionRefusedError("nobody listens"), scored(0.5, 2.0)))
        scores = await scoring.score("group 7", make_task(0), some(2))
        assert scores == (Score(value=0.5, is_correct=False), Score(value=2.0, is_correct=True))
        assert scoring.metrics()["scoring/num_failed_attempts"] == 1

    @pytest.mark.parametrize(
        ("answer", "reason"),
        [
            (ConnectionRefusedError("nobody listens"), "ConnectionRefusedError: nobody listens"),
            (TimeoutError(), "TimeoutError"),
            (RuntimeError("Traceback\n  line 1\nValueError: deep down"), "ValueError: deep down"),
            (scored(1.0), "group 17 has 2 responses, and the scorer gave 1 scores"),
            (scored(1.0, 1.0, 1.0), "group 17 has 2 responses, and the scorer gave 3 scores"),
            (ScoredResponses(scores=(1.0, math.nan), counts=VerifierCounts()), "1.0, which is no Score"),
        ],
    )
    async def test_what_always_fails_is_given_up_with_group_and_reason(
        self, answer: Exception | ScoredResponses, reason: str
    ) -> None:
        judge = Answers(answer)
        scoring = make_scoring(judge, max_attempts=4)
        result = await scoring.score("group 17", make_task(0), some(2))
        assert isinstance(result, Unscored)
        assert "group 17 was not scored in 4 attempts" in result.reason and reason in result.reason
        assert len(judge.asked) == 4 == scoring.metrics()["scoring/num_failed_attempts"]

    async def test_a_loss_of_the_scorer_is_no_attempt_and_the_same_responses_are_scored_again(self) -> None:
        judge = Answers(*[ProcessLost("gone")] * (MAX_LOST - 1), scored(0.5))
        scoring = make_scoring(judge, max_attempts=1)
        responses = some(1)
        scores = await scoring.score("group 3", make_task(0), responses)
        assert scores == (Score(value=0.5, is_correct=False),)
        assert judge.asked == [(make_task(0), responses)] * MAX_LOST
        metrics = scoring.metrics()
        assert metrics["scoring/num_lost_calls"] == MAX_LOST - 1
        assert metrics["scoring/num_failed_attempts"] == 0

    async def test_a_group_that_ends_the_scorer_is_given_up_and_no_other(self) -> None:
        """Group 0 ends the scorer, with everything that it scores at that moment."""
        lost = asyncio.Event()
        num_begun = 0

        async def judge(task: Task, responses: Sequence[Response]) -> ScoredResponses:
            nonlocal lost, num_begun
            num_begun += 1
            mine = lost
            if task.source_index == 0:
                # Others begin meanwhile.
                await some_turns(20)
                lost = asyncio.Event()
                mine.set()
                raise ProcessLost("the scorer (process 7) was gone before it answered")
            if num_begun <= 4:
                await mine.wait()
                raise ProcessLost("the scorer (process 7) was gone before it answered")
            await some_turns()
            if mine.is_set():
                raise ProcessLost("the scorer (process 8) was gone before it answered")
            return scored(0.5)

        scoring = make_scoring(judge, max_in_flight=4)
        killer, *others = await score_groups(scoring, *range(4))
        assert isinstance(killer, Unscored)
        assert "group 0 lost its scorer 6 times, at last: the scorer (process 7) was gone" in killer.reason
        assert not any(isinstance(other, Unscored) for other in others)

    async def test_groups_that_have_lost_a_scorer_are_scored_one_at_a_time(self) -> None:
        seen: set[int] = set()
        busy = Busy()

        async def judge(task: Task, responses: Sequence[Response]) -> ScoredResponses:
            if task.source_index not in seen:
                seen.add(task.source_index)
                raise ProcessLost("gone")
            return await busy(task, responses)

        await score_groups(make_scoring(judge, max_in_flight=2), *range(4))
        assert busy.most == 1

    async def test_cancelling_ends_it_at_once_and_is_no_failed_attempt(self) -> None:
        begun = asyncio.Event()

        async def judge(task: Task, responses: Sequence[Response]) -> ScoredResponses:
            begun.set()
            await asyncio.Event().wait()
            raise AssertionError

        scoring = make_scoring(judge)
        task = asyncio.create_task(score_groups(scoring, 0))
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert scoring.metrics()["scoring/num_failed_attempts"] == 0

    async def test_counts_and_the_peak_of_memory_never_fall_if_answers_overtake_each_other(self) -> None:
        answers = [
            dataclasses.replace(scored(0.0, num_timeouts=one), memory=MemoryPeak(resident_bytes=one * 2**30))
            for one in (2, 5, 3)
        ]
        scoring = make_scoring(Answers(*answers))
        assert "memory/scorer_gib" not in scoring.metrics()
        for index in range(3):
            await score_groups(scoring, index)
        assert scoring.metrics()["scoring/num_timeouts"] == 5
        assert scoring.metrics()["memory/scorer_gib"] == 5.0


class Judge:
    """A scorer in threads: calls ``work`` for each response."""

    counts = VerifierCounts()

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
    ) -> tuple[SampledResponse, ...]:
        response = Response(f"response {seed}", 4, FinishReason.STOP)
        versions = VersionRange(first=seed, last=seed + 1)
        return (SampledResponse(response=response, versions=versions, ids_T=np.zeros(4, np.int32)),)


async def evaluated(call: Call, num_tasks: int, *, num_samples: int = 1) -> HeldOutScores:
    sampling = tiny_config(Path("unused")).sampling
    tasks = [make_problem(i) for i in range(num_tasks)]
    return await evaluate(
        ProblemSet(tasks=tasks, sampling=sampling, num_samples=num_samples),
        ResponseGroups(
            Generators(), make_scoring(call, max_attempts=2), Prompts(), group_size=1, sampling=sampling
        ),
    )


class TestEvaluation:
    async def test_what_the_scorer_calls_correct_counts_and_nothing_else(self) -> None:
        # As with a judge that gives up to 5 points: 1.0 is a bad answer, 4.5 a correct one.
        values = [1.0, 4.5, 0.25, 4.5, -1.0]

        async def judge(task: Task, responses: Sequence[Response]) -> ScoredResponses:
            return scored(values[task.source_index])

        result = await evaluated(judge, 5)
        assert result.accuracy == 2 / 5
        assert result.score_mean == pytest.approx(sum(values) / 5)
        assert result.num_unscored == 0
        # The n-th response was sampled under versions n and n + 1.
        assert result.metrics()["eval/version_min"] == 0 and result.metrics()["eval/version_max"] == 5

    async def test_accuracy_of_several_samples_is_the_mean_over_all_responses(self) -> None:
        answered: list[tuple[int, str]] = []

        async def judge(task: Task, responses: Sequence[Response]) -> ScoredResponses:
            (response,) = responses
            answered.append((task.source_index, response.text))
            # Right in one of four samples of the first problem, in none of the second.
            return scored(4.5 * (response.text == "response 4"))

        result = await evaluated(judge, 2, num_samples=4)
        assert result.accuracy == 1 / 8 and result.num_scored == 8
        # Every sample has a seed of its own; the first ones are those of a single sample.
        assert sorted(answered) == [
            (problem, f"response {2 * k + problem}") for problem in (0, 1) for k in range(4)
        ]

    async def test_what_is_never_scored_is_left_out_and_counted(self) -> None:
        async def judge(task: Task, responses: Sequence[Response]) -> ScoredResponses:
            if task.source_index in (1, 2):
                raise ConnectionRefusedError
            return scored(2.0 * (task.source_index == 0))

        result = await evaluated(judge, 4)
        assert (result.accuracy, result.score_mean, result.num_unscored) == (1 / 2, 1.0, 2)
        unscored = await evaluated(Answers(ConnectionRefusedError()), 3)
        counts = {"eval/num_unscored": 3, "eval/version_min": 0, "eval/version_max": 3}
        assert unscored.accuracy is None and unscored.metrics() == counts

    @pytest.mark.exhaustive
    def test_endless_answers_among_others_score_zero_and_end_nothing(self) -> None:
        num_endless, num_problems, limit_s = 4, 16, 5.0
        pool = VerifierPool(MathVerifierChoice(), ScorerSection(num_workers=2, answer_limit_s=limit_s))
        pool.start()

        class Answers:
            counts = VerifierCounts()

            def score(self, task: Task, response: str) -> Score:
                answer = ENDLESS if task.source_index % 4 == 0 else r"\boxed{4}"
                return pool.score(MathProblem(answer="4"), answer)

        # Shorter than all endless answers together: queueing must not count.
        scoring = ResponseScoring(Answers().score, num_workers=2, limit_s=9.0)

        async def judge(task: Task, responses: Sequence[Response]) -> ScoredResponses:
            return ScoredResponses(
                scores=await scoring.score(task, [one.text for one in responses]), counts=pool.counts
            )

        result = asyncio.run(evaluated(judge, num_problems))
        assert result.num_unscored == 0
        assert result.num_correct == num_problems - num_endless
        assert pool.counts == VerifierCounts(num_timeouts=num_endless)
        scoring.close()
        pool.close()

    def test_endless_answers_of_a_group_score_zero(self) -> None:
        pool = VerifierPool(MathVerifierChoice(), ScorerSection(num_workers=2, answer_limit_s=0.1))
        pool.start()

        class Answers:
            counts = VerifierCounts()

            def score(self, task: Task, response: str) -> Score:
                return pool.score(MathProblem(answer="4"), response)

        scoring = ResponseScoring(Answers().score, num_workers=2, limit_s=300.0)
        scores = asyncio.run(scoring.score(make_task(0), [ENDLESS] * 4))
        assert scores == (Score(value=0.0, is_correct=False),) * 4
        assert pool.counts == VerifierCounts(num_timeouts=4)
        scoring.close()
        pool.close()
