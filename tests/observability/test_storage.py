"""Disks that are full or fail for a while: nothing is lost, nothing is there twice, and the run waits."""

import asyncio
import errno
import os
from contextlib import nullcontext
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forgeasync.files import RUN_MARK, AppendedFile, Refusal, is_refusal, read_json_lines
from forgeasync.observability import (
    FaultLog,
    Role,
    RunDir,
    StorageFaults,
    fault_log,
    release_claims,
    undefined,
)
from tests.support.disks import Disk, install


def test_what_a_failed_flush_lost_is_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a failed flush Linux takes pages for written that are not."""
    disk = Disk(1000)
    install(monkeypatch, disk)
    path = tmp_path / "file"
    file = AppendedFile(os.open(path, os.O_RDWR | os.O_CREAT), is_flushed=True)
    file.write(b"one\n")
    disk.flush_error = errno.EIO
    with pytest.raises(OSError, match="Input/output"):
        file.write(b"two\n")
    assert path.read_bytes() == b"one\n", "it is not shown as written"
    file.write(b"three\n")
    assert path.read_bytes() == b"one\ntwo\nthree\n"
    file.close()


@given(st.lists(st.binary(min_size=1, max_size=20) | st.integers(0, 200), max_size=30), st.booleans())
def test_any_history_of_writes_and_outages_ends_with_all_bytes_in_order(
    tmp_path_factory: pytest.TempPathFactory, history: list[bytes | int], is_flushed: bool
) -> None:
    """Numbers are the room that the disk has from then on. At any time there are whole writes."""
    disk = Disk(1000)
    with pytest.MonkeyPatch.context() as monkeypatch:
        install(monkeypatch, disk)
        path = tmp_path_factory.mktemp("disk") / "file"
        file = AppendedFile(os.open(path, os.O_RDWR | os.O_CREAT), is_flushed=is_flushed)
        written, ends = b"", {0}
        for step in history:
            if isinstance(step, int):
                # What is written stays written.
                disk.room = max(step, path.stat().st_size)
                continue
            written += step
            ends.add(len(written))
            try:
                file.write(step)
            except OSError:
                assert file.num_kept_bytes
            found = path.read_bytes()
            assert written.startswith(found) and len(found) in ends, "no part of a write"
            assert len(found) + file.num_kept_bytes == len(written)
        disk.room = 10_000
        file.write(b"")
        file.close()
        assert path.read_bytes() == written


def test_which_errors_a_write_may_be_tried_again_after() -> None:
    assert all(is_refusal(OSError(number, "")) for number in (errno.ENOSPC, errno.EDQUOT, errno.EIO))
    others = (OSError(errno.EBADF, "closed"), PermissionError(errno.EACCES, "no"), ValueError("full"))
    assert not any(map(is_refusal, others))


class Writer:
    """Keeps something until ``flush`` was called often enough."""

    def __init__(self, path: str, num_refusals: int) -> None:
        self.path, self.num_refusals = path, num_refusals

    def flush(self) -> Refusal | None:
        self.num_refusals -= 1
        return Refusal(path=self.path, reason="full") if self.num_refusals >= 0 else None


async def test_an_outage_of_several_files_is_one_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fault_log, "RETRY_S", 0.0)
    told: list[str] = []
    log = FaultLog(tell=told.append)
    faults = StorageFaults(log)
    await faults.until_written([Writer("a", 0), Writer("b", 0)])
    assert not told
    for number in (1, 2):
        await faults.until_written([Writer("a", 3), Writer("b", 1)])
        counts = log.metrics()
        assert counts["faults/detected_storage"] == counts["faults/recovered_storage"] == number
    assert told[0] == "a cannot be written (full): the data is kept, and the write repeated"
    assert told[1].startswith("a was written after ")
    assert faults.metrics()["faults/storage_wait_s"] > 0


async def test_a_call_that_waits_for_a_disk_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fault_log, "PATIENCE_S", 0.001)
    log = FaultLog()
    faults = StorageFaults(log)

    room = asyncio.Event()
    num_asked = 0

    async def report() -> str:
        await room.wait()
        return "report"

    async def refusal() -> Refusal | None:
        nonlocal num_asked
        num_asked += 1
        if num_asked < 3:
            return None
        if num_asked == 5:
            assert [fault.who for fault in log.open] == ["ledger.jsonl"], "told while it waits"
            room.set()
        return Refusal(path="ledger.jsonl", reason="full")

    assert await faults.while_waiting(report(), refusal) == "report"
    assert not log.open and log.metrics()["faults/recovered_storage"] == 1

    async def breaks() -> str:
        raise ValueError("the call's own")

    with pytest.raises(ValueError, match="the call's own"):
        await faults.while_waiting(breaks(), refusal)


@pytest.mark.parametrize(("error", "is_told"), [(errno.EIO, True), (errno.EBADF, False)])
def test_a_run_that_has_ended_stays_so_where_its_lock_cannot_be_written(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: int,
    is_told: bool,
) -> None:
    monkeypatch.setenv(RUN_MARK, "none")
    run_dir = RunDir(path=tmp_path)
    run_dir.claim()
    disk = Disk(0)
    disk.error = error
    install(monkeypatch, disk)
    with nullcontext() if is_told else pytest.raises(OSError):
        release_claims()
    said = f"{tmp_path} cannot say that this run has ended in order ({os.strerror(error)})"
    assert (said in capsys.readouterr().err) == is_told
    disk.room = 1000
    # Nobody has it any more.
    run_dir.claim()
    release_claims()


# --- the log of faults ---


def test_faults_are_counted_by_role_and_kept_in_the_file(tmp_path: Path) -> None:
    told: list[str] = []
    file = tmp_path / "faults.jsonl"
    log = FaultLog(file, told.append)
    first = log.detected(Role.GENERATOR, "generator 2 (process 4711)", "has died")
    log.detected(Role.SCORER, "scorer (process 5)", "does not answer")
    log.recovered(first, "was replaced by process 4712")
    metrics = log.metrics()
    assert metrics["faults/detected_generator"] == metrics["faults/recovered_generator"] == 1
    assert (metrics["faults/detected_scorer"], metrics["faults/recovered_scorer"]) == (1, 0)
    assert {f"faults/{what}_{role}" for what in ("detected", "recovered") for role in Role} == set(metrics)
    assert not undefined(metrics)
    lines = read_json_lines(file)
    numbers = [(line["event"], line["role"], line["number"]) for line in lines]
    assert numbers == [("detected", "generator", 0), ("detected", "scorer", 1), ("recovered", "generator", 0)]
    assert lines[2]["took_s"] >= 0 and lines[2]["how"] == "was replaced by process 4712"
    assert told[0] == "generator 2 (process 4711) has died"
    assert [one.role for one in log.open] == [Role.SCORER]


def test_lines_that_the_disk_refuses_are_written_later(tmp_path: Path) -> None:
    file = tmp_path / "not there yet" / "faults.jsonl"
    log = FaultLog(file)
    fault = log.detected(Role.STORAGE, "the disk", "is full")
    file.parent.mkdir()
    log.recovered(fault, "has room again")
    assert [line["event"] for line in read_json_lines(file)] == ["detected", "recovered"]


def test_a_later_start_goes_on_in_the_same_file(tmp_path: Path) -> None:
    """Numbers stay unique, counts are those of the run, and what had failed before comes back."""
    file = tmp_path / "faults.jsonl"
    first = FaultLog(file)
    first.recovered(first.detected(Role.SCORER, "scorer (process 5)", "has died"), "was replaced")
    first.detected(Role.GENERATOR, "generator 2 (process 6)", "has died")
    FaultLog(file).detected(Role.CONTROLLER, "controller (process 4)", "was killed by SIGKILL")
    with file.open("a") as torn:
        torn.write('{"time_s": 1, "ev')
    told: list[str] = []
    later = FaultLog(file, told.append)
    assert [fault.role for fault in later.open] == [Role.GENERATOR, Role.CONTROLLER]
    new = later.detected(Role.TRAINER, "trainer rank 0 (process 9)", "has died")
    later.recover_earlier("came back as process 8")
    later.recover_earlier("came back as process 8")
    assert later.open == (new,) and new.number == 3
    metrics = later.metrics()
    for role, num_recovered in {"scorer": 1, "generator": 1, "controller": 1, "trainer": 0}.items():
        assert metrics[f"faults/detected_{role}"] == 1
        assert metrics[f"faults/recovered_{role}"] == num_recovered
    lines = read_json_lines(file)
    assert [line["number"] for line in lines if line["event"] == "detected"] == [0, 1, 2, 3]
    assert [line["number"] for line in lines if line["event"] == "recovered"] == [0, 1, 2]
    assert 0 <= lines[-1]["took_s"] < 60
    assert told[-1].startswith("controller (process 4) came back as process 8 after ")


@pytest.mark.parametrize("line", ["{", "{}", '{"event": "detected", "role": "nobody"}', "7"])
def test_a_file_of_something_else_is_refused(tmp_path: Path, line: str) -> None:
    file = tmp_path / "faults.jsonl"
    file.write_text(line + "\n")
    with pytest.raises(ValueError, match=r"line 1 is not a line of faults\.jsonl"):
        FaultLog(file)
