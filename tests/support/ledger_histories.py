"""Random histories of a real buffer with a ledger: runs that are killed, resumed, and end."""

from hypothesis import strategies as st

from forgeasync.buffer.decisions import DropReason
from forgeasync.config.buffer import AccountingSection, BatchOrder, BufferSection, StaleGroups
from forgeasync.ledger.lines import AnyEvent, Checkpointed, Ended, Resumed
from tests.support.buffer_world import BufferWorld

REASONS = (DropReason.BAD_RECORD, DropReason.CANCELLED, DropReason.FILTERED, DropReason.UNSCORED)


class LedgerWorld(BufferWorld):
    """A world whose run writes checkpoints and can be resumed from them."""

    def __init__(self, *, groups_per_step: int, k: int) -> None:
        super().__init__(
            groups_per_step=groups_per_step,
            k=k,
            section=BufferSection(
                stale_groups=StaleGroups.DROP, order=BatchOrder.COMPLETION, adapt_load=False, max_attempts=3
            ),
            accounting=AccountingSection(),
        )
        self.checkpoints = []
        """Line and snapshot of each that stands."""

    def checkpoint(self) -> None:
        snapshot = self.buffer.snapshot()
        self.note(Checkpointed(step=self.trainer_version))
        self.checkpoints.append((len(self.events), snapshot))

    def resume(self, number: int) -> None:
        """Kill the run, and go on from one of its checkpoints."""
        # The last events never reached the file.
        line, snapshot = self.checkpoints[number]
        del self.checkpoints[number + 1 :]
        again = LedgerWorld(groups_per_step=self.groups_per_step, k=self.k)
        again.buffer.restore(snapshot)
        self.buffer = again.buffer
        self.trainer_version = self.served_version = snapshot.trainer_version
        self.sampling, self.sampled = {}, {}
        self._num_tasks = snapshot.num_submitted
        self.note(Resumed(step=self.trainer_version, line=line, groups_per_step=self.groups_per_step))
        waiting = self.buffer.snapshot().pending
        assert self.book.open_prompts == {
            one.submission_id: one.attempt for one in sorted(waiting, key=lambda one: one.submission_id)
        }

    def end(self) -> None:
        now = self.buffer.snapshot()
        left = (*now.started, *now.complete, *now.pending)
        self.note(Ended(unfinished=tuple(sorted(one.submission_id for one in left))))


@st.composite
def histories(draw: st.DrawFn, *, num_moves: int = 40) -> list[AnyEvent]:
    """Events of a run, each of which the real buffer has made; the book has followed it."""
    world = LedgerWorld(groups_per_step=draw(st.integers(1, 3)), k=draw(st.integers(0, 2)))
    moves = ["finish", "score", "complete", "complete", "take", "take", "fail", "checkpoint", "resume"]
    for _ in range(draw(st.integers(5, num_moves))):
        world.start_all()
        match draw(st.sampled_from(moves)):
            case "finish" if world.sampling:
                world.finish(draw(st.sampled_from(sorted(world.sampling))))
            case "score" if world.sampled:
                world.score(draw(st.sampled_from(sorted(world.sampled))))
            case "complete":
                for group_id in sorted(world.sampling):
                    world.finish(group_id)
                for group_id in sorted(world.sampled):
                    world.score(group_id)
            case "take":
                if world.take() is not None:
                    world.serve(world.trainer_version)
            case "fail" if known := sorted(world.sampling) + sorted(world.sampled):
                world.fail(draw(st.sampled_from(known)), draw(st.sampled_from(REASONS)))
            case "checkpoint":
                world.checkpoint()
            case "resume" if world.checkpoints:
                world.note()
                world.resume(draw(st.integers(0, len(world.checkpoints) - 1)))
        world.note()
    if draw(st.booleans()):
        world.end()
        if world.checkpoints and draw(st.booleans()):
            # With more steps to make.
            world.resume(len(world.checkpoints) - 1)
            world.start_all()
            world.note()
    return world.events
