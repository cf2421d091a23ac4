"""A supervised run whose processes are killed: the controller alone, then everything at once."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from forgeasync.controller import newest_step
from forgeasync.files import RUN_MARK, SHARED_MEMORY, files_of
from tests.support.app_runs import (
    check_ledger,
    controller_of,
    finish_well,
    read_lines,
    run_here,
    start,
    write_tiny_run,
)
from tests.support.processes import send_signal

NUM_STEPS = 24
WAIT_S = 600.0
END_S = 60.0


class Seen:
    """All processes that a run has had whenever somebody looked."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.root = psutil.Process(process.pid)
        self.all: set[psutil.Process] = {self.root}

    def look(self) -> None:
        try:
            self.all |= set(self.root.children(recursive=True))
        except psutil.NoSuchProcess:
            pass  # one that has just ended, or the run itself

    def running(self) -> list[psutil.Process]:
        return [one for one in self.all if is_running(one)]

    def files(self) -> list[Path]:
        """Files in shared memory that are named after one of them."""
        marks = {f"-{one.pid}-" for one in self.all}
        return [file for file in SHARED_MEMORY.iterdir() if any(mark in file.name for mark in marks)]


def is_running(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until(is_so: Callable[[], bool], seen: Seen, limit_s: float = WAIT_S) -> None:
    end_s = time.monotonic() + limit_s
    while not is_so():
        assert time.monotonic() < end_s
        seen.look()
        time.sleep(0.1)


def newest(run_dir: Path) -> int:
    return newest_step(run_dir / "metrics.jsonl")


def num_recovered(run_dir: Path) -> int:
    file = run_dir / "faults.jsonl"
    return file.read_text().count('"recovered"') if file.exists() else 0


def mark_in(run_dir: Path) -> str:
    """What everything carries that the process in run.lock has started."""
    mark: str = json.loads((run_dir / "run.lock").read_text())["mark"]
    return mark


@pytest.mark.exhaustive
@pytest.mark.timeout(1500)
def test_kills_of_the_controller_and_of_everything_lose_nothing(tmp_path: Path) -> None:
    overrides = (f"max_steps={NUM_STEPS}", "checkpoint={every_steps: 2, keep: 2}")
    config_file, run_dir = write_tiny_run(tmp_path, *overrides, scale=4.0), tmp_path / "run"
    # What is imported once makes the second start quick: the first run must still be there.
    code, _, err = run_here("--config", str(config_file), "--dry-run")
    assert code == 0, err
    process = start(config_file, f"run_dir={run_dir}", "--supervise")
    seen = Seen(process)
    try:
        wait_until(lambda: newest(run_dir) >= 3 or process.poll() is not None, seen)
        holder = json.loads((run_dir / "run.lock").read_text())
        assert process.poll() is None and holder["pid"] != process.pid
        listed = json.loads((run_dir / "procs.json").read_text())
        assert listed["controller"] == holder["pid"] and all(one["start_ticks"] for one in listed["procs"])
        environments = [Path(f"/proc/{one['pid']}/environ").read_bytes() for one in listed["procs"]]
        assert all(f"{RUN_MARK}={holder['mark']}".encode() in one for one in environments)
        second = ["--config", str(config_file), f"run_dir={run_dir}", "--resume", "latest"]
        code, _, err = run_here(*second)
        assert code == 2 and f"(process {holder['pid']} on {holder['host']}, since " in err

        seen.look()
        first = seen.running()
        os.kill(holder["pid"], signal.SIGKILL)
        wait_until(lambda: num_recovered(run_dir) == 1 or process.poll() is not None, seen)
        marks = {holder["mark"], mark_in(run_dir)}
        resumed_at = newest(run_dir)
        assert resumed_at >= 2, "from a checkpoint"
        wait_until(lambda: newest(run_dir) > resumed_at or process.poll() is not None, seen)
        assert process.poll() is None
        assert [one for one in first if is_running(one)] == [seen.root]
        assert not list(SHARED_MEMORY.glob(f"*-{holder['pid']}-*"))

        seen.look()
        send_signal(seen.running())
        process.communicate(timeout=END_S)
        wait_until(lambda: not seen.running(), seen, END_S)
    finally:
        send_signal(seen.running())
        process.wait()
    process = start(config_file, f"run_dir={run_dir}", "--resume", "latest")
    out = finish_well(process, deadline_s=WAIT_S)
    assert "the controller of this run has died: process " in out
    assert not seen.files() and not list(SHARED_MEMORY.glob(f"*-{controller_of(run_dir)}-*"))
    marks.add(mark_in(run_dir))
    assert len(marks) == 3 and not [file for mark in marks for file in files_of(mark)]

    lines = read_lines(run_dir / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(NUM_STEPS + 1))
    assert lines[-1]["faults/detected_controller"] == lines[-1]["faults/recovered_controller"] == 2
    events = [(one["event"], one["number"], one["role"]) for one in read_lines(run_dir / "faults.jsonl")]
    assert events == [(what, one, "controller") for one in (0, 1) for what in ("detected", "recovered")]
    assert check_ledger(run_dir)["ends"]["trained"] == 4 * NUM_STEPS
