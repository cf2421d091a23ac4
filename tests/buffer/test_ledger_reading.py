"""A ledger's file: every damage is found, and a last line that a crash has cut is none."""

import random
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forgeasync.buffer import (
    START,
    AnyEvent,
    BadLine,
    LedgerLines,
    LedgerReading,
    LedgerUnreadable,
    Opened,
    Submitted,
    encode_line,
    encode_lines,
    read_ledger,
)
from tests.support.ledger_histories import histories
from tests.support.ledgers import is_intact, ledger_text, opened


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ledger") / "ledger.jsonl"


EVENTS = [opened(1), *(Submitted(prompt=one, source="s", task_id=f"task {one}") for one in range(5))]


def read(file: Path, text: bytes) -> LedgerReading:
    file.write_bytes(text)
    return read_ledger(file)


@settings(max_examples=50, deadline=None)
@given(events=histories())
def test_what_is_written_is_read(file: Path, events: list[AnyEvent]) -> None:
    text, position = encode_lines(events, START)
    reading = read(file, text)
    assert reading.contradiction is None and reading.num_torn_bytes == 0
    assert reading.position == position
    assert is_intact(text)
    lines = LedgerLines(file.name)
    assert [lines.read(line) for line in text.splitlines()] == events
    assert lines.position == position
    assert read_ledger(file, line=len(events)).checksum_at == position.checksum
    assert read_ledger(file, line=len(events) + 1).checksum_at is None


@settings(max_examples=5, deadline=None)
@given(events=histories(num_moves=8))
def test_a_crash_may_cut_the_end_at_every_byte(file: Path, events: list[AnyEvent]) -> None:
    text = ledger_text(events)
    first = text.index(b"\n") + 1
    for size in range(len(text)):
        if size < first:
            with pytest.raises(LedgerUnreadable):
                read(file, text[:size])
            continue
        reading = read(file, text[:size])
        assert reading.contradiction is None
        assert reading.position.num_lines == text[:size].count(b"\n")
        assert reading.num_torn_bytes == size - text[:size].rindex(b"\n") - 1


@settings(max_examples=300, deadline=None)
@given(events=histories(num_moves=15), seed=st.integers(0, 2**32))
def test_every_damage_is_found_at_its_line(file: Path, events: list[AnyEvent], seed: int) -> None:
    """A line that is missing, twice, elsewhere, cut off in the middle, or has another byte."""
    rng = random.Random(seed)
    lines = ledger_text(events).splitlines(keepends=True)
    at = rng.randrange(len(lines) - 1)
    match rng.randrange(5):
        case 0:
            del lines[at]
        case 1:
            lines.insert(at, lines[at])
            at += 1
        case 2:
            other = rng.randrange(at + 1, len(lines))
            lines[at], lines[other] = lines[other], lines[at]
        case 3:
            size = rng.randrange(len(lines[at]))
            lines[at] = lines[at][:size]
        case _:
            column = rng.randrange(len(lines[at]))
            byte = rng.choice([byte for byte in range(256) if byte != lines[at][column]])
            lines[at] = lines[at][:column] + bytes([byte]) + lines[at][column + 1 :]
    text = b"".join(lines)
    assert not is_intact(text)
    reading = read(file, text)
    assert reading.contradiction is not None and reading.contradiction.line == at + 1
    assert reading.position.num_lines == at


def test_a_line_with_its_checksum_must_still_say_something_known() -> None:
    line, _ = encode_line(EVENTS[1], START)
    changes = ((b'"submitted"', b'"invented"'), (b'"prompt":0', b'"prompt":-1'), (b'"source":"s",', b""))
    for old, new in changes:
        said = line.replace(old, new).rpartition(b',"crc"')[0]
        with pytest.raises(BadLine, match="says nothing that a ledger can say"):
            LedgerLines("ledger.jsonl").read(said + b',"crc":"%08x"}' % zlib.crc32(said))


def test_texts_of_users_stay_in_their_line(file: Path) -> None:
    """Also what looks like the end of a line, or like a checksum."""
    hostile = 'a\nb\u2028,"crc":"00000000"}\n\x00é'
    events = [opened(1), Submitted(prompt=0, source=hostile, task_id=hostile)]
    text = ledger_text(events)
    assert text.count(b"\n") == 2 and read(file, text).contradiction is None
    lines = LedgerLines(file.name)
    assert [lines.read(line) for line in text.splitlines()] == events


@pytest.mark.parametrize(
    ("damaged", "num_lost"),
    [
        # Its number and its checksum are still there.
        (lambda line: line.replace(b'task 1"', b'task 9"'), 1),
        # Its checksum is gone, and the next line's cannot be checked without it.
        (lambda line: line[:20], 2),
    ],
)
def test_reading_goes_on_behind_a_bad_line(damaged: Callable[[bytes], bytes], num_lost: int) -> None:
    written = ledger_text(EVENTS).splitlines()
    lines, found = LedgerLines("ledger.jsonl"), []
    for line in [*written[:2], damaged(written[2]), *written[3:]]:
        try:
            found.append(lines.read(line))
        except BadLine:
            lines.skip(line)
    assert found == [*EVENTS[:2], *EVENTS[2 + num_lost :]]
    assert lines.position.num_lines == len(EVENTS)


def test_what_is_no_ledger_is_refused(file: Path, tmp_path: Path) -> None:
    with pytest.raises(LedgerUnreadable, match="cannot be read: No such file"):
        read_ledger(tmp_path / "nothing")
    with pytest.raises(LedgerUnreadable, match="is empty"):
        read(file, b"")
    with pytest.raises(LedgerUnreadable, match=r"has only the beginning of a line \(9 bytes\)"):
        read(file, b'{"n":1,"e')
    newer = ledger_text([Opened(format=7, run="r", seed=0, groups_per_step=1)])
    with pytest.raises(LedgerUnreadable, match="has format 7; this version of forgeasync reads 1"):
        read(file, newer)
