"""Runs whose hosts are processes, with nothing shared but sockets: what travels, and how they end."""

import os
import re
import signal
import subprocess
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from forgeasync.config import dump_config
from forgeasync.testing import tiny_config, write_tiny_model
from tests.support.app_runs import DEADLINE_S, NEVER_ENDING, REPOSITORY, read_lines, wait_for_step
from tests.support.processes import send_signal
from tests.support.tiers import Starts, starts
from tests.support.warm_python import REAL_PYTHON

pytestmark = pytest.mark.exhaustive

MARK = "FORGEASYNC_TEST_RUN"
"""In the environment of everything that a run starts, in whatever session."""

FOLDER = re.compile(r"(/dev/shm/forgeasync_payloads-[^/\s]+)/")
HOST = re.compile(r"(trainer|generators)_\d+$")


@dataclass(slots=True)
class Run:
    """A run of many hosts, with what its processes have mapped of shared memory."""

    process: subprocess.Popen[str]
    mark: str
    users: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    """By folder in shared memory, the hosts whose processes had files of it mapped."""

    def processes(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                is_alive = process.status() != psutil.STATUS_ZOMBIE
                if is_alive and process.environ().get(MARK) == self.mark:
                    found.append(process)
        return found

    def host(self, name: str) -> psutil.Process:
        """The process that is a host."""
        found = []
        for process in self.processes():
            # Others may end meanwhile.
            with suppress(ProcessLookupError, psutil.NoSuchProcess):
                if os.getsid(process.pid) == process.pid and _host(process) == name:
                    found.append(process)
        (host,) = found
        return host

    def look(self) -> None:
        for process in self.processes():
            with suppress(OSError, psutil.NoSuchProcess):
                maps = Path(f"/proc/{process.pid}/maps").read_text()
                name = _host(psutil.Process(os.getsid(process.pid)))
                for folder in FOLDER.findall(maps):
                    self.users[folder].add(name)

    def wait(self, until: Callable[[], bool]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not until():
            assert time.monotonic() < deadline
            self.look()
            time.sleep(1.0)

    def finish(self) -> tuple[int, str]:
        """Exit code and stderr; no process and no file is left."""
        _, err = self.process.communicate(timeout=DEADLINE_S)
        left = self.processes()
        assert not left, f"left behind: {[orphan.pid for orphan in left]}"
        assert not [folder for folder in self.users if Path(folder).exists()]
        return self.process.returncode, err


def _host(session: psutil.Process) -> str:
    """The host that a session's first process is; the controller has none."""
    name = session.environ().get("HYPERACTOR_PROCESS_NAME", "")
    return name if HOST.fullmatch(name) else "controller"


@pytest.fixture(scope="module")
def config_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hosts")
    file = folder / "run.yaml"
    file.write_text(dump_config(tiny_config(write_tiny_model(folder / "model"))))
    return file


@pytest.fixture
def start(config_file: Path) -> Iterator[Callable[..., Run]]:
    """Starts runs with overrides; whatever happens, nothing is left running."""
    runs: list[Run] = []

    def start_one(*overrides: str) -> Run:
        runs.append(_start(config_file, *overrides))
        return runs[-1]

    yield start_one
    for run in runs:
        send_signal(run.processes())


@starts(Starts.PROCESSES)
def _start(config_file: Path, *overrides: str) -> Run:
    mark = uuid.uuid4().hex
    # Not the warm Python: what it starts would not be in its host's session.
    command = [REAL_PYTHON, "-m", "apps.grpo", "--config", str(config_file)]
    process = subprocess.Popen(
        [*command, "launcher.kind=process", *overrides],
        cwd=REPOSITORY,
        env=os.environ | {"OMP_NUM_THREADS": "1", MARK: mark},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    return Run(process=process, mark=mark)


def test_weights_and_payloads_travel_between_hosts_that_share_no_memory(
    start: Callable[..., Run], tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    run = start(
        f"run_dir={run_dir}",
        "launcher.hosts={trainer: 1, generators: 2}",
        "generator.num_replicas=2",
        "max_off_policy_steps=1",
    )
    run.wait(lambda: run.process.poll() is not None)
    code, err = run.finish()
    assert code == 0, err
    _, *steps = read_lines(run_dir / "metrics.jsonl")
    assert [line["policy_version"] for line in steps] == [1, 2, 3]
    for line in steps:
        assert line["payload/num_read_shared"] == 0 < line["payload/num_read_remote"]
        assert line["weights/num_bad_blocks"] == 0
        if line["off_policy/age_max"] == 0:
            assert line["mismatch/logprob_abs_max"] < 1e-4
    # Staging buffers, and the generators' receive buffers, stay mapped for as long as the run lasts.
    hosts = set().union(*run.users.values())
    assert hosts == {"trainer_0", "generators_0", "generators_1"}, run.users
    assert all(len(users) == 1 for users in run.users.values()), run.users
    logs = {file.name for file in (run_dir / "logs").iterdir()}
    assert {"host-trainer-0.log", "host-generators-0.log", "host-generators-1.log"} <= logs


def test_a_killed_host_ends_the_run_and_is_named(start: Callable[..., Run], tmp_path: Path) -> None:
    """One of two hosts of the trainer, whose ranks have found each other before."""
    run_dir = tmp_path / "run"
    run = start(
        f"run_dir={run_dir}",
        NEVER_ENDING,
        "launcher.hosts={trainer: 2, generators: 1}",
        "max_off_policy_steps=1",
    )
    wait_for_step(run_dir, run.process)
    run.look()
    run.host("trainer_1").send_signal(signal.SIGKILL)
    code, err = run.finish()
    assert code == 1
    last = err.splitlines()[-1]
    assert "host trainer-1" in last and "lost" in last, err


@pytest.mark.timeout(1500)
def test_a_supervised_run_goes_on_after_a_trainer_host_is_lost(
    start: Callable[..., Run], tmp_path: Path
) -> None:
    """Snapshots are gone with the host; the next start has a new one and goes on from the checkpoint."""
    run_dir = tmp_path / "run"
    run = start(
        f"run_dir={run_dir}",
        NEVER_ENDING,
        "--supervise",
        "launcher.hosts={trainer: 1, generators: 1}",
        "checkpoint.every_steps=2",
        "max_off_policy_steps=1",
    )

    def newest() -> int:
        file = run_dir / "metrics.jsonl"
        return int(read_lines(file)[-1]["step"]) if file.exists() and file.read_text() else 0

    faults = run_dir / "faults.jsonl"

    def events() -> list[tuple[object, object]]:
        return [(one["event"], one["role"]) for one in read_lines(faults)] if faults.exists() else []

    run.wait(lambda: newest() >= 5)
    run.host("trainer_0").send_signal(signal.SIGKILL)
    run.wait(lambda: ("recovered", "host") in events())
    run.wait(lambda: newest() >= 7)
    run.process.send_signal(signal.SIGTERM)
    code, err = run.finish()
    assert code == 143, err
    assert events().count(("detected", "host")) == 1
    lost = next(one for one in read_lines(faults) if one["role"] == "host")
    assert "host trainer-0 (" in lost["what"] and "is lost: " in lost["what"]
    assert "with --resume latest" in err
    (resumed,) = [line for line in read_lines(run_dir / "ledger.jsonl") if line["event"] == "resumed"]
    assert resumed["step"] >= 2, "from a checkpoint"


def test_hosts_end_themselves_when_the_controller_was_killed(
    start: Callable[..., Run], tmp_path: Path
) -> None:
    run = start(f"run_dir={tmp_path / 'run'}", NEVER_ENDING, "timeouts.host_s=5")
    run.wait(lambda: len(run.users) > 0)
    run.process.send_signal(signal.SIGKILL)
    run.process.wait()
    run.wait(lambda: not run.processes())
    run.finish()
