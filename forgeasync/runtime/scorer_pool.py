"""The scorers of a run: responses of groups are scored as they finish, in separate processes.

``ScorerProcesses`` supervises the processes. ``ScoreQueue`` holds the responses that wait for a scorer, and
retries those of a lost one; ``forgeasync.scoring.dispatch`` has the policy. ``GroupScoring`` collects the
scores of groups. A failure costs at most one response's group.
"""

import asyncio
import functools
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from forgeasync.config import (
    NamedSource,
    PythonReward,
    RunConfig,
    ScoredUnit,
    ScorerSection,
    named_sets,
    named_sources,
)
from forgeasync.environments import Response
from forgeasync.observability import Fault, Role, describe_error
from forgeasync.processes import MemoryPeak, largest
from forgeasync.rollouts import Score, Task
from forgeasync.runtime.process_manager import SCORER, ProcessManager
from forgeasync.runtime.scorer import ScoredResponses, ScorerActor, ScorerReady, Unavailable
from forgeasync.runtime.supervised import (
    ProcessLost,
    RestartBudget,
    RestartsFail,
    RunReports,
    Spawned,
    Supervised,
    SupervisedPool,
    spawn_local,
)
from forgeasync.scoring import REWARD_COUNTS, Assignment, Dispatcher, DispatchOutcome

logger = logging.getLogger(__name__)

RETRY_WAIT_S = 0.2
"""Seconds before the second attempt; the wait doubles with every further one."""

SpawnScorer = Callable[[int, int], Awaitable[Spawned[ScorerActor]]]
"""Starts and sets up a scorer, given its place among the run's scorers and a unique number."""

Scorer = Supervised[ScorerActor]


class ScorerProcesses(SupervisedPool[Scorer]):
    """The scorers' processes; ``score`` calls one of them, and ``ScoreQueue`` chooses which."""

    role = Role.SCORER
    heartbeat_key = "scorer.heartbeat_s"
    replica_type = Supervised[ScorerActor]
    after_loss = ": another one starts, and its responses are scored again"

    def __init__(
        self,
        spawn: SpawnScorer,
        reports: RunReports,
        section: ScorerSection,
        *,
        on_change: Callable[[int, bool], None] = lambda rank, is_up: None,
    ) -> None:
        """``on_change`` is called with a place and whether it has a process, whenever that changes after the
        start."""
        super().__init__(spawn, reports, heartbeat_s=section.heartbeat_s)
        self._section = section
        self._on_change = on_change
        self._budgets = [RestartBudget(section.max_restarts) for _ in range(section.num_replicas)]

    async def score(
        self, rank: int, task: Task, responses: Sequence[Response], first: int
    ) -> ScoredResponses | Unavailable:
        """Return the score of each response, from the scorer at a place.

        ``first`` is the index of the first response in its group.

        Raises:
            ProcessLost: there is no scorer at this place, or it was lost before it answered.
            Exception: whatever the scorer raises.
        """
        scorer = self.at(rank)
        if scorer is None:
            raise ProcessLost(f"{self.name_of(rank, 0)} is gone")
        scored = await scorer.call(lambda: scorer.actor.score.call_one(task, responses, first))
        if isinstance(scored, Unavailable):
            return scored
        self._budgets[rank].reset()
        return scored

    def name_of(self, rank: int, number: int) -> str:
        """Return the name of a scorer, for messages."""
        return "the scorer" if self._section.num_replicas == 1 else f"scorer {rank}"

    def _on_ready(self, replica: Scorer, fault: Fault | None) -> None:
        super()._on_ready(replica, fault)
        if fault is not None:
            self._on_change(replica.rank, True)

    def _on_lost(self, replica: Scorer, fault: Fault) -> bool:
        self._on_change(replica.rank, False)
        failure = self._exhausted(replica.rank, f"{fault.who} {fault.what}")
        self._failure = self._failure or failure
        return failure is None

    def _on_start_failed(self, rank: int, number: int, error: Exception) -> Exception | None:
        return self._exhausted(rank, f"it could not be started: {describe_error(error)}")

    def _exhausted(self, rank: int, reason: str) -> RestartsFail | None:
        """Count a failure at a place; return an error if its budget is used up."""
        if self._budgets[rank].take():
            return None
        return RestartsFail(
            f"{self.name_of(rank, 0)} was restarted {self._section.max_restarts} times in a row without a "
            f"response that it has scored (scorer.max_restarts); at last: {reason}"
        )


ScoreCall = Callable[[Task, Sequence[Response], int], Awaitable[ScoredResponses | Unavailable]]
"""Scores responses to a task, given the first one's index in its group; may raise ``ProcessLost``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unscored:
    """A group or a response that has no scores."""

    reason: str
    """Description of the last failure, which names the group."""


@dataclass(slots=True, kw_only=True)
class _Job:
    """An item of the dispatcher: the responses to score, and the future of their scores."""

    name: str
    task: Task
    responses: Sequence[Response]
    first: int
    result: "asyncio.Future[tuple[Score, ...] | Unscored]"
    calls: "set[asyncio.Task[None]]" = field(default_factory=set)
    problem: str = ""
    """Reason if it is given up now, which completes a sentence."""


class ScoreQueue:
    """Scores responses, with an asyncio task for each assignment and a timer for items that become ready
    later.

    The deadline of a response, ``timeouts.score_s``, is enforced by the scorer, which knows when it starts on
    a response (``forgeasync.runtime.scorer``). Waiting here has no limit.
    """

    def __init__(
        self,
        calls: Sequence[ScoreCall],
        section: ScorerSection,
        *,
        retry_wait_s: float = RETRY_WAIT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``calls`` has one entry for each replica."""
        self._calls = tuple(calls)
        self._section = section
        self._clock = clock
        self._dispatch = Dispatcher(len(calls), section, retry_wait_s=retry_wait_s)
        self._jobs: dict[int, _Job] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._counts = [Counter[str]() for _ in calls]
        """Last known counts of all processes of each replica."""
        self._lost_counts = [Counter[str]() for _ in calls]
        """Last known counts of its lost processes."""
        self._memory: MemoryPeak | None = None

    def score(
        self, name: str, task: Task, responses: Sequence[Response], *, first: int = 0
    ) -> "asyncio.Future[tuple[Score, ...] | Unscored]":
        """Start scoring; return a future with one score per response, or why there are none.

        ``name`` names the responses in messages. ``first`` is the index of the first response in its group.
        Cancel the future to withdraw the responses.
        """
        number = self._dispatch.submit(self._clock())
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

    def set_up(self, rank: int, is_up: bool) -> None:
        """Record that a replica runs, or is lost with all its calls."""
        if is_up:
            self._dispatch.replica_up(rank)
        else:
            self._lost_counts[rank] = self._counts[rank].copy()
            for number in self._dispatch.replica_down(rank, self._clock()):
                job = self._jobs[number]
                job.problem = f"lost its scorer {self._section.max_lost} times: its process was gone"
                self._give_up(job)
        self._pump()

    def metrics(self) -> dict[str, float]:
        """Return counts since the run began and the scorers' memory, by their names in metrics.jsonl."""
        memory = {} if self._memory is None else self._memory.metrics("scorer")
        dispatch, counts = self._dispatch, self._dispatch.counts
        of_rewards = sum(self._counts, Counter[str]())
        return (
            {name: of_rewards[name] for name in REWARD_COUNTS}
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

    def _forget(self, number: int) -> None:
        """Remove an item that has ended, or whose caller was cancelled."""
        job = self._jobs.pop(number)
        for call in job.calls:
            call.cancel()
        self._dispatch.withdraw(number)
        self._pump()

    def _pump(self) -> None:
        """Start all calls that can start, and schedule the next call of this method for the next item."""
        now_s = self._clock()
        while (assignment := self._dispatch.next(now_s)) is not None:
            job = self._jobs[assignment.item]
            call = asyncio.get_running_loop().create_task(self._call(job, assignment))
            job.calls.add(call)
            call.add_done_callback(job.calls.discard)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        due_s = self._dispatch.next_due_s(now_s)
        if due_s is not None:
            self._timer = asyncio.get_running_loop().call_later(due_s - now_s, self._pump)

    async def _call(self, job: _Job, assignment: Assignment) -> None:
        """Make one call and report its outcome to the dispatcher."""
        dispatch = self._dispatch
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
        except ProcessLost as error:
            job.problem = f"lost its scorer {self._section.max_lost} times, at last: {error}"
            fate = dispatch.lost(assignment, self._clock())
        except Exception as error:  # any type: a scorer can fail in every way, and none may end the run
            reason, num = f"{type(error).__name__}: {describe_error(error)}", self._section.max_attempts
            tries = "1 attempt" if num == 1 else f"{num} attempts, the last"
            job.problem = f"was not scored in {tries}: {reason}"
            fate = dispatch.failed(assignment, self._clock())
            if fate is not DispatchOutcome.DISCARDED:
                logger.warning("an attempt to score %s failed: %s", job.name, reason)
        # The caller may have been cancelled in this step of the event loop.
        if fate is DispatchOutcome.SCORED and not job.result.done():
            job.result.set_result(scores)
        elif fate is DispatchOutcome.GIVEN_UP:
            self._give_up(job)
        self._pump()

    def _give_up(self, job: _Job) -> None:
        if not job.result.done():
            job.result.set_result(Unscored(reason=f"{job.name} {job.problem}"))

    def _checked(self, job: _Job, replica: int, answer: ScoredResponses) -> tuple[Score, ...]:
        """Return the scores of an answer, after a check that each response has one.

        Its counts and memory peaks are recorded even if the scores are not used.

        Raises:
            ValueError, TypeError: a response has no score.
        """
        # Replies can arrive out of order, and counts and peaks only increase.
        self._counts[replica] |= self._lost_counts[replica] + answer.counts
        self._memory = largest((self._memory, answer.memory))
        scores = tuple(answer.scores)
        if len(scores) != len(job.responses):
            raise ValueError(
                f"{job.name} has {len(job.responses)} responses, and the scorer gave {len(scores)} scores "
                "for them"
            )
        for score in scores:
            if not isinstance(score, Score):
                raise TypeError(f"{job.name}: the scorer gave {score!r}, which is not a Score")
        return scores


Scoring = asyncio.Future[tuple[Score, ...] | Unscored]


class GroupScoring:
    """Scores groups response by response.

    ``finished`` starts scoring a response while others of its group are still being sampled; ``score_group``
    then only waits for it. The score counts only if the finished group contains the same response: if a
    generator is lost, its response can be sampled again.
    """

    def __init__(
        self,
        pool: ScoreQueue,
        *,
        compares: Callable[[Task], bool] = lambda task: False,
        isolation: str = "",
    ) -> None:
        """``compares`` returns whether a reward of the task compares the responses of a group; these are then
        scored together, once all have ended. ``isolation`` describes the isolation of verifiers."""
        self.isolation = isolation
        self._pool = pool
        self._compares = compares
        self._early: dict[int, dict[int, tuple[Response, Scoring]]] = {}
        """Responses of groups that are still being sampled, by group and index in it."""
        self._num_early = 0

    def finished(self, group_id: int, task: Task, index: int, response: Response) -> None:
        """Start scoring a response of a group that is still being sampled.

        ``score_group`` or ``forget`` must follow.
        """
        if self._compares(task):
            return
        name = f"response {index} of group {group_id}"
        before = self._early.setdefault(group_id, {})
        if index in before:
            before[index][1].cancel()
        before[index] = response, self._pool.score(name, task, [response], first=index)

    def forget(self, group_id: int) -> None:
        """Withdraw the responses of a group that will not be scored."""
        for _, scoring in self._early.pop(group_id, {}).values():
            scoring.cancel()

    async def score_group(
        self, group_id: int, task: Task, responses: Sequence[Response]
    ) -> tuple[Score, ...] | Unscored:
        """Return one score per response of a group, or why there are none."""
        early = self._early.pop(group_id, {})
        begun: dict[int, Scoring] = {}
        for index, (response, scoring) in early.items():
            if index < len(responses) and responses[index] == response:
                begun[index] = scoring
            else:
                scoring.cancel()
        self._num_early += len(begun)
        return await self.score(f"group {group_id}", task, responses, begun)

    async def score(
        self,
        name: str,
        task: Task,
        responses: Sequence[Response],
        begun: dict[int, Scoring] | None = None,
    ) -> tuple[Score, ...] | Unscored:
        """Return one score per response, or why there are none; ``name`` is the group's name in messages.

        ``begun`` has the scorings that were already started, by index.
        """
        begun = {} if begun is None else begun
        try:
            if self._compares(task):
                return await self._pool.score(name, task, responses)
            for index in sorted(set(range(len(responses))) - begun.keys()):
                one = f"response {index} of {name}" if len(responses) > 1 else name
                begun[index] = self._pool.score(one, task, [responses[index]], first=index)
            # The group has no scores if any response has none, so the first such response ends the wait.
            for scoring in asyncio.as_completed(begun.values()):
                if isinstance(result := await scoring, Unscored):
                    return result
            results = [begun[index].result() for index in range(len(responses))]
            return tuple(score for one in results if not isinstance(one, Unscored) for score in one)
        finally:
            for scoring in begun.values():
                scoring.cancel()

    def metrics(self) -> dict[str, float]:
        """Return counts since the run began and the scorers' memory, by their names in metrics.jsonl."""
        return self._pool.metrics() | {"score/num_early": self._num_early}


async def start_scorer(processes: ProcessManager, config: RunConfig) -> GroupScoring:
    """Start the scorers' processes; return the scoring of groups with them."""
    section = config.scorer
    sources = (*named_sources(config.data), *named_sets(config.evaluation))

    isolation = ""

    async def set_up(actor: ScorerActor) -> ScorerReady:
        nonlocal isolation
        ready = await actor.setup.call_one(sources, section, config.timeouts.score_s, config.seed)
        isolation = ready.isolation
        return ready

    async def spawn(rank: int, number: int) -> Spawned[ScorerActor]:
        return await spawn_local(
            "scorer",
            f"{SCORER}-{rank}-{number}",
            ScorerActor,
            processes.log_dir,
            rank,
            set_up=set_up,
            call="setting up a scorer",
            timeouts=config.timeouts,
        )

    scorers = processes.scorer = ScorerProcesses(
        spawn, processes, section, on_change=lambda rank, is_up: pool.set_up(rank, is_up)
    )
    num_replicas = section.num_replicas
    await scorers.start(num_replicas)
    calls = [functools.partial(scorers.score, rank) for rank in range(num_replicas)]
    words = isolation if num_replicas == 1 else f"{num_replicas} scorers, in each {isolation}"
    pool = ScoreQueue(calls, section)
    comparing = frozenset(source.name for source in sources if _compares(source))
    return GroupScoring(pool, compares=lambda task: task.source in comparing, isolation=words)


def _compares(source: NamedSource) -> bool:
    """Return whether a reward of a source scores all responses of a group at once."""
    return any(isinstance(one, PythonReward) and one.scores is ScoredUnit.GROUP for one in source.rewards)
