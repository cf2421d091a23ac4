"""A run whose generators are killed and stopped, one after the other, makes all of its steps."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.app_runs import NEVER_ENDING, check_open_ledger, finish, read_lines, start, write_tiny_run

LIMIT_S = 600.0


class Run:
    """The files of a run that goes on."""

    def __init__(self, run_dir: Path, process: subprocess.Popen[str]) -> None:
        self.run_dir = run_dir
        self.process = process

    def until(self, is_reached: Callable[[], bool]) -> None:
        end_s = time.monotonic() + LIMIT_S
        while not is_reached():
            assert self.process.poll() is None, "the run has ended"
            assert time.monotonic() < end_s, is_reached
            time.sleep(0.1)

    def num_steps(self) -> int:
        file = self.run_dir / "metrics.jsonl"
        return len(file.read_text().splitlines()) - 1 if file.exists() else 0

    def until_more_steps(self, count: int) -> None:
        wanted = self.num_steps() + count
        self.until(lambda: self.num_steps() >= wanted)

    def pid(self, rank: int) -> int:
        processes = json.loads((self.run_dir / "procs.json").read_text())["procs"]
        return next(one["pid"] for one in processes if (one["role"], one["rank"]) == ("generator", rank))

    def events(self, event: str) -> list[dict[str, object]]:
        file = self.run_dir / "faults.jsonl"
        lines = read_lines(file) if file.exists() else []
        return [line for line in lines if line["event"] == event]


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
def test_generators_are_killed_and_stopped_and_nothing_is_lost(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    process = start(
        write_tiny_run(tmp_path),
        f"run_dir={run_dir}",
        NEVER_ENDING,
        "max_off_policy_steps=2",
        "generator.num_replicas=2",
        "sampling.max_response_tokens=60",
        "checkpoint.every_steps=null",
        "evaluation.every_steps=100000",
        "logging.rollouts_per_step=100",
    )
    run = Run(run_dir, process)
    try:
        run.until(lambda: run.num_steps() >= 3)
        killed, stopped = run.pid(0), run.pid(1)
        os.kill(killed, signal.SIGKILL)
        run.until(lambda: len(run.events("recovered")) == 1)
        assert run.pid(0) != killed
        run.until_more_steps(3)
        os.kill(stopped, signal.SIGSTOP)
        run.until(lambda: len(run.events("recovered")) == 2)
        run.until_more_steps(3)
    finally:
        # The run ends in order, and whatever has happened leaves nothing behind.
        process.send_signal(signal.SIGTERM)
        _, _, err = finish(process)
    assert [event["what"] for event in run.events("detected")] == [
        "has died",
        "has not answered for generator.heartbeat_s = 8 s",
    ], err
    died, stood_still = run.events("detected")
    assert "evidence" not in died and "the controller waits in GrpoRun." in str(stood_still["evidence"])
    _, *steps = read_lines(run_dir / "metrics.jsonl")
    last = steps[-1]
    assert last["stall/num_found"] == 0
    assert last["faults/detected_generator"] == last["faults/recovered_generator"] == 2
    assert last["generator/num_healthy"] == 2 and last["generator/num_lost"] == 2
    assert last["faults/tokens_kept_share"] >= 0.95
    assert [line["step"] for line in steps] == list(range(1, len(steps) + 1))
    for line in steps:
        assert line["off_policy/age_max"] <= 2 and line["dropped/lost"] == line["dropped/late"] == 0
        assert line["dropped/bad_record"] == 0 and line["routing/recorded_share"] == 1.0
        # Tokens whose version is not that of their weights would differ far more from the trainer's.
        if line["off_policy/age_max"] == 0:
            assert line["mismatch/logprob_abs_max"] < 1e-4
    check_open_ledger(run_dir)
