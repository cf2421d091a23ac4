"""A run with an environment of two turns: what trains is what was sampled, and failures cost a group."""

import json
from pathlib import Path

import pytest
import yaml

from forgeasync.config.load import dump_config
from tests.support.app_runs import finish, read_lines, start
from tests.support.models import write_random_model
from tests.support.runs import tiny_config

ENVIRONMENT = "tests.support.environments.TryAgain"


@pytest.fixture(scope="module")
def config_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One trainer proc, kept sets and routing replay on, all rollouts written."""
    folder = tmp_path_factory.mktemp("environment")
    config = yaml.safe_load(dump_config(tiny_config(write_random_model(folder / "model", scale=8.0))))
    config["trainer"]["parallel"] = {"num_procs": 1}
    config["sampling"] = {"max_response_tokens": 12, "top_k": 12, "top_p": 0.9, "temperature": 0.8}
    config["logging"] = {"rollouts_per_step": 100}
    config["evaluation"] = {"num_problems": 4}
    config["max_steps"] = 2
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(config))
    return file


def test_both_turns_train_as_exactly_as_one(config_file: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    code, out, err = finish(
        start(
            config_file,
            f"run_dir={run_dir}",
            "max_off_policy_steps=1",
            "buffer.max_given_up_in_a_row=50",
            f"environment={{kind: python, factory: {ENVIRONMENT}, "
            "options: {hint: '4 - 5 =', failing_digit: 7}}",
        )
    )
    assert code == 0, err
    initial, *steps = read_lines(run_dir / "metrics.jsonl")
    assert "eval/score_mean" in initial and "environment ready" in out
    rollouts = [json.loads(line) for line in (run_dir / "rollouts.jsonl").read_text().splitlines()]
    assert len(rollouts) == 2 * 16
    assert [line["step"] for line in steps] == [1, 2]
    assert steps[0]["environment/mean_turns"] == 2.0 and steps[0]["environment/mean_episode_s"] > 0
    for line in steps:
        assert line["environment/num_truncated"] == line["dropped/bad_record"] == 0
        # As small as with a single turn, over the tokens of both.
        assert line["mismatch/fresh_logprob_abs_mean"] < 1e-5
        assert line["mismatch/logprob_abs_max"] < 1e-4 or line["off_policy/age_max"] > 0
        assert line["routing/recorded_share"] == 1.0
        mine = [rollout for rollout in rollouts if rollout["step"] == line["step"]]
        num_sampled = sum(end - start for one in mine for _, start, end in one["version_spans"])
        num_trained = line["throughput/train_tokens_per_s"] * line["time/step_s"]
        assert round(num_trained) == num_sampled, "the trained tokens are exactly the sampled ones"
        assert line["response/length_mean"] * len(mine) == pytest.approx(num_sampled)
        assert sum(one["response_tokens"] for one in mine) > num_sampled, "some were given"
    for rollout in rollouts:
        assert "4 - 5 =" in rollout["response"] and len(rollout["version_spans"]) >= 2
        assert not rollout["answer"].endswith("7"), "an episode that fails is never scored"
    assert sum(line["dropped/episode_failed"] for line in steps) >= 1
    assert f"environment {ENVIRONMENT}, task " in out and "KeyError: 'no tool of this name'" in out
    assert steps[-1]["payload/num_bytes_held"] == 0
