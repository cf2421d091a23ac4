"""Random histories of the replay buffer: nothing too old trains, nothing is lost, and it always goes on."""

import pickle

from hypothesis import given, settings
from hypothesis import strategies as st

from forgeasync.buffer import DropReason
from forgeasync.config import AccountingPolicy, AccountingSection, AgeOf, BufferSection, StaleGroups
from tests.support.buffer_world import EXACT, WEIGHT, BufferWorld, complete

ACCOUNTINGS = [AccountingSection(policy=AccountingPolicy.NONE), EXACT, WEIGHT]


@st.composite
def worlds(draw: st.DrawFn, stale_groups: StaleGroups) -> BufferWorld:
    """A world at its beginning, with any bounds."""
    groups_per_step = draw(st.integers(1, 4))
    max_groups = st.none() | st.integers(groups_per_step, groups_per_step + 6)
    section = BufferSection(
        stale_groups=stale_groups,
        age_of=draw(st.sampled_from(AgeOf)),
        max_groups=draw(max_groups),
        max_in_flight=draw(st.none() | st.integers(1, 6)),
        adapt_load=draw(st.booleans()),
    )
    accounting = draw(st.sampled_from(ACCOUNTINGS))
    k = draw(st.integers(0, 5))
    return BufferWorld(groups_per_step=groups_per_step, k=k, section=section, accounting=accounting)


def play(world: BufferWorld, data: st.DataObject, num_moves: int = 60) -> None:
    """A random history."""
    reasons = [DropReason.BAD_RECORD, DropReason.CANCELLED, DropReason.FILTERED]
    for _ in range(num_moves):
        world.start_all()
        move = data.draw(st.sampled_from(["decode", "end", "finish", "score", "take", "serve", "fail"]))
        if move in ("decode", "end", "finish") and world.sampling:
            group_id = data.draw(st.sampled_from(sorted(world.sampling)))
            {"decode": world.decode, "end": world.end_one, "finish": world.finish}[move](group_id)
        elif move == "score" and world.sampled:
            world.score(data.draw(st.sampled_from(sorted(world.sampled))))
        elif move == "take":
            world.take()
        elif move == "serve":
            world.serve(data.draw(st.integers(world.served_version, world.trainer_version)))
        elif move == "fail" and (known := sorted(world.sampling) + sorted(world.sampled)):
            world.fail(data.draw(st.sampled_from(known)), data.draw(st.sampled_from(reasons)))
        world.check_counts()
        assert world.buffer.num_in_flight + world.buffer.num_complete <= (world.k + 1) * world.groups_per_step
        assert len(world.buffer.snapshot().pending) <= 2 * (world.k + 2) * world.groups_per_step


@settings(max_examples=450)
@given(world=worlds(StaleGroups.WAIT), data=st.data())
def test_waiting_never_deadlocks_nor_drops_and_bounds_ages(world: BufferWorld, data: st.DataObject) -> None:
    play(world, data)
    for _ in range(world.groups_per_step):
        world.finish_everything()
    assert world.take() is not None, "all groups are complete, yet the trainer waits"
    assert world.buffer.num_dropped[DropReason.STALE] == 0
    world.check_counts()


@settings(max_examples=300)
@given(world=worlds(StaleGroups.DROP), data=st.data())
def test_dropping_bounds_ages_and_comes_to_the_next_batch(world: BufferWorld, data: st.DataObject) -> None:
    play(world, data)
    num_before = world.trainer_version
    for _ in range(2 * world.groups_per_step + 2):
        world.finish_everything()
        world.take()
    assert world.trainer_version > num_before
    world.check_counts()


def test_memory_does_not_grow_with_the_length_of_a_run() -> None:
    sizes = []
    section = BufferSection(stale_groups=StaleGroups.DROP, max_groups=12)
    world = BufferWorld(groups_per_step=4, k=2, section=section, accounting=EXACT)
    for step in range(600):
        world.start_all()
        ids = sorted(world.sampling)
        world.decode(ids[0])
        # The oldest straggles and goes stale; one fails; the rest train.
        if step % 3 == 0:
            world.fail(ids[-1], DropReason.BAD_RECORD)
        for group_id in [one for one in ids[1:] if one in world.sampling]:
            complete(world, group_id)
        if step % 5 == 0 and ids[0] in world.sampling:
            complete(world, ids[0])
        world.take()
        world.serve(world.trainer_version)
        world.note()
        if step in (299, 599):
            world.buffer._submissions.history = type(world.buffer._submissions.history)()
            sizes.append(len(pickle.dumps(world.buffer)))
    assert world.buffer.num_dropped[DropReason.STALE] > 10
    assert sizes[1] < 1.2 * sizes[0]
