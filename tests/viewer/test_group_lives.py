"""The lives of groups, by ledgers whose stories are known."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forgeasync.buffer import DropReason
from forgeasync.ledger import Book, Opened
from forgeasync.viewer import Fate, GroupLife, GroupLives, LedgerLines, Piece
from tests.support.viewer_runs import (
    begun_group,
    eventful_ledger,
    finished_group,
    ledger_of_steps,
    ledger_text,
    opened,
    trained,
)


def read(text: bytes) -> LedgerLines:
    ledger = LedgerLines()
    ledger.add(Piece(data=text[: text.rfind(b"\n") + 1], start=0, is_anew=False))
    return ledger


def lives_of(text: bytes) -> GroupLives:
    ledger = read(text)
    assert (ledger.num_damaged, ledger.lives.num_odd) == (0, 0)
    return ledger.lives


def test_the_stories_of_these_tests_can_be_true() -> None:
    for events in (eventful_ledger(), [one for step in ledger_of_steps(3, 2, is_ended=True) for one in step]):
        book = Book()
        for event in events:
            book.apply(event)


def test_a_group_that_was_undone_stays_beside_the_one_that_has_its_number_now() -> None:
    lives = lives_of(ledger_text(eventful_ledger()))
    now, before = lives.of_group(2)
    assert (now.fate, now.step, now.started_line, now.ended_line) == (Fate.SKIPPED, 2, 18, 23)
    assert (now.undone_line, now.prompt, now.attempt) == (None, 1, 1)
    assert (before.fate, before.step, before.ended_line, before.undone_line) == (Fate.UNDONE, 2, 16, 17)
    assert [life.fate for life in lives.of_group(3)] == [Fate.SCORING, Fate.UNDONE]
    assert lives.num_resumptions == 1


def test_what_was_before_the_checkpoint_stands() -> None:
    lives = lives_of(ledger_text(eventful_ledger()))
    (first,) = lives.of_group(0)
    assert (first.fate, first.step, first.submitted_line, first.sampled_line) == (Fate.TRAINED, 1, 2, 4)
    (lost,) = lives.of_group(1)
    assert (lost.fate, lost.reason, lost.comes_again) == (Fate.DROPPED, DropReason.LOST, True)


def test_all_attempts_at_a_prompt_are_found_and_counted() -> None:
    lives = lives_of(ledger_text(eventful_ledger()))
    assert [(one.group, one.fate) for one in lives.of_prompt(1)] == [
        (1, Fate.DROPPED),
        (2, Fate.UNDONE),
        (2, Fate.SKIPPED),
    ]
    counts = {fate: num for fate, num in lives.num_of_fate().items() if num}
    assert counts == {Fate.TRAINED: 1, Fate.DROPPED: 1, Fate.UNDONE: 2, Fate.SKIPPED: 1, Fate.SCORING: 1}


def test_steps_made_before_a_line_go_back_with_a_resumption() -> None:
    lives = lives_of(ledger_text(eventful_ledger()))
    assert [lives.step_before(line) for line in (1, 7, 8, 15, 16, 17, 22, 23, 24)] == [
        *(0, 0, 1, 1, 2, 1, 1, 2, 2),
    ]


def test_filters_find_what_a_look_at_every_group_finds() -> None:
    lives = lives_of(ledger_text(eventful_ledger()))
    everything = [lives.at(row) for row in range(len(lives))]

    def found(**wanted: object) -> list[GroupLife]:
        return [lives.at(int(row)) for row in lives.rows(**wanted)]  # type: ignore[arg-type]

    for fate in Fate:
        assert found(fate=fate) == [one for one in everything if one.fate is fate][::-1]
    assert found(reason=DropReason.LOST) == [one for one in everything if one.reason is DropReason.LOST]
    assert found(step=2) == [one for one in everything if one.step == 2][::-1]
    assert found() == everything[::-1]


def test_groups_of_a_ledger_that_begins_late_have_their_numbers() -> None:
    late = Opened(
        format=1, run="x", seed=0, groups_per_step=1, step=7, next_group=40, num_submitted=30, waiting=()
    )
    lives = lives_of(ledger_text([late, *begun_group(40)[1:], *finished_group(40)]))
    (life,) = lives.of_group(40)
    assert (life.fate, life.submitted_line) == (Fate.WAITING, None)
    assert lives.of_group(0) == [] == lives.of_group(41)
    assert lives.step_before(3) == 7


def test_groups_that_had_not_ended_with_the_run_are_unfinished() -> None:
    events = [event for events in ledger_of_steps(3, 2, is_ended=False) for event in events]
    lives = lives_of(ledger_text(events))
    assert lives.num_of_fate()[Fate.SAMPLING] == 2
    ended = [event for events in ledger_of_steps(3, 2, is_ended=True) for event in events]
    assert lives_of(ledger_text([*ended[:-2], ended[-1]])).num_of_fate()[Fate.UNFINISHED] == 2


TEXT = ledger_text(eventful_ledger())


@given(size=st.integers(0, len(TEXT)))
def test_any_cut_of_a_ledger_is_the_life_of_every_group_so_far(size: int) -> None:
    lines = TEXT[:size].count(b"\n")
    lives = lives_of(TEXT[:size])
    assert lives.num_lines == lines
    whole = lives_of(TEXT)
    for group in range(4):
        starts = [one.started_line for one in lives.of_group(group)]
        assert starts == [one.started_line for one in whole.of_group(group) if one.started_line <= lines]


@given(place=st.integers(0, len(TEXT) - 1), byte=st.integers(0, 255), length=st.integers(1, 40))
def test_a_damaged_place_costs_lines_and_never_the_others(place: int, byte: int, length: int) -> None:
    damaged = TEXT[:place] + bytes([byte]) * length + TEXT[place + length :]
    if damaged == TEXT:
        return
    ledger = read(damaged)
    untouched = TEXT[:place].count(b"\n")
    assert ledger.lives.num_lines >= untouched
    if not damaged.endswith(b"\n"):
        damaged = damaged[: damaged.rfind(b"\n") + 1]
    if damaged != TEXT[: len(damaged)]:
        assert ledger.num_damaged >= 1
        assert ledger.first_damage is not None


def test_behind_a_line_that_is_none_one_more_is_lost_and_the_rest_is_read() -> None:
    events = [opened(1), *begun_group(0), *finished_group(0), *begun_group(1), trained(1, range(0, 1))]
    lines = ledger_text(events).splitlines(keepends=True)
    ledger = read(b"".join([*lines[:3], b"no line\n", *lines[4:]]))
    assert ledger.num_damaged == 2
    assert "is not a line of a ledger" in str(ledger.first_damage)
    (life,) = ledger.lives.of_group(0)
    assert (life.sampled_line, life.scored_line, life.fate) == (None, None, Fate.TRAINED)
    assert ledger.lives.of_group(1)[0].fate is Fate.SAMPLING


def test_a_ledger_of_another_format_is_refused_in_words() -> None:
    other = Opened(format=2, run="x", seed=0, groups_per_step=1)
    ledger = read(ledger_text([other, *begun_group(0)]))
    assert ledger.refusal == "has format 2; this version of forgeasync reads 1"
    assert len(ledger.lives) == 0


@pytest.mark.parametrize("number", [10**6, 10**15])
def test_a_number_that_no_ledger_of_this_length_has_takes_no_memory(number: int) -> None:
    ledger = read(ledger_text([opened(1), *begun_group(number), trained(1, range(number, number + 1))]))
    assert ledger.lives.num_odd > 0
    assert len(ledger.lives) == 0


def test_where_prompts_were_submitted_is_known_by_the_place_in_the_file() -> None:
    lives = lives_of(TEXT)
    for prompt in range(3):
        offset = lives.offset_of_prompt(prompt)
        assert offset is not None
        line = TEXT[offset:].split(b"\n")[0]
        assert b'"event":"submitted","prompt":%d,' % prompt in line
    assert lives.offset_of_prompt(3) is None


def test_lines_of_trained_steps_include_undone_ones() -> None:
    lines_N, steps_N = lives_of(TEXT).trained_lines()
    np.testing.assert_array_equal(lines_N, [8, 16, 23])
    np.testing.assert_array_equal(steps_N, [1, 2, 2])
