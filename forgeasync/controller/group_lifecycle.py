"""The life of a group after it is sampled: scored, filtered, completed, dropped, given up, trained on.

Each outcome frees what nobody needs any more, and reaches the buffer, the payload store, the generators and
the files of the run.
"""

import dataclasses
from collections.abc import Sequence

from forgeasync.actors import BufferActor, GeneratorRouter, GroupScoring, TeacherFailure, Teaching, Unscored
from forgeasync.algorithms import Filtered
from forgeasync.buffer import Batch, DropReason, StarvationWatch, Update
from forgeasync.config import Interruption, ModelFacts, RunConfig, num_groups_held
from forgeasync.controller.group_spiller import GroupSpiller
from forgeasync.controller.preparation import Prepared
from forgeasync.controller.recorder import RunRecorder
from forgeasync.controller.resume import RunFiles
from forgeasync.environments import response_of
from forgeasync.models import largest_group_payload_bytes
from forgeasync.rollouts import AsyncPayloadBudget, Group, PayloadBudget, Score, largest_excess


def payload_budget(config: RunConfig, facts: ModelFacts) -> AsyncPayloadBudget:
    """Return the budget that groups reserve their memory from."""
    capacity = int(config.payload.capacity_gib * 2**30)
    largest_group = largest_group_payload_bytes(config, facts)
    excess = largest_excess(capacity, num_groups_held(config), largest_group)
    return AsyncPayloadBudget(PayloadBudget(capacity, excess_bytes=excess), largest_group_bytes=largest_group)


class GroupLifecycle:
    """Applies each outcome of a group wherever the group is known."""

    def __init__(
        self,
        prepared: Prepared,
        *,
        generators: GeneratorRouter,
        buffer: BufferActor,
        scorer: GroupScoring,
        teaching: Teaching,
        payloads: AsyncPayloadBudget,
        recorder: RunRecorder,
        files: RunFiles,
    ) -> None:
        """``files`` says where finished groups are kept, and where checkpoints are."""
        self.starvation = StarvationWatch(prepared.config.buffer.max_given_up_in_a_row)
        self._config = prepared.config
        self._resumed = prepared.resumed
        self._generators = generators
        self._buffer = buffer
        self._scorer = scorer
        self._teaching = teaching
        self._payloads = payloads
        self._recorder = recorder
        self.spiller = GroupSpiller(
            files.run_dir.payloads.resolve(),
            prepared,
            checkpoints=files.checkpoints,
            generators=generators,
            tell=recorder.console.message,
        )

    def metrics(self) -> dict[str, float]:
        """Return what is counted of kept groups and of teachers, under their names in metrics.jsonl."""
        return self.spiller.metrics() | self._teaching.metrics()

    async def scored(self, group: Group) -> tuple[Score, ...] | None:
        """Have the scorer score a sampled group; None: it could not, and the group was given up."""
        responses = [response_of(rollout) for rollout in group.rollouts]
        scores = await self._scorer.score_group(group.group_id, group.task, responses)
        if isinstance(scores, Unscored):
            await self.drop(group, DropReason.UNSCORED, scores.reason)
            return None
        return scores

    async def settled(
        self, group: Group, scores: tuple[Score, ...] | None
    ) -> tuple[Group, tuple[Score, ...] | None] | None:
        """Have a sampled group's teacher look at it, if the run has teachers, and let its arrays stay.

        ``scores`` are those that an environment has given. Where there are none, they come back only if the
        teacher had to have them: it reads responses that were correct. None: the group was given up, because
        it has no scores, the teacher could not look at it, or the arrays take too much memory.
        """
        if scores is None and self._teaching.needs_scores(group.task):
            scores = await self.scored(group)
            if scores is None:
                return None
        taught = await self._taught(group, scores)
        if taught is not None:
            if await self._payloads.settle(taught.group_id, taught.num_payload_bytes):
                return taught, scores
            problem = (
                f"group {taught.group_id} takes {taught.num_payload_bytes:,} bytes, more than its "
                "reservation and the rest of the shared excess; must be less, or payload.capacity_gib larger"
            )
            await self.drop(taught, DropReason.OVERSIZED, problem)
        self._scorer.forget(group.group_id)
        return None

    async def _taught(self, group: Group, scores: Sequence[Score] | None) -> Group | None:
        answer = await self._teaching.teach(group.group_id, group.task, group.rollouts, scores)
        if isinstance(answer, TeacherFailure):
            reason = DropReason.OVERSIZED if answer.is_full else DropReason.UNSCORED
            await self.drop(group, reason, answer.problem)
            return None
        if answer is group.rollouts:
            return group
        await self._generators.free_payloads(group.rollouts)
        return dataclasses.replace(group, rollouts=answer)

    async def complete(self, group: Group, filtered: Filtered, scores: Sequence[Score]) -> None:
        """Complete a group that the filters have left something of; ``scores`` are those of all rollouts."""
        self.starvation.came_through()
        kept = [scores[index] for index in filtered.kept]
        lost = await self._buffer.scored.call_one(group.group_id, filtered.rewards, filtered.kept, kept)
        if lost:
            await self.lose(lost)
        else:
            self.spiller.keep(group, filtered.rewards, filtered.kept, kept)

    @property
    def num_first_prompts(self) -> int:
        """Prompts to submit before anything starts: all that ``restore`` needs, and a whole batch to start.

        Later ones are submitted only when one of these has started.
        """
        num_next = 0 if self._resumed is None else self._resumed.num_next_prompts
        return num_next + self._config.algorithm.groups_per_step

    async def restore(self) -> None:
        """Give the buffer the finished groups from before the run was resumed, if there are any."""
        if self._resumed is not None:
            for kept in self._resumed.found.groups:
                self.spiller.restored(await self._buffer.restored.call_one(kept))

    async def give_up(self, group_id: int, reason: DropReason, problem: str | None = None) -> None:
        """Give up a group; the buffer decides what takes its place. ``problem`` says what was wrong with it.

        Raises:
            NothingTrains: too many groups in a row were given up.
        """
        if problem is not None:
            self._recorder.warn(problem)
            self.starvation.given_up(reason, problem)
        self._recorder.forget_records([group_id])
        await self._payloads.release(group_id)
        await self._buffer.failed.call_one(group_id, reason)

    async def drop(self, group: Group, reason: DropReason, problem: str | None = None) -> None:
        """Give up a group that was sampled, and free its arrays."""
        await self._generators.free_payloads(group.rollouts)
        await self.give_up(group.group_id, reason, problem)

    async def commit(self, batch: Batch, *, trainer_wait_share: float, update: Update) -> None:
        """Tell the buffer that a batch was trained on, and free the groups that are too old now.

        Arrays of the batch itself stay until the trainer needs them no more: ``free`` is for the caller.
        """
        committed = await self._buffer.committed.call_one(trainer_wait_share, update)
        self.spiller.trained(batch.trainer_version + 1, batch.groups)
        await self.lose(committed.lost)
        if committed.cancelled and self._config.weights.interruption is Interruption.CANCEL_STALE:
            await self._generators.cancel_groups(committed.cancelled)

    async def lose(self, groups: Sequence[Group]) -> None:
        """Forget groups that the buffer has dropped."""
        self.spiller.forget(group.group_id for group in groups)
        self._recorder.forget_records(group.group_id for group in groups)
        await self.free(groups)

    async def free(self, groups: Sequence[Group]) -> None:
        """Free the arrays of groups whose step is done, or that were dropped.

        Those of restored groups are in no shared memory; the spiller removes them.
        """
        sampled = [group for group in groups if not group.is_restored]
        await self._generators.free_payloads(rollout for group in sampled for rollout in group.rollouts)
        for group in sampled:
            await self._payloads.release(group.group_id)
