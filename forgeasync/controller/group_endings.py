"""How groups end (trained on, dropped, given up): arrays are freed, the buffer and the files are told."""

from collections.abc import Sequence

from forgeasync.actors.buffer import BufferActor
from forgeasync.actors.router import GeneratorRouter
from forgeasync.buffer.decisions import DropReason
from forgeasync.buffer.events import Update
from forgeasync.buffer.starvation import StarvationWatch
from forgeasync.config.model_facts import ModelFacts
from forgeasync.config.run import RunConfig, num_groups_held
from forgeasync.config.weights import Interruption
from forgeasync.controller.recorder import RunRecorder
from forgeasync.models.sizes import largest_group_payload_bytes
from forgeasync.rollouts.payload_budget import AsyncPayloadBudget, PayloadBudget, largest_excess
from forgeasync.rollouts.rollout import Group


def payload_budget(config: RunConfig, facts: ModelFacts) -> AsyncPayloadBudget:
    """Return the budget that groups reserve their memory from."""
    capacity = int(config.payload.capacity_gib * 2**30)
    largest_group = largest_group_payload_bytes(config, facts)
    excess = largest_excess(capacity, num_groups_held(config), largest_group)
    return AsyncPayloadBudget(PayloadBudget(capacity, excess_bytes=excess), largest_group_bytes=largest_group)


class GroupEndings:
    """Ends groups in all places that know of them."""

    def __init__(
        self,
        config: RunConfig,
        *,
        generators: GeneratorRouter,
        buffer: BufferActor,
        payloads: AsyncPayloadBudget,
        recorder: RunRecorder,
    ) -> None:
        self.starvation = StarvationWatch(config.buffer.max_given_up_in_a_row)
        self._config = config
        self._generators = generators
        self._buffer = buffer
        self._payloads = payloads
        self._recorder = recorder

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

    async def commit(self, *, trainer_wait_share: float, update: Update) -> None:
        """Tell the buffer that a batch was trained on, and free the groups that are too old now.

        Arrays of the batch itself stay until the trainer needs them no more: ``free`` is for the caller.
        """
        committed = await self._buffer.committed.call_one(trainer_wait_share, update)
        await self.lose(committed.lost)
        if committed.cancelled and self._config.weights.interruption is Interruption.CANCEL_STALE:
            await self._generators.cancel_groups(committed.cancelled)

    async def lose(self, groups: Sequence[Group]) -> None:
        """Forget groups that the buffer has dropped."""
        self._recorder.forget_records(group.group_id for group in groups)
        await self.free(groups)

    async def free(self, groups: Sequence[Group]) -> None:
        """Free the arrays of groups whose step is done, or that were dropped."""
        await self._generators.free_payloads(rollout for group in groups for rollout in group.rollouts)
        for group in groups:
            await self._payloads.release(group.group_id)
