"""Has teachers look at sampled groups: each group goes to an engine of the teacher of its task's source.

Who waits for whom: the collecting loop waits for a group's teacher before the buffer takes the group as
finished. A teacher's engines that are lost are replaced; their groups go to another engine.
"""

import asyncio
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import numpy as np

from forgeasync.actors.generator_pool import GeneratorPool
from forgeasync.actors.replica import LiveReplica, ReplicaLost
from forgeasync.actors.teacher import TeacherActor, Untaught
from forgeasync.config.teachers import TeacherSection
from forgeasync.rollouts.rollout import StoredRollout
from forgeasync.rollouts.task import Task
from forgeasync.waiting import DeadlineExceeded, deadline


@dataclass(slots=True, kw_only=True)
class Teacher:
    """One teacher's engines, and how many groups they are given at once."""

    name: str
    section: TeacherSection
    pool: GeneratorPool
    prompt_of: Callable[[Task], np.ndarray] | None = None
    """Tokens that it reads before a response instead of the policy's prompt; None: the policy's prompt."""
    room: asyncio.Semaphore
    """Groups beyond it wait here, where waiting does not count against their deadline."""


@dataclass(slots=True)
class Teaching:
    """All teachers of a run; none in runs whose loss needs none."""

    by_source: Mapping[str, Teacher] = field(default_factory=dict)
    """The teacher of each source of data."""
    score_limit_s: float = 60.0
    """``timeouts.score_s``: time for one attempt at a group."""
    _num_retried: int = 0
    _num_failed: int = 0
    _num_tokens: int = 0
    _busy_s: float = 0.0

    async def teach(
        self, group_id: int, task: Task, rollouts: tuple[StoredRollout, ...]
    ) -> tuple[StoredRollout, ...] | Untaught:
        """The rollouts of a group with references to a file of their own, which has their teacher's record.

        The file of before is still there. Without teachers the group comes back as it is.
        """
        if not self.by_source:
            return rollouts
        teacher = self.by_source[task.source]
        prompt_ids_P = None if teacher.prompt_of is None else teacher.prompt_of(task)
        async with teacher.room:
            start_s = time.perf_counter()
            try:
                return await self._attempts(teacher, group_id, rollouts, prompt_ids_P)
            finally:
                self._busy_s += time.perf_counter() - start_s

    async def _attempts(
        self,
        teacher: Teacher,
        group_id: int,
        rollouts: tuple[StoredRollout, ...],
        prompt_ids_P: np.ndarray | None,
    ) -> tuple[StoredRollout, ...] | Untaught:
        answer = Untaught(problem="no attempt")
        for attempt in range(teacher.section.max_attempts):
            self._num_retried += attempt > 0
            try:
                found = await self._attempt(teacher, group_id, rollouts, prompt_ids_P)
            except (ReplicaLost, DeadlineExceeded) as error:
                found = Untaught(problem=str(error))
            if not isinstance(found, Untaught):
                self._num_tokens += sum(rollout.num_response_tokens for rollout in rollouts)
                return found
            answer = replace(found, problem=f"teacher {teacher.name}, group {group_id}: {found.problem}")
            if answer.is_full:
                break
        self._num_failed += 1
        return answer

    async def _attempt(
        self,
        teacher: Teacher,
        group_id: int,
        rollouts: tuple[StoredRollout, ...],
        prompt_ids_P: np.ndarray | None,
    ) -> tuple[StoredRollout, ...] | Untaught:
        replica = await teacher.pool.assigned(len(rollouts))
        call = f"teacher {teacher.name} looking at group {group_id}"
        try:
            async with deadline(self.score_limit_s, call=call, key="timeouts.score_s"):
                return await replica.while_there(functools.partial(_teach, replica, rollouts, prompt_ids_P))
        finally:
            teacher.pool.table.change(lambda table: table.ended(replica.number, len(rollouts)))

    def metrics(self) -> dict[str, float]:
        """Return counts since the command started, under their names in metrics.jsonl; none without one."""
        if not self.by_source:
            return {}
        return {
            "teacher/version": min(one.pool.table.state.served for one in self.by_source.values()),
            "teacher/num_retried": self._num_retried,
            "teacher/num_failed": self._num_failed,
            "teacher/num_tokens": self._num_tokens,
            "teacher/busy_s": self._busy_s,
        }


async def _teach(
    replica: LiveReplica, rollouts: Sequence[StoredRollout], prompt_ids_P: np.ndarray | None
) -> tuple[StoredRollout, ...] | Untaught:
    # Monarch's handle of an actor is of no class of ours.
    return await cast(TeacherActor, replica.actor).teach.call_one(rollouts, prompt_ids_P)
