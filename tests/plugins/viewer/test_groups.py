"""The histories of groups, by ledgers whose stories are known."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forgeasync.buffer import DropReason, Opened
from forgeasync.plugins.viewer import RunReader
from tests.support.ledgers import ledger_text, opened
from tests.support.viewer_runs import (
    begun_group,
    eventful_ledger,
    finished_group,
    ledger_of_steps,
    read,
    trained,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("run")


def read_ledger(folder: Path, text: bytes) -> RunReader:
    (folder / "ledger.jsonl").write_bytes(text)
    (folder / "config.yaml").write_text("max_steps: 2\n")
    return read(folder)


def histories_of(folder: Path, text: bytes) -> Any:
    reader = read_ledger(folder, text)
    assert reader.problems == []
    return reader.groups


def counts_of(groups: Any) -> dict[str, int]:
    return {fate: num for fate, num in groups.num_of_fate().items() if num}


TEXT = ledger_text(eventful_ledger())


@pytest.fixture
def groups(folder: Path) -> Any:
    """The groups of an eventful ledger."""
    return histories_of(folder, TEXT)


def test_a_group_that_was_undone_stays_beside_the_one_that_has_its_number_now(groups: Any) -> None:
    now, before = groups.of_group(2)
    assert (now.fate, now.step, now.started_line, now.ended_line) == ("skipped", 2, 18, 23)
    assert (now.undone_line, now.prompt, now.attempt) == (None, 1, 1)
    assert (before.fate, before.step, before.ended_line, before.undone_line) == ("undone", 2, 16, 17)
    assert [life.fate for life in groups.of_group(3)] == ["scoring", "undone"]
    assert groups.num_resumptions == 1
    assert groups.line_of_step == {1: 8, 2: 23}, "of a step that was repeated the last one"


def test_what_was_before_the_checkpoint_stands(groups: Any) -> None:
    (first,) = groups.of_group(0)
    assert (first.fate, first.step, first.submitted_line, first.sampled_line) == ("trained", 1, 2, 4)
    (lost,) = groups.of_group(1)
    assert (lost.fate, lost.reason, lost.is_resubmitted) == ("dropped", DropReason.LOST, True)
    attempts = [(one.group, one.fate) for one in groups.of_prompt(1)]
    assert attempts == [(1, "dropped"), (2, "undone"), (2, "skipped")]
    found = [groups.step_before(line) for line in (1, 7, 8, 15, 16, 17, 22, 23, 24)]
    assert found == [0, 0, 1, 1, 2, 1, 1, 2, 2]


def test_groups_are_found_and_counted_by_fate(groups: Any) -> None:
    everything = list(groups)
    assert counts_of(groups) == {"trained": 1, "dropped": 1, "undone": 2, "skipped": 1, "scoring": 1}
    for fate in groups.num_of_fate():
        assert groups.find(fate=fate) == [one for one in everything if one.fate is fate][::-1]
    assert groups.find(reason=DropReason.LOST) == groups.of_group(1)
    assert groups.find(step=2) == [one for one in everything if one.step == 2][::-1]


def test_groups_of_a_ledger_that_begins_late_have_their_numbers(folder: Path) -> None:
    begun = {"step": 7, "next_group": 40, "num_submitted": 30, "waiting": ()}
    late = Opened(format=1, run="x", seed=0, groups_per_step=1, **begun)
    groups = histories_of(folder, ledger_text([late, *begun_group(40)[1:], *finished_group(40)]))
    (life,) = groups.of_group(40)
    assert (life.fate, life.submitted_line) == ("waiting", None)
    assert groups.of_group(0) == [] == groups.of_group(41)
    assert groups.step_before(3) == 7


def test_groups_that_had_not_ended_with_the_run_are_unfinished(folder: Path) -> None:
    events = [event for events in ledger_of_steps(3, 2, is_ended=False) for event in events]
    groups = histories_of(folder, ledger_text(events))
    assert counts_of(groups)["sampling"] == 2
    ended = [event for events in ledger_of_steps(3, 2, is_ended=True) for event in events]
    assert counts_of(histories_of(folder, ledger_text([*ended[:-2], ended[-1]])))["unfinished"] == 2


@given(place=st.integers(0, len(TEXT) - 1), byte=st.integers(0, 255), length=st.integers(1, 40))
def test_a_damaged_place_costs_lines_and_no_others(folder: Path, place: int, byte: int, length: int) -> None:
    damaged = TEXT[:place] + bytes([byte]) * length + TEXT[place + length :]
    if damaged == TEXT:
        return
    groups = read_ledger(folder, damaged).groups
    untouched = TEXT[:place].count(b"\n")
    assert groups.num_lines >= untouched
    if not damaged.endswith(b"\n"):
        damaged = damaged[: damaged.rfind(b"\n") + 1]
    if damaged != TEXT[: len(damaged)]:
        assert "damaged lines were left out; the first: line " in groups.problems[0]


def test_behind_a_line_that_is_none_one_more_is_lost_and_the_rest_is_read(folder: Path) -> None:
    events = [opened(1), *begun_group(0), *finished_group(0), *begun_group(1), trained(1, range(0, 1))]
    lines = ledger_text(events).splitlines(keepends=True)
    reader = read_ledger(folder, b"".join([*lines[:3], b"no line\n", *lines[4:]]))
    assert "ledger.jsonl: 2 damaged lines were left out; the first: line 4" in reader.problems[0]
    (life,) = reader.groups.of_group(0)
    assert (life.sampled_line, life.scored_line, life.fate) == (None, None, "trained")
    assert reader.groups.of_group(1)[0].fate == "sampling"


def test_the_task_of_a_prompt_is_read_from_the_ledger(folder: Path, groups: Any) -> None:
    # Prompt 2 was submitted again after the resumption.
    found = [groups.task_of(prompt) for prompt in range(4)]
    assert found == [*(("sums", f"sums/{prompt}") for prompt in range(3)), None]
    (folder / "ledger.jsonl").write_text("another file\n")
    assert groups.task_of(0) is None
