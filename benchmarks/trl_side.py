"""TRL's half of ``against_trl.py``: trains with GRPOTrainer and writes the time of each step.

    .venv-trl/bin/python benchmarks/trl_side.py SPEC.json OUT.json

Runs in TRL's own environment, so it imports nothing of forgeasync. ``against_trl.run_trl`` writes SPEC.json.
Its ``tasks`` is a file of JSON lines with the ``prompt`` and the reasoning-gym ``entry`` of each problem, in
training order. Sampling is transformers' ``generate``, TRL's path without a GPU. A step's time is from the
end of the step before to its own end, so it includes all of TRL's work.
"""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import reasoning_gym
import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from trl import GRPOConfig, GRPOTrainer


class StepLog(TrainerCallback):
    """Collects the end, the response lengths and the mean reward of each step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Any]] = []
        self.lengths: list[int] = []
        self.rewards: list[float] = []

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.steps.append(
            {
                "step": state.global_step,
                "end_s": time.perf_counter(),
                "lengths": self.lengths,
                "reward_mean": sum(self.rewards) / len(self.rewards),
            }
        )
        self.lengths, self.rewards = [], []


def gym_reward(spec: SimpleNamespace, log: StepLog) -> Callable[..., list[float]]:
    """Return forgeasync's ReasoningGymScorer for TRL: reasoning-gym's score of the text after the last
    prefix."""
    # Only for its verifier: each problem has its own entry.
    verifier = reasoning_gym.create_dataset(spec.gym_task, seed=0, size=1, **spec.gym_options)

    def score(text: str, entry: dict[str, Any]) -> float:
        prefix = spec.answer_prefix
        _, found, answer = text.rpartition(prefix) if prefix else ("", "found", text)
        try:
            return float(verifier.score_answer(answer.strip(), entry)) if found else 0.0
        except Exception:  # of any type: verifiers read untrusted text
            return 0.0

    def reasoning_gym_reward(
        *, completions: list[str], completion_ids: list[list[int]], entry: list[str], **_: Any
    ) -> list[float]:
        rewards = [score(text, json.loads(one)) for text, one in zip(completions, entry, strict=True)]
        log.lengths += [len(ids) for ids in completion_ids]
        log.rewards += rewards
        return rewards

    return reasoning_gym_reward


def main() -> None:
    """Train as SPEC.json says, and write the steps."""
    spec_file, out_file = sys.argv[1:]
    spec = SimpleNamespace(**json.loads(Path(spec_file).read_text(encoding="utf-8")))
    torch.set_num_threads(spec.threads)
    tasks = [json.loads(line) for line in Path(spec.tasks).read_text(encoding="utf-8").splitlines()]
    log = StepLog()
    trainer = GRPOTrainer(
        model=spec.model,
        reward_funcs=gym_reward(spec, log),
        args=GRPOConfig(**spec.grpo),
        train_dataset=datasets.Dataset.from_list(tasks),
        callbacks=[log],
    )
    trainer.train()
    Path(out_file).write_text(json.dumps(log.steps), encoding="utf-8")


if __name__ == "__main__":
    main()
