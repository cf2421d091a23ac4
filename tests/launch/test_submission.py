"""What is told of a Slurm job that does not start, by stand-ins for Slurm's commands; nothing is started."""

import asyncio
import json
import os
from pathlib import Path

import pytest

from forgeasync.config import SlurmLauncher
from forgeasync.launch import LaunchFailed, Submission, build_job, submission
from forgeasync.testing import HandTime
from tests.support.processes import run_apart

SLURM = SlurmLauncher(kind="slurm", gpus_per_host=8, partition="gpu")
TAKEN = "echo Submitted batch job 7"


@pytest.fixture
def commands(tmp_path: Path) -> Path:
    """A folder for PATH; ``scancel`` writes down which jobs it was given."""
    write(tmp_path, "scancel", f'echo "$@" >> {tmp_path}/cancelled')
    return tmp_path


def write(folder: Path, name: str, script: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


def write_squeue(folder: Path, state: str | None, told: str) -> None:
    """Job 7 as ``--json`` has it (None: no longer), and as it is told in words."""
    jobs = [] if state is None else [{"job_id": 7, "job_state": [state]}]
    text = json.dumps({"jobs": jobs})
    write(folder, "squeue", f"case \"$*\" in *--json*) echo '{text}';; *) echo '{told}';; esac")


def start(commands: Path, limit_s: int | None, *, is_interrupted: bool = False) -> tuple[str, str]:
    """Words of the failure, and what was cancelled; a process of its own, which sets Monarch up.

    With a limit no time passes until the job is said to wait. An interruption comes while sbatch runs, which
    has made a file ``begun`` and waits for a file ``go``.
    """
    words = run_apart(_start, commands, limit_s, is_interrupted)
    cancelled = commands / "cancelled"
    return words, cancelled.read_text() if cancelled.exists() else ""


def _start(commands: Path, limit_s: int | None, is_interrupted: bool) -> str:
    submission.TELL_S = 0.0
    os.environ["PATH"] = f"{commands}:{os.environ['PATH']}"
    launcher = SLURM.model_copy(update={"start_timeout_s": limit_s})
    clock = HandTime()
    return clock.run(_start_and_end(clock, launcher, commands, is_interrupted))


async def _start_and_end(
    clock: HandTime, launcher: SlurmLauncher, commands: Path, is_interrupted: bool
) -> str:
    logs = commands / "logs"
    job = Submission(build_job(launcher, "test", logs), launcher, logs)
    told: list[str] = []
    starting = asyncio.create_task(job.start(told.append))
    if is_interrupted:
        await clock.stand_until((commands / "begun").exists)
        starting.cancel()
        (commands / "go").touch()
    elif launcher.start_timeout_s is not None:
        await clock.stand_until(lambda: any("PENDING" in one for one in told) or starting.done())
        clock.advance(launcher.start_timeout_s)
    try:
        await starting
    except (LaunchFailed, asyncio.CancelledError) as error:
        return "\n".join([*told, str(error)])
    finally:
        await job.end()
    return "started"


def test_a_job_that_waits_too_long_is_cancelled_with_slurms_reason(commands: Path) -> None:
    write(commands, "sbatch", TAKEN)
    write_squeue(commands, "PENDING", "PENDING (QOSMaxNodePerUserLimit)")
    text, cancelled = start(commands, 3)
    *told, words = text.splitlines()
    pending = "Slurm job 7 is PENDING (QOSMaxNodePerUserLimit)"
    assert told[-1] == pending and told.count(pending) == 1, "once, as it does not change"
    assert words.startswith("Slurm job 7 has not started within 3 s (launcher.start_timeout_s): it is ")
    assert "it is PENDING (QOSMaxNodePerUserLimit). It is cancelled now." in words
    assert "2 nodes of partition gpu" in words
    assert cancelled == "7\n"


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ("CANCELLED", "Slurm job 7 was cancelled by someone other than this run (scancel)"),
        ("TIMEOUT", "Slurm job 7 has reached its time limit"),
        ("PREEMPTED", "Slurm job 7 was preempted by another job"),
    ],
)
def test_a_job_that_has_gone_from_the_queue_is_told_as_what_it_is(
    commands: Path, state: str, words: str
) -> None:
    write(commands, "sbatch", TAKEN)
    write_squeue(commands, None, f"{state} (None)")
    told, _ = start(commands, None)
    assert told.splitlines()[-1].startswith(words), told


def test_a_job_that_waits_again_after_its_start_is_told_as_that(tmp_path: Path) -> None:
    """Its hosts are lost, and nothing else says why."""
    why = run_apart(_why_gone, tmp_path)
    assert why == [None, "Slurm job 7 was put back into the queue (scontrol requeue), which ends its hosts"]


def _why_gone(commands: Path) -> list[str | None]:
    os.environ["PATH"] = f"{commands}:{os.environ['PATH']}"
    write_squeue(commands, "PENDING", "PENDING (BeginTime)")
    job = Submission(build_job(SLURM, "test", commands), SLURM, commands)
    job._slurm_id = "7"
    before = asyncio.run(job.why_gone())
    job._has_hosts = True
    return [before, asyncio.run(job.why_gone())]


def test_a_job_that_slurm_refuses_has_slurms_words(commands: Path) -> None:
    write(commands, "sbatch", "echo 'sbatch: error: invalid partition specified: gpu' >&2; exit 1")
    write_squeue(commands, None, "")
    words, cancelled = start(commands, 60)
    assert "sbatch: error: invalid partition specified: gpu" in words
    assert cancelled == ""


def test_a_run_that_is_ended_while_it_submits_cancels_what_it_gets(commands: Path) -> None:
    """Between sbatch and its answer nobody knows the job's id yet."""
    wait = f"touch {commands}/begun; until [ -e {commands}/go ]; do sleep 0.01; done"
    write(commands, "sbatch", f"{wait}; {TAKEN}")
    write_squeue(commands, "PENDING", "PENDING (Resources)")
    words, cancelled = start(commands, None, is_interrupted=True)
    assert not words.startswith("Slurm job") and cancelled.split("\n")[0] == "7", (words, cancelled)
