"""Has teachers look at sampled groups: each group goes to an engine of the teacher of its task's source.

Who waits for whom: the collecting loop waits for a group's teacher before the buffer takes the group as
finished. A teacher's engines that are lost are replaced; their groups go to another engine.
"""

import asyncio
import functools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol, cast

import numpy as np

from forgeasync.actors.generator_pool import GeneratorPool
from forgeasync.actors.moving_teacher import MovingTeacher
from forgeasync.actors.replica import LiveReplica, ReplicaLost
from forgeasync.actors.taught_groups import TaughtGroups, TeacherFailure
from forgeasync.actors.teacher import TeacherActor
from forgeasync.config import TeacherSection
from forgeasync.rollouts import (
    Instead,
    Response,
    Score,
    StoredRollout,
    Task,
    TeacherPrompts,
    TeacherReads,
    TeacherRecord,
)
from forgeasync.scoring import RewardUnavailable

if TYPE_CHECKING:
    # It imports the SDK, which only runs with such a teacher need.
    from forgeasync.scoring import TeacherClient
from forgeasync.waiting import DeadlineExceeded, deadline

LONGEST_WAIT_S = 15.0
"""Longest time between two requests to a server that is down, for each group that waits."""


class TeacherModel(Protocol):
    """What looks at groups: engines of the run, or a server."""

    @property
    def version(self) -> int:
        """Version of its weights; 0 is what it began with."""
        ...

    async def teach(
        self, rollouts: Sequence[StoredRollout], reads: Sequence[TeacherReads]
    ) -> tuple[StoredRollout, ...] | TeacherFailure:
        """See ``TaughtGroups.teach``.

        Raises:
            ReplicaLost: what it was asked of is gone.
            RewardUnavailable: it is not there now.
        """
        ...


@dataclass(frozen=True, slots=True)
class PoolTeacher:
    """Engines of the run, which are watched and replaced as generators are."""

    pool: GeneratorPool

    @property
    def version(self) -> int:
        return self.pool.table.state.served

    async def teach(
        self, rollouts: Sequence[StoredRollout], reads: Sequence[TeacherReads]
    ) -> tuple[StoredRollout, ...] | TeacherFailure:
        replica = await self.pool.assigned(len(rollouts))
        try:
            return await replica.while_there(functools.partial(_teach, replica, rollouts, reads))
        finally:
            self.pool.table.change(lambda table: table.ended(replica.number, len(rollouts)))


@dataclass(frozen=True, slots=True)
class EndpointTeacher:
    """A server, which is asked from the controller's process."""

    groups: TaughtGroups
    client: "TeacherClient"
    room: asyncio.Semaphore
    """Requests at once."""

    @property
    def version(self) -> int:
        return 0

    async def teach(
        self, rollouts: Sequence[StoredRollout], reads: Sequence[TeacherReads]
    ) -> tuple[StoredRollout, ...] | TeacherFailure:
        return await self.groups.teach(rollouts, reads, self._score)

    async def _score(self, ids_S: np.ndarray, num_prompt: int, given_TK: np.ndarray | None) -> TeacherRecord:
        assert given_TK is None, "no server gives log-probabilities of given ids, which the rules say"
        async with self.room:
            return await self.client.score(ids_S, num_prompt=num_prompt, num_ids=self.groups.num_ids)


@dataclass(slots=True, kw_only=True)
class Teacher:
    """One teacher, and how many groups it is given at once."""

    name: str
    section: TeacherSection
    model: TeacherModel
    prompts: TeacherPrompts
    room: asyncio.Semaphore
    """Groups beyond it wait here, where waiting does not count against their deadline."""


@dataclass(slots=True)
class OutageBackoff:
    """How long a group has waited for a server that is down."""

    _since_s: float | None = None
    _num_waits: int = 0

    def wait_s(self, section: TeacherSection, error: RewardUnavailable, now_s: float) -> float | None:
        """Seconds until the server is asked again; None: the group has waited for long enough."""
        assert section.endpoint is not None, "engines of the run are lost, not away"
        self._since_s = now_s if self._since_s is None else self._since_s
        if now_s - self._since_s >= section.endpoint.max_unavailable_s:
            return None
        self._num_waits += 1
        longest_s = max(LONGEST_WAIT_S, error.retry_after_s)
        return min(longest_s, error.retry_after_s * 2 ** min(self._num_waits - 1, 10))


@dataclass(slots=True)
class Teaching:
    """All teachers of a run; none in runs whose loss needs none."""

    by_source: Mapping[str, Teacher] = field(default_factory=dict)
    """The teacher of each source of data."""
    score_limit_s: float = 60.0
    """``timeouts.score_s``: time for one attempt at a group."""
    moving: tuple[MovingTeacher, ...] = ()
    """Those that take published versions."""
    _num_retried: int = 0
    _num_failed: int = 0
    _num_tokens: int = 0
    _num_without_sibling: int = 0
    _num_without_feedback: int = 0
    _busy_s: float = 0.0

    def needs_scores(self, task: Task) -> bool:
        """Whether what a task's teacher reads depends on the scores of the group."""
        return bool(self.by_source) and self.by_source[task.source].section.needs_scores

    async def teach(
        self,
        group_id: int,
        task: Task,
        rollouts: tuple[StoredRollout, ...],
        scores: Sequence[Score] | None = None,
    ) -> tuple[StoredRollout, ...] | TeacherFailure:
        """The rollouts of a group with references to a file of their own, which has their teacher's record.

        The file of before is still there. Without teachers the group comes back as it is. ``scores`` are
        needed where ``needs_scores`` says so.
        """
        if not self.by_source:
            return rollouts
        teacher = self.by_source[task.source]
        reads = self._reads(teacher, task, rollouts, scores)
        async with teacher.room:
            start_s = time.perf_counter()
            try:
                return await self._attempts(teacher, group_id, rollouts, reads)
            finally:
                self._busy_s += time.perf_counter() - start_s

    def _reads(
        self,
        teacher: Teacher,
        task: Task,
        rollouts: Sequence[StoredRollout],
        scores: Sequence[Score] | None,
    ) -> tuple[TeacherReads, ...]:
        """What the teacher reads before each rollout's response."""
        section, prompts = teacher.section, teacher.prompts
        if not section.needs_scores:
            return (prompts.of_task(section.prompt, task),) * len(rollouts)
        assert scores is not None, "needs_scores has said so"
        responses = [
            Response(
                text=rollout.text,
                num_tokens=rollout.num_response_tokens,
                is_correct=score.is_correct,
                feedback=score.feedback,
            )
            for rollout, score in zip(rollouts, scores, strict=True)
        ]
        reads = prompts.of_group(section, task, responses)
        for response, read in zip(responses, reads, strict=True):
            if read is Instead.NOTHING:
                has_feedback = not section.shows_feedback or prompts.can_show(response.feedback)
                is_siblings = section.shows_sibling and has_feedback
                self._num_without_sibling += is_siblings
                self._num_without_feedback += not is_siblings
        return reads

    async def _attempts(
        self,
        teacher: Teacher,
        group_id: int,
        rollouts: tuple[StoredRollout, ...],
        reads: Sequence[TeacherReads],
    ) -> tuple[StoredRollout, ...] | TeacherFailure:
        num_left, away = teacher.section.max_attempts, OutageBackoff()
        while True:
            try:
                found = await self._attempt(teacher, group_id, rollouts, reads)
            except (ReplicaLost, DeadlineExceeded) as error:
                found = TeacherFailure(problem=str(error))
            except RewardUnavailable as error:
                if (wait_s := away.wait_s(teacher.section, error, time.monotonic())) is not None:
                    self._num_retried += 1
                    await asyncio.sleep(wait_s)
                    continue
                found, num_left = TeacherFailure(problem=str(error)), 0
            if not isinstance(found, TeacherFailure):
                self._num_tokens += sum(
                    rollout.num_response_tokens
                    for rollout, read in zip(rollouts, reads, strict=True)
                    if read is not Instead.NOTHING
                )
                return found
            num_left -= 1
            if num_left <= 0 or found.is_full:
                self._num_failed += 1
                return replace(found, problem=f"teacher {teacher.name}, group {group_id}: {found.problem}")
            self._num_retried += 1

    async def _attempt(
        self,
        teacher: Teacher,
        group_id: int,
        rollouts: tuple[StoredRollout, ...],
        reads: Sequence[TeacherReads],
    ) -> tuple[StoredRollout, ...] | TeacherFailure:
        call = f"teacher {teacher.name} looking at group {group_id}"
        async with deadline(self.score_limit_s, call=call, key="timeouts.score_s"):
            return await teacher.model.teach(rollouts, reads)

    def metrics(self) -> dict[str, float]:
        """Return counts since the command started, under their names in metrics.jsonl; none without one."""
        if not self.by_source:
            return {}
        return {
            "teacher/served_version": min(one.model.version for one in self.by_source.values()),
            "teacher/num_retried": self._num_retried,
            "teacher/num_failed": self._num_failed,
            "teacher/num_tokens": self._num_tokens,
            "teacher/num_without_sibling": self._num_without_sibling,
            "teacher/num_without_feedback": self._num_without_feedback,
            "teacher/busy_s": self._busy_s,
            "teacher/num_updates": sum(one.num_updates for one in self.moving),
            "teacher/num_rescored": sum(one.num_rescored for one in self.moving),
        }


async def _teach(
    replica: LiveReplica, rollouts: Sequence[StoredRollout], reads: Sequence[TeacherReads]
) -> tuple[StoredRollout, ...] | TeacherFailure:
    # Monarch's handle of an actor is of no class of ours.
    return await cast(TeacherActor, replica.actor).teach.call_one(rollouts, reads)
