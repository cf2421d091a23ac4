"""The average of what is trained, against the same recursion in float64. Resumed: test_run_checkpoint.py."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from forgeasync.config import ParallelSection
from forgeasync.trainer import PolicyTrainer, TrainingSequence, pack_rows
from forgeasync.weights import WeightSet, name_in
from tests.support import lora, trainers
from tests.support.processes import run_ranks

ALPHA, NUM_STEPS = 0.9, 100


def _published(trainer: PolicyTrainer) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """This rank's shards of the policy and of its average."""
    shards = [trainers.local(one.tensor).detach().double() for one in trainer.published_weights()]
    return shards[: len(shards) // 2], shards[len(shards) // 2 :]


def _train(folder: Path, sequences: list[TrainingSequence], has_adapters: bool) -> None:
    parallel = ParallelSection() if has_adapters else ParallelSection(num_procs=2, expert=2)
    trainer = (lora if has_adapters else trainers).make_trainer(folder, parallel, average_alpha=ALPHA)
    names = [name for weight in trainer.published_weights() for name in weight.names]
    of_policy = names[: len(names) // 2]
    assert names == of_policy + [name_in(WeightSet.AVERAGE, name) for name in of_policy]
    num_ranks = trainer.num_data_ranks
    rows = pack_rows(sequences, tokens_per_row=trainers.TOKENS_PER_ROW, num_ranks=num_ranks)[
        trainer.data_rank
    ]
    bad_rows = [dataclasses.replace(row, advantages_T=np.full_like(row.advantages_T, np.nan)) for row in rows]
    _, expected = _published(trainer)
    for number in range(NUM_STEPS):
        is_bad = number % 10 == 3
        result = trainer.train_step(bad_rows if is_bad else rows)
        assert (result.skip_reason is not None) == is_bad
        if not is_bad:
            weights, _ = _published(trainer)
            pairs = zip(expected, weights, strict=True)
            expected = [ALPHA * before + (1.0 - ALPHA) * newest for before, newest in pairs]
    weights, averages = _published(trainer)
    distances = []
    for weight, found, exact in zip(weights, averages, expected, strict=True):
        assert (found - exact).abs().max() < 2e-6 * exact.abs().max()
        distances.append(float((weight - exact).abs().max() / exact.abs().max()))
    assert max(distances) > 1e-3


@pytest.mark.exhaustive
@pytest.mark.parametrize("has_adapters", [False, True], ids=["experts", "adapters"])
def test_the_average_of_100_steps(
    folder: Path, sequences: list[TrainingSequence], has_adapters: bool
) -> None:
    """Over weights of two ranks with half of the experts each, and over adapters; bad steps do not count."""
    run_ranks(1 if has_adapters else 2, _train, folder, sequences[:6], has_adapters)
