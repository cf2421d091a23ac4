"""Whole runs with servers of others: every token that they had sampled trains, and nothing else."""

import json
from pathlib import Path

import pytest

from tests.support.adapters.servers import openenv_server, verifiers_server
from tests.support.app_runs import finish, read_lines, start
from tests.support.runs import write_episodes_run

pytestmark = pytest.mark.exhaustive


def run(folder: Path, environment: str, *, num_turns: int) -> None:
    file = write_episodes_run(folder)
    run_dir = folder / "run"
    code, out, err = finish(
        start(file, f"run_dir={run_dir}", "max_off_policy_steps=1", f"environment={environment}")
    )
    assert code == 0, err
    initial, *steps = read_lines(run_dir / "metrics.jsonl")
    assert "eval/score_mean" in initial and "environment ready" in out
    rollouts = [json.loads(line) for line in (run_dir / "rollouts.jsonl").read_text().splitlines()]
    assert [line["step"] for line in steps] == [1, 2] and len(rollouts) == 2 * 16
    for line in steps:
        # Groups of a step may all have ended during the step before.
        assert line.get("episode/turns_mean", num_turns) == num_turns
        assert line.get("mismatch/fresh_logprob_abs_mean", 0.0) < 1e-5
        assert line["routing/recorded_share"] == 1.0
        mine = [rollout for rollout in rollouts if rollout["step"] == line["step"]]
        num_sampled = sum(end - begin for one in mine for _, begin, end in one["version_spans"])
        num_trained = line["throughput/train_tokens_per_s"] * line["time/step_s"]
        assert round(num_trained) == num_sampled, "the trained tokens are exactly the sampled ones"
    for rollout in rollouts:
        # One branch: no turn was rendered anew from text.
        (branch,) = rollout["episode_record"]["agents"][0]["branches"]
        turns = [one for one in branch if one["role"] == "assistant"]
        assert len(turns) == num_turns
        assert sum(one["num_tokens"] for one in turns) == sum(
            end - begin for _, begin, end in rollout["version_spans"]
        )
        # Neither server is told of our answers: its reward is the one that it has computed itself.
        assert rollout["reward"] == pytest.approx(reward_of(environment, [one["content"] for one in turns]))
    last = steps[-1]
    assert last["episode/num_rewritten_histories"] == last["episode/num_turns_from_text"] == 0
    assert last["episode/ended_completed"] >= len(rollouts)
    assert last["episode/ended_environment_crash"] == last["episode/ended_infrastructure"] == 0
    assert last["payload/num_bytes_held"] == 0


def reward_of(environment: str, turns: list[str]) -> float:
    if "verifiers" in environment:
        return 2.0 * len(set("".join(turns)))
    return float(sum(len(set(turn)) for turn in turns))


def test_a_run_through_a_verifiers_server(tmp_path: Path) -> None:
    with verifiers_server("letters") as server:
        address = f"tcp://127.0.0.1:{server.port}"
        run(tmp_path, f"{{kind: verifiers, address: '{address}'}}", num_turns=2)


def test_a_run_in_environments_of_an_openenv_server(tmp_path: Path) -> None:
    """The server has 8 sessions and the run 16 and more episodes at once: the others wait."""
    with openenv_server() as server:
        url = f"ws://127.0.0.1:{server.port}/letters/ws"
        options = "action: {kind: text, field: message}, observation_field: num_left, open_s: 100"
        run(tmp_path, f"{{kind: openenv, url: '{url}', {options}}}", num_turns=3)
