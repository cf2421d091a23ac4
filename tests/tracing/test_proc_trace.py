"""The trace of a real process, also where its disk refuses or the process is killed."""

import errno
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from forgeasync.tracing import Lane, State, close_trace, doing, open_trace, proc_trace, shares, span, started
from tests.support.disks import Disk, install


def lane_in(folder: Path) -> Lane:
    (file,) = folder.glob("*.trace.jsonl")
    lane = Lane()
    for line in file.read_bytes().splitlines():
        lane.add(line)
    assert lane.num_damaged == 0
    return lane


def test_states_and_spans_reach_the_file(tmp_path: Path) -> None:
    open_trace(tmp_path / "logs", "scorer-0", idle=State.WAITING_FOR_BATCH)
    time.sleep(0.01)
    started()
    with doing(State.COMPUTING), span("score", {"group": 5}), doing(State.FETCHING):
        time.sleep(0.02)
    with pytest.raises(KeyError), doing(State.SWAPPING), span("fails"):
        time.sleep(0.005)
        raise KeyError
    time.sleep(0.005)
    close_trace()
    lane = lane_in(tmp_path / "logs")
    assert [state for state, _, _ in lane.stretches()] == [
        *(State.STARTING, State.COMPUTING, State.SWAPPING, State.WAITING_FOR_BATCH)
    ]
    assert [(one.name, dict(one.facts)) for one in lane.spans] == [("score", {"group": 5}), ("fails", {})]
    (computed,) = (end - begin for state, begin, end in lane.stretches() if state is State.COMPUTING)
    assert computed >= lane.spans[0].took_s - 1e-3 and lane.spans[0].took_s >= 0.02


def test_threads_share_a_trace(tmp_path: Path) -> None:
    open_trace(tmp_path, "scorer-0", idle=State.WAITING_FOR_BATCH)
    started()

    def work() -> None:
        for _ in range(200):
            with doing(State.COMPUTING), span("x"):
                pass

    threads = [threading.Thread(target=work) for _ in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    time.sleep(0.002)
    close_trace()
    lane = lane_in(tmp_path)
    assert len(lane.spans) == 800 and lane.num_lost == 0
    assert lane.state is State.WAITING_FOR_BATCH


def test_nothing_is_recorded_without_a_trace(tmp_path: Path) -> None:
    close_trace()
    with doing(State.COMPUTING), span("x"):
        started()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_costs_the_trace_only(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "logs").write_text("a file")
    open_trace(tmp_path / "logs", "buffer-0", idle=State.WAITING_FOR_BATCH)
    assert "buffer-0 has no trace" in capfd.readouterr().err
    with doing(State.COMPUTING):
        pass


def test_what_a_full_disk_refuses_comes_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(room=1 << 20)
    install(monkeypatch, disk)
    monkeypatch.setattr(proc_trace, "WRITE_EVERY_S", 0.01)
    open_trace(tmp_path, "buffer-0", idle=State.WAITING_FOR_BATCH)
    disk.room = 0
    with span("while the disk is full"):
        time.sleep(0.05)
    assert b"while the disk is full" not in next(tmp_path.iterdir()).read_bytes()
    disk.room = 1 << 20
    close_trace()
    assert [one.name for one in lane_in(tmp_path).spans] == ["while the disk is full"]


def test_a_disk_that_refuses_for_good_ends_the_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    disk = Disk(room=1 << 20)
    install(monkeypatch, disk)
    open_trace(tmp_path, "buffer-0", idle=State.WAITING_FOR_BATCH)
    disk.room, disk.error = 0, errno.EROFS
    with span("x"):
        pass
    close_trace()
    assert "this process's trace ends here" in capfd.readouterr().err


def test_a_killed_process_leaves_what_it_did(tmp_path: Path) -> None:
    program = f"""
import sys, time
from pathlib import Path
from forgeasync.tracing.proc_trace import doing, open_trace, started
from forgeasync.tracing.states import State
open_trace(Path({str(tmp_path)!r}), "generator-0", idle=State.WAITING_FOR_ROOM)
started()
with doing(State.COMPUTING):
    print("half", flush=True)
    time.sleep(60)
"""
    child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert child.stdout is not None and child.stdout.readline() == b"half\n"
    while b"computing" not in next(tmp_path.iterdir()).read_bytes():
        time.sleep(0.01)
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    lane = lane_in(tmp_path)
    assert lane.state is State.COMPUTING
    assert shares([lane], lane.begin_s, lane.end_s)
