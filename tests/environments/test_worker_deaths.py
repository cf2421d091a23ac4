"""A run whose environment workers are killed and stopped while it trains."""

import json
import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import yaml

from forgeasync.config import dump_config
from forgeasync.testing import tiny_config, write_tiny_model
from tests.support.app_runs import finish, read_lines, start

ENVIRONMENT = "tests.support.environments.SlowSteps"


NUM_KILLS = 10


@pytest.mark.exhaustive
@pytest.mark.timeout(1500)
def test_workers_that_die_cost_no_group(tmp_path: Path) -> None:
    """Every second death is a stop: the worker is alive and answers nothing."""
    config = yaml.safe_load(dump_config(tiny_config(write_tiny_model(tmp_path / "model", scale=8.0))))
    config["trainer"]["parallel"] = {"num_procs": 1}
    config["sampling"] = {"max_response_tokens": 12, "temperature": 0.8}
    config["logging"] = {"rollouts_per_step": 100}
    config["evaluation"] = {"num_problems": 2, "every_steps": 1000}
    config["max_steps"] = 14
    config["episodes"] = {"num_workers": 4, "heartbeat_s": 5.0, "max_attempts": 100}
    pids, run_dir = tmp_path / "pids", tmp_path / "run"
    options = f"{{pids: {pids}, pause_s: 0.5}}"
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(config))
    process = start(
        file,
        f"run_dir={run_dir}",
        "max_off_policy_steps=1",
        f"environment={{kind: python, factory: {ENVIRONMENT}, options: {options}}}",
    )
    killed: set[int] = set()
    seen = 0
    while len(killed) < NUM_KILLS and process.poll() is None:
        # Steps take a second: all deaths have to come well before the last one.
        time.sleep(0.5)
        lines = pids.read_text().split() if pids.exists() else []
        fresh = [int(line) for line in lines[seen:] if int(line) not in killed]
        # A worker that did not answer in time may have been replaced.
        with suppress(IndexError, ProcessLookupError):
            os.kill(fresh[-1], signal.SIGSTOP if len(killed) % 2 else signal.SIGKILL)
            seen = len(lines)
            killed.add(fresh[-1])
    code, out, err = finish(process, deadline_s=600.0)
    assert code == 0, err
    assert len(killed) == NUM_KILLS
    _, *steps = read_lines(run_dir / "metrics.jsonl")
    assert [line["step"] for line in steps] == list(range(1, config["max_steps"] + 1))
    # A worker that a slow machine kept from answering for so long is replaced as well.
    num_restarted = steps[-1]["environment/num_restarted_workers"]
    assert num_restarted >= NUM_KILLS
    assert steps[-1]["episode/ended_infrastructure"] >= 1
    assert out.count("its episodes run again elsewhere") == num_restarted
    assert sum(line["dropped/episode_failed"] for line in steps) == 0, "a lost episode costs no group"
    rollouts = [json.loads(line) for line in (run_dir / "rollouts.jsonl").read_text().splitlines()]
    groups = {(one["group_id"], one["step"]) for one in rollouts}
    assert len(groups) == len({group_id for group_id, _ in groups}), "no group trains twice"
    assert all("4 - 5 =" in one["response"] for one in rollouts), "whole episodes train"
    assert not any(psutil.pid_exists(pid) for pid in {*killed, *map(int, pids.read_text().split())})
