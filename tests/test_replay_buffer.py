"""The replay buffer's promises on hand-made and on random histories."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forgeasync.buffer.replay_buffer import DropReason, ReplayBuffer
from forgeasync.config.schema import StaleGroups
from forgeasync.data.rollout import Group
from forgeasync.data.task import Task
from tests.support.rollouts import make_stored_rollout


def make_group(group_id: int, version: int) -> Group:
    rollout = make_stored_rollout((version, 0, 1))
    task = Task(task_id=str(group_id), prompt="", answer="", source_index=group_id)
    return Group(group_id=group_id, task=task, rollouts=(rollout,), rewards=(1.0,))


def make_buffer(
    groups_per_step: int,
    steps: int,
    *,
    stale: StaleGroups = StaleGroups.WAIT,
    max_groups: int | None = None,
    num_steps: int = 1000,
) -> ReplayBuffer:
    return ReplayBuffer(
        groups_per_step=groups_per_step,
        max_off_policy_steps=steps,
        stale_groups=stale,
        max_groups=max_groups,
        num_groups_in_run=num_steps * groups_per_step,
    )


def admit_all(buffer: ReplayBuffer) -> list[int]:
    ids = []
    while (group_id := buffer.admit()) is not None:
        ids.append(group_id)
    return ids


def test_synchronous_admits_exactly_one_batch_and_waits_for_all_of_it() -> None:
    buffer = make_buffer(3, 0)
    assert admit_all(buffer) == [0, 1, 2]
    buffer.add(make_group(1, 0))
    buffer.add(make_group(0, 0))
    assert buffer.take(0) is None
    buffer.add(make_group(2, 0))
    assert [group.group_id for group in buffer.take(0)] == [0, 1, 2]
    assert buffer.admit() is None, "the next step's groups wait for its weights"
    buffer.set_served_version(1)
    assert admit_all(buffer) == [3, 4, 5]


def test_runs_ahead_by_at_most_k_steps() -> None:
    assert len(admit_all(make_buffer(2, 4))) == 5 * 2


def test_depth_is_bounded_also_where_age_would_allow_more() -> None:
    buffer = make_buffer(2, 4, max_groups=3)
    assert admit_all(buffer) == [0, 1, 2]
    for group_id in range(3):
        buffer.add(make_group(group_id, 0))
    assert buffer.admit() is None, "complete groups count too"
    assert len(buffer.take(0)) == 2
    assert admit_all(buffer) == [3, 4]


def test_nothing_is_started_that_the_run_cannot_train_on() -> None:
    assert len(admit_all(make_buffer(2, 4, num_steps=3))) == 3 * 2


def test_two_stragglers_are_not_left_to_share_one_last_step() -> None:
    # Groups 0 and 1 started at version 0 and may be trained on at step 2 at the latest, one per step: step 1
    # must not go to group 3, though it is complete.
    buffer = make_buffer(1, 2)
    admit_all(buffer)
    buffer.add(make_group(2, 0))
    assert [group.group_id for group in buffer.take(0)] == [2]
    buffer.set_served_version(1)
    assert admit_all(buffer) == [3]
    buffer.add(make_group(3, 1))
    assert buffer.take(1) is None
    buffer.add(make_group(1, 0))
    assert [group.group_id for group in buffer.take(1)] == [1]


def test_drop_policy_counts_stale_groups_and_frees_their_places() -> None:
    buffer = make_buffer(1, 1, stale=StaleGroups.DROP)
    assert admit_all(buffer) == [0, 1]
    buffer.add(make_group(1, 0))
    assert buffer.take(0) is not None
    buffer.set_served_version(1)
    assert admit_all(buffer) == [2]
    buffer.add(make_group(2, 1))
    assert buffer.take(1) is not None
    buffer.set_served_version(2)
    assert len(admit_all(buffer)) == 1
    buffer.add(make_group(0, 0))
    assert buffer.take(2) is None
    assert [group.group_id for group in buffer.drop_stale(2)] == [0]
    assert buffer.num_dropped[DropReason.STALE] == 1
    assert buffer.admit() is not None


def test_dropped_group_is_counted_and_replaced() -> None:
    buffer = make_buffer(2, 0)
    admit_all(buffer)
    buffer.drop(0, DropReason.STALE)
    assert buffer.num_dropped[DropReason.STALE] == 1
    assert admit_all(buffer) == [2]


def test_a_group_is_added_once() -> None:
    buffer = make_buffer(1, 0)
    buffer.admit()
    buffer.add(make_group(0, 0))
    with pytest.raises(KeyError):
        buffer.add(make_group(0, 0))


@settings(max_examples=300, deadline=None)
@given(
    groups_per_step=st.integers(1, 4),
    k=st.integers(0, 5),
    spare_groups=st.none() | st.integers(0, 6),
    data=st.data(),
)
def test_waiting_never_deadlocks_and_never_trains_on_older_tokens(
    groups_per_step: int, k: int, spare_groups: int | None, data: st.DataObject
) -> None:
    max_groups = None if spare_groups is None else groups_per_step + spare_groups
    buffer = make_buffer(groups_per_step, k, max_groups=max_groups)
    trainer_version = served = num_failed = 0
    in_flight: dict[int, int] = {}
    seen: list[int] = []
    for _ in range(60):
        for group_id in admit_all(buffer):
            in_flight[group_id] = served
        action = data.draw(st.sampled_from(["complete", "take", "serve", "fail"]))
        if action == "complete" and in_flight:
            group_id = data.draw(st.sampled_from(sorted(in_flight)))
            started = in_flight.pop(group_id)
            buffer.add(make_group(group_id, data.draw(st.integers(started, served))))
        elif action == "fail" and in_flight:
            group_id = data.draw(st.sampled_from(sorted(in_flight)))
            del in_flight[group_id]
            buffer.drop(group_id, DropReason.STALE)
            num_failed += 1
        elif action == "serve":
            served = data.draw(st.integers(served, trainer_version))
            buffer.set_served_version(served)
        elif action == "take" and (batch := buffer.take(trainer_version)) is not None:
            assert len(batch) == groups_per_step
            assert all(trainer_version - group.first_version <= k for group in batch)
            seen += [group.group_id for group in batch]
            trainer_version += 1
    served = trainer_version
    buffer.set_served_version(served)
    for group_id in admit_all(buffer):
        in_flight[group_id] = served
    for group_id, started in in_flight.items():
        buffer.add(make_group(group_id, started))
    assert buffer.take(trainer_version) is not None, "all groups are complete, yet the trainer waits"
    assert len(set(seen)) == len(seen)
    assert buffer.num_dropped[DropReason.STALE] == num_failed
