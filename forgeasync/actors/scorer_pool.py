"""The scorers of a run as one: responses wait here for a scorer, and are asked for again when one is lost.

The decisions are ``forgeasync.scoring.dispatch``'s. Here are the calls: one task for each assignment, which
tells the dispatcher how it ended, and a timer for what becomes ready later.
"""

import asyncio
import functools
import logging
import operator
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from forgeasync.actors.scorer import ScoredResponses, Unavailable
from forgeasync.actors.watched_scorer import ScorerLost
from forgeasync.config import ScorerSection
from forgeasync.environments import Response
from forgeasync.observability import last_words
from forgeasync.process_memory import MemoryPeak, largest
from forgeasync.rollouts import Score, Task, VerifierCounts
from forgeasync.scoring import Assignment, Dispatcher, Fate
from forgeasync.waiting import Monitor

logger = logging.getLogger(__name__)

RETRY_WAIT_S = 0.2
"""Seconds before the second attempt; the wait doubles with every further one."""

ScoreCall = Callable[[Task, Sequence[Response], int], Awaitable[ScoredResponses | Unavailable]]
"""Has a scorer score responses to a task; the number is the place of the first one in its group. May raise
``ScorerLost``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unscored:
    """A group or a response that has no scores."""

    reason: str
    """Why the last attempt failed; names the group."""


@dataclass(slots=True, kw_only=True)
class _Job:
    """An item of the dispatcher with what it is and who waits for it."""

    name: str
    task: Task
    responses: Sequence[Response]
    first: int
    result: "asyncio.Future[tuple[Score, ...] | Unscored]"
    calls: "set[asyncio.Task[None]]" = field(default_factory=set)
    problem: str = ""
    """What to say of it if it is given up now, as the rest of a sentence."""


class ScorerPool:
    """Has responses scored by the scorers of a run. A failure costs one response's group at most.

    The deadline of a response, ``timeouts.score_s``, is kept by the scorer, which knows when it begins with a
    response (``forgeasync.actors.scorer``). Waiting here has no limit.
    """

    def __init__(
        self,
        calls: Sequence[ScoreCall],
        section: ScorerSection,
        *,
        isolation: str = "",
        retry_wait_s: float = RETRY_WAIT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``calls`` has one entry for each replica; ``isolation`` names what isolates verifiers."""
        self.isolation = isolation
        self._calls = tuple(calls)
        self._section = section
        self._clock = clock
        self._dispatch = Monitor(Dispatcher(len(calls), section, retry_wait_s=retry_wait_s))
        self._jobs: dict[int, _Job] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._counts = [VerifierCounts()] * len(calls)
        """Of every replica."""
        self._memory: MemoryPeak | None = None

    async def score(
        self, name: str, task: Task, responses: Sequence[Response], *, first: int = 0
    ) -> tuple[Score, ...] | Unscored:
        """Return one score per response, or why there are none; ``name`` says in messages what is scored.

        Waits while the queue is full. ``first`` is the place of the first response in its group. If the
        caller is cancelled, the responses are withdrawn.
        """
        number = await self._dispatch.until(lambda dispatch: dispatch.submit(self._clock()))
        return await self._begin(number, name, task, responses, first)

    def try_score(
        self, name: str, task: Task, responses: Sequence[Response], *, first: int
    ) -> "asyncio.Future[tuple[Score, ...] | Unscored] | None":
        """Begin to score if the queue has room; else None. Cancelling the future withdraws the responses."""
        number = self._dispatch.change(lambda dispatch: dispatch.submit(self._clock()))
        return None if number is None else self._begin(number, name, task, responses, first)

    def set_up(self, rank: int, is_up: bool) -> None:
        """Take note that a replica is there, or is gone with all that it was asked for."""
        if is_up:
            self._dispatch.change(lambda dispatch: dispatch.replica_up(rank))
        else:
            now_s = self._clock()
            for number in self._dispatch.change(lambda dispatch: dispatch.replica_down(rank, now_s)):
                job = self._jobs[number]
                job.problem = f"lost its scorer {self._section.max_lost} times: its process was gone"
                self._give_up(job)
        self._pump()

    def metrics(self) -> dict[str, float]:
        """Return counts since the run began and the scorers' memory, under their names in metrics.jsonl."""
        memory = {} if self._memory is None else self._memory.metrics("scorer")
        dispatch, counts = self._dispatch.state, self._dispatch.state.counts
        return (
            functools.reduce(operator.add, self._counts).metrics()
            | memory
            | {
                "scoring/num_failed_attempts": counts.num_failed,
                "scoring/num_lost_calls": counts.num_lost,
                "score/num_retried": counts.num_retried,
                "score/num_failed": counts.num_given_up,
                "score/num_deferred": counts.num_deferred,
                "score/num_discarded": counts.num_discarded,
                "score/num_queued": dispatch.num_waiting,
                "score/num_in_flight": dispatch.num_assigned,
            }
        )

    def _begin(
        self, number: int, name: str, task: Task, responses: Sequence[Response], first: int
    ) -> "asyncio.Future[tuple[Score, ...] | Unscored]":
        job = _Job(
            name=name,
            task=task,
            responses=responses,
            first=first,
            result=asyncio.get_running_loop().create_future(),
        )
        self._jobs[number] = job
        job.result.add_done_callback(lambda result: self._forget(number))
        self._pump()
        return job.result

    def _forget(self, number: int) -> None:
        """An item has ended, or whoever waited for it was cancelled."""
        job = self._jobs.pop(number)
        for call in job.calls:
            call.cancel()
        self._dispatch.change(lambda dispatch: dispatch.withdraw(number))
        self._pump()

    def _pump(self) -> None:
        """Begin all calls that can begin now, and come again when the next item becomes ready."""
        now_s = self._clock()
        while (assignment := self._dispatch.change(lambda dispatch: dispatch.next(now_s))) is not None:
            job = self._jobs[assignment.item]
            call = asyncio.get_running_loop().create_task(self._call(job, assignment))
            job.calls.add(call)
            call.add_done_callback(job.calls.discard)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        due_s = self._dispatch.state.next_due_s(now_s)
        if due_s is not None:
            self._timer = asyncio.get_running_loop().call_later(due_s - now_s, self._pump)

    async def _call(self, job: _Job, assignment: Assignment) -> None:
        """Make one call and tell the dispatcher how it ended."""
        dispatch = self._dispatch.state
        scores: tuple[Score, ...] = ()
        try:
            answer = await self._calls[assignment.replica](job.task, job.responses, job.first)
            if isinstance(answer, Unavailable):
                job.problem = (
                    f"was not scored within scorer.max_unavailable_s = "
                    f"{self._section.max_unavailable_s:g} s: {answer.reason}"
                )
                fate = dispatch.deferred(assignment, self._clock(), answer.retry_after_s)
            else:
                scores = self._checked(job, assignment.replica, answer)
                fate = dispatch.scored(assignment)
        except ScorerLost as error:
            job.problem = f"lost its scorer {self._section.max_lost} times, at last: {error}"
            fate = dispatch.lost(assignment, self._clock())
        except Exception as error:  # any type: a scorer can fail in every way, and none may end the run
            reason, num = f"{type(error).__name__}: {last_words(error)}", self._section.max_attempts
            tries = "1 attempt" if num == 1 else f"{num} attempts, the last"
            job.problem = f"was not scored in {tries}: {reason}"
            fate = dispatch.failed(assignment, self._clock())
            if fate is not Fate.DISCARDED:
                logger.warning("an attempt to score %s failed: %s", job.name, reason)
        # Whoever waited may have been cancelled in this very step of the loop.
        if fate is Fate.SCORED and not job.result.done():
            job.result.set_result(scores)
        elif fate is Fate.GIVEN_UP:
            self._give_up(job)
        self._dispatch.change(lambda dispatch: None)
        self._pump()

    def _give_up(self, job: _Job) -> None:
        if not job.result.done():
            job.result.set_result(Unscored(reason=f"{job.name} {job.problem}"))

    def _checked(self, job: _Job, replica: int, answer: ScoredResponses) -> tuple[Score, ...]:
        """The scores of an answer. Raises ValueError or TypeError where there is not one for each response.

        Its counts and peaks are taken in whatever becomes of the scores.
        """
        # Replies can arrive out of order, and counts and peaks only rise.
        self._counts[replica] = self._counts[replica].merged(answer.counts)
        self._memory = largest((self._memory, answer.memory))
        scores = tuple(answer.scores)
        if len(scores) != len(job.responses):
            raise ValueError(
                f"{job.name} has {len(job.responses)} responses, and the scorer gave {len(scores)} scores "
                "for them"
            )
        for score in scores:
            if not isinstance(score, Score):
                raise TypeError(f"{job.name}: the scorer gave {score!r}, which is no Score")
        return scores
