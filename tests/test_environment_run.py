"""Whole runs with environments of two turns: what trains is what was sampled, and failures cost a group."""

import json
from pathlib import Path

import pytest
import yaml

from forgeasync.config.load import dump_config
from tests.support.models import write_random_model
from tests.support.runs import tiny_config
from tests.test_grpo_app import finish, read_lines, start

SUPPORT = "tests.support.environments"


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


def spans_of(rollout: dict) -> list[list[int]]:
    return rollout["version_spans"]


def test_both_turns_train_as_exactly_as_one(config_file: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    code, out, err = finish(
        start(
            config_file,
            f"run_dir={run_dir}",
            "max_off_policy_steps=1",
            f"environment={{kind: python, factory: {SUPPORT}.TryAgain, options: {{hint: '4 - 5 ='}}}}",
        )
    )
    assert code == 0, err
    initial, *steps = read_lines(run_dir / "metrics.jsonl")
    assert initial["eval/num_unscored"] == 0
    rollouts = [json.loads(line) for line in (run_dir / "rollouts.jsonl").read_text().splitlines()]
    assert len(rollouts) == 2 * 16
    assert [line["step"] for line in steps] == [1, 2]
    for line in steps:
        assert line["environment/mean_turns"] == 2.0 and line["environment/num_truncated"] == 0
        assert line["environment/mean_episode_s"] > 0
        assert line["dropped/episode_failed"] == line["dropped/bad_record"] == 0
        # As small as with a single turn, over the tokens of both.
        assert line["mismatch/fresh_logprob_abs_mean"] < 1e-5
        assert line["mismatch/logprob_abs_max"] < 1e-4 or line["off_policy/age_max"] > 0
        assert line["routing/recorded_share"] == 1.0
        mine = [rollout for rollout in rollouts if rollout["step"] == line["step"]]
        sampled = [end - start for rollout in mine for _, start, end in spans_of(rollout)]
        num_trained = line["throughput/train_tokens_per_s"] * line["time/step_s"]
        assert round(num_trained) == sum(sampled), "the trained tokens are exactly the sampled ones"
        assert line["response/length_mean"] * len(mine) == pytest.approx(sum(sampled))
        assert sum(rollout["response_tokens"] for rollout in mine) > sum(sampled), "some were given"
    for rollout in rollouts:
        assert rollout["response"].count("4 - 5 =") >= 1
        assert len(spans_of(rollout)) >= 2
    assert steps[-1]["payload/num_bytes_held"] == 0
    assert "environment ready" in out


def test_an_episode_that_fails_costs_its_group(config_file: Path, tmp_path: Path) -> None:
    """Its prompt comes again and is given up for good in the end; the others train."""
    run_dir = tmp_path / "run"
    code, out, err = finish(
        start(
            config_file,
            f"run_dir={run_dir}",
            "max_steps=3",
            "timeouts.episode_s=5",
            "buffer.max_given_up_in_a_row=100",
            f"environment={{kind: python, factory: {SUPPORT}.FailsSometimes, "
            "options: {raises: '7', hangs: '3'}}",
        )
    )
    assert code == 0, err
    initial, *steps = read_lines(run_dir / "metrics.jsonl")
    assert sum(line["dropped/episode_failed"] for line in steps) >= 2
    assert steps[-1]["payload/num_bytes_held"] == 0
    answers = [json.loads(line)["answer"] for line in (run_dir / "rollouts.jsonl").read_text().splitlines()]
    assert answers and not any(answer.endswith(("7", "3")) for answer in answers)
    assert f"environment {SUPPORT}.FailsSometimes, task " in out
    assert "KeyError: 'no tool of this name'" in out
    assert "took longer than 5 s; timeouts.episode_s sets this limit" in out


def test_episodes_that_fill_the_context_are_truncated(config_file: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    code, _, err = finish(
        start(
            config_file,
            f"run_dir={run_dir}",
            "max_steps=1",
            "model.max_context_length=64",
            f"environment={{kind: python, factory: {SUPPORT}.UntilFull}}",
        )
    )
    assert code == 0, err
    initial, step = read_lines(run_dir / "metrics.jsonl")
    assert initial["eval/score_mean"] == 0.0 and initial["eval/num_unscored"] == 0
    assert step["environment/num_truncated"] == 16 and step["response/truncated_share"] == 1.0
    assert step["reward/mean"] == 0.0
    lines = [json.loads(line) for line in (run_dir / "rollouts.jsonl").read_text().splitlines()]
    assert {line["finish_reason"] for line in lines} == {"length"}
    assert all(55 < line["prompt_tokens"] + line["response_tokens"] <= 64 for line in lines)
