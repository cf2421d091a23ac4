"""The composed loss in the trainer: pieces of a batch, the reference policy, the age limit."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM

from forgeasync.algorithms import Loss
from forgeasync.config import LoraSection, OptimizerSection, ParallelSection
from forgeasync.models import read_model_facts
from forgeasync.trainer import (
    PackedRow,
    PolicyTrainer,
    StepSums,
    TrainingSequence,
    pack_row,
    pack_rows,
)
from tests.support.lora import LORA, adapters, reference_logprobs
from tests.support.processes import run_ranks
from tests.support.tokens import K3, section
from tests.support.trainers import make_sequences, make_trainer, whole


def unclipped_trainer(
    folder: Path, loss: Loss, *, learning_rate: float = 1e-12, **options: Any
) -> PolicyTrainer:
    """Unless a learning rate is given, steps leave the weights as they are; gradients are not clipped."""
    optimizer = OptimizerSection(learning_rate=learning_rate, max_grad_norm=1e9)
    return make_trainer(
        folder, loss=loss, temperature=0.8, tokens_per_row=1024, optimizer=optimizer, **options
    )


def _near_policy(folder: Path) -> list[TrainingSequence]:
    """Sequences of uneven lengths and ages, sampled by a policy not far from the trained one."""
    trainer = unclipped_trainer(folder, Loss())
    rng = np.random.default_rng(1)
    near = []
    for sequence in make_sequences(11, read_model_facts(str(folder))):
        with torch.no_grad():
            logprobs_T = trainer.logprobs(pack_row([sequence])).numpy()
        noise_T = rng.normal(0, 0.3) / 10 + 0.2 * rng.standard_normal(len(logprobs_T))
        near.append(
            dataclasses.replace(
                sequence,
                behavior_logprobs_T=(logprobs_T + noise_T).astype(np.float32),
                ages_T=rng.integers(0, 4, len(logprobs_T)).astype(np.int32),
                weight=[1.0, 2.5, 4.0][len(near) % 3],
            )
        )
    return near


def step_gradients(
    trainer: PolicyTrainer, rows: list[PackedRow]
) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    gradients: dict[str, torch.Tensor] = {}

    def keep(*_: object) -> None:
        gradients.update(
            {n: whole(p.grad) for n, p in trainer.model.named_parameters() if p.grad is not None}
        )

    hook = trainer._optimizer.register_step_pre_hook(keep)
    metrics = trainer.train_step(rows).metrics
    hook.remove()
    return metrics, gradients


Step = tuple[dict[str, float], dict[str, torch.Tensor]]
"""Metrics and gradients."""


PIECES: dict[str, tuple[Loss, int | None]] = {
    "token_mean": (section(kl=K3), None),
    "token_mean, young tokens": (section(), 1),
    "token_sum": (section(aggregation={"kind": "sequence_mean_of_token_sum"}), None),
    "constant_length": (
        section(aggregation={"kind": "constant_length", "length": 60}, objective={"kind": "topr"}),
        2,
    ),
    "gspo": (
        section(
            objective={"kind": "gspo", "clip_low": 0.03, "clip_high": 0.03},
            aggregation={"kind": "sequence_mean_of_token_mean"},
        ),
        None,
    ),
    "corrected": (
        section(
            objective={"kind": "reinforce"},
            corrections=[
                {"kind": "truncated_is", "cap": 1.1, "level": "sequence"},
                {"kind": "off_policy_sequence_mask", "threshold": 0.02},
                {"kind": "age_weight", "half_life": 2.0},
            ],
            aggregation={"kind": "sequence_mean_of_token_mean"},
            kl={"estimator": "k2", "coefficient": 0.3, "where": "reward"},
        ),
        2,
    ),
}


def _pieces(
    folder: Path, parallel: ParallelSection, sequences: list[TrainingSequence], tokens_per_row: int
) -> dict[str, Step]:
    # Built with a reference; the weights stay as they are from one case to the next.
    trainer = unclipped_trainer(folder, PIECES["token_mean"][0], parallel=parallel)
    rows = pack_rows(sequences, tokens_per_row=tokens_per_row, num_ranks=trainer.num_data_ranks)
    found = {}
    for name, (loss, max_token_age) in PIECES.items():
        trainer._loss, trainer._max_token_age = loss, max_token_age
        found[name] = step_gradients(trainer, rows[trainer.data_rank])
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class InOneRow:
    """What one process finds that has all sequences in one row."""

    sequences: list[TrainingSequence]
    pieces: dict[str, Step]
    step: Step
    by_hand: Step


def _in_one_row(folder: Path) -> InOneRow:
    sequences = _near_policy(folder)
    assert sum(sequence.num_tokens for sequence in sequences) < 1024
    step, by_hand = _by_hand(folder, sequences)
    pieces = _pieces(folder, ParallelSection(), sequences, 1024)
    return InOneRow(sequences=sequences, pieces=pieces, step=step, by_hand=by_hand)


@pytest.fixture(scope="module")
def in_one_row(folder: Path) -> InOneRow:
    return run_ranks(1, _in_one_row, folder)[0]


@pytest.mark.parametrize(
    ("parallel", "tokens_per_row"),
    [
        pytest.param(ParallelSection(num_procs=2, expert=2), 128, id="fsdp2-ep2"),
        pytest.param(ParallelSection(num_procs=2, context=2), 256, id="cp2"),
    ],
)
def test_pieces_add_up_to_one_big_batch(
    folder: Path, in_one_row: InOneRow, parallel: ParallelSection, tokens_per_row: int
) -> None:
    """Uneven microbatches and ranks: every aggregation's loss, gradients and metrics are the whole's."""
    arguments = (folder, parallel, in_one_row.sequences, tokens_per_row)
    for found in run_ranks(parallel.num_procs, _pieces, *arguments):
        for name, (metrics, gradients) in found.items():
            expected, expected_gradients = in_one_row.pieces[name]
            assert metrics.keys() == expected.keys()
            for key in ("loss", "grad_norm", "off_policy/effective_sample_share", "mismatch/kl"):
                assert metrics[key] == pytest.approx(expected[key], rel=2e-5, abs=1e-6), (name, key)
            for key in expected:
                if key.startswith(("correction/", "objective/", "kl/", "off_policy/", "policy/")):
                    assert metrics[key] == pytest.approx(expected[key], rel=1e-4, abs=1e-6), (name, key)
            assert gradients.keys() == expected_gradients.keys()
            largest = max(float(gradient.abs().max()) for gradient in expected_gradients.values())
            assert largest > 1e-3
            for parameter, gradient in expected_gradients.items():
                torch.testing.assert_close(
                    gradients[parameter], gradient, atol=2e-6 * largest, rtol=1e-4, msg=f"{name} {parameter}"
                )


def test_old_tokens_are_left_out(in_one_row: InOneRow) -> None:
    ages = np.concatenate([sequence.ages_T for sequence in in_one_row.sequences])
    metrics, _ = in_one_row.pieces["token_mean, young tokens"]
    assert metrics["off_policy/rejected_token_share"] == pytest.approx(float((ages > 1).mean()))
    assert "off_policy/rejected_token_share" not in in_one_row.pieces["gspo"][0]


def _by_hand(folder: Path, sequences: list[TrainingSequence]) -> tuple[Step, Step]:
    """Young tokens of plain REINFORCE, by the trainer and by a loss written out over its logprobs."""
    trainer = unclipped_trainer(folder, section(objective={"kind": "reinforce"}), max_token_age=1)
    row = pack_row(sequences)
    step = step_gradients(trainer, [row])
    mask = torch.from_numpy(row.ages_L[row.mask_L] <= 1)
    advantages = torch.from_numpy(row.advantages_L[row.mask_L])
    behavior = torch.from_numpy(row.behavior_logprobs_L[row.mask_L])
    lengths = [len(sequence.response_ids_T) for sequence in sequences]
    weights = torch.tensor([one.weight for one in sequences]).repeat_interleave(torch.tensor(lengths))
    with trainer._forward.replay(row):
        logprobs, entropies, _ = trainer._forward.predictions(row)
        loss = -(weights * advantages * logprobs)[mask].sum() / weights[mask].sum()
        loss.backward()
    own = {name: whole(p.grad) for name, p in trainer.model.named_parameters()}
    ratios = (logprobs.detach() - behavior)[mask].double().exp()
    share = float(ratios.sum() ** 2 / (len(ratios) * ratios.square().sum()))
    metrics = {
        "loss": float(loss),
        "off_policy/effective_sample_share": share,
        "policy/entropy": float(entropies[mask].double().mean()),
    }
    return step, (metrics, own)


def test_a_step_is_the_written_out_loss(in_one_row: InOneRow) -> None:
    metrics, gradients = in_one_row.step
    expected, expected_gradients = in_one_row.by_hand
    for key, value in expected.items():
        assert metrics[key] == pytest.approx(value, rel=1e-5)
    assert 0.5 < metrics["off_policy/effective_sample_share"] < 0.999
    for name, gradient in expected_gradients.items():
        torch.testing.assert_close(gradients[name], gradient, atol=1e-6, rtol=1e-4, msg=name)


def _against_checkpoint(
    folder: Path, sequences: list[TrainingSequence]
) -> list[tuple[dict[str, float], dict[str, float], float, float]]:
    return [_one_against_checkpoint(folder, sequences, lora) for lora in (None, LORA)]


def _one_against_checkpoint(
    folder: Path, sequences: list[TrainingSequence], lora: LoraSection | None
) -> tuple[dict[str, float], dict[str, float], float, float]:
    """Metrics of a first and a third step, and what they should say of KL and loss."""
    penalty = {"estimator": "k3", "coefficient": 0.3, "where": "loss"}
    loss = section(objective={"kind": "reinforce"}, kl=penalty)
    # With recorded experts: the reference does not take them.
    trainer = unclipped_trainer(folder, loss, learning_rate=3e-3, lora=lora)
    free = [dataclasses.replace(sequence, kept_tokens=None, weight=1.0) for sequence in sequences[:3]]
    unrecorded = pack_row([dataclasses.replace(sequence, expert_ids_SMK=None) for sequence in free])
    first = trainer.train_step([unrecorded]).metrics
    trainer.train_step([unrecorded])
    if lora is not None:
        assert all(float(tensor.abs().max()) > 0 for tensor in adapters(trainer).values())
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    head = reference.lm_head
    head.register_forward_hook(lambda module, inputs, logits: logits / 0.8)
    row = pack_row(free)
    with torch.no_grad():
        ref_T = torch.cat([reference_logprobs(reference, sequence) for sequence in free]).double()
        current_T = trainer.logprobs(row).double()
    third = trainer.train_step([row]).metrics
    log_T = ref_T - current_T
    expected_kl = float((log_T.exp() - 1 - log_T).mean())
    advantages_T = torch.from_numpy(row.advantages_L[row.mask_L]).double()
    expected_loss = float((-advantages_T * current_T).mean()) + 0.3 * expected_kl
    return first, third, expected_kl, expected_loss


def test_the_reference_is_the_checkpoint(folder: Path, in_one_row: InOneRow) -> None:
    """Frozen copy and switched-off adapters against transformers: no KL at first, then that to the start."""
    for first, third, expected_kl, expected_loss in run_ranks(
        1, _against_checkpoint, folder, in_one_row.sequences
    )[0]:
        assert first["kl/k3"] == 0.0
        assert expected_kl > 1e-3
        assert third["kl/k3"] == pytest.approx(expected_kl, rel=1e-3)
        assert third["loss"] == pytest.approx(expected_loss, rel=1e-4)


def _sums_of_this_rank() -> dict[str, float]:
    sums = StepSums(num_layers=0, device="cpu")
    first, second = {"objective/first": torch.tensor(2.0)}, {"objective/second": torch.tensor(3.0)}
    sums.add(first if dist.get_rank() == 0 else second | first)
    sums.add({"mismatch/num_fresh": torch.tensor(0), "mismatch/fresh_logprob_abs_mean": torch.tensor(0.0)})
    return sums.metrics(4, mesh=init_device_mesh("cpu", (2,)))


def test_a_sum_that_only_some_ranks_have_is_not_taken_for_another() -> None:
    """An objective of a user's own may give one for some rows only, and in any order."""
    for metrics in run_ranks(2, _sums_of_this_rank):
        assert metrics["objective/first"] == 1.0 and metrics["objective/second"] == 0.75
