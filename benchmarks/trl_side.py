"""TRL's half of ``against_trl.py``: trains with GRPOTrainer and writes the time of each step.

    .venv-trl/bin/python benchmarks/trl_side.py SPEC.json OUT.json

Runs in TRL's own environment, so it imports nothing of forgeasync. SPEC.json has the settings in which both
sides agree (``against_trl.run_spec``) and those of TRL alone. Its ``tasks`` is a file of JSON lines with the
``prompt`` and the reasoning-gym ``entry`` of each problem, in training order. Sampling is transformers'
``generate``, TRL's path without a GPU. A step's time is from the end of the step before to its own end, so it
includes all of TRL's work.
"""

import json
import sys
import time
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


class GymReward:
    """forgeasync's ReasoningGymScorer for TRL: reasoning-gym's score of the text after the last prefix."""

    __name__ = "reasoning_gym"

    def __init__(self, spec: SimpleNamespace, log: StepLog) -> None:
        # Only for its verifier: each problem has its own entry.
        self._verifier = reasoning_gym.create_dataset(spec.gym_task, seed=0, size=1, **spec.gym_options)
        self._prefix = spec.answer_prefix
        self._log = log

    def __call__(
        self, *, completions: list[str], completion_ids: list[list[int]], entry: list[str], **_: Any
    ) -> list[float]:
        rewards = [self._score(text, json.loads(one)) for text, one in zip(completions, entry, strict=True)]
        self._log.lengths += [len(ids) for ids in completion_ids]
        self._log.rewards += rewards
        return rewards

    def _score(self, text: str, entry: dict[str, Any]) -> float:
        _, found, answer = text.rpartition(self._prefix) if self._prefix else ("", "found", text)
        try:
            return float(self._verifier.score_answer(answer.strip(), entry)) if found else 0.0
        except Exception:  # of any type: verifiers read untrusted text
            return 0.0


def grpo_config(spec: SimpleNamespace) -> GRPOConfig:
    """Return settings for one optimizer step per generated batch, without evaluation, reports or
    checkpoints."""
    sequences_per_step = spec.group_size * spec.groups_per_step
    assert sequences_per_step % spec.micro_batch == 0, "micro batches must divide the batch"
    return GRPOConfig(
        output_dir=spec.scratch,
        seed=spec.seed,
        use_cpu=True,
        bf16=False,
        max_steps=spec.max_steps,
        num_generations=spec.group_size,
        per_device_train_batch_size=spec.micro_batch,
        gradient_accumulation_steps=sequences_per_step // spec.micro_batch,
        # TRL's default recomputes activations, which saves memory and costs time.
        gradient_checkpointing=False,
        shuffle_dataset=False,
        temperature=spec.temperature,
        top_k=spec.top_k,
        top_p=spec.top_p,
        max_completion_length=spec.max_response_tokens,
        use_transformers_continuous_batching=spec.continuous_batching,
        # The mean over all tokens of the batch, as on the other side.
        loss_type="dapo",
        beta=0.0,
        epsilon=spec.clip_low,
        epsilon_high=spec.clip_high,
        scale_rewards="group",
        # TRL would add the load-balancing loss that the model's config names. The other side has none.
        router_aux_loss_coef=0.0,
        learning_rate=spec.learning_rate,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=spec.warmup_steps,
        adam_beta1=spec.betas[0],
        adam_beta2=spec.betas[1],
        adam_epsilon=spec.eps,
        weight_decay=spec.weight_decay,
        max_grad_norm=spec.max_grad_norm,
        model_init_kwargs={"dtype": "float32", "experts_implementation": spec.experts},
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        eval_strategy="no",
        disable_tqdm=True,
    )


def main() -> None:
    """Train as SPEC.json says, and write the steps."""
    spec_file, out_file = sys.argv[1:]
    spec = SimpleNamespace(**json.loads(Path(spec_file).read_text(encoding="utf-8")))
    torch.set_num_threads(spec.threads)
    tasks = [json.loads(line) for line in Path(spec.tasks).read_text(encoding="utf-8").splitlines()]
    log = StepLog()
    trainer = GRPOTrainer(
        model=spec.model,
        reward_funcs=GymReward(spec, log),
        args=grpo_config(spec),
        train_dataset=datasets.Dataset.from_list(tasks),
        callbacks=[log],
    )
    trainer.train()
    Path(out_file).write_text(json.dumps(log.steps), encoding="utf-8")


if __name__ == "__main__":
    main()
