"""A run with an environment of two turns: what trains is what was sampled, and failures cost a group."""

import json
from pathlib import Path

import pytest

from apps.show import shown
from tests.support.app_runs import finish, read_lines, start, write_episodes_run

ENVIRONMENT = "tests.support.environments.TryAgain"


@pytest.fixture(scope="module")
def config_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_episodes_run(tmp_path_factory.mktemp("environment"))


@pytest.mark.exhaustive
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
    assert "renderer plain: data.chat_template is false" in out
    rollouts = [json.loads(line) for line in (run_dir / "rollouts.jsonl").read_text().splitlines()]
    assert len(rollouts) == 2 * 16
    assert [line["step"] for line in steps] == [1, 2]
    assert steps[0]["episode/turns_mean"] == 2.0 and steps[0]["episode/mean_s"] > 0
    assert steps[-1]["episode/ended_environment_crash"] >= 3, "such an episode has three attempts"
    assert steps[-1]["episode/ended_completed"] >= len(rollouts)
    for line in steps:
        assert line["episode/ended_length"] == line["dropped/bad_record"] == 0
        assert line["environment/num_restarted_workers"] == line["episode/num_rewritten_histories"] == 0
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
        record = rollout["episode_record"]
        (branch,) = record["agents"][0]["branches"]
        assert [one["role"] for one in branch] == ["user", "assistant"] * 2
        assert branch[2]["content"] == "4 - 5 =" and record["attempts"][-1]["ending"] == "completed"
        turns = [branch[1], branch[3]]
        assert sum(one["num_tokens"] for one in turns) == sum(
            end - start for _, start, end in rollout["version_spans"]
        )
        versions = {version for version, _, _ in rollout["version_spans"]}
        assert {min(one["first_version"] for one in turns), max(one["version"] for one in turns)} <= versions
        (kept,) = record["artifacts"]
        assert (run_dir / kept).read_text() == branch[3]["content"]
        assert "4 - 5 =" in rollout["response"] and len(rollout["version_spans"]) >= 2
        assert not rollout["answer"].endswith("7"), "an episode that fails is never scored"
    assert sum(line["dropped/episode_failed"] for line in steps) >= 1
    assert f"environment {ENVIRONMENT}, task " in out and "KeyError: 'no tool of this name'" in out
    assert steps[-1]["payload/num_bytes_held"] == 0
    # Of episodes that have trained, all of which are written, and of those still under way at the end.
    folders = {one.name.rpartition("-")[0] for one in (run_dir / "artifacts").iterdir()}
    assert {f"{one['group_id']}-{one['episode']}" for one in rollouts} <= folders
    assert steps[-1]["episode/num_artifacts"] >= len(rollouts)
    assert steps[-1]["eval/version_min"] == steps[-1]["eval/version_max"] == 2
    assert len(shown(run_dir, None, as_json=False)) == len(rollouts) + 1


@pytest.mark.exhaustive
def test_an_agent_with_its_own_loop_trains_through_a_session(config_file: Path, tmp_path: Path) -> None:
    """It samples two drafts, goes on from the first of them, and knows nothing of training."""
    run_dir = tmp_path / "run"
    code, _, err = finish(
        start(
            config_file,
            f"run_dir={run_dir}",
            "max_steps=20",
            "max_off_policy_steps=1",
            "environment={kind: python, factory: tests.support.own_loops.OwnLoop}",
        )
    )
    assert code == 0, err
    _, *steps = read_lines(run_dir / "metrics.jsonl")
    rollouts = [json.loads(line) for line in (run_dir / "rollouts.jsonl").read_text().splitlines()]
    assert [line["step"] for line in steps] == list(range(1, 21))
    assert steps[0]["episode/turns_mean"] == 3.0
    for line in steps:
        # Groups of a step may all have ended during the step before.
        assert line.get("episode/turns_mean", 3.0) == 3.0
        assert line.get("mismatch/fresh_logprob_abs_mean", 0.0) < 1e-5
        assert line["routing/recorded_share"] == 1.0
        mine = [rollout for rollout in rollouts if rollout["step"] == line["step"]]
        num_sampled = sum(end - start for one in mine for _, start, end in one["version_spans"])
        num_trained = line["throughput/train_tokens_per_s"] * line["time/step_s"]
        assert round(num_trained) == num_sampled, "every sampled token of all branches trains once"
    last = steps[-1]
    assert last["episode/num_rewritten_histories"] == last["episode/num_turns_from_text"] == 0
    assert last["session/num_requests"] >= 2 * len(rollouts) and last["session/num_failed"] == 0
    assert last["session/num_not_honoured"] >= len(rollouts), "the drafts' temperature"
    assert last["payload/num_bytes_held"] == 0


@pytest.mark.exhaustive
def test_a_model_without_a_chat_template_calls_python_during_a_run(config_file: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    plain = "{call_prefix: '+', call_suffix: '-', result_suffix: ' = ', error_text: '0'}"
    code, _, err = finish(
        start(
            config_file,
            f"run_dir={run_dir}",
            f"environment={{kind: python_tool, max_rounds: 3, plain_calls: {plain}}}",
        )
    )
    assert code == 0, err
    _, *steps = read_lines(run_dir / "metrics.jsonl")
    assert [line["step"] for line in steps] == [1, 2]
    last = steps[-1]
    num_calls = sum(num for key, num in last.items() if key.startswith("episode/num_tool_calls_"))
    assert num_calls > last["episode/num_tool_calls_unreadable"] > 0
    assert 1.0 < last["episode/turns_mean"] <= 4.0
    assert 0.0 < last["episode/tool_call_p50_s"] <= last["episode/tool_call_max_s"] < last["episode/max_s"]
    assert last["episode/ended_completed"] >= 2 * 16
    assert last["episode/ended_infrastructure"] == last["episode/ended_environment_crash"] == 0
    assert last["mismatch/fresh_logprob_abs_mean"] < 1e-5
