"""Random histories of the replay buffer: nothing too old trains, nothing is lost, and it always goes on."""

import pickle

from hypothesis import given, settings
from hypothesis import strategies as st

from forgeasync.buffer import DropReason
from forgeasync.config import (
    AccountingPolicy,
    AccountingSection,
    AgeOf,
    BatchOrder,
    BufferSection,
    Replacement,
    StaleGroups,
)
from tests.support.buffer_world import BufferWorld, complete

accountings = st.sampled_from(
    [
        AccountingSection(policy=AccountingPolicy.NONE),
        AccountingSection(policy=AccountingPolicy.EXACT),
        AccountingSection(policy=AccountingPolicy.EXACT, replacement=Replacement.WEIGHT),
    ]
)


ages = st.sampled_from(list(AgeOf))


bounds = st.none() | st.integers(0, 6)


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
        assert world.buffer.num_present <= (world.k + 1) * world.groups_per_step
        assert world.buffer.num_pending <= 2 * (world.k + 2) * world.groups_per_step


@settings(max_examples=300)
@given(
    groups_per_step=st.integers(1, 4),
    k=st.integers(0, 5),
    age_of=ages,
    spare=bounds,
    max_in_flight=st.none() | st.integers(1, 6),
    adapt_load=st.booleans(),
    accounting=accountings,
    data=st.data(),
)
def test_waiting_never_deadlocks_drops_nothing_and_never_trains_on_older_tokens(
    groups_per_step: int,
    k: int,
    age_of: AgeOf,
    spare: int | None,
    max_in_flight: int | None,
    adapt_load: bool,
    accounting: AccountingSection,
    data: st.DataObject,
) -> None:
    section = BufferSection(
        age_of=age_of,
        max_groups=None if spare is None else groups_per_step + spare,
        max_in_flight=max_in_flight,
        adapt_load=adapt_load,
    )
    world = BufferWorld(groups_per_step=groups_per_step, k=k, section=section, accounting=accounting)
    play(world, data)
    for _ in range(groups_per_step):
        world.finish_everything()
    assert world.take() is not None, "all groups are complete, yet the trainer waits"
    assert world.buffer.num_dropped[DropReason.STALE] == 0
    world.check_counts()


@settings(max_examples=300)
@given(
    groups_per_step=st.integers(1, 4),
    k=st.integers(0, 5),
    age_of=ages,
    order=st.sampled_from(list(BatchOrder)),
    spare=bounds,
    window=st.none() | st.integers(0, 4),
    accounting=accountings,
    data=st.data(),
)
def test_dropping_never_trains_on_older_tokens_and_always_comes_to_the_next_batch(
    groups_per_step: int,
    k: int,
    age_of: AgeOf,
    order: BatchOrder,
    spare: int | None,
    window: int | None,
    accounting: AccountingSection,
    data: st.DataObject,
) -> None:
    if window is not None:
        accounting = AccountingSection(
            policy=AccountingPolicy.WINDOWED_FIFO, window_groups=groups_per_step + window
        )
    section = BufferSection(
        stale_groups=StaleGroups.DROP,
        age_of=age_of,
        order=order,
        max_groups=None if spare is None else groups_per_step + spare,
    )
    world = BufferWorld(groups_per_step=groups_per_step, k=k, section=section, accounting=accounting)
    play(world, data)
    num_before = world.trainer_version
    for _ in range(2 * groups_per_step + 2):
        world.finish_everything()
        world.take()
    assert world.trainer_version > num_before
    world.check_counts()


@settings(max_examples=150)
@given(groups_per_step=st.integers(1, 4), k=st.integers(0, 5), extra=st.integers(0, 4), data=st.data())
def test_a_window_and_waiting_go_together(
    groups_per_step: int, k: int, extra: int, data: st.DataObject
) -> None:
    accounting = AccountingSection(
        policy=AccountingPolicy.WINDOWED_FIFO, window_groups=groups_per_step + extra
    )
    world = BufferWorld(groups_per_step=groups_per_step, k=k, section=BufferSection(), accounting=accounting)
    play(world, data)
    world.finish_everything()
    assert world.take() is not None
    assert world.buffer.num_dropped[DropReason.STALE] == 0


def test_memory_does_not_grow_with_the_length_of_a_run() -> None:
    sizes = []
    accounting = AccountingSection(policy=AccountingPolicy.WINDOWED_FIFO, window_groups=6, metric_groups=50)
    section = BufferSection(stale_groups=StaleGroups.DROP, max_groups=12)
    world = BufferWorld(groups_per_step=4, k=2, section=section, accounting=accounting)
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
