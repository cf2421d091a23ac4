"""One optimizer step of adapters: the same under every parallel layout, checkpointed and compiled or not."""

from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from forgeasync.config import ActivationCheckpointing, Dtype, ParallelSection
from forgeasync.trainer import TrainingSequence, pack_row, pack_rows
from tests.support.lora import adapters, base_weights, make_trainer
from tests.support.processes import run_ranks
from tests.support.trainers import TOKENS_PER_ROW

NONE, FULL = ActivationCheckpointing.NONE, ActivationCheckpointing.FULL


class Stepped(NamedTuple):
    metrics: dict[str, float]
    gradients: dict[str, torch.Tensor]
    adapters: dict[str, torch.Tensor]


def _step(
    folder: Path, sequences: list[TrainingSequence], parallel: ParallelSection, keys: dict[str, object]
) -> Stepped:
    trainer = make_trainer(folder, parallel, **keys)
    base = base_weights(trainer)
    rows = pack_rows(sequences, tokens_per_row=TOKENS_PER_ROW, num_ranks=trainer.num_data_ranks)
    gradients: dict[str, torch.Tensor] = {}
    trainer._optimizer.register_step_pre_hook(lambda *_: gradients.update(adapters(trainer, gradients=True)))
    # More microbatches than one, and an uneven last one: nothing but padding on some rank.
    metrics = trainer.train_step([*rows[trainer.data_rank], pack_row([])]).metrics
    assert all(torch.equal(base[name], tensor) for name, tensor in base_weights(trainer).items())
    assert {one.dtype for one in trainer.model.parameters() if one.requires_grad} == {torch.float32}
    frozen = {one.dtype for one in trainer.model.parameters() if not one.requires_grad}
    assert frozen == {torch.bfloat16 if keys.get("dtype") is Dtype.BFLOAT16 else torch.float32}
    return Stepped(metrics, gradients, adapters(trainer))


@pytest.fixture(scope="module")
def single(folder: Path, sequences: list[TrainingSequence]) -> Stepped:
    return run_ranks(1, _step, folder, sequences, ParallelSection(), {})[0]


LAYOUTS = {
    "fsdp2-ep2": {"expert": 2},
    "replicate2": {"data_replicate": 2},
    "tp2-ep2": {"tensor": 2, "expert": 2},
    "fsdp2": {},
    "tp2-no-sp": {"tensor": 2, "sequence": False},
    "fsdp2-ep2, full AC": {"expert": 2},
}


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(name, marks=[pytest.mark.exhaustive] if number > 2 else [])
        for number, name in enumerate(LAYOUTS)
    ],
)
def test_a_step_is_the_same_under_every_layout(
    folder: Path, sequences: list[TrainingSequence], single: Stepped, layout: str
) -> None:
    """Through recorded experts (routing replay); gradients before clipping are compared as they are after."""
    keys = {"activation_checkpointing": FULL if "AC" in layout else NONE}
    parallel = ParallelSection(num_procs=2, **LAYOUTS[layout])
    for found in run_ranks(2, _step, folder, sequences, parallel, keys):
        for name in ("loss", "grad_norm", "mismatch/kl", "routing/disagreement_share"):
            assert found.metrics[name] == pytest.approx(single.metrics[name], rel=1e-4), name
        assert found.gradients.keys() == single.gradients.keys() == single.adapters.keys()
        largest = max(float(gradient.abs().max()) for gradient in single.gradients.values())
        for name, expected in single.gradients.items():
            torch.testing.assert_close(
                found.gradients[name] / largest, expected / largest, atol=2e-6, rtol=1e-4, msg=name
            )
            torch.testing.assert_close(
                found.adapters[name], single.adapters[name], atol=2e-5, rtol=1e-4, msg=name
            )


@pytest.mark.exhaustive
def test_compiled_and_in_bfloat16(folder: Path, sequences: list[TrainingSequence], single: Stepped) -> None:
    """Adapters stay float32; the frozen rest is kept in the compute dtype."""
    keys = {"activation_checkpointing": FULL, "dtype": Dtype.BFLOAT16, "compile": True}
    (found,) = run_ranks(1, _step, folder, sequences, ParallelSection(), keys)
    assert found.metrics["loss"] == pytest.approx(single.metrics["loss"], rel=2e-2)
    gradient, exact = (
        torch.cat([one.gradients[name].flatten() for name in single.gradients]) for one in (found, single)
    )
    assert torch.cosine_similarity(gradient, exact, dim=0) > 0.995
