"""Random histories of a real buffer with a ledger: runs that are killed, resumed, and end."""

from collections.abc import Collection, Iterable
from typing import Any

from hypothesis import strategies as st

from forgeasync.buffer import (
    ATTEMPT_STRIDE,
    AnyEvent,
    Batch,
    Candidate,
    Checkpointed,
    DropReason,
    Ended,
    RestorePlan,
    Resumed,
    attempt_and_prompt,
    plan_restore,
    reference_version,
)
from forgeasync.config import BufferSection, StaleGroups
from forgeasync.rollouts import Group, Score, SpilledGroup
from tests.support.buffer_world import EXACT, GROUP_SIZE, BufferWorld, make_task

MOVES = "decode finish score complete complete take take serve fail checkpoint resume".split()
REASONS = (DropReason.BAD_RECORD, DropReason.CANCELLED, DropReason.FILTERED, DropReason.UNSCORED)


DROP = BufferSection(stale_groups=StaleGroups.DROP, adapt_load=False, max_attempts=3)


class LedgerWorld(BufferWorld):
    """A world whose run writes checkpoints and can be resumed from them.

    The finished groups are on a disk. They come back, those of lost steps in the batches that they had.
    """

    def __init__(self, *, section: BufferSection = DROP, **setup: Any) -> None:
        super().__init__(section=section, **{"accounting": EXACT} | setup)
        self.checkpoints = []
        """Line and snapshot of each that stands."""
        self.disk: dict[int, SpilledGroup] = {}
        """Finished groups by draw id."""
        self.taken: dict[int, set[int]] = {}
        """Draw ids of the groups that each step was made with, and those to come will be made with again."""

    def score(self, group_id: int) -> None:
        group = self.sampled[group_id]
        super().score(group_id)
        if group_id in self.buffer._entries:
            kept = tuple(range(GROUP_SIZE))
            scores = tuple(Score(1.0, True) for _ in kept)
            self.disk[group.draw_id] = SpilledGroup(
                group=group, rewards=(1.0,) * GROUP_SIZE, kept=kept, scores=scores
            )

    def take(self) -> Batch | None:
        batch = super().take()
        if batch is not None:
            for group in batch.groups:
                newest = max(rollout.last_version for rollout in group.rollouts)
                assert newest <= batch.trainer_version, "sampled under weights that there never were"
            self.taken[self.trainer_version] = {group.draw_id for group in batch.groups}
        return batch

    def move(self, draw: st.DrawFn) -> None:
        """Start all that can start, and make a random move."""

        def one_of(groups: Iterable[int]) -> int:
            return draw(st.sampled_from(sorted(groups)))

        self.start_all()
        match draw(st.sampled_from(MOVES)):
            case "decode" if self.sampling:
                self.decode(one_of(self.sampling))
            case "finish" if self.sampling:
                self.finish(one_of(self.sampling))
            case "score" if self.sampled:
                self.score(one_of(self.sampled))
            case "complete":
                for group_id in sorted(self.sampling):
                    self.finish(group_id)
                for group_id in sorted(self.sampled):
                    self.score(group_id)
            case "take":
                if self.take() is not None and draw(st.booleans()):
                    self.serve(self.trainer_version)
            case "serve":
                self.serve(self.trainer_version)
            case "fail" if known := (*self.sampling, *self.sampled):
                self.fail(one_of(known), draw(st.sampled_from(REASONS)))
            case "checkpoint":
                self.checkpoint()
            case "resume" if self.checkpoints:
                self.note()
                missing = draw(st.sets(st.sampled_from(sorted(self.disk)))) if self.disk else ()
                self.resume(draw(st.integers(0, len(self.checkpoints) - 1)), missing=missing)
        self.note()

    def checkpoint(self) -> None:
        snapshot = self.buffer.snapshot()
        self.note(Checkpointed(step=self.trainer_version))
        self.checkpoints.append((len(self.events), snapshot))

    def resume(self, number: int, *, missing: Collection[int] = ()) -> None:
        """Kill the run, and go on from one of its checkpoints; files of ``missing`` draw ids are gone."""
        # The last events never reached the file.
        line, snapshot = self.checkpoints[number]
        del self.checkpoints[number + 1 :]
        for draw_id in missing:
            self.disk.pop(draw_id, None)
        made, on_disk, was_killed = dict(self.taken), set(self.disk), not self.book.is_ended
        plan = plan_restore(
            [self._candidate(draw_id, one) for draw_id, one in self.disk.items()],
            self.book.lost_after(snapshot.trainer_version),
            snapshot,
            groups_per_step=self.groups_per_step,
            max_off_policy_steps=self.k,
        )
        self.buffer = self.new_buffer()
        self.buffer.restore(snapshot, batches=plan.batches, num_groups=len(plan.restored))
        self.trainer_version = self.served_version = snapshot.trainer_version
        last = self.trainer_version + len(plan.batches)
        self.taken = {step: draw_ids for step, draw_ids in self.taken.items() if step <= last}
        self.sampling, self.sampled = {}, {}
        self._num_tasks = snapshot.num_submitted
        self.note(
            Resumed(
                step=self.trainer_version,
                line=line,
                groups_per_step=self.groups_per_step,
                batches=plan.batches,
            )
        )
        waiting = self.buffer.snapshot().pending
        assert self.book.open_prompts == {
            one.submission_id: one.attempt for one in sorted(waiting, key=lambda one: one.submission_id)
        }
        self._restore(plan)
        # The steps made before a kill are made again with the same groups, as far as they are all there.
        for number, batch in enumerate(plan.batches, start=self.trainer_version + 1):
            assert made[number] == {one.draw_id for one in self.restored_of(batch)}
        if was_killed:
            assert not made.get(last + 1, {None}) <= on_disk, f"step {last + 1} could be made again"

    def restored_of(self, prompts: Collection[int]) -> list[Group]:
        """The groups on the disk of some prompts."""
        return [one.group for draw_id, one in self.disk.items() if attempt_and_prompt(draw_id)[1] in prompts]

    def _candidate(self, draw_id: int, one: SpilledGroup) -> Candidate:
        attempt, prompt = attempt_and_prompt(draw_id)
        return Candidate(
            prompt=prompt,
            attempt=attempt,
            reference=reference_version(one.group.rollouts, self.section.age_of),
            last_version=max(rollout.last_version for rollout in one.group.rollouts),
        )

    def _restore(self, plan: RestorePlan) -> None:
        while self._num_tasks <= max((one.prompt for one in plan.restored), default=-1):
            self.buffer.submit([make_task(self._num_tasks)])
            self._num_tasks += 1
        draw_ids = [one.attempt * ATTEMPT_STRIDE + one.prompt for one in plan.restored]
        self.disk = {draw_id: self.disk[draw_id] for draw_id in draw_ids}
        for one in self.disk.values():
            self.buffer.restored(one)

    def end(self) -> None:
        now = self.buffer.snapshot()
        left = (*now.started, *now.complete, *now.pending)
        self.note(Ended(unfinished=tuple(sorted(one.submission_id for one in left))))


@st.composite
def histories(draw: st.DrawFn, *, num_moves: int = 40) -> list[AnyEvent]:
    """Events of a run, each of which the real buffer has made; the book has followed it."""
    world = LedgerWorld(groups_per_step=draw(st.integers(1, 3)), k=draw(st.integers(0, 2)))
    for _ in range(draw(st.integers(5, num_moves))):
        world.move(draw)
    if draw(st.booleans()):
        world.end()
        if world.checkpoints and draw(st.booleans()):
            # With more steps to make.
            world.resume(len(world.checkpoints) - 1)
            world.start_all()
            world.note()
    return world.events
