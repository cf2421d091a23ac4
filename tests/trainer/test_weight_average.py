"""The average of what is trained: against a reference over 100 steps, and resumed bit for bit. Gloo ranks."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from forgeasync.config import ParallelSection
from forgeasync.models import read_model_facts
from forgeasync.testing import write_tiny_model
from forgeasync.trainer import PackedRow, PolicyTrainer, TrainingSequence, pack_rows
from forgeasync.weights import WeightSet, name_in
from tests.support import lora, trainers
from tests.support.processes import run_ranks

ALPHA, NUM_STEPS, NUM_BEFORE = 0.9, 100, 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What one rank has at the end; errors are relative to the largest value of a tensor."""

    num_skipped: int
    error: float
    """Of the averages, against the same recursion in float64."""
    distance: float
    """Of the averages from the weights."""
    differing: list[str]
    """Averages and weights that are not those of a trainer that was resumed half-way, bit for bit."""
    names: list[str]
    average_names: list[str]


def _state(trainer: PolicyTrainer) -> dict[str, torch.Tensor]:
    state = trainer.state.tensors().items()
    return {
        name: trainers.local(one).detach().clone()
        for name, one in state
        if name.startswith(("model.", "average."))
    }


def _make(folder: Path, parallel: ParallelSection, has_adapters: bool) -> PolicyTrainer:
    make = lora.make_trainer if has_adapters else trainers.make_trainer
    return make(folder, parallel, average_alpha=ALPHA)


def _spoiled(rows: list[PackedRow]) -> list[PackedRow]:
    advantages_L = rows[0].advantages_L.copy()
    advantages_L[rows[0].mask_L] = np.nan
    return [dataclasses.replace(rows[0], advantages_L=advantages_L), *rows[1:]]


def _train(folder: Path, sequences: list[TrainingSequence], has_adapters: bool, out: Path) -> Seen:
    parallel = ParallelSection() if has_adapters else ParallelSection(num_procs=2, expert=2)
    num_ranks = parallel.num_procs
    trainer = _make(folder, parallel, has_adapters)
    rows = pack_rows(sequences, tokens_per_row=trainers.TOKENS_PER_ROW, num_ranks=num_ranks)[
        trainer.data_rank
    ]

    def step(one: PolicyTrainer, number: int) -> bool:
        result = one.train_step(_spoiled(rows) if number % 10 == 3 else rows)
        return result.skip_reason is None

    averages = {name: one for name, one in _state(trainer).items() if name.startswith("average.")}
    expected = {name: one.double() for name, one in averages.items()}
    num_skipped = 0
    for number in range(NUM_STEPS):
        if number == NUM_BEFORE:
            trainer.begin_checkpoint(out, run_state=b"", keep=1)
            trainer.finish_checkpoint()
        if not step(trainer, number):
            num_skipped += 1
            continue
        weights = _state(trainer)
        for name, before in expected.items():
            newest = weights[f"model.{name.removeprefix('average.')}"].double()
            expected[name] = ALPHA * before + (1.0 - ALPHA) * newest
    found = _state(trainer)

    def largest_error(others: dict[str, torch.Tensor]) -> float:
        errors = [
            float((found[name].double() - other.double()).abs().max() / other.abs().max())
            for name, other in others.items()
            if other.numel()
        ]
        return max(errors)

    again = _make(folder, parallel, has_adapters)
    again.resume(out)
    for number in range(NUM_BEFORE, NUM_STEPS):
        step(again, number)
    resumed = _state(again)
    return Seen(
        num_skipped=num_skipped,
        error=largest_error(expected),
        distance=largest_error({name: found[f"model.{name.removeprefix('average.')}"] for name in expected}),
        differing=[name for name in found if not torch.equal(found[name], resumed[name])],
        names=[name for weight in trainer.named_weights() for name in weight.names],
        average_names=[
            name
            for weight in trainer.published_weights()[len(trainer.named_weights()) :]
            for name in weight.names
        ],
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize("has_adapters", [False, True], ids=["experts", "adapters"])
def test_the_average_of_100_steps(has_adapters: bool, tmp_path: Path) -> None:
    """Over whole weights of two ranks with half of the experts each, and over adapters."""
    folder = write_tiny_model(tmp_path / "hf", scale=4.0)
    sequences = trainers.make_sequences(6, read_model_facts(str(folder)))
    ranks = run_ranks(1 if has_adapters else 2, _train, folder, sequences, has_adapters, tmp_path / "step-50")
    for seen in ranks:
        assert seen.num_skipped == 10, "steps that were not made do not count"
        assert seen.error < 2e-6 < 1e-3 < seen.distance
        assert not seen.differing
        assert seen.average_names == [name_in(WeightSet.AVERAGE, name) for name in seen.names]
