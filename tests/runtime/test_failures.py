"""Why a run has ended: who died of what, and what its folder keeps of it."""

import asyncio
import functools
import os
import re
import subprocess
import sys
import warnings
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError

from forgeasync.observability import Role, RunLog, failure_line, run_log
from forgeasync.runtime import ActorDied, HostLost, LocalHosts, Proc, ProcessManager, read_report
from forgeasync.waiting import DeadlineExceeded, deadline
from tests.support.disks import Disk, install

KILLED = """The actor <root>.<forgeasync.runtime.trainer.TrainerActor trainer{'procs': 1/2}> and all its descendants have failed:
  the process this actor was running on failed: Killed(sig=9)"""  # noqa: E501
KILLED_ON_HOSTS = """The actor <root>.<monarch._src.spmd.actor.SPMDActor _SPMDActor{'hosts': 1/2, 'procs': 1/3}> and all its descendants have failed:
  the process this actor was running on failed: Killed(sig=9)"""  # noqa: E501
SILENT = """The actor trainer-1<e53rFKMEXeP>@trainer-1<e53rFKMEXeP>.ipc://@KUw,proc_agent and all its descendants have failed:
  timeout waiting for message from proc mesh agent while querying for "spmdactor-H1m". The process likely crashed"""  # noqa: E501


@pytest.mark.parametrize(
    ("report", "expected", "has_signal"),
    [
        (KILLED, "trainer rank 1 of 2 was killed by signal 9 (SIGKILL; the kernel does so when", True),
        (KILLED.replace("sig=9", "sig=11"), "trainer rank 1 of 2 was killed by signal 11 (SIGSEGV)", True),
        (KILLED.replace("sig=9", "sig=99"), "trainer rank 1 of 2 was killed by signal 99 (unknown)", True),
        (KILLED.replace(" trainer{", " _SPMDActor{"), "trainer rank 1 of 2 was killed by signal 9", True),
        (KILLED_ON_HOSTS, "trainer rank 4 of 6 was killed by signal 9", True),
        (KILLED.replace(" trainer{", " generator{"), "generator rank 1 of 2 was killed", True),
        (SILENT, "trainer rank 1 is gone (The actor", False),
        # Procs of a trainer that has replaced another one have its number in their names.
        (SILENT.replace("trainer-1<", "trainer-9-1<"), "trainer rank 1 is gone (The actor", False),
        ("something else", "something else", False),
    ],
)
def test_a_report_names_rank_signal_and_log(report: str, expected: str, has_signal: bool) -> None:
    death = read_report(report, Path("logs"))
    assert death.text.startswith(expected) and death.has_signal == has_signal
    assert "\n" not in death.text
    if report != "something else":
        role, _, rank, *_ = expected.split()
        assert f"see logs/{role}-{rank}.log" in death.text


class Machine:
    """A host on which some processes have ended."""

    id = "h"

    def __init__(self, *ended: int) -> None:
        self._ended = ended

    async def is_running(self, pid: int) -> bool:
        return pid not in self._ended


@asynccontextmanager
async def run_of(manager: ProcessManager) -> AsyncIterator[ProcessManager]:
    """The body is a run, whose end names deaths."""
    try:
        async with manager.naming_deaths():
            yield manager
    finally:
        await manager.close()


async def fail_beside_a_death(host: Machine, report: Callable[[ProcessManager], object]) -> None:
    """A run whose trainer misses a deadline."""
    async with run_of(ProcessManager(Path("logs"))) as manager, asyncio.TaskGroup() as loops:
        manager.peers = [Proc(role="trainer", rank=rank, pid=100 + rank, host=host) for rank in range(2)]
        loops.create_task(asyncio.sleep(60))
        report(manager)
        async with deadline(0.01, call="the trainer making step 3", key="timeouts.train_step_s"):
            await asyncio.sleep(60)


class FailingHosts(LocalHosts):
    """They fail as they are watched, or only as they are closed."""

    def __init__(self, error: Exception, *, is_watched: bool) -> None:
        super().__init__()
        self._error, self._is_watched = error, is_watched

    async def watch(self) -> None:
        if self._is_watched:
            raise self._error
        await super().watch()

    async def close(self) -> None:
        await super().close()
        if isinstance(self._error, HostLost):
            raise self._error


@pytest.mark.parametrize("is_watched", [True, False])
async def test_a_lost_host_is_one_fault_of_its_own_role(is_watched: bool) -> None:
    manager = ProcessManager(Path("logs"), FailingHosts(HostLost("host b is lost"), is_watched=is_watched))
    await manager.open(lambda line: None)
    if is_watched:
        with pytest.raises(HostLost, match="host b"):
            await manager.watch()
    with pytest.raises(HostLost, match="host b"):
        await manager.close()
    (fault,) = manager.faults.open
    assert (fault.role, fault.what) == (Role.HOST, "are not whole: host b is lost")


async def test_hosts_that_cannot_be_watched_any_more_end_the_run() -> None:
    unwatched = FailingHosts(ConnectionError("no agent can be called"), is_watched=True)
    manager = ProcessManager(Path("logs"), unwatched)
    await manager.open(lambda line: None)
    with pytest.raises(ConnectionError, match="no agent can be called"):
        await manager.watch()
    await manager.close()


def soon(after_s: float, report: str, manager: ProcessManager) -> None:
    asyncio.get_running_loop().call_later(after_s, manager._on_report, report)


def report_twice(manager: ProcessManager) -> None:
    manager._on_report(SILENT)
    soon(0.1, KILLED, manager)


@pytest.mark.usefixtures("virtual_time")
@pytest.mark.parametrize(
    ("dead", "report", "message"),
    [
        (101, functools.partial(soon, 0.3, KILLED), "trainer rank 1 of 2 was killed by signal 9"),
        # Nobody reports it.
        (100, lambda manager: None, r"^trainer rank 0 \(process 100\) has ended; see logs/trainer-0.log$"),
        # A better report replaces one without a signal.
        (101, report_twice, "signal 9"),
    ],
)
async def test_a_death_is_told_instead_of_what_the_survivors_say(
    dead: int, report: Callable[[ProcessManager], object], message: str
) -> None:
    with pytest.raises(ActorDied, match=message) as caught:
        await fail_beside_a_death(Machine(dead), report)
    assert isinstance(caught.value.__cause__, ExceptionGroup), "what they say is kept behind it"


@pytest.mark.parametrize(
    "report",
    [
        *(KILLED.replace(" trainer{", actor) for actor in (" trainer{", " trainer-2{", " _SPMDActor{")),
        SILENT,
        SILENT.replace("trainer-1<", "trainer-9-1<"),
    ],
)
async def test_a_death_that_somebody_looks_after_ends_nothing(
    monkeypatch: pytest.MonkeyPatch, report: str
) -> None:
    """Monarch's own actor in the proc, by which ranks meet, is reported too, and a proc that is silent."""
    monkeypatch.setattr("forgeasync.runtime.process_manager.BETTER_REPORT_S", 0.0)
    for owned, ends_the_run in ((["trainer"], False), ([], True)):
        manager = ProcessManager(Path("logs"))
        manager.owned.update(owned)
        manager._on_report(report)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert manager._failure.done() == ends_the_run
        await manager.close()


@pytest.mark.usefixtures("virtual_time")
async def test_without_a_death_the_error_is_the_run_s_own() -> None:
    with pytest.raises(ExceptionGroup) as caught:
        await fail_beside_a_death(Machine(), lambda _: None)
    (error,) = caught.value.exceptions
    assert isinstance(error, DeadlineExceeded)


async def test_a_death_that_is_named_comes_before_what_monarch_says_of_it() -> None:
    with pytest.raises(ActorDied, match="rank 1"):
        async with run_of(ProcessManager(Path("logs"))):
            raise ExceptionGroup("loops", [SupervisionError("Endpoint call failed"), ActorDied("rank 1")])


# --- run.log ---


def test_the_log_holds_start_lines_warnings_and_the_reason(tmp_path: Path) -> None:
    file = tmp_path / "run.log"
    with pytest.raises(ExceptionGroup), warnings.catch_warnings():
        with RunLog(file) as log:
            log.line("step 1/4")
            run_log.logging.captureWarnings(True)
            warnings.simplefilter("always")
            warnings.warn("careful", stacklevel=1)
            raise ExceptionGroup("loops", [AssertionError(), ValueError("later")])
    run_log.logging.captureWarnings(False)
    text = file.read_text()
    for expected in ("command: ", "commit: ", "torch 2.", "transformers ", f"{os.cpu_count()} cores"):
        assert expected in text
    assert " step 1/4\n" in text and "careful" in text
    assert "Traceback" in text and "ValueError: later" in text
    assert "failed: AssertionError: no message, never raised\n" in text


def test_a_second_start_goes_on_in_the_same_log_and_an_interrupt_is_no_failure(tmp_path: Path) -> None:
    file = tmp_path / "run.log"
    with RunLog(file):
        pass
    assert file.read_text().splitlines()[-1].endswith(" done")
    with pytest.raises(KeyboardInterrupt), RunLog(file):
        raise KeyboardInterrupt
    text = file.read_text()
    assert text.count("command: ") == 2 and text.splitlines()[-1].endswith(" interrupted")


def test_a_log_that_cannot_be_written_hides_no_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ValueError, match="the run's own"):
        with RunLog(Path("/dev/full")) as log:
            log.line("lost")
            raise ValueError("the run's own")
    said = capsys.readouterr().err
    assert said.count("/dev/full gets its further lines later, if it can: ") == 1
    assert "/dev/full lacks its last " in said


def test_a_log_and_a_stderr_on_a_full_disk_end_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stderr", full)
        with RunLog(Path("/dev/full")) as log:
            log.line("lost")
        # What is still in its buffer is refused again.
        with pytest.raises(OSError):
            full.close()


def test_lines_of_the_log_that_a_full_disk_refuses_are_written_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    disk = Disk(1_000_000)
    install(monkeypatch, disk)
    file = tmp_path / "run.log"
    with RunLog(file) as log:
        disk.room = file.stat().st_size + 5
        log.line("first")
        log.line("second")
        assert "first" not in file.read_text()
        disk.room = 1_000_000
    assert [line.split()[-1] for line in file.read_text().splitlines()[-3:]] == ["first", "second", "done"]
    assert capsys.readouterr().err.count("later, if it can") == 1


def test_the_commit_and_whether_files_differ_from_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "forgeasync" / "observability"
    package.mkdir(parents=True)
    monkeypatch.setattr(run_log, "__file__", str(package / "run_log.py"))
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert run_log._commit() == f"none, {tmp_path} is not a git repository"
    (tmp_path / "file").write_text("a")
    identity = ["-c", "user.name=n", "-c", "user.email=e"]
    for command in (["init", "-q"], ["add", "file"], [*identity, "commit", "-qm", "m"]):
        subprocess.run(["git", "-C", str(tmp_path), *command], check=True)
    commit = run_log._commit()
    assert len(commit) == 40
    (tmp_path / "file").write_text("b")
    assert run_log._commit() == f"{commit}, with changes"


def test_the_last_line_says_what_people_know() -> None:
    assert failure_line(DeadlineExceeded("late; timeouts.x_s")) == "failed: TimeoutError: late; timeouts.x_s"
    full = RuntimeError("\n".join([*"abcd", "torch.OutOfMemoryError: CUDA out of memory. 2 GiB"]))
    assert re.search("CUDA out of memory.*--dry-run.*trainer.tokens_per_row", failure_line(full))


def test_the_command_line_can_be_run_again() -> None:
    code = "from forgeasync.observability.run_log import describe_start; print(describe_start()[0])"
    out = subprocess.run([sys.executable, "-c", code, "a b"], capture_output=True, text=True, check=True)
    assert out.stdout.startswith(f"command: {sys.executable} -c ") and out.stdout.endswith("'a b'\n")
