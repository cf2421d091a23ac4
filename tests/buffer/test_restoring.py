"""Which finished groups a resumed run trains on, and when."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forgeasync.buffer import (
    BufferSnapshot,
    Candidate,
    LostSteps,
    SkipReason,
    Submission,
    plan_restore,
)
from forgeasync.config import AgeOf, BufferSection, StaleGroups
from forgeasync.rollouts import Group, SpilledGroup
from tests.support.buffer_world import make_snapshot, make_task, make_world
from tests.support.ledger_histories import LedgerWorld
from tests.support.rollouts import make_stored_rollout


def snapshot(version: int, num_submitted: int, **waiting: int) -> BufferSnapshot:
    """``waiting`` are prompts, as p3=1 for prompt 3 with its attempt 1."""
    pending = [
        Submission(submission_id=int(name[1:]), task=make_task(int(name[1:])), attempt=attempt)
        for name, attempt in waiting.items()
    ]
    return make_snapshot(version, num_submitted=num_submitted, next_group_id=100, pending=pending)


def candidate(prompt: int, first: int, last: int | None = None, *, attempt: int = 0) -> Candidate:
    """Sampled under versions from ``first`` to ``last``."""
    return Candidate(
        prompt=prompt, attempt=attempt, reference=first, last_version=first if last is None else last
    )


def lost(*batches: tuple[int, ...], **first_attempts: int) -> LostSteps:
    return LostSteps(
        batches=batches, first_attempts={int(name[1:]): one for name, one in first_attempts.items()}
    )


def plan(
    candidates: list[Candidate], steps: LostSteps, at: BufferSnapshot, *, k: int = 1
) -> tuple[list[tuple[int, int]], list[tuple[int, ...]], dict[SkipReason, int]]:
    """What is restored (prompt, attempt), the batches, and what is not."""
    found = plan_restore(candidates, steps, at, groups_per_step=2, max_off_policy_steps=k)
    restored = [(one.prompt, one.attempt) for one in found.restored]
    return restored, list(found.batches), {reason: num for reason, num in found.left_out.items() if num}


def test_from_the_first_step_that_lacks_a_group_on_weights_are_lost() -> None:
    """Step 4 lacks the group of prompt 7: version 4 will be another one."""
    groups = [candidate(4, 2), candidate(5, 2), candidate(6, 3), candidate(8, 3), candidate(9, 4)]
    restored, batches, left_out = plan(groups, lost((4, 5), (6, 7)), snapshot(2, 6, p4=0, p5=0))
    assert batches == [(4, 5)] and left_out == {SkipReason.LOST_WEIGHTS: 1}
    assert restored == [(4, 0), (5, 0), (6, 0), (8, 0)]


def test_what_is_too_old_or_was_dropped_is_left_out() -> None:
    firsts = {4: 1, 5: 0, 6: 2, 7: 2, 1: 0}
    groups = [*(candidate(*one) for one in firsts.items()), candidate(8, 2, attempt=1)]
    at = snapshot(2, 8, p4=0, p5=0, p6=1, p7=0)
    restored, batches, left_out = plan(groups, lost(p7=1, p8=1), at)
    assert restored == [(4, 0), (8, 1)] and batches == []
    # Prompt 1 had ended, attempts at 6 and 7 were lost.
    assert left_out == {SkipReason.OLD: 1, SkipReason.ENDED: 3}


def test_steps_of_another_size_or_of_an_age_that_is_no_longer_allowed_are_not_made_again() -> None:
    groups = [candidate(prompt, 1) for prompt in (4, 5, 6)]
    at = snapshot(2, 7, p4=0, p5=0, p6=0)
    assert plan(groups, lost((4, 5, 6)), at)[:2] == ([(4, 0), (5, 0), (6, 0)], [])
    assert plan(groups, lost((4, 5)), at, k=0) == ([], [], {SkipReason.OLD: 3})


def test_of_two_attempts_the_later_one_stands() -> None:
    groups = [candidate(4, 2), candidate(4, 2, attempt=1)]
    assert plan(groups, lost(), snapshot(2, 6, p4=0)) == ([(4, 1)], [], {SkipReason.ENDED: 1})


def kept(prompt: int, *, task: int | None = None) -> SpilledGroup:
    """A finished group, sampled under version 2."""
    rollouts = (make_stored_rollout((2, 0, 4)),) * 2
    of_task = make_task(prompt if task is None else task)
    group = Group(group_id=55, draw_id=prompt, task=of_task, rollouts=rollouts)
    return SpilledGroup(group=group, rewards=(1.0,), kept=(1,), scores=None)


def test_the_buffer_takes_restored_groups_as_if_they_had_come_in_their_time() -> None:
    """The groups of the steps that are made again wait for each other; others do not take their places."""
    world = make_world(2, 1, longest_first=False)
    world.buffer.restore(snapshot(2, 6, p4=0, p5=0), batches=[(4, 7), (5, 6)], num_groups=4)
    for prompt in (6, 7, 8, 9):
        world.buffer.submit([make_task(prompt)])
    buffer = world.buffer
    for prompt in (4, 5, 6):
        buffer.restored(kept(prompt))

    def next_batch() -> list[Group]:
        batch = buffer.take()
        assert batch is not None
        buffer.committed(trainer_wait_share=0.0)
        return list(batch.groups)

    assert buffer.take() is None, "prompt 7's group is missing"
    restored = buffer.restored(kept(7))
    assert restored.group_id == 103 and restored.draw_id == 7
    assert buffer.start() is None, "two batches are there, and version 2 is served"
    groups = next_batch()
    assert [group.draw_id for group in groups] == [4, 7]
    assert [len(group.rollouts) for group in groups] == [1, 1] and groups[0].rewards == (1.0,)
    assert [group.draw_id for group in next_batch()] == [5, 6]
    buffer.set_served_version(4)
    starts = [buffer.start(), buffer.start()]
    assert [one.task.task_id for one in starts if one is not None] == ["8", "9"]
    assert buffer.metrics()["buffer/num_restored"] == 4


def test_a_group_of_another_task_is_refused() -> None:
    world = make_world(2, 1)
    world.buffer.restore(snapshot(2, 6, p4=0))
    with pytest.raises(ValueError, match="is task '4' of 's', and was task '5' of 's'"):
        world.buffer.restored(kept(4, task=5))


SECTIONS = [
    {},
    {"age_of": AgeOf.NEWEST_TOKEN},
    {"age_of": AgeOf.TOKEN},
    {"max_in_flight": 2},
    {"adapt_load": True},
    {"stale_groups": StaleGroups.DROP},
]


@settings(max_examples=300, deadline=None)
@given(data=st.data(), options=st.sampled_from(SECTIONS))
def test_a_killed_run_keeps_its_bounds_and_batches(data: st.DataObject, options: dict[str, object]) -> None:
    """The world's ``take`` checks ages token by token, its ``resume`` batches, its book every prompt."""
    gps, k = data.draw(st.integers(1, 3)), data.draw(st.integers(0, 3))
    section = BufferSection(**{"adapt_load": False} | options)
    world = LedgerWorld(groups_per_step=gps, k=k, section=section)
    world.checkpoint()
    for _ in range(data.draw(st.integers(10, 60))):
        world.move(data.draw)
    for _ in range(gps + 1):
        world.finish_everything()
    assert world.take() is not None, "it goes on"
