"""A replay buffer that is written down and restored."""

import msgspec

from forgeasync.buffer import ATTEMPT_STRIDE, BufferSnapshot, DropReason
from forgeasync.config import AccountingSection, Replacement, StaleGroups
from tests.support.buffer_world import WEIGHT, complete, make_task, make_world, started, taken


def test_a_restored_buffer_starts_what_was_lost_and_goes_on() -> None:
    world = make_world(2, 2, longest_first=False)
    assert started(world) == [0, 1, 2, 3, 4, 5]
    complete(world, 0, 1, 2)
    assert taken(world) == [0, 1]
    world.fail(3, DropReason.BAD_RECORD)
    snapshot = msgspec.json.decode(msgspec.json.encode(world.buffer.snapshot()), type=BufferSnapshot)
    assert [one.task.task_id for one in snapshot.complete] == ["2"]
    assert [one.task.task_id for one in snapshot.started] == ["4", "5"]
    assert [(one.task.task_id, one.attempt) for one in snapshot.pending] == [("6", 0), ("7", 0), ("3", 1)]

    again = make_world(2, 2, longest_first=False)
    again.buffer.restore(snapshot)
    starts = []
    while (start := again.buffer.start()) is not None:
        starts.append(start)
    # Version 1 is served: three batches of two may be under way, and the first was trained on.
    assert [start.task.task_id for start in starts] == ["2", "3", "4", "5", "6", "7"]
    assert [start.group_id for start in starts] == [6, 7, 8, 9, 10, 11]
    assert [start.draw_id % ATTEMPT_STRIDE for start in starts] == [2, 3, 4, 5, 6, 7]
    assert starts[1].draw_id > ATTEMPT_STRIDE, "another attempt draws anew"
    again.buffer.submit(make_task(8))
    metrics = again.buffer.metrics()
    assert metrics["buffer/num_restarted"] == 3 and metrics["buffer/num_reissued"] == 1
    assert again.buffer.num_trained == 2 and again.buffer.num_submitted == 9


def test_a_batch_that_was_taken_and_not_committed_starts_again() -> None:
    accounting = AccountingSection(replacement=Replacement.WEIGHT)
    world = make_world(2, 1, longest_first=False, stale_groups=StaleGroups.DROP, accounting=accounting)
    assert started(world) == [0, 1, 2, 3]
    complete(world, 0, 1)
    before = world.buffer.snapshot()
    assert world.buffer.take() is not None
    snapshot = world.buffer.snapshot()
    assert snapshot == before
    assert [one.task.task_id for one in snapshot.complete] == ["0", "1"]


def test_deficits_that_a_batch_takes_over_are_kept_until_it_is_committed() -> None:
    """A run that resumes from in between has them again, as it has the batch's prompts."""
    world = make_world(1, 1, longest_first=False, stale_groups=StaleGroups.DROP, accounting=WEIGHT)
    assert started(world) == [0, 1]
    for group_id in (0, 1):
        world.finish(group_id)
    for _ in range(world.section.max_attempts):
        # Given up for good, after it was sampled: its length is known.
        (lost,) = set(world.sampled) - {0}
        world.fail(lost, DropReason.UNSCORED)
        for group_id in started(world):
            world.finish(group_id)
    world.score(0)
    before = world.buffer.snapshot()
    assert [one.weight for one in before.deficits] == [1.0]
    batch = world.buffer.take()
    assert batch is not None and batch.weights == (2.0,)
    assert world.buffer.snapshot() == before
    world.buffer.committed(trainer_wait_share=0.0)
    assert world.buffer.snapshot().deficits == ()


def test_a_prompt_that_is_gone_for_good_is_missed_at_the_length_that_it_had_first() -> None:
    world = make_world(1, 0, stale_groups=StaleGroups.DROP, accounting=WEIGHT, max_attempts=2)
    for num_tokens in (9, 1):
        (group_id,) = started(world)
        world.decode(group_id, num_tokens - 1)
        world.finish(group_id)
        world.fail(group_id, DropReason.UNSCORED)
    (deficit,) = world.buffer.snapshot().deficits
    assert (deficit.length_bucket, deficit.weight) == (3, 1.0), "9 tokens, not 1"
