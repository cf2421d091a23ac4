"""Steps that are not taken: nan or inf on any rank, and data of another distribution. Real gloo ranks."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor

from forgeasync.config import ParallelSection
from forgeasync.models import read_model_facts
from forgeasync.testing import write_tiny_model
from forgeasync.trainer import (
    MismatchTooLarge,
    NonFiniteWeights,
    PackedRow,
    PolicyTrainer,
    StepResult,
    TrainingSequence,
    full_tensors,
    pack_rows,
    write_rows,
)
from tests.support.processes import run_ranks
from tests.support.trainers import TOKENS_PER_ROW, make_sequences, make_trainer

TWO_RANKS = ParallelSection(num_procs=2, expert=2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What one rank saw of a trainer's refusals."""

    skipped: dict[str, StepResult]
    unchanged: dict[str, bool]
    """Whether the weights after each of them are bit for bit those before."""
    taken: StepResult
    """A step after all of them."""
    equals_step_alone: bool
    """Whether it left the weights that it leaves without steps skipped before it."""
    refused: dict[str, str]


def _weights(trainer: PolicyTrainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in full_tensors(trainer.model, trainer._facts)}


def _equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _with(rows: list[PackedRow], field: str, value: float) -> list[PackedRow]:
    """The rows with one target's number replaced."""
    values_L = getattr(rows[0], field).copy()
    values_L[rows[0].mask_L.nonzero()[0][1]] = value
    return [dataclasses.replace(rows[0], **{field: values_L}), *rows[1:]]


def _refusals(folder: Path, sequences: list[TrainingSequence], out: Path) -> Seen:
    trainer, alone = make_trainer(folder, TWO_RANKS), make_trainer(folder, TWO_RANKS)
    rank = trainer.data_rank
    rows = pack_rows(sequences, tokens_per_row=TOKENS_PER_ROW, num_ranks=2)[rank]
    before = _weights(trainer)
    skipped, unchanged = {}, {}

    def step(name: str, of_second: list[PackedRow]) -> None:
        # Only the second rank has the bad number.
        skipped[name] = trainer.train_step(of_second if rank == 1 else rows)
        unchanged[name] = _equal(before, _weights(trainer))

    step("nan advantage", _with(rows, "advantages_L", np.nan))
    step("inf log-probability", _with(rows, "behavior_logprobs_L", -np.inf))
    parameter = dict(trainer.model.named_parameters())["layers.1.attention.qkv_linear.wq.weight"]
    accumulate = trainer._accumulate_gradients

    def poisoned(*arguments: object) -> str | None:
        problem = accumulate(*arguments)
        if rank == 1:
            _local(parameter.grad).view(-1)[0] = torch.inf
        return problem

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "_accumulate_gradients", poisoned)
        step("inf gradient", rows)
    taken = trainer.train_step(rows)
    alone.train_step(rows)
    equals_step_alone = _equal(_weights(alone), _weights(trainer))

    refused = {}
    try:
        trainer.train_step(rows, max_fresh_mismatch=1e-3)
    except MismatchTooLarge as error:
        refused["mismatch"] = str(error)
    equals_step_alone &= _equal(_weights(alone), _weights(trainer))
    write_rows(out, rows, rank=rank, reason="why")
    if rank == 1:
        _local(parameter.detach()).view(-1)[3] = torch.nan
    for name, call in {
        "export": lambda: trainer.save_hf(out / "export", source=folder),
        "checkpoint": lambda: trainer.begin_checkpoint(out / "step-00000004", run_state=b"{}", keep=2),
        "publishing": lambda: trainer.require_finite_weights("publishing"),
    }.items():
        try:
            call()
        except NonFiniteWeights as error:
            refused[name] = str(error)
    return Seen(
        skipped=skipped,
        unchanged=unchanged,
        taken=taken,
        equals_step_alone=equals_step_alone,
        refused=refused,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "hf", scale=4.0, num_experts=8, top_k=3)


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("out")


@pytest.fixture(scope="module")
def seen(folder: Path, out: Path) -> list[Seen]:
    return run_ranks(2, _refusals, folder, make_sequences(11, read_model_facts(str(folder))), out)


def test_what_is_not_finite_on_one_rank_is_skipped_on_all(seen: list[Seen]) -> None:
    expected = {
        "nan advantage": "on trainer rank 1 is nan: the advantage of its target 1 is nan",
        "inf log-probability": "on trainer rank 1 is",
        "inf gradient": "the reduced gradient of layers.1.attention.qkv_linear.wq.weight has values that "
        "are nan or infinite on trainer rank",
    }
    for rank in seen:
        assert all(rank.unchanged.values()), rank.unchanged
        for name, text in expected.items():
            assert text in (rank.skipped[name].skip_reason or ""), (name, rank.skipped[name].skip_reason)
        assert [result.policy_version for result in rank.skipped.values()] == [1, 2, 3]
    assert "the generator's log-probability of its target 1 is -inf" in (
        seen[0].skipped["inf log-probability"].skip_reason or ""
    )


def test_the_step_after_skipped_ones_is_taken_as_if_they_had_not_been(seen: list[Seen]) -> None:
    for rank in seen:
        assert rank.taken.skip_reason is None and rank.taken.policy_version == 4
        assert rank.equals_step_alone
        assert np.isfinite(rank.taken.metrics["loss"]) and np.isfinite(rank.taken.metrics["grad_norm"])


def test_data_of_another_distribution_is_not_trained_on(seen: list[Seen]) -> None:
    for rank in seen:
        assert "trainer.max_fresh_mismatch = 0.001" in rank.refused["mismatch"]


def test_weights_that_are_not_finite_go_nowhere(seen: list[Seen], out: Path) -> None:
    for rank in seen:
        for name in ("export", "checkpoint", "publishing"):
            assert "on trainer rank 1" in rank.refused[name], rank.refused
            assert "wq" in rank.refused[name] or "q_proj" in rank.refused[name]
    assert sorted(path.suffix for path in out.iterdir()) == [".npz", ".npz"]


def test_a_skipped_batch_can_be_read_back(seen: list[Seen], out: Path) -> None:
    with np.load(out / "rank-0.npz") as arrays:
        assert str(arrays["reason"]) == "why"
        assert arrays["row0.mask_L"].any()
        assert len(arrays["row0.kept_offsets"]) == arrays["row0.mask_L"].sum() + 1
