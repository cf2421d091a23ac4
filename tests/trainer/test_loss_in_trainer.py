"""The composed loss in the trainer: pieces of a batch, the reference policy, the age limit."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM

from forgeasync.algorithms import Loss
from forgeasync.config import OptimizerSection, ParallelSection
from forgeasync.models import read_model_facts
from forgeasync.trainer import PackedRow, PolicyTrainer, StepSums, TrainingSequence, pack_row, pack_rows
from tests.support.lora import LORA
from tests.support.processes import run_ranks
from tests.support.references import reference_logprobs
from tests.support.tokens import K3, section
from tests.support.trainers import make_sequences, make_trainer, named_tensors, step_with_gradients


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


Step = tuple[dict[str, float], dict[str, torch.Tensor]]
"""Metrics and gradients."""


def step_gradients(trainer: PolicyTrainer, rows: list[PackedRow]) -> Step:
    result, gradients = step_with_gradients(trainer, rows)
    return result.metrics, gradients


COMPARED = ("loss", "grad_norm", "mismatch/kl", "kl/", "objective/", "correction/", "off_policy/", "teacher/")


def assert_alike(found: Step, expected: Step, name: str, *, atol: float = 1e-5, rtol: float = 2e-4) -> None:
    """``atol`` is a share of the largest gradient."""
    metrics, gradients = found
    for key, value in expected[0].items():
        if key.startswith(COMPARED):
            assert metrics[key] == pytest.approx(value, rel=1e-4, abs=1e-6), (name, key)
    assert gradients.keys() == expected[1].keys()
    largest = max(float(gradient.abs().max()) for gradient in expected[1].values())
    assert largest > 1e-3
    for parameter, gradient in expected[1].items():
        torch.testing.assert_close(
            gradients[parameter], gradient, atol=atol * largest, rtol=rtol, msg=f"{name} {parameter}"
        )


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


def _in_one_row(folder: Path) -> tuple[list[TrainingSequence], dict[str, Step]]:
    sequences = _near_policy(folder)
    assert sum(sequence.num_tokens for sequence in sequences) < 1024
    return sequences, _pieces(folder, ParallelSection(), sequences, 1024)


@pytest.fixture(scope="module")
def in_one_row(folder: Path) -> tuple[list[TrainingSequence], dict[str, Step]]:
    """Sequences, and what one process finds that has all of them in one row."""
    return run_ranks(1, _in_one_row, folder)[0]


@pytest.mark.parametrize(
    ("parallel", "tokens_per_row"),
    [
        pytest.param(ParallelSection(num_procs=2, expert=2), 128, id="fsdp2-ep2"),
        pytest.param(ParallelSection(num_procs=2, context=2), 256, id="cp2"),
    ],
)
def test_pieces_add_up_to_one_big_batch(
    folder: Path,
    in_one_row: tuple[list[TrainingSequence], dict[str, Step]],
    parallel: ParallelSection,
    tokens_per_row: int,
) -> None:
    """Uneven microbatches and ranks: every aggregation's loss, gradients and metrics are the whole's."""
    sequences, pieces = in_one_row
    for found in run_ranks(parallel.num_procs, _pieces, folder, parallel, sequences, tokens_per_row):
        for name, expected in pieces.items():
            metrics = found[name][0]
            assert metrics.keys() == expected[0].keys()
            for key in ("loss", "grad_norm", "off_policy/effective_sample_share", "policy/entropy"):
                assert metrics[key] == pytest.approx(expected[0][key], rel=2e-5, abs=1e-6), (name, key)
            assert_alike(found[name], expected, name, atol=2e-6, rtol=1e-4)


def _by_hand(folder: Path) -> None:
    """Young tokens of plain REINFORCE, by the trainer and by a loss written out over its logprobs."""
    sequences = _near_policy(folder)
    trainer = unclipped_trainer(folder, section(objective={"kind": "reinforce"}), max_token_age=1)
    row = pack_row(sequences)
    result, gradients = step_with_gradients(trainer, [row])
    mask = torch.from_numpy(row.ages_T <= 1)
    advantages = torch.from_numpy(row.advantages_T)
    behavior = torch.from_numpy(row.behavior_logprobs_T)
    lengths = torch.tensor([len(sequence.response_ids_T) for sequence in sequences])
    weights = torch.tensor([one.weight for one in sequences]).repeat_interleave(lengths)
    with trainer._forward.replay(row):
        logprobs, entropies, _ = trainer._forward.predictions(row)
        loss = -(weights * advantages * logprobs)[mask].sum() / weights[mask].sum()
        loss.backward()
    ratios = (logprobs.detach() - behavior)[mask].double().exp()
    share = float(ratios.sum() ** 2 / (len(ratios) * ratios.square().sum()))
    assert 0.5 < share < 0.999
    assert result.num_targets == mask.sum()
    for key, value in {
        "loss": float(loss),
        "off_policy/effective_sample_share": share,
        "off_policy/rejected_token_share": float((~mask).double().mean()),
        "policy/entropy": float(entropies[mask].double().mean()),
    }.items():
        assert result.metrics[key] == pytest.approx(value, rel=1e-5), key
    assert gradients.keys() == named_tensors(trainer).keys()
    for name, gradient in named_tensors(trainer, gradients=True).items():
        torch.testing.assert_close(gradients[name], gradient, atol=1e-6, rtol=1e-4, msg=name)


def test_a_step_is_the_written_out_loss(folder: Path) -> None:
    run_ranks(1, _by_hand, folder)


def _against_checkpoint(folder: Path) -> None:
    """A first and a third step, and what they should say of KL and loss."""
    sequences = _near_policy(folder)[:3]
    # With recorded experts: the reference does not take them.
    free = [dataclasses.replace(sequence, kept_tokens=None, weight=1.0) for sequence in sequences]
    row, unrecorded = (
        pack_row(some) for some in (free, [dataclasses.replace(one, expert_ids_SMK=None) for one in free])
    )
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    reference.lm_head.register_forward_hook(lambda module, inputs, logits: logits / 0.8)
    with torch.no_grad():
        ref_T = torch.cat([reference_logprobs(reference, sequence) for sequence in free])
    advantages_T = torch.from_numpy(row.advantages_T).double()
    for lora in (None, LORA):
        loss = section(objective={"kind": "reinforce"}, kl=K3)
        trainer = unclipped_trainer(folder, loss, learning_rate=3e-3, lora=lora)
        assert trainer.train_step([unrecorded]).metrics["kl/k3"] == 0.0
        trainer.train_step([unrecorded])
        if lora is not None:
            assert all(float(tensor.abs().max()) > 0 for tensor in named_tensors(trainer).values())
        with torch.no_grad():
            current_T = trainer.logprobs(row).double()
        metrics = trainer.train_step([row]).metrics
        log_T = ref_T - current_T
        expected_kl = float((log_T.exp() - 1 - log_T).mean())
        assert expected_kl > 1e-3
        assert metrics["kl/k3"] == pytest.approx(expected_kl, rel=1e-3)
        expected_loss = float((-advantages_T * current_T).mean()) + 0.3 * expected_kl
        assert metrics["loss"] == pytest.approx(expected_loss, rel=1e-4)


def test_the_reference_is_the_checkpoint(folder: Path) -> None:
    """Frozen copy and switched-off adapters against transformers: no KL at first, then that to the start."""
    run_ranks(1, _against_checkpoint, folder)


def _sums_of_this_rank() -> None:
    sums = StepSums(num_layers=0, device="cpu")
    first, second = {"objective/first": torch.tensor(2.0)}, {"objective/second": torch.tensor(3.0)}
    sums.add(first if dist.get_rank() == 0 else second | first)
    sums.add({"mismatch/num_fresh": torch.tensor(0), "mismatch/fresh_logprob_abs_mean": torch.tensor(0.0)})
    metrics = sums.metrics(4, mesh=init_device_mesh("cpu", (2,)))
    assert metrics["objective/first"] == 1.0 and metrics["objective/second"] == 0.75


def test_a_sum_that_only_some_ranks_have_is_not_taken_for_another() -> None:
    """An objective of a user's own may give one for some rows only, and in any order."""
    run_ranks(2, _sums_of_this_rank)
