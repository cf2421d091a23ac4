"""A ledger's file: written in order, continued after a crash; every damage is found but a cut last line."""

import asyncio
import errno
import pickle
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
    Journal,
    JournalFile,
    JournalInUse,
    JournalNotWritten,
    LedgerLines,
    LedgerPosition,
    LedgerReading,
    LedgerUnreadable,
    Opened,
    Submitted,
    cut_torn_line,
    encode_line,
    encode_lines,
    read_ledger,
)
from forgeasync.buffer import ledger_journal as journal_module
from tests.support.disks import Disk, install
from tests.support.ledger_histories import histories
from tests.support.ledgers import is_intact, ledger_text, opened


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.jsonl"


def prompts(first: int, number: int) -> list[Submitted]:
    return [Submitted(prompt=first + one, source="s", task_id=str(first + one)) for one in range(number)]


async def test_events_are_on_the_disk_in_their_order_when_waited_for(path: Path) -> None:
    journal = Journal(JournalFile.create(path), START)
    journal.append([opened(1)])
    # Batches that come while another one is being written.
    for first in range(0, 300, 3):
        journal.append(prompts(first, 3))
        await asyncio.sleep(0)
    await journal.durable()
    assert path.read_bytes().count(b"\n") == 301
    metrics = journal.metrics()
    assert metrics["ledger/num_events"] == 301 and metrics["ledger/behind_s"] > 0
    assert journal.metrics()["ledger/behind_s"] == 0
    await journal.close()
    reading = read_ledger(path)
    assert reading.contradiction is None and reading.position == journal.position
    assert reading.book.totals.num_submitted == 300


async def test_events_reach_the_disk_if_nobody_waits(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "SYNC_EVERY_S", 0.01)
    journal = Journal(JournalFile.create(path), START)
    for event in (opened(1), *prompts(0, 2)):
        journal.append([event])
        while path.read_bytes().count(b"\n") < journal.position.num_lines:
            await asyncio.sleep(0.005)
    assert read_ledger(path).book.totals.num_submitted == 2


async def test_a_journal_is_gone_on_with_after_its_last_line(path: Path) -> None:
    async def write(file: JournalFile, position: LedgerPosition, *events: object) -> None:
        journal = Journal(file, position)
        journal.append(events)
        await journal.close()

    # Lines longer than what is read at a time.
    long = Submitted(prompt=0, source="s", task_id="x" * 200_000)
    await write(JournalFile.create(path), START, opened(1), long)
    with pytest.raises(FileExistsError):
        JournalFile.create(path)
    file, position = JournalFile.reopen(path)
    assert position == read_ledger(path).position
    await write(file, position, *prompts(1, 2))
    assert read_ledger(path).contradiction is None and read_ledger(path).book.totals.num_submitted == 3


@pytest.mark.parametrize("num_bytes", [1, 20, 200_000])
def test_a_torn_last_line_is_cut_and_nothing_else(path: Path, num_bytes: int) -> None:
    file = JournalFile.create(path)
    file.write(b"".join(b"%d" % one + b"x" * 50_000 + b"\n" for one in range(3)))
    file.close()
    whole = path.read_bytes()
    assert cut_torn_line(path) == 0 and path.read_bytes() == whole
    path.write_bytes(whole + b"y" * num_bytes)
    with pytest.raises(ValueError, match="the last line is not a whole line of a ledger"):
        JournalFile.reopen(path)
    assert cut_torn_line(path) == num_bytes and path.read_bytes() == whole


def test_one_process_writes_at_a_time(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "LOCK_WAIT_S", 0.1)
    file = JournalFile.create(path)
    for act in (JournalFile.reopen, cut_torn_line):
        with pytest.raises(JournalInUse, match="another process writes this ledger"):
            act(path)
    file.close()
    again, position = JournalFile.reopen(path)
    assert position == START
    again.close()


async def test_a_full_disk_is_waited_for(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "RETRY_S", 0.001)
    disk = Disk(100)
    install(monkeypatch, disk)
    journal = Journal(JournalFile.create(path), START)
    journal.append([opened(1), *prompts(0, 20)])
    waiting = asyncio.create_task(journal.durable())
    while journal.refusal is None:
        await asyncio.sleep(0.001)
    assert "No space left on device" in journal.refusal.reason
    assert journal.refusal.path == str(path)
    journal.append(prompts(20, 1))
    for _ in range(20):
        await asyncio.sleep(0.001)
        assert not waiting.done()
        # Another try writes a part and cuts it off again; a look may fall in between.
        while path.read_bytes():
            await asyncio.sleep(0)
    disk.room = 1_000_000
    await waiting
    await journal.close()
    assert journal.refusal is None
    reading = read_ledger(path)
    assert reading.contradiction is None and reading.book.totals.num_submitted == 21


async def test_a_lasting_error_names_the_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(100)
    disk.error = errno.EBADF
    install(monkeypatch, disk)
    journal = Journal(JournalFile.create(path), START)
    journal.append([opened(1), *prompts(0, 20)])
    for wait in (journal.durable, journal.close):
        with pytest.raises(JournalNotWritten, match=r"Bad file descriptor; \d+ bytes") as raised:
            await wait()
        assert raised.value.filename == str(path)
        again = pickle.loads(pickle.dumps(raised.value))
        # As it leaves its actor.
        assert type(again) is JournalNotWritten and str(again) == str(raised.value)
    with pytest.raises(JournalNotWritten):
        journal.append(prompts(20, 1))


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
        with pytest.raises(BadLine, match="is not an event of a ledger"):
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
