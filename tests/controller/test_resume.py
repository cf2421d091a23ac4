"""What a run that was killed has left is ended, and nothing else."""

import dataclasses
import fcntl
import json
import multiprocessing.shared_memory
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from forgeasync import processes
from forgeasync.controller import claim_run, end_own_run, resume, resume_or_begin_anew
from forgeasync.files import RUN_MARK, files_of
from forgeasync.observability import ProcessListFile, RunDir, leftover_processes, release_claims, run_dir
from forgeasync.processes import is_running
from forgeasync.rollouts import sweep_stale_folders
from forgeasync.schema import ConfigError
from forgeasync.testing import tiny_config

pytestmark = pytest.mark.processes


CONTROLLER = """
import multiprocessing, multiprocessing.shared_memory, subprocess, sys, time
from pathlib import Path
from forgeasync.observability.run_dir import ProcessListFile, RunDir
from forgeasync.rollouts.run_folder import create_run_folder

if __name__ == "__main__":
    run_dir = RunDir(path=Path(sys.argv[1]))
    run_dir.claim()
    sleep = ["sleep", "600"]
    marked = subprocess.Popen(sleep, start_new_session=True)
    listed = subprocess.Popen(sleep, start_new_session=True, env={})
    ProcessListFile(run_dir.procs).put("generator", 0, pid=listed.pid, host="host-0")
    lock = multiprocessing.get_context("spawn").Lock()
    memory = multiprocessing.shared_memory.SharedMemory(create=True, size=8)
    folder = create_run_folder(0)
    print(marked.pid, listed.pid, folder, flush=True)
    sys.stdin.read()
"""


@contextmanager
def controller(folder: Path) -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
    """A controller of a run in that folder, and what it has started and made."""
    process = subprocess.Popen(
        [sys.executable, "-c", CONTROLLER, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    said: list[str] = []
    try:
        assert process.stdout is not None
        said = process.stdout.readline().split()
        assert len(said) == 3
        yield process, said
    finally:
        process.kill()
        process.wait()
        for pid in said[:2]:
            if is_running(int(pid)):
                psutil.Process(int(pid)).kill()


@pytest.fixture(autouse=True)
def released(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(RUN_MARK, "none")
    yield
    release_claims()


Start = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def started() -> Iterator[Start]:
    """Starts programs that end with their test."""
    running: list[subprocess.Popen[bytes]] = []

    def start(*command: str, **options: Any) -> subprocess.Popen[bytes]:
        running.append(subprocess.Popen(command, **options))
        return running[-1]

    yield start
    for one in running:
        one.kill()
        one.wait()


SLEEP = ("sleep", "600")


def kill_at_once(process: subprocess.Popen[str]) -> None:
    """After what would remove its semaphores when it is gone."""
    for child in psutil.Process(process.pid).children():
        if "resource_tracker" in " ".join(child.cmdline()):
            child.kill()
    process.kill()
    process.wait()


def test_a_killed_controller_leaves_nothing_to_the_next_start(tmp_path: Path, started: Start) -> None:
    config = tiny_config(tmp_path).model_copy(update={"run_dir": str(tmp_path)})
    run_dir = RunDir(path=tmp_path)
    assert claim_run(config) == [] and not list(tmp_path.iterdir()), "no run was there"
    foreign = started(*SLEEP, start_new_session=True)
    with controller(tmp_path) as (process, (marked, listed, folder)):
        with pytest.raises(ConfigError, match=rf"is in progress \(process {process.pid} on "):
            claim_run(config)
        assert is_running(int(marked)) and is_running(int(listed))
        mark = json.loads(run_dir.lock.read_text())["mark"]
        assert len(list(files_of(mark))) == 2 and Path(folder).is_dir()
        kill_at_once(process)
        # Its folder is left too, until the next start of any run on this machine.
        assert is_running(int(marked)) and is_running(int(listed))
        words = claim_run(config)
        assert f"the controller of this run has died: process {process.pid} on " in words[0]
        assert words[1] == "2 processes that it had left were killed"
        assert not is_running(int(marked)) and not is_running(int(listed))
        assert not list(files_of(mark)) and not Path(folder).exists()
    assert is_running(foreign.pid)
    (line,) = map(json.loads, run_dir.faults.read_text().splitlines())
    assert (line["event"], line["role"], line["what"]) == ("detected", "controller", "has died")
    assert str(process.pid) in line["who"]
    assert os.environ[RUN_MARK] == json.loads(run_dir.lock.read_text())["mark"] != mark


def test_a_run_that_ended_in_order_is_no_fault(tmp_path: Path, started: Start) -> None:
    config = tiny_config(tmp_path).model_copy(update={"run_dir": str(tmp_path)})
    run_dir = RunDir(path=tmp_path)
    run_dir.claim()
    left = started(*SLEEP)
    release_claims()
    # Tests beside this one may leave files, which come after it.
    assert claim_run(config)[0] == "1 processes that it had left were killed"
    assert left.wait() == -9
    assert not run_dir.faults.exists()


REFUSED = """
import sys
from pathlib import Path
from forgeasync.controller import exit_code
from forgeasync.observability import RunDir
from forgeasync.schema import ConfigError, Problem

def run():
    RunDir(path=Path(sys.argv[1])).claim()
    raise ConfigError([Problem(field="seed", remedy="must be lucky")])

sys.exit(exit_code(run))
"""


def test_a_refused_start_leaves_the_folder_as_it_was(tmp_path: Path) -> None:
    run_dir = RunDir(path=tmp_path)
    run_dir.claim()
    release_claims()
    before = run_dir.lock.read_bytes()
    done = subprocess.run([sys.executable, "-c", REFUSED, str(tmp_path)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (2, "refused:\nseed: must be lucky\n")
    assert run_dir.lock.read_bytes() == before and list(tmp_path.iterdir()) == [run_dir.lock]


def test_a_start_of_another_run_removes_the_files_of_a_dead_one_but_not_of_a_live_one(tmp_path: Path) -> None:
    (tmp_path / "dead").mkdir()
    (tmp_path / "live").mkdir()
    with controller(tmp_path / "dead") as (dead, said), controller(tmp_path / "live") as (live, _):
        marks = [json.loads((tmp_path / one / "run.lock").read_text())["mark"] for one in ("dead", "live")]
        kill_at_once(dead)
        folder = Path(said[2])
        # Another host of the same run, as a process of this machine, is still there.
        other = folder.with_name(f"{folder.name[:-49]}{'0' * 16}-{marks[0]}")
        other.mkdir()
        descriptor = os.open(other, os.O_RDONLY)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        # What is there counts, not who removed it: another run on this machine may start meanwhile.
        try:
            sweep_stale_folders()
            assert not folder.exists() and other.is_dir() and len(list(files_of(marks[0]))) == 2
        finally:
            os.close(descriptor)
        sweep_stale_folders()
        assert not other.exists()
        assert not list(files_of(marks[0])) and len(list(files_of(marks[1]))) == 2
        assert live.poll() is None


def test_the_end_of_a_run_removes_what_its_killed_processes_have_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, started: Start
) -> None:
    monkeypatch.setattr(resume, "LINGER_S", 0.2)
    run_dir = RunDir(path=tmp_path)
    run_dir.claim()
    mark = os.environ[RUN_MARK]
    role = started(sys.executable, "-c", ROLE, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    late = started(*SLEEP)
    assert role.stdout is not None and role.stdout.readline() == b"made\n"
    (file,) = files_of(mark)
    role.kill()
    own = multiprocessing.shared_memory.SharedMemory(create=True, size=8)
    assert set(files_of(mark)) == {file, Path("/dev/shm") / own.name}
    end_own_run()
    assert [one.name for one in files_of(mark)] == [own.name], "this process still uses it"
    assert late.wait() == -9
    own.close()
    own.unlink()


ROLE = """
import sys
from multiprocessing import shared_memory
from forgeasync.files import name_shared_memory

name_shared_memory()
file = open("/dev/shm/" + shared_memory._make_filename()[1:], "x")
print("made", flush=True)
sys.stdin.read()
"""


def test_a_process_that_only_has_the_same_id_is_none_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, started: Start
) -> None:
    file, process = tmp_path / "procs.json", started(*SLEEP)
    listing = ProcessListFile(file)
    listing.put("generator", 0, pid=process.pid, host="host-0")
    # Of another machine, whose ids mean nothing here: this process was started by another one.
    listing.put("generator", 1, pid=os.getppid(), host="host-1")
    assert [one.pid for one in leftover_processes(file)] == [process.pid]
    (entry, other) = listing.entries
    assert entry.start_ticks is not None and other.start_ticks is None
    listing._entries["generator", 0] = dataclasses.replace(entry, start_ticks=entry.start_ticks - 1)
    listing._write()
    assert not list(leftover_processes(file)), "the id is another process's now"
    listing.put("generator", 0, pid=process.pid, host="host-0")
    boot = tmp_path / "boot"
    boot.write_text("another\n")
    monkeypatch.setattr(run_dir, "BOOT_ID", boot)
    assert not list(leftover_processes(file)), "the machine was started anew"
    assert not list(leftover_processes(tmp_path / "none.json"))


def test_what_does_not_end_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "kill", lambda processes: len(processes))
    process = psutil.Process(os.getppid())
    with pytest.raises(
        processes.NotEnded, match=rf"processes {process.pid} of a run that is over do not end within"
    ):
        processes.end_all(lambda: [process], limit_s=0.1)


def test_latest_of_a_run_without_a_checkpoint_begins_anew_and_keeps_what_there_was(tmp_path: Path) -> None:
    config = tiny_config(tmp_path).model_copy(update={"run_dir": str(tmp_path / "run")})
    run_dir = RunDir(path=tmp_path / "run")
    assert resume_or_begin_anew(config, "latest") == ("latest", []), "no run was there: it is refused later"
    run_dir.path.mkdir()
    run_dir.claim()
    release_claims()
    run_dir.metrics.write_text('{"step": 1}\n')
    run_dir.ledger.write_text("{}\n")
    claim_run(config)
    assert resume_or_begin_anew(config, "elsewhere/step-00000001") == ("elsewhere/step-00000001", [])
    (run_dir.checkpoints / "final").mkdir(parents=True)
    assert resume_or_begin_anew(config, "latest") == ("latest", []), (
        "a trained model is no reason to begin anew"
    )
    (run_dir.checkpoints / "final").rmdir()
    resume, (line,) = resume_or_begin_anew(config, "latest")
    assert resume is None and line == (
        "without a checkpoint the run starts over; moved to metrics.cut-1.jsonl, ledger.cut-1.jsonl"
    )
    assert not run_dir.ledger.exists() and not run_dir.has_trained
    assert (run_dir.path / "ledger.cut-1.jsonl").read_text() == "{}\n"
    (run_dir.checkpoints / "step-00000001").mkdir()
    (run_dir.checkpoints / "step-00000001" / "run.json").write_text("{}")
    assert resume_or_begin_anew(config, "latest") == ("latest", [])
