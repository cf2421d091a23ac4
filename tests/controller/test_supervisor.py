"""The process that starts a run again, with a small program in the run's place."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from forgeasync.controller import Supervisor, has_ended, newest_step, supervisor
from forgeasync.observability import RunDir, RunInUse, RunLock
from forgeasync.processes import is_running
from tests.support.disks import Disk, install
from tests.support.processes import wait_until

pytestmark = pytest.mark.processes

RUN = """
import json, os, signal, subprocess, sys, time
from pathlib import Path
from forgeasync.controller.supervisor import start_beating
from forgeasync.observability.fault_log import FaultLog, Role
from forgeasync.observability.run_dir import RunDir, release_claims

run_dir = RunDir(path=Path(sys.argv[1]))
plan = sys.argv[2].split(",")
resumed = sys.argv[3:]
run_dir.path.mkdir(exist_ok=True)
run_dir.claim()
starts = run_dir.path / "starts"
number = len(starts.read_text().splitlines()) if starts.exists() else 0
with starts.open("a") as file:
    file.write(" ".join(resumed) + "\\n")
# Neither the mark nor the process group tells whose it is.
orphan = subprocess.Popen(["sleep", "600"], start_new_session=True, env={})
with (run_dir.path / "orphans").open("a") as file:
    file.write(f"{orphan.pid}\\n")
run_dir.checkpoints.mkdir(exist_ok=True)
if plan[number] == "stillborn":
    release_claims()
    sys.exit(1)
faults = FaultLog(run_dir.faults)
faults.recover_earlier("came back")
for what in plan[number].split("+"):
    if what.startswith("step"):
        with run_dir.metrics.open("a") as file:
            file.write(json.dumps({"step": int(what[4:])}) + "\\n")
    elif what.startswith("checkpoint"):
        folder = run_dir.checkpoints / "step-00000001"
        folder.mkdir()
        (folder / "run.json").write_text("{}")
    elif what == "rewind":
        (run_dir.checkpoints / "step-00000002").rename(run_dir.checkpoints / "step-00000002.cut-1")
    elif what == "ended":
        (run_dir.checkpoints / "final").mkdir()
        run_dir.ledger.write_text('{"n":1,"event":"opened"}\\n{"n":2,"event":"ended"}\\n')
    elif what == "buffer":
        faults.detected(Role.BUFFER, "the buffer (process 1)", "has died")
    elif what == "log":
        with run_dir.run_log.open("a") as file:
            file.write("2030-01-01 00:00:00 failed: OSError: no luck\\n")
    elif what == "beat":
        start_beating()
    elif what == "wait":
        def stop(number, frame):
            print("told", signal.Signals(number).name, flush=True)
            orphan.kill()
            release_claims()
            sys.exit(128 + number)
        signal.signal(signal.SIGTERM, stop)
        signal.signal(signal.SIGINT, stop)
        print("ready", flush=True)
        time.sleep(600)
    elif what.startswith("exit"):
        release_claims()
        sys.exit(int(what[4:]))
    else:
        os.kill(os.getpid(), getattr(signal, what))
"""

SUPERVISOR = """
import sys
from pathlib import Path
from forgeasync.controller.supervisor import Supervisor
from forgeasync.observability.run_dir import RunDir
run_dir = RunDir(path=Path(sys.argv[1]))
supervisor = Supervisor(
    [sys.executable, *sys.argv[4:]],
    run_dir,
    run_dir.checkpoints,
    resume=sys.argv[2] or None,
    controller_s=float(sys.argv[3]),
)
heavy = [name for name in ("torch", "vllm", "monarch", "transformers") if name in sys.modules]
assert not heavy, heavy
sys.exit(supervisor.run())
"""


@contextmanager
def supervised(
    folder: Path, *plan: str, resume: str = "", controller_s: float = 600.0
) -> Iterator[subprocess.Popen[str]]:
    """A supervisor of a program whose n-th start does what the n-th part of the plan says."""
    script = folder.with_name("run.py")
    script.write_text(RUN)
    process = subprocess.Popen(
        [
            *(sys.executable, "-c", SUPERVISOR, str(folder), resume, str(controller_s)),
            *(str(script), str(folder), ",".join(plan)),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        for pid in orphans(folder):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def orphans(folder: Path) -> list[int]:
    """Those that still run."""
    file = folder / "orphans"
    pids = map(int, file.read_text().split()) if file.exists() else ()
    found = []
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            if is_running(pid) and psutil.Process(pid).name() == "sleep":
                found.append(pid)
    return found


def events(folder: Path) -> list[tuple[str, str, str]]:
    lines = [json.loads(line) for line in (folder / "faults.jsonl").read_text().splitlines()]
    return [(line["event"], line["role"], line.get("what", line.get("how"))) for line in lines]


def run_to_the_end(folder: Path, *plan: str, resume: str = "", code: int = 0) -> str:
    """Run a supervisor to its end; return what it says on stderr."""
    with supervised(folder, *plan, resume=resume) as process:
        _, err = process.communicate()
        assert process.returncode == code, err
        assert not orphans(folder), "a session and an environment of its own hide nothing"
    return err


def until_ready(process: subprocess.Popen[str]) -> None:
    """Wait until the plan has come to ``wait``."""
    assert process.stdout is not None and process.stdout.readline() == "ready\n"


def child_of(process: subprocess.Popen[str]) -> psutil.Process:
    (child,) = (one for one in psutil.Process(process.pid).children() if "run.py" in str(one.cmdline()))
    return child


def test_a_run_that_is_killed_comes_back_until_it_is_done(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    plan = ["step1+SIGKILL", "step1+checkpoint+step2+SIGSEGV", "log+exit1", "SIGKILL", "step3+ended+exit0"]
    err = run_to_the_end(folder, *plan)
    run_dir = RunDir(path=folder)
    assert (folder / "starts").read_text().splitlines() == ["", "", *["--resume latest"] * 3]
    assert (folder / "metrics.cut-1.jsonl").read_text() == '{"step": 1}\n', "the first had no checkpoint"
    assert [json.loads(line)["step"] for line in run_dir.metrics.read_text().splitlines()] == [1, 2, 3]
    whys = [
        "was killed by SIGKILL",
        "was killed by SIGSEGV",
        "has ended with exit code 1: failed: OSError: no luck",
        "was killed by SIGKILL",
    ]
    assert events(folder) == [
        (event, "controller", words)
        for why in whys
        for event, words in (("detected", why), ("recovered", "came back"))
    ]
    assert "without a checkpoint the run starts over; moved to metrics.cut-1.jsonl" in err
    assert has_ended(run_dir) and newest_step(run_dir.metrics) == 3


@pytest.mark.exhaustive
def test_a_given_checkpoint_is_gone_on_from_until_later_ones_are_out_of_the_way(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    for name in ("step-00000001", "step-00000002"):
        (folder / "checkpoints" / name).mkdir(parents=True)
        (folder / "checkpoints" / name / "run.json").write_text("{}")
    given = str(folder / "checkpoints" / "step-00000001")
    run_to_the_end(folder, "SIGKILL", "rewind+SIGKILL", "exit0", resume=given)
    starts = (folder / "starts").read_text().splitlines()
    assert starts == [f"--resume {given}", f"--resume {given}", "--resume latest"]


@pytest.mark.parametrize(
    ("plan", "code", "expected"),
    [
        pytest.param(["exit2"], 2, "", marks=pytest.mark.exhaustive, id="refused"),
        pytest.param(["exit0"], 0, "", id="done"),
        pytest.param(["exit143"], 143, "", id="stopped"),
        pytest.param(
            ["step1+ended+SIGKILL"], 0, "detected controller, recovered controller", id="dies after its end"
        ),
        pytest.param(
            ["step1+checkpoint+buffer+exit1", "stillborn", "step2+exit0"],
            0,
            "detected buffer, detected controller, recovered buffer, recovered controller",
            marks=pytest.mark.exhaustive,
            id="a start fails while the fault of an earlier one is open",
        ),
        pytest.param(
            # Nothing says of the second one that it was about to end.
            ["step1+checkpoint+buffer+exit1", "step2+buffer+SIGKILL", "exit0"],
            0,
            "detected buffer, recovered buffer, detected buffer, detected controller, recovered buffer, "
            "recovered controller",
            marks=pytest.mark.exhaustive,
            id="a run that ends over a lost role is that role's fault",
        ),
    ],
)
def test_an_end_is_the_fault_of_a_role_or_of_nobody(
    tmp_path: Path, plan: list[str], code: int, expected: str
) -> None:
    folder = tmp_path / "run"
    err = run_to_the_end(folder, *plan, code=code)
    did_everything = "supervisor: the run was killed by SIGKILL, after it had done everything" in err
    assert did_everything == ("ended" in plan[0])
    assert len((folder / "starts").read_text().splitlines()) == len(plan)
    assert (folder / "faults.jsonl").exists() == bool(expected)
    if expected:
        assert ", ".join(f"{event} {role}" for event, role, _ in events(folder)) == expected


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_stop_goes_to_the_run_and_ends_both(tmp_path: Path, number: signal.Signals) -> None:
    folder = tmp_path / "run"
    with supervised(folder, "SIGKILL", "wait") as process:
        until_ready(process)
        process.send_signal(number)
        out, err = process.communicate()
        assert process.returncode == 128 + number, err
        assert out == f"told {number.name}\n"
    assert len(events(folder)) == 2, "being stopped is no fault"


def test_a_folder_that_another_run_has_taken_meanwhile_is_left_alone(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with supervised(folder, "wait", "exit0") as process:
        until_ready(process)
        run_dir = RunDir(path=folder)
        child = child_of(process)
        with pytest.raises(RunInUse, match=rf"process {child.pid} on .*, since 20\d\d-\d\d-\d\d "):
            RunLock.take(run_dir.lock, "0")
        # The supervisor stands still, so that the other one comes first.
        process.send_signal(signal.SIGSTOP)
        child.kill()
        wait_until(lambda: child.status() == psutil.STATUS_ZOMBIE)
        lock = RunLock.take(run_dir.lock, "0")
        assert lock.before is not None and (lock.before.pid, lock.before.has_ended) == (child.pid, False)
        process.send_signal(signal.SIGCONT)
        _, err = process.communicate()
        lock.release()
        assert process.returncode == 2
        assert (
            f"gives up: {folder} is the folder of another run" in err and f"process {os.getpid()} on" in err
        )
    assert not run_dir.faults.exists(), "the other one writes there"


def test_a_folder_on_a_disk_that_fails_is_taken_when_the_disk_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run that died is still found in the file then."""
    folder, disk, num_waits = RunDir(path=tmp_path), Disk(room=1 << 20), 0
    dead = RunLock.take(folder.lock, "dead")
    os.close(dead._descriptor)
    disk.error, disk.room = errno.EIO, 0

    def wait(seconds: float) -> None:
        nonlocal num_waits
        num_waits += 1
        disk.room = (1 << 20) * (num_waits == 2)

    install(monkeypatch, disk)
    monkeypatch.setattr(supervisor.time, "sleep", wait)
    one = Supervisor([], folder, folder.checkpoints, resume=None, controller_s=4.0)
    lock = one._lock_folder()
    assert lock.before is not None and lock.before.mark == "dead" and num_waits == 2
    assert capsys.readouterr().err.count("cannot be written") == 1
    lock.release()


def test_a_run_that_was_stopped_is_killed_and_comes_back(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    # The second start gives no sign of life at all, as while a program is loaded.
    with supervised(folder, "step1+checkpoint+beat+SIGSTOP", "wait", controller_s=1.0) as process:
        until_ready(process)
        time.sleep(1.5)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate()
        assert process.returncode == 143, err
    silence = "has not sent a heartbeat for timeouts.controller_s = 1 s"
    assert events(folder) == [("detected", "controller", silence), ("recovered", "controller", "came back")]
    assert f"the run {silence}: killing it; it was stopped by a signal" in err and "MainThread in " in err
    assert "with --resume latest" in err
    first, *_ = (folder / "faults.jsonl").read_text().splitlines()
    assert "run.py:" in json.loads(first)["evidence"], "where its program stood"


@pytest.mark.exhaustive
def test_a_supervisor_that_stood_still_holds_nothing_against_the_run(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with supervised(folder, "beat+wait", controller_s=4.0) as process:
        until_ready(process)
        child = child_of(process)
        for one in (process, child):
            one.send_signal(signal.SIGSTOP)
        time.sleep(supervisor.STALL_S + 1.0)
        process.send_signal(signal.SIGCONT)
        time.sleep(0.7)
        child.send_signal(signal.SIGCONT)
        time.sleep(2.0)
        process.send_signal(signal.SIGTERM)
        process.communicate()
        assert process.returncode == 143
    assert not (folder / "faults.jsonl").exists()


def test_a_run_goes_on_without_its_supervisor_and_the_next_one_finds_it(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with supervised(folder, "beat+wait", "exit0") as process:
        until_ready(process)
        child = child_of(process)
        num_threads = child.num_threads()
        process.kill()
        process.wait()
        with supervised(folder, "beat+wait", "exit0") as second:
            _, err = second.communicate()
            assert second.returncode == 2, err
        assert f"process {child.pid} on " in err
        # Its thread has written into the pipe of the supervisor that is gone, and ends.
        wait_until(lambda: child.num_threads() < num_threads)
        assert is_running(child.pid)
        child.terminate()
        child.wait()
    assert not (folder / "faults.jsonl").exists()


@pytest.mark.parametrize(
    ("text", "step"), [("", 0), ('{"step": 0}\n', 0), ('{"step": 4}\n{"step": 5}\n{"st', 5), ('{"st', 0)]
)
def test_the_newest_step_is_that_of_the_last_whole_line(tmp_path: Path, text: str, step: int) -> None:
    file = tmp_path / "metrics.jsonl"
    assert newest_step(file) == 0
    file.write_text(text)
    assert newest_step(file) == step
