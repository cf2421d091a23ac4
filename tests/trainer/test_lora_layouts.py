"""One optimizer step of adapters: the same under every parallel layout, checkpointed and compiled or not."""

from pathlib import Path

import pytest
import torch

from forgeasync.config import ActivationCheckpointing, Dtype, LoraSection, ParallelSection
from forgeasync.trainer import TrainingSequence, pack_row, pack_rows
from tests.support.lora import LORA, adapters, base_weights, make_trainer
from tests.support.processes import run_ranks
from tests.support.trainers import TOKENS_PER_ROW


def _step(
    folder: Path,
    parallel: ParallelSection,
    sequences: list[TrainingSequence],
    checkpointing: ActivationCheckpointing,
    lora: LoraSection,
) -> tuple[dict[str, float], dict[str, torch.Tensor], dict[str, torch.Tensor], bool]:
    trainer = make_trainer(folder, parallel, activation_checkpointing=checkpointing, lora=lora)
    base = base_weights(trainer)
    rows = pack_rows(sequences, tokens_per_row=TOKENS_PER_ROW, num_ranks=trainer.num_data_ranks)
    # More microbatches than one, and an uneven last one: nothing but padding on some rank.
    rows = [[*of_rank, pack_row([])] for of_rank in rows]
    gradients: dict[str, torch.Tensor] = {}
    trainer._optimizer.register_step_pre_hook(lambda *_: gradients.update(adapters(trainer, gradients=True)))
    result = trainer.train_step(rows[trainer.data_rank])
    is_base_kept = all(torch.equal(base[name], tensor) for name, tensor in base_weights(trainer).items())
    return result.metrics, gradients, adapters(trainer), is_base_kept


@pytest.fixture(scope="module")
def single(
    folder: Path, sequences: list[TrainingSequence]
) -> tuple[dict[str, float], dict[str, torch.Tensor], dict[str, torch.Tensor], bool]:
    none = ActivationCheckpointing.NONE
    return run_ranks(1, _step, folder, ParallelSection(), sequences, none, LORA)[0]


@pytest.mark.parametrize(
    ("parallel", "checkpointing"),
    [
        pytest.param(
            ParallelSection(num_procs=2),
            ActivationCheckpointing.NONE,
            id="fsdp2",
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(ParallelSection(num_procs=2, expert=2), ActivationCheckpointing.NONE, id="fsdp2-ep2"),
        pytest.param(
            ParallelSection(num_procs=2, expert=2),
            ActivationCheckpointing.FULL,
            id="ep2-full-ac",
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            ParallelSection(num_procs=2, data_replicate=2), ActivationCheckpointing.NONE, id="replicate2"
        ),
        pytest.param(
            ParallelSection(num_procs=2, tensor=2, expert=2), ActivationCheckpointing.NONE, id="tp2-ep2"
        ),
        pytest.param(
            ParallelSection(num_procs=2, tensor=2, sequence=False),
            ActivationCheckpointing.NONE,
            id="tp2-no-sp",
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_a_step_is_the_same_under_every_layout(
    folder: Path,
    sequences: list[TrainingSequence],
    single: tuple[dict[str, float], dict[str, torch.Tensor], dict[str, torch.Tensor], bool],
    parallel: ParallelSection,
    checkpointing: ActivationCheckpointing,
) -> None:
    """Through recorded experts (routing replay); gradients before clipping are compared as they are after."""
    metrics, gradients, weights, _ = single
    for rank_metrics, rank_gradients, rank_weights, is_base_kept in run_ranks(
        parallel.num_procs, _step, folder, parallel, sequences, checkpointing, LORA
    ):
        assert is_base_kept
        for name in ("loss", "grad_norm", "mismatch/kl", "routing/disagreement_share"):
            assert rank_metrics[name] == pytest.approx(metrics[name], rel=1e-4), name
        assert rank_gradients.keys() == gradients.keys() == weights.keys()
        scale = max(float(gradient.abs().max()) for gradient in gradients.values())
        for name, expected in gradients.items():
            torch.testing.assert_close(
                rank_gradients[name] / scale, expected / scale, atol=2e-6, rtol=1e-4, msg=name
            )
            torch.testing.assert_close(rank_weights[name], weights[name], atol=2e-5, rtol=1e-4, msg=name)


def _step_in(
    folder: Path, sequences: list[TrainingSequence], dtype: Dtype, compile: bool
) -> tuple[float, torch.Tensor, set[torch.dtype], set[torch.dtype]]:
    """Loss and gradients of a step with checkpointing; dtypes of what is trained, and of what is frozen."""
    checkpointing = ActivationCheckpointing.FULL
    trainer = make_trainer(
        folder, ParallelSection(), activation_checkpointing=checkpointing, dtype=dtype, compile=compile
    )
    row = pack_row(sequences[:3])
    gradients: dict[str, torch.Tensor] = {}
    trainer._optimizer.register_step_pre_hook(lambda *_: gradients.update(adapters(trainer, gradients=True)))
    loss = trainer.train_step([row]).metrics["loss"]
    trained, frozen = (
        {parameter.dtype for parameter in trainer.model.parameters() if parameter.requires_grad is is_trained}
        for is_trained in (True, False)
    )
    return loss, torch.cat([gradient.flatten() for gradient in gradients.values()]), trained, frozen


@pytest.mark.exhaustive
def test_compiled_and_in_bfloat16(folder: Path, sequences: list[TrainingSequence]) -> None:
    """Adapters stay float32; the frozen rest is kept in the compute dtype."""
    exact_loss, exact, _, kept = run_ranks(1, _step_in, folder, sequences, Dtype.FLOAT32, False)[0]
    loss, gradient, trained, frozen = run_ranks(1, _step_in, folder, sequences, Dtype.BFLOAT16, True)[0]
    assert kept == {torch.float32}
    assert trained == {torch.float32} and frozen == {torch.bfloat16}
    assert loss == pytest.approx(exact_loss, rel=2e-2)
    assert torch.cosine_similarity(gradient, exact, dim=0) > 0.995
