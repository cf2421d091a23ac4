"""The journal: in order, on the disk when it says so, of one process at a time, continued after a crash."""

import asyncio
import errno
import pickle
from pathlib import Path

import pytest

from forgeasync.buffer import (
    START,
    Journal,
    JournalFile,
    JournalInUse,
    JournalNotWritten,
    LedgerPosition,
    Submitted,
    cut_torn_line,
    read_ledger,
)
from forgeasync.buffer import ledger_journal as journal_module
from tests.support.disks import Disk, install
from tests.support.ledgers import opened


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


async def test_events_reach_the_disk_without_anyone_waiting(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


async def test_a_full_disk_is_waited_for_and_loses_nothing(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


async def test_a_lasting_error_is_raised_and_names_the_file(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
