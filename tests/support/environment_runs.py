"""Whole runs with an environment, in which every sampled token trains once and exactly."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.app_runs import finish, read_lines, start, write_episodes_run


@dataclass(frozen=True, kw_only=True)
class Finished:
    """What a run leaves."""

    run_dir: Path
    out: str
    initial: dict[str, float]
    steps: list[dict[str, float]]
    rollouts: list[dict[str, Any]]

    @property
    def last(self) -> dict[str, float]:
        return self.steps[-1]

    def of_step(self, line: dict[str, float]) -> list[dict[str, Any]]:
        """The rollouts of a step."""
        return [rollout for rollout in self.rollouts if rollout["step"] == line["step"]]


def num_sampled(*rollouts: dict[str, Any]) -> int:
    return sum(end - begin for one in rollouts for _, begin, end in one["version_spans"])


def train(folder: Path, environment: str, *overrides: str, num_steps: int = 2) -> Finished:
    """Make a run to its end and check what holds for every environment."""
    run_dir, file = folder / "run", write_episodes_run(folder)
    more = ("max_off_policy_steps=1", f"max_steps={num_steps}", f"environment={environment}", *overrides)
    code, out, err = finish(start(file, f"run_dir={run_dir}", *more))
    assert code == 0, err
    assert "environment ready" in out
    initial, *steps = read_lines(run_dir / "metrics.jsonl")
    assert "eval/score_mean" in initial
    rollouts = [json.loads(line) for line in (run_dir / "rollouts.jsonl").read_text().splitlines()]
    run = Finished(run_dir=run_dir, out=out, initial=initial, steps=steps, rollouts=rollouts)
    assert [line["step"] for line in steps] == list(range(1, num_steps + 1))
    assert len(rollouts) == 16 * num_steps
    for line in steps:
        num_trained = line["throughput/train_tokens_per_s"] * line["time/step_s"]
        assert round(num_trained) == num_sampled(*run.of_step(line))
        # Groups of a step may all have ended during the step before.
        assert line.get("mismatch/fresh_logprob_abs_mean", 0.0) < 1e-5
        assert line["routing/recorded_share"] == 1.0
    assert run.last["episode/ended_infrastructure"] == run.last["payload/num_bytes_held"] == 0
    assert run.last["episode/ended_completed"] >= len(rollouts)
    return run


def turns_of(rollout: dict[str, Any]) -> list[dict[str, Any]]:
    """The model's turns of a rollout with one branch: then no turn was rendered anew from text."""
    (branch,) = rollout["episode_record"]["agents"][0]["branches"]
    turns = [one for one in branch if one["role"] == "assistant"]
    assert sum(one["num_tokens"] for one in turns) == num_sampled(rollout)
    return turns
