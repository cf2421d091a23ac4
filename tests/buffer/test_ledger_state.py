"""The book follows every real history, and contradicts every other one."""

import random
from collections import Counter

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forgeasync.buffer import (
    AnyEvent,
    Checkpointed,
    Contradiction,
    Dropped,
    DropReason,
    Ended,
    LedgerState,
    LostSteps,
    Place,
    Restored,
    Resumed,
    Sampled,
    Scored,
    Started,
    Submitted,
    Trained,
    Update,
)
from tests.support.ledger_histories import histories
from tests.support.ledgers import is_consistent, opened, plain

LOST, STALE, FILTERED = DropReason.LOST, DropReason.STALE, DropReason.FILTERED


def read(*events: AnyEvent) -> LedgerState:
    book = LedgerState()
    for event in events:
        book.apply(event)
    return book


def submitted(*prompts: int) -> list[AnyEvent]:
    return [Submitted(prompt=prompt, source="s", task_id=f"task {prompt}") for prompt in prompts]


def ready(prompt: int, group: int, attempt: int = 0) -> list[AnyEvent]:
    """A prompt's group comes to where it can be trained on."""
    return [
        Started(prompt=prompt, attempt=attempt, group=group),
        Sampled(prompt=prompt, group=group),
        Scored(prompt=prompt, group=group),
    ]


def trained(step: int, prompt: int, group: int, update: Update = Update.MADE) -> Trained:
    return Trained(step=step, prompts=(prompt,), groups=(group,), update=update)


def dropped(prompt: int, group: int, reason: DropReason, *, again: bool) -> Dropped:
    return Dropped(prompt=prompt, group=group, reason=reason, again=again)


def restored(prompt: int, group: int, attempt: int = 0) -> Restored:
    return Restored(prompt=prompt, attempt=attempt, group=group)


def resumed_from(line: int, *batches: tuple[int, ...]) -> Resumed:
    """From a checkpoint of step 1."""
    return Resumed(step=1, line=line, groups_per_step=1, batches=batches)


STEP_1 = [opened(1), *submitted(0, 1), *ready(0, 0), trained(1, 0, 0)]
"""Seven lines: one step, and prompt 1 waits."""

STARTED_1, READY_1 = ready(1, 1)[:1], ready(1, 1)
"""Prompt 1's group after that."""


def resumed(*batches: tuple[int, ...]) -> list[AnyEvent]:
    """Step 1 is in a checkpoint, and step 2, of prompt 1, is lost."""
    return [Checkpointed(step=1), *READY_1, trained(2, 1, 1), resumed_from(8, *batches)]


def test_every_prompt_has_an_end_by_its_way() -> None:
    book = read(
        opened(1),
        *submitted(0, 1, 2, 3, 4, 5),
        *ready(0, 0),
        trained(1, 0, 0),
        *ready(1, 1),
        trained(2, 1, 1, Update.SKIPPED),
        *ready(2, 2)[:2],
        dropped(2, 2, FILTERED, again=False),
        Started(prompt=3, attempt=0, group=3),
        dropped(3, 3, DropReason.BAD_RECORD, again=True),
        Started(prompt=3, attempt=1, group=4),
        dropped(3, 4, DropReason.CANCELLED, again=False),
        Started(prompt=4, attempt=0, group=5),
        Ended(unfinished=(4, 5)),
    )
    ends = [Place.TRAINED, Place.SKIPPED, Place.FILTERED, Place.DROPPED, Place.UNFINISHED, Place.UNFINISHED]
    assert [state.place for prompt in range(6) if (state := book.prompt(prompt)) is not None] == ends
    totals = book.totals
    assert totals.num_ended == Counter(ends)
    assert totals.num_dropped == {DropReason.CANCELLED: 1}
    assert totals.num_lost == {DropReason.CANCELLED: 1, DropReason.BAD_RECORD: 1, DropReason.FILTERED: 1}
    assert totals.num_attempts == 6 and totals.num_reissued == 1
    assert book.is_ended and not book.open_prompts


def test_a_resumption_undoes_what_came_after_its_checkpoint() -> None:
    """Prompt 1 was complete at the checkpoint, was trained after it, and is trained again."""
    after = [*submitted(2), trained(2, 1, 1), *ready(2, 2)[:2], dropped(2, 2, FILTERED, again=False)]
    book = read(*STEP_1, *READY_1, Checkpointed(step=1), *after, resumed_from(11))
    (resumption,) = book.resumptions
    assert resumption.undone_steps == (2,) and resumption.untrained_prompts == (1,)
    assert resumption.undone_prompts == (1, 2) and resumption.restarted_prompts == (1,)
    assert book.open_prompts == {1: 0} and book.totals.num_restarted == 1
    assert [one.step for one in book.steps] == [1] and book.losses == []
    assert book.totals.num_submitted == 2 and book.totals.num_ended == {Place.TRAINED: 1}
    for event in (*submitted(2), *ready(1, 2), trained(2, 1, 2), Ended(unfinished=(2,))):
        book.apply(event)
    assert book.totals.num_ended == {Place.TRAINED: 2, Place.UNFINISHED: 1}


def test_a_run_can_be_resumed_twice_from_one_checkpoint_and_from_an_earlier_one() -> None:
    first = [opened(1), *submitted(0), *ready(0, 0), Checkpointed(step=0), trained(1, 0, 0)]
    again = Resumed(step=0, line=6, groups_per_step=1)
    book = read(*first, Checkpointed(step=1), resumed_from(8), again, *ready(0, 1), again)
    assert [one.undone_steps for one in book.resumptions] == [(), (1,), ()]
    assert book.open_prompts == {0: 0} and book.totals.step == 0
    assert book.totals.num_restarted == 1, "of the history that stands"
    with pytest.raises(Contradiction, match="continues from the checkpoint of step 1 in line 8"):
        book.apply(resumed_from(8))


TWO_PROMPTS = Trained(step=2, prompts=(1, 0), groups=(1, 0), update=Update.MADE)
OTHER_TASK = Submitted(prompt=2, source="s", task_id="other")


@pytest.mark.parametrize(
    ("events", "words"),
    [
        (submitted(0), r"prompt 2 comes next; prompt 0 was trained at step 1 \(line 7\)"),
        ([Checkpointed(step=1), *submitted(2), resumed_from(8), OTHER_TASK], "'other' .* 'task 2' of 's'"),
        (ready(5, 1), "line 8: prompt 5 was started, but it was not submitted"),
        (ready(1, 1, attempt=1), r"as attempt 1, but it waits for attempt 0 to start \(line 3\)"),
        (ready(1, 2), "prompt 1 was started as group 2, but group 1 comes next"),
        ([Sampled(prompt=1, group=1)], "group 1 of prompt 1 was sampled, but the prompt waits"),
        ([*STARTED_1, Scored(prompt=1, group=1)], r"was scored, .* has its group 1 started \(line 8\)"),
        ([*READY_1, trained(2, 0, 0)], r"step 2 with group 0, but it was trained at step 1 \(line 7\)"),
        ([*READY_1, trained(1, 1, 1)], r"step 2 comes next; step 1 was trained before \(line 7\)"),
        ([*READY_1, TWO_PROMPTS], "step 2 was trained on 2 prompts and 2 groups; a step has 1"),
        ([dropped(0, 0, STALE, again=False)], r"dropped \(stale\), but the prompt was trained at step 1"),
        ([*READY_1, dropped(1, 1, FILTERED, again=True)], "prompt 1 was filtered, and cannot come again"),
        ([Checkpointed(step=2)], "a checkpoint of step 2 was begun, but step 1 was the last one"),
        ([Checkpointed(step=1), resumed_from(7)], r"line 9: .* step 1 in line 7; .* lines 8 \(step 1\)"),
        ([Ended(unfinished=())], r"with 0 unfinished prompts, but it leaves out prompt 1, which waits"),
        ([Ended(unfinished=(0, 1))], "but it names prompt 0, which was trained at step 1"),
        ([Ended(unfinished=(1, 2))], "but it names prompt 2, which was not submitted"),
        ([Ended(unfinished=(1, 1))], "but it names a prompt twice"),
        ([Ended(unfinished=(1,)), *submitted(2)], "says 'submitted' after the run has ended"),
        ([opened(1)], "line 8: opens a ledger that line 1 has opened"),
        ([restored(1, 1)], "prompt 1 was restored in a run that was not resumed"),
        ([*resumed(), restored(0, 1)], "prompt 0 was restored, but it was trained at step 1"),
        ([*resumed(), restored(1, 2)], "prompt 1 was restored as group 2, but group 1 comes next"),
        ([*resumed((1,)), *submitted(2), *ready(2, 1), trained(2, 2, 1)], "made again with prompts 1"),
        ([*resumed(), *STARTED_1, dropped(1, 1, LOST, again=True), restored(1, 2)], "waits for attempt 1"),
    ],
)
def test_a_contradiction_names_both_lines(events: list[AnyEvent], words: str) -> None:
    with pytest.raises(Contradiction, match=words):
        read(*STEP_1, *events)
    assert not is_consistent(plain([*STEP_1, *events]))


def test_a_ledger_can_begin_later() -> None:
    first = msgspec.structs.replace(
        opened(1), step=4, next_group=9, num_submitted=7, waiting=((3, 1), (6, 0))
    )
    book = read(first, *submitted(7), *ready(3, 9, attempt=1), trained(5, 3, 9), Ended(unfinished=(6, 7)))
    assert book.totals.num_ended == {Place.TRAINED: 1, Place.UNFINISHED: 2}
    with pytest.raises(Contradiction, match="prompt 2 was started, but it had ended before the ledger began"):
        read(first, *ready(2, 9))
    with pytest.raises(Contradiction, match="prompt 7 waits, but is not one of 7 prompts"):
        read(msgspec.structs.replace(first, waiting=((7, 0),)))


def test_groups_that_come_back_are_scored_and_their_steps_are_made_again() -> None:
    book = read(*STEP_1, *resumed((1,)), restored(1, 1, attempt=2), trained(2, 1, 1), *submitted(2))
    state = book.prompt(1)
    assert state is not None and (state.place, state.attempt, state.group) == (Place.TRAINED, 2, 1)
    assert book.totals.num_restored == 1 and book.totals.num_attempts == 1
    (resumption,) = book.resumptions
    assert resumption.undone_steps == (2,) and resumption.num_steps_again == 1


def test_what_a_run_loses_is_what_it_has_made_and_what_it_was_to_make_again() -> None:
    made = read(*STEP_1, *resumed((1,), (2,)), restored(1, 1), trained(2, 1, 1))
    assert made.lost_after(1) == LostSteps(batches=((1,), (2,)), first_attempts={})
    assert made.lost_after(2) == LostSteps(batches=((2,),), first_attempts={})
    lost = read(
        *STEP_1,
        *resumed(),
        *STARTED_1,
        dropped(1, 1, DropReason.BAD_RECORD, again=True),
        *submitted(2),
        Started(prompt=2, attempt=0, group=2),
        dropped(2, 2, FILTERED, again=False),
    )
    assert lost.lost_after(1) == LostSteps(batches=(), first_attempts={1: 1, 2: 1})


def is_followed(events: list[AnyEvent]) -> bool:
    try:
        read(*events)
    except Contradiction:
        return False
    return True


@settings(max_examples=100, deadline=None)
@given(events=histories())
def test_what_the_buffer_does_is_never_contradicted(events: list[AnyEvent]) -> None:
    assert is_followed(events) and is_consistent(plain(events))


def changed(event: AnyEvent, rng: random.Random) -> AnyEvent:
    """The event with another value in one field."""
    name = rng.choice(list(event.__struct_fields__))
    value = getattr(event, name)
    match value:
        case bool():
            other = not value
        case int():
            other = max(0, value + rng.choice([-2, -1, 1, 2]))
        case tuple():
            other = rng.choice([value[1:], (*value, rng.randrange(4)), value[::-1]])
            if name == "waiting":
                other = ((0, 0),)
            elif name == "batches":
                other = rng.choice([value[1:], ((0,), *value), value[::-1]])
        case DropReason():
            other = rng.choice(list(DropReason))
        case Update():
            other = rng.choice(list(Update))
        case _:
            other = value + "x"
    return msgspec.structs.replace(event, **{name: other})


@settings(max_examples=400, deadline=None)
@given(events=histories(num_moves=25), seed=st.integers(0, 2**32))
def test_changed_histories_are_contradicted_as_by_another_program(events: list[AnyEvent], seed: int) -> None:
    rng = random.Random(seed)
    # Every kind of event as often as any other.
    kind = rng.choice(sorted({type(event).__name__ for event in events}))
    at = rng.choice([number for number, event in enumerate(events) if type(event).__name__ == kind])
    match rng.randrange(6):
        case 0:
            del events[at]
        case 1:
            events.insert(rng.randrange(len(events) + 1), events[at])
        case 2:
            other = rng.randrange(len(events))
            events[at], events[other] = events[other], events[at]
        case _:
            events[at] = changed(events[at], rng)
    assert is_followed(events) == is_consistent(plain(events))
