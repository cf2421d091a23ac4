"""The replay buffer's promises on histories made by hand."""

import msgspec
import pytest

from forgeasync.buffer import (
    ATTEMPT_STRIDE,
    BufferSnapshot,
    DropReason,
    known_reference,
    reference_version,
)
from forgeasync.config import AgeOf, BufferSection, StaleGroups
from forgeasync.rollouts import Group, GroupProgress
from tests.support.buffer_world import (
    EXACT,
    WEIGHT,
    BufferWorld,
    complete,
    make_task,
    make_world,
    started,
    taken,
)
from tests.support.rollouts import make_stored_rollout


def make_dropping_world(groups_per_step: int, k: int, **options: object) -> BufferWorld:
    return make_world(groups_per_step, k, stale_groups=StaleGroups.DROP, **options)


def test_synchronous_starts_exactly_one_batch_and_waits_for_all_of_it() -> None:
    world = make_world(3, 0)
    assert started(world) == [0, 1, 2]
    complete(world, 1, 0)
    assert taken(world) is None
    complete(world, 2)
    assert taken(world) == [0, 1, 2]
    assert started(world) == [], "the next step's groups wait for its weights"
    world.serve(1)
    assert started(world) == [3, 4, 5]


def test_depth_bound_counts_complete_groups_and_in_flight_bound_does_not() -> None:
    world = make_world(2, 4, max_groups=3)
    assert started(world) == [0, 1, 2]
    complete(world, 0, 1, 2)
    assert started(world) == []
    assert len(taken(world)) == 2
    assert started(world) == [3, 4]

    world = make_world(2, 4, max_in_flight=3)
    assert started(world) == [0, 1, 2]
    world.finish(0)
    assert started(world) == [], "sampled, but not scored yet"
    world.score(0)
    assert started(world) == [3]


def test_nothing_is_started_that_the_run_cannot_train_on() -> None:
    world = BufferWorld(groups_per_step=2, k=4, section=BufferSection(), accounting=EXACT, num_steps=3)
    assert len(started(world)) == 3 * 2


def test_generators_wait_where_the_bound_kept_groups_from_starting() -> None:
    world = make_world(2, 1, adapt_load=True)
    assert started(world) == [0, 1, 2, 3]
    complete(world, 0, 1, 2, 3)
    assert taken(world) == [0, 1]
    assert world.buffer.metrics()["load/generators_wait"] == 1.0
    world.serve(1)
    # Two groups are under way, and four may be.
    assert taken(world) == [2, 3]
    assert world.buffer.metrics()["load/generators_wait"] == 0.0


def test_a_batch_takes_what_started_first_of_equal_deadlines() -> None:
    world = make_dropping_world(1, 3)
    started(world)
    complete(world, 3, 1)
    assert taken(world) == [1]


def leave_behind(world: BufferWorld) -> None:
    """Train two steps without group 0, whose tokens of version 0 are then too old to train on."""
    complete(world, 1)
    assert taken(world) == [1]
    world.serve(1)
    assert started(world) == [2]
    complete(world, 2)
    assert taken(world) == [2]
    assert world.cancellable == {0}
    world.serve(2)


def test_stale_group_is_dropped_counted_and_its_prompt_comes_first() -> None:
    world = make_dropping_world(1, 1)
    assert started(world) == [0, 1]
    world.decode(0)
    leave_behind(world)
    late = world.sampling[0].task
    complete(world, 0)
    assert world.buffer.num_dropped[DropReason.STALE] == 1
    first, *_ = started(world)
    assert world.sampling[first].task == late
    world.check_counts()


def test_exact_accounting_gives_up_on_a_prompt_after_max_attempts() -> None:
    world = make_world(1, 0, max_attempts=2)
    for _ in range(2):
        (group_id,) = started(world)
        world.fail(group_id, DropReason.BAD_RECORD)
    assert world.buffer.num_reissued == 1
    assert world.sampling == {}
    (group_id,) = started(world)
    assert world.sampling[group_id].task.task_id == "1", "the next prompt's turn"


def test_two_stragglers_are_not_left_to_share_one_last_step() -> None:
    # Groups 0 and 1 started at version 0 and may be trained on at step 2 at the latest, one per step: step 1
    # must not go to group 3, though it is complete.
    world = make_world(1, 2)
    started(world)
    complete(world, 2)
    assert taken(world) == [2]
    world.serve(1)
    # What runs has not begun to decode: it counts from version 1 now, and nothing has to be waited for.
    for group_id in (0, 1):
        world.decode(group_id)
    assert started(world) == [3]
    complete(world, 3)
    world.take()
    world.serve(2)
    assert started(world) == [4]
    complete(world, 4)
    assert taken(world) is None, "groups 0 and 1 have steps 2 and 3 left"
    complete(world, 1)
    assert taken(world) == [1]


def test_expired_group_that_turns_out_younger_can_train() -> None:
    world = make_dropping_world(1, 1, age_of=AgeOf.NEWEST_TOKEN)
    assert started(world) == [0, 1]
    world.end_one(0)
    leave_behind(world)
    assert started(world) == [3]
    sampling = world.sampling[0]
    sampling.ended.clear()
    world.finish(0)
    world.score(0)
    assert taken(world) == [0], "both of its rollouts ended under version 2"


def test_reference_versions_by_hand() -> None:
    two = (make_stored_rollout((3, 0, 1), (5, 1, 2), (6, 2, 5)), make_stored_rollout((4, 0, 3), (5, 3, 4)))
    assert reference_version(two, AgeOf.OLDEST_TOKEN) == 3
    assert reference_version(two, AgeOf.NEWEST_TOKEN) == 5
    assert reference_version(two, AgeOf.TOKEN) == 6
    # The means are 5.2 and 4.25.
    assert reference_version(two, AgeOf.MEAN) == 4


def test_progress_raises_the_reference_only_as_far_as_it_is_certain() -> None:
    def known(num_running: int, num_tokens: int, age_of: AgeOf) -> int:
        progress = GroupProgress(group_id=0, version=7, num_running=num_running, num_tokens=num_tokens)
        return known_reference(progress, 2, age_of)

    for age_of in AgeOf:
        assert known(2, 0, age_of) == 7, "nothing was sampled before"
        assert known(0, 9, age_of) == 0
    assert [known(1, 9, age_of) for age_of in AgeOf] == [0, 0, 0, 7]
    assert [known(2, 9, age_of) for age_of in AgeOf] == [0, 7, 0, 7]
    assert known(1, 0, AgeOf.OLDEST_TOKEN) == 0, "the other one may have ended and not been told of"


def test_progress_of_groups_that_are_not_sampled_is_no_news() -> None:
    world = make_world(1, 1, age_of=AgeOf.TOKEN)
    assert started(world) == [0, 1]
    world.finish(0)
    for group_id in (0, 99):
        progress = GroupProgress(group_id=group_id, version=1, num_running=2, num_tokens=5)
        world.buffer.progressed([progress])
    world.score(0)
    complete(world, 1)
    assert taken(world) == [0], "what was sampled is known: nothing of it is newer, and its deadline stays"


def test_what_is_counted() -> None:
    world = make_world(2, 1)
    assert started(world) == [0, 1, 2, 3]
    complete(world, 2)
    world.fail(3, DropReason.BAD_RECORD)
    metrics = world.buffer.metrics()
    counted = {key: value for key, value in metrics.items() if not key.startswith("accounting/")}
    assert counted == {
        "buffer/num_in_flight": 2,
        "buffer/num_complete": 1,
        "buffer/num_reissued": 1,
        "buffer/num_restarted": 0,
        "buffer/num_restored": 0,
        "load/bound": 4,
        "load/trainer_waits": 0.0,
        "load/generators_wait": 0.0,
    }
    assert metrics["accounting/outstanding_deficit"] == metrics["accounting/num_censored"] == 0
    assert len(world.buffer.snapshot().pending) == 3, "two more prompts were asked for, and one comes again"


def test_each_reward_stays_with_its_rollout() -> None:
    """Through scoring, filtering and the batch: three rollouts, of which the outer two are kept."""
    world = make_world(1, 0)
    started(world)
    rollouts = tuple(make_stored_rollout((0, 0, 1), text=text) for text in ("bad", "filtered", "good"))
    world.buffer.finished(Group(group_id=0, draw_id=0, task=make_task(0), rollouts=rollouts))
    world.buffer.scored(0, (-2.0, 5.0), (0, 2))
    batch = world.buffer.take()
    assert batch is not None
    (group,) = batch.groups
    assert group.rewards is not None
    found = {one.text: reward for one, reward in zip(group.rollouts, group.rewards, strict=True)}
    assert found == {"bad": -2.0, "good": 5.0}


def test_what_filters_drop_is_not_missed() -> None:
    """It was sampled and scored: that it does not train is what was asked for."""
    world = make_dropping_world(1, 0, accounting=WEIGHT)
    (group_id,) = started(world)
    world.finish(group_id)
    world.fail(group_id, DropReason.FILTERED)
    snapshot = world.buffer.snapshot()
    assert snapshot.deficits == () and snapshot.num_censored == 0
    (group_id,) = started(world)
    assert world.sampling[group_id].task.task_id == "1", "it does not come again"


@pytest.mark.parametrize(("most", "expected"), [(1, [1, 1]), (3, [3, 3]), (99, [4, 2])])
def test_groups_start_together_as_far_as_bounds_allow(most: int, expected: list[int]) -> None:
    buffer = make_world(4, 1, max_groups=6).buffer
    found: list[int] = []
    for num_groups in expected:
        buffer.submit(make_task(number) for number in range(buffer.num_wanted))
        some, num_wanted = buffer.start_groups(most)
        assert num_wanted == buffer.num_wanted == len(some) == num_groups
        found += [one.group_id for one in some]
    assert found == list(range(sum(expected)))


def test_a_batch_makes_room_for_the_next_group_before_it_is_trained_on() -> None:
    world = make_world(1, 1, max_groups=1)
    assert started(world) == [0]
    complete(world, 0)
    world.buffer.submit([make_task(9)])
    assert world.buffer.start_groups(9) is None
    assert world.buffer.take() is not None
    (next_start,), _ = world.buffer.start_groups(9)
    assert next_start.group_id == 1


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
    again.buffer.submit([make_task(8)])
    metrics = again.buffer.metrics()
    assert metrics["buffer/num_restarted"] == 3 and metrics["buffer/num_reissued"] == 1
    assert again.buffer.num_trained == 2 and again.buffer.snapshot().num_submitted == 9


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
    world = make_dropping_world(1, 0, accounting=WEIGHT, max_attempts=2)
    for num_tokens in (9, 1):
        (group_id,) = started(world)
        world.decode(group_id, num_tokens - 1)
        world.finish(group_id)
        world.fail(group_id, DropReason.UNSCORED)
    (deficit,) = world.buffer.snapshot().deficits
    assert (deficit.length_bucket, deficit.weight) == (3, 1.0), "9 tokens, not 1"
