"""Trainers for tests, and random sequences for them."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from forgeasync.algorithms import Loss
from forgeasync.config import ModelFacts, OptimizerSection, ParallelSection, TrainerSection
from forgeasync.models import read_model_facts
from forgeasync.rollouts import NO_RECORD, BranchKey, KeptTokens, RolloutKey
from forgeasync.trainer import (
    PackedRow,
    PolicyTrainer,
    Source,
    StepResult,
    TrainerSetup,
    TrainingSequence,
    pack_row,
)

TOKENS_PER_ROW = 128
LARGE_STEP = OptimizerSection(learning_rate=1e-2, max_grad_norm=0.1, eps=1e-3)
"""A wrong gradient shows in the weights."""


def make_setup(folder: Path, section: TrainerSection, **fields: Any) -> TrainerSetup:
    """What a trainer of the model in ``folder`` starts with; ``fields`` are further ones of it."""
    defaults = {"temperature": 1.0, "loss": Loss(), "seed": 0, "checkpoint": folder}
    return TrainerSetup(section=section, facts=read_model_facts(str(folder)), **defaults | fields)


def make_trainer(folder: Path, parallel: ParallelSection | None = None, **options: Any) -> PolicyTrainer:
    """This rank of a trainer of the model in ``folder``; ``options``: of its setup, or keys of its section.

    Steps are large and nothing is measured beside them, unless ``options`` say otherwise.
    """
    defaults = {"tokens_per_row": TOKENS_PER_ROW, "optimizer": LARGE_STEP, "replay_probe_share": 0.0}
    keys = {name: options.pop(name) for name in TrainerSection.model_fields.keys() & options.keys()}
    section = TrainerSection(parallel=parallel or ParallelSection(), **defaults | keys)
    return PolicyTrainer(make_setup(folder, section, **options))


def make_sequences(num_sequences: int, facts: ModelFacts) -> list[TrainingSequence]:
    """Random sequences with random expert ids (some tokens without) and random kept sets (some whole).

    They are two episodes a group; the tokens of every third are asked for.
    """
    rng = np.random.default_rng(0)
    vocab_size = facts.vocab_size
    sequences = []
    for index in range(num_sequences):
        response = rng.integers(0, vocab_size, rng.integers(3, 60)).astype(np.int32)
        prompt = rng.integers(0, vocab_size, rng.integers(1, 20)).astype(np.int32)
        kept = [
            {int(token), *rng.integers(0, vocab_size, 5).tolist()}
            if rng.random() < 0.8
            else range(vocab_size)
            for token in response
        ]
        sequences.append(
            TrainingSequence(
                prompt_ids_P=prompt,
                response_ids_T=response,
                expert_ids_SMK=random_expert_ids(rng, len(prompt) + len(response), facts),
                kept_tokens=KeptTokens.from_rows([list(row) for row in kept], vocab_size=vocab_size),
                behavior_logprobs_T=(-3.0 + 0.3 * rng.standard_normal(len(response))).astype(np.float32),
                ages_T=np.zeros(len(response), np.int32),
                advantage=float(rng.standard_normal()),
                source=Source(
                    key=BranchKey(
                        rollout=RolloutKey(group_id=index // 2, episode=index % 2, agent=0), branch=0
                    ),
                    is_recorded=index % 3 == 0,
                ),
            )
        )
    return sequences


def random_rows(rng: np.random.Generator, vocab_size: int, num_ranks: int) -> list[list[PackedRow]]:
    """A row for each rank, with one sequence of 8 prompt and 32 response tokens; nothing is replayed."""

    def row() -> PackedRow:
        ids = rng.integers(0, vocab_size, 40).astype(np.int32)
        return pack_row([plain_sequence(ids[:8], ids[8:], advantage=float(rng.normal()))])

    return [[row()] for _ in range(num_ranks)]


def plain_sequence(
    prompt_ids_P: np.ndarray, response_ids_T: np.ndarray, *, advantage: float = 1.0, **fields: Any
) -> TrainingSequence:
    """All tokens are on policy and had a log-probability of -3, unless ``fields`` say otherwise."""
    num = len(response_ids_T)
    ages_T, behavior_logprobs_T = np.zeros(num, np.int32), np.full(num, -3.0, np.float32)
    defaults = {"ages_T": ages_T, "behavior_logprobs_T": behavior_logprobs_T}
    return TrainingSequence(
        prompt_ids_P=prompt_ids_P, response_ids_T=response_ids_T, advantage=advantage, **defaults | fields
    )


def make_sequence(ages: list[int]) -> TrainingSequence:
    """Two tokens of a prompt, and a token of a response for each age."""
    response = np.arange(len(ages), dtype=np.int32)
    old = {"ages_T": np.asarray(ages, np.int32), "behavior_logprobs_T": np.zeros(len(ages), np.float32)}
    return plain_sequence(np.asarray([1, 2], np.int32), response, **old)


def make_row(ages: list[list[int]]) -> PackedRow:
    return pack_row([make_sequence(ages_of_one) for ages_of_one in ages])


def random_expert_ids(rng: np.random.Generator, num_tokens: int, facts: ModelFacts) -> np.ndarray:
    scores = rng.random((num_tokens, facts.num_layers, facts.num_experts))
    ids_SMK = np.sort(scores.argsort(-1)[..., : facts.top_k], axis=-1).astype(np.int16)
    ids_SMK[rng.random(num_tokens) < 0.2] = NO_RECORD
    return ids_SMK


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard, or what is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def named_tensors(trainer: PolicyTrainer, *, gradients: bool = False) -> dict[str, torch.Tensor]:
    """All that is published (or its gradients) whole, one tensor per expert, by Hugging Face's names."""
    tensors = {}
    for weight in trainer.published_weights():
        tensor = weight.tensor.grad if gradients else weight.tensor
        if tensor is None:
            continue  # as those of buffers and averages
        full = whole(tensor)
        tensors |= dict(zip(weight.names, full if len(weight.names) > 1 else [full], strict=True))
    return tensors


def step_with_gradients(
    trainer: PolicyTrainer, rows: list[PackedRow]
) -> tuple[StepResult, dict[str, torch.Tensor]]:
    """A step's result, and its whole gradients as the optimizer sees them."""
    gradients: dict[str, torch.Tensor] = {}
    hook = trainer._optimizer.register_step_pre_hook(
        lambda *_: gradients.update(named_tensors(trainer, gradients=True))
    )
    result = trainer.train_step(rows)
    hook.remove()
    return result, gradients
