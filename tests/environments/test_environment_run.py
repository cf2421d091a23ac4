"""Runs with an environment: what trains is what was sampled, and failures cost at most a group."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from apps.show import shown
from tests.support.app_runs import REPOSITORY, finish, read_lines, start, write_episodes_run
from tests.support.environment_runs import num_sampled, train, turns_of

pytestmark = pytest.mark.exhaustive


def test_both_turns_train_as_exactly_as_one(tmp_path: Path) -> None:
    factory = "tests.support.environments.TryAgain"
    environment = f"{{kind: python, factory: {factory}, options: {{hint: '4 - 5 =', failing_digit: 7}}}}"
    run = train(tmp_path, environment, "buffer.max_given_up_in_a_row=50")
    assert "renderer plain: data.chat_template is false" in run.out
    assert run.steps[0]["episode/turns_mean"] == 2.0 and run.steps[0]["episode/mean_s"] > 0
    assert run.last["episode/ended_environment_crash"] >= 3, "such an episode has three attempts"
    for line in run.steps:
        mine = run.of_step(line)
        assert line["episode/ended_length"] == line["dropped/bad_record"] == 0
        assert line["environment/num_restarted_workers"] == line["episode/num_rewritten_histories"] == 0
        # As small as with a single turn, over the tokens of both.
        assert line["mismatch/fresh_logprob_abs_mean"] < 1e-5
        assert line["mismatch/logprob_abs_max"] < 1e-4 or line["off_policy/age_max"] > 0
        assert line["response/length_mean"] * len(mine) == pytest.approx(num_sampled(*mine))
        assert sum(one["response_tokens"] for one in mine) > num_sampled(*mine), "some were given"
    for rollout in run.rollouts:
        record, turns = rollout["episode_record"], turns_of(rollout)
        (branch,) = record["agents"][0]["branches"]
        assert [one["role"] for one in branch] == ["user", "assistant"] * 2
        assert branch[2]["content"] == "4 - 5 =" and record["attempts"][-1]["ending"] == "completed"
        versions = {version for version, _, _ in rollout["version_spans"]}
        assert {min(one["first_version"] for one in turns), max(one["version"] for one in turns)} <= versions
        (kept,) = record["artifacts"]
        assert (run.run_dir / kept).read_text() == branch[3]["content"]
        assert "4 - 5 =" in rollout["response"] and len(rollout["version_spans"]) >= 2
        assert not rollout["answer"].endswith("7"), "an episode that fails is never scored"
    assert sum(line["dropped/episode_failed"] for line in run.steps) >= 1
    assert f"environment {factory}, task " in run.out and "KeyError: 'no tool of this name'" in run.out
    # Of episodes that have trained, all of which are written, and of those still in flight at the end.
    folders = {one.name.rpartition("-")[0] for one in (run.run_dir / "artifacts").iterdir()}
    assert {f"{one['group_id']}-{one['episode']}" for one in run.rollouts} <= folders
    assert run.last["episode/num_artifacts"] >= len(run.rollouts)
    assert run.last["eval/version_min"] == run.last["eval/version_max"] == 2
    assert len(shown(run.run_dir, None, as_json=False)) == len(run.rollouts) + 1


def test_a_run_trains_on_what_the_example_server_scores(tmp_path: Path) -> None:
    command = [sys.executable, "-I", "examples/remote/server.py", "0"]
    server = subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        url = server.stdout.readline().split()[-1]
        run = train(tmp_path, f"{{kind: remote, url: '{url}'}}")
    finally:
        server.kill()
        server.wait()
    assert run.last["episode/num_rewritten_histories"] == run.last["episode/num_turns_from_text"] == 0
    assert run.last["episode/ended_environment_crash"] == 0
    assert all(line["reward/turns"] == 2.0 and line["reward/mean"] > 1.0 for line in run.steps)


NUM_STEPS, NUM_KILLS = 14, 10


@pytest.mark.timeout(1500)
def test_workers_that_die_cost_no_group(tmp_path: Path) -> None:
    """Every second death is a stop: the worker is alive and answers nothing."""
    pids, run_dir = tmp_path / "pids", tmp_path / "run"
    options = f"{{pids: {pids}, pause_s: 0.5}}"
    process = start(
        write_episodes_run(tmp_path),
        f"run_dir={run_dir}",
        "max_off_policy_steps=1",
        f"max_steps={NUM_STEPS}",
        "evaluation={num_problems: 2, every_steps: 1000}",
        "episodes={num_workers: 4, heartbeat_s: 5.0, max_attempts: 100}",
        f"environment={{kind: python, factory: tests.support.environments.SlowSteps, options: {options}}}",
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
    assert [line["step"] for line in steps] == list(range(1, NUM_STEPS + 1))
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
