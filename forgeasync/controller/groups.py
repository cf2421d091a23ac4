"""Lifecycle of a group after sampling: scored, filtered, completed, dropped, given up, trained on.

``GroupLifecycle`` applies each outcome to the buffer, the payload store, the generators and the run's files.
``GroupSpiller`` keeps finished groups on the disk, so that a run whose controller was killed can resume with
them.
"""

import asyncio
import dataclasses
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from forgeasync.algorithms import Filtered
from forgeasync.buffer import Batch, DropReason, ReplayBuffer, StarvationDetector, Update
from forgeasync.checkpoints import checkpoint_bytes, export_bytes, list_checkpoints, step_of
from forgeasync.config import Interruption, ModelFacts, RunConfig, num_groups_held
from forgeasync.controller.preparation import Prepared
from forgeasync.controller.recorder import RunRecorder
from forgeasync.controller.resume import RunFiles
from forgeasync.environments import response_of
from forgeasync.models import largest_group_payload_bytes
from forgeasync.rollouts import (
    AsyncPayloadBudget,
    Group,
    PayloadBudget,
    Score,
    SpilledGroup,
    encode_facts,
    file_name,
    largest_excess,
)
from forgeasync.runtime import GeneratorRouter, GroupScoring, RemoteBuffer, TeacherFailure, Teachers, Unscored


def payload_budget(config: RunConfig, facts: ModelFacts) -> AsyncPayloadBudget:
    """Return the budget of payload memory from which groups reserve."""
    capacity = int(config.payload.capacity_gib * 2**30)
    largest_group = largest_group_payload_bytes(config, facts)
    excess = largest_excess(capacity, num_groups_held(config), largest_group)
    return AsyncPayloadBudget(PayloadBudget(capacity, excess_bytes=excess), largest_group_bytes=largest_group)


class GroupLifecycle:
    """Applies each outcome of a group, and frees its memory and files once nothing needs them."""

    def __init__(
        self,
        prepared: Prepared,
        *,
        generators: GeneratorRouter,
        buffer: RemoteBuffer,
        scorer: GroupScoring,
        teaching: Teachers,
        payloads: AsyncPayloadBudget,
        recorder: RunRecorder,
        files: RunFiles,
    ) -> None:
        """``files`` has the folders of finished groups and of checkpoints."""
        self.starvation = StarvationDetector(prepared.config.buffer.max_given_up_in_a_row)
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
        """Return the metrics of spilled groups and of teachers, by metric name."""
        return self.spiller.metrics() | self._teaching.metrics()

    async def scored(self, group: Group) -> tuple[Score, ...] | None:
        """Score a sampled group; return None if that failed, in which case the group was dropped."""
        responses = [response_of(rollout) for rollout in group.rollouts]
        scores = await self._scorer.score_group(group.group_id, group.task, responses)
        if isinstance(scores, Unscored):
            await self.drop(group, DropReason.UNSCORED, scores.reason)
            return None
        return scores

    async def settled(
        self, group: Group, scores: tuple[Score, ...] | None
    ) -> tuple[Group, tuple[Score, ...] | None] | None:
        """Have the teacher of a sampled group, if any, read it; then settle its memory reservation.

        ``scores`` are those of an environment, if any. Without them the group is scored here only if its
        teacher needs the scores. Returns the group and its scores, if it has any. Returns None if the group
        was dropped: scoring or its teacher failed, or its arrays exceed its memory reservation.
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
        """Report a group with rollouts left after the filters to the buffer, and queue it for the disk.

        ``scores`` are those of all rollouts, also of filtered ones.
        """
        self.starvation.came_through()
        kept = [scores[index] for index in filtered.kept]
        lost = await self._buffer.change(
            ReplayBuffer.scored, group.group_id, filtered.rewards, filtered.kept, kept
        )
        if lost:
            await self.lose(lost)
        else:
            self.spiller.keep(group, filtered.rewards, filtered.kept, kept)

    @property
    def num_first_prompts(self) -> int:
        """Prompts to submit before any group starts: those that ``restore`` needs, and those of one batch.

        Later prompts are submitted only after one of these has started.
        """
        num_next = 0 if self._resumed is None else self._resumed.num_next_prompts
        return num_next + self._config.algorithm.groups_per_step

    async def restore(self) -> None:
        """Give the buffer the finished groups that a resumed run found on the disk."""
        if self._resumed is not None:
            for kept in self._resumed.found.groups:
                self.spiller.restored(await self._buffer.change(ReplayBuffer.restored, kept))

    async def give_up(self, group_id: int, reason: DropReason, problem: str | None = None) -> None:
        """Give up a group; the buffer decides what is sampled in its place.

        ``problem`` is a message for the console. Groups without one do not count toward the limit.

        Raises:
            NothingTrains: too many consecutive groups with a problem were given up.
        """
        if problem is not None:
            self._recorder.warn(problem)
            self.starvation.given_up(reason, problem)
        self._recorder.forget_records([group_id])
        await self._payloads.release(group_id)
        await self._buffer.change(ReplayBuffer.failed, group_id, reason)

    async def drop(self, group: Group, reason: DropReason, problem: str | None = None) -> None:
        """Free the arrays of a sampled group and give it up."""
        await self._generators.free_payloads(group.rollouts)
        await self.give_up(group.group_id, reason, problem)

    async def commit(self, batch: Batch, *, trainer_wait_share: float, update: Update) -> None:
        """Commit a trained batch to the buffer, and free the groups that are too old for the new version.

        The arrays of the batch stay until ``free`` is called, once the trainer has finished with them.
        """
        committed = await self._buffer.change(
            ReplayBuffer.committed, trainer_wait_share=trainer_wait_share, update=update
        )
        self.spiller.trained(batch.trainer_version + 1, batch.groups)
        await self.lose(committed.lost)
        if committed.cancelled and self._config.weights.interruption is Interruption.CANCEL_STALE:
            await self._generators.cancel_groups(committed.cancelled)

    async def lose(self, groups: Sequence[Group]) -> None:
        """Free groups that the buffer has dropped, with their files and records."""
        self.spiller.forget(group.group_id for group in groups)
        self._recorder.forget_records(group.group_id for group in groups)
        await self.free(groups)

    async def free(self, groups: Sequence[Group]) -> None:
        """Free the arrays of groups that were trained on or dropped.

        Arrays of restored groups are files, not shared memory; ``spiller`` removes them.
        """
        sampled = [group for group in groups if not group.is_restored]
        await self._generators.free_payloads(rollout for group in sampled for rollout in group.rollouts)
        for group in sampled:
            await self._payloads.release(group.group_id)


class GroupSpiller:
    """Keeps finished groups on the disk until a checkpoint covers the step that trained on them.

    The host with a group's arrays writes the file, one group at a time. The file is removed when the group is
    dropped or when a complete checkpoint covers the step that trained on it. Groups that cannot be written
    are counted and reported; if the run is killed, they are sampled again.
    """

    def __init__(
        self,
        folder: Path,
        prepared: Prepared,
        *,
        checkpoints: Path,
        generators: GeneratorRouter,
        tell: Callable[[str], None],
    ) -> None:
        """Write into ``folder``; ``checkpoints`` is the run's folder of checkpoints."""
        config = prepared.config
        self._folder = folder
        self._checkpoints = checkpoints
        self._generators = generators
        self._tell = tell
        self._is_on = config.buffer.keep_groups
        self._keeps_all = config.record_execution
        self._has_checkpoints = config.checkpoint.every_steps is not None
        # If these files filled the disk, the checkpoint that allows removing them could not be written.
        self._reserved_bytes = export_bytes(config, prepared.facts)
        if self._has_checkpoints:
            self._reserved_bytes += checkpoint_bytes(config, prepared.facts)
        self._waiting: dict[int, tuple[SpilledGroup, float]] = {}
        """Groups to write, including the one being written, each with the time at which it was queued."""
        self._files: dict[int, Path] = {}
        self._trained: deque[tuple[int, tuple[int, ...]]] = deque()
        """Steps, with the ids of their groups, whose files wait for a checkpoint."""
        self._obsolete: set[int] = set()
        self._changed = asyncio.Event()
        self._wrote = asyncio.Event()
        self._is_refused = False
        self._num_left_out = 0 if prepared.resumed is None else prepared.resumed.found.num_left_out
        self._num_unkept = 0
        self._longest_behind_s = 0.0

    def keep(
        self, group: Group, rewards: Sequence[float], kept: Sequence[int], scores: Sequence[Score]
    ) -> None:
        """Queue a scored group for writing; ``kept`` are the indices of the rollouts to train on."""
        if self._is_on:
            one = SpilledGroup(group=group, rewards=tuple(rewards), kept=tuple(kept), scores=tuple(scores))
            self._waiting[group.group_id] = one, time.monotonic()
            self._changed.set()

    def restored(self, group: Group) -> None:
        """Register the file of a group that a resumed run has restored."""
        self._files[group.group_id] = self._folder / file_name(group.draw_id)

    def trained(self, step: int, groups: Iterable[Group]) -> None:
        """Keep the files of a step's groups until a checkpoint covers the step, or permanently.

        With ``record_execution``, they are a part of the run's record.
        """
        if self._keeps_all:
            return
        ids = tuple(group.group_id for group in groups)
        if not self._has_checkpoints:
            self.forget(ids)
        elif any(one in self._files or one in self._waiting for one in ids):
            self._trained.append((step, ids))
            self._changed.set()

    def forget(self, group_ids: Iterable[int]) -> None:
        """Mark the files of groups for removal."""
        self._obsolete.update(group_ids)
        self._changed.set()

    async def loop(self) -> None:
        """Write and remove files until cancelled."""
        if self._is_on:
            self._folder.mkdir(exist_ok=True)
        while True:
            await self._changed.wait()
            self._changed.clear()
            await self._remove_obsolete()
            if self._waiting:
                await self._write_first()
                self._changed.set()

    async def until_written(self, groups: Sequence[Group]) -> None:
        """Wait until no file of these groups is still to be written."""
        while any(group.group_id in self._waiting for group in groups):
            self._wrote.clear()
            await self._wrote.wait()

    async def end(self) -> None:
        """Remove the files, after the run's last step."""
        if self._keeps_all:
            await self._remove_obsolete()
            return
        await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)

    async def _write_first(self) -> None:
        group_id, (kept, since_s) = next(iter(self._waiting.items()))
        target = self._folder / file_name(kept.group.draw_id)
        problem = await self._write(kept, target)
        del self._waiting[group_id]
        self._wrote.set()
        self._longest_behind_s = max(self._longest_behind_s, time.monotonic() - since_s)
        if problem is None:
            self._files[group_id] = target
        else:
            self._num_unkept += 1
        if (problem is not None) != self._is_refused:
            self._is_refused = problem is not None
            self._tell(
                "finished groups are kept on the disk again"
                if problem is None
                else f"warning: finished groups cannot be kept on the disk ({problem}); if the run is "
                "killed, these are sampled again"
            )

    async def _write(self, kept: SpilledGroup, target: Path) -> str | None:
        """Write a group to ``target``; return a message if that failed."""
        num_bytes = kept.group.num_payload_bytes
        free = (await asyncio.to_thread(shutil.disk_usage, self._folder)).free
        if free < num_bytes + self._reserved_bytes:
            return (
                f"{self._folder} has {free:,} bytes left, and the next checkpoint and the trained model take "
                f"{self._reserved_bytes:,}"
            )
        ref = kept.group.rollouts[0].branches[0].response
        host = next((host for host in self._generators.pool.hosts if host.id == ref.host_id), None)
        if host is None:
            return f"host {ref.host_id}, which has its arrays, is gone"
        return await host.keep_group(target, encode_facts(kept), ref.file)

    async def _remove_obsolete(self) -> None:
        if self._trained:
            found = await asyncio.to_thread(list_checkpoints, self._checkpoints)
            newest = max((step_of(folder) or 0 for folder in found), default=0)
            while self._trained and self._trained[0][0] <= newest:
                self._obsolete.update(self._trained.popleft()[1])
        for group_id in self._obsolete:
            self._waiting.pop(group_id, None)
        files = [file for one in self._obsolete if (file := self._files.pop(one, None)) is not None]
        self._obsolete.clear()
        await asyncio.to_thread(_unlink, files)

    def metrics(self) -> dict[str, float]:
        """Return metrics by name; ``buffer/kept_behind_s`` is the longest delay since the last call."""
        longest_s, self._longest_behind_s = self._longest_behind_s, 0.0
        return {
            "buffer/num_kept_groups": len(self._files),
            "buffer/num_unkept_groups": self._num_unkept,
            "buffer/num_left_out_groups": self._num_left_out,
            "buffer/kept_behind_s": longest_s,
        }


def _unlink(files: Sequence[Path]) -> None:
    for file in files:
        file.unlink(missing_ok=True)
