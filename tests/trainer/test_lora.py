"""Adapters against merged weights and transformers' gradients; training them."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from forgeasync.config import ADAPTABLE
from forgeasync.trainer import (
    ATTENTION_MODULES,
    EXPERT_PARAMETERS,
    WEIGHTS_FILE,
    GroupedAdapter,
    TrainingSequence,
    pack_row,
)
from forgeasync.weights import merge_adapter
from tests.support.lora import LORA, PREFIX, adapters, base_weights, free, make_trainer, reference_logprobs
from tests.support.peft_adapters import write_merged
from tests.support.processes import run_ranks


def _logprobs_and_gradients(
    folder: Path, sequences: list[TrainingSequence], out: Path
) -> tuple[torch.Tensor, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Log-probabilities, and gradients of their sum, each times its index + 1."""
    trainer = make_trainer(folder)
    logprobs_T = trainer.logprobs(pack_row(sequences))
    (logprobs_T * torch.arange(1, len(logprobs_T) + 1)).sum().backward()
    trainer.save_hf(out, source=folder)
    return logprobs_T.detach(), adapters(trainer), adapters(trainer, gradients=True)


def test_logprobs_and_gradients_match_the_merged_model(
    folder: Path, sequences: list[TrainingSequence], tmp_path: Path
) -> None:
    """With W' = W + s B A and G the gradient of W': that of A is s B^T G, that of B is s G A^T."""
    out = tmp_path / "peft"
    logprobs_T, tensors, gradients = run_ranks(1, _logprobs_and_gradients, folder, free(sequences), out)[0]
    layer, rank = f"{PREFIX}model.layers.1", LORA.rank
    assert tensors[f"{layer}.self_attn.k_proj.lora_A.weight"].shape == (rank, 64)
    assert tensors[f"{layer}.self_attn.q_proj.lora_B.weight"].shape == (128, rank)
    assert tensors[f"{layer}.mlp.experts.7.up_proj.lora_B.weight"].shape == (64, rank)
    assert len(tensors) == 2 * 2 * (4 + 8 * 3)
    saved = load_file(out / WEIGHTS_FILE)
    assert saved.keys() == tensors.keys()
    assert all(torch.equal(saved[name], tensor) for name, tensor in tensors.items())

    reference = AutoModelForCausalLM.from_pretrained(
        write_merged(folder, tensors, LORA, tmp_path / "merged"),
        dtype=torch.float64,
        attn_implementation="eager",
        experts_implementation="eager",
    )
    expected_T = torch.cat([reference_logprobs(reference, sequence) for sequence in free(sequences)])
    torch.testing.assert_close(logprobs_T.double(), expected_T.detach(), atol=1e-4, rtol=0)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        plain_T = torch.cat([reference_logprobs(plain, sequence) for sequence in free(sequences)])
    assert (plain_T - expected_T).abs().mean() > 0.05, "adapters that do nothing would hide mistakes"

    (expected_T * torch.arange(1, len(expected_T) + 1)).sum().backward()
    of_weights = {name: parameter.grad for name, parameter in reference.named_parameters()}
    for name, gradient in gradients.items():
        module, side, _ = name.rsplit(".", 2)
        weight_gradient = of_weight(module.removeprefix(PREFIX), of_weights)
        a, b = (tensors[f"{module}.lora_{s}.weight"].double() for s in "AB")
        factor = b.T @ weight_gradient if side == "lora_A" else weight_gradient @ a.T
        expected = LORA.alpha / LORA.rank * factor
        scale = max(1.0, float(expected.abs().max()))
        torch.testing.assert_close(gradient.double() / scale, expected / scale, atol=1e-4, rtol=0, msg=name)


def of_weight(module: str, gradients: dict[str, torch.Tensor]) -> torch.Tensor:
    """The gradient of one linear layer; transformers keeps those of experts fused, gate before up."""
    if ".experts." not in module:
        return gradients[f"{module}.weight"]
    experts, index, projection = module.rsplit(".", 2)
    if projection == "down_proj":
        return gradients[f"{experts}.down_proj"][int(index)]
    gate, up = gradients[f"{experts}.gate_up_proj"][int(index)].chunk(2)
    return gate if projection == "gate_proj" else up


def test_merged_is_the_product_in_float32() -> None:
    base, a, b = torch.randn(3, 8, 6).bfloat16(), torch.randn(3, 2, 6), torch.randn(3, 8, 2)
    by_hand = base.double() + 0.5 * torch.einsum("eor,eri->eoi", b.double(), a.double())
    result = merge_adapter(base, a, b, 0.5)
    assert result.dtype == torch.bfloat16
    torch.testing.assert_close(result, by_hand.bfloat16(), atol=0, rtol=2**-7)
    assert torch.equal(merge_adapter(base, a, torch.zeros_like(b), 0.5), base)


def _train(folder: Path, sequences: list[TrainingSequence]) -> None:
    """30 steps on one batch, from adapters as they start."""
    trainer = make_trainer(folder, is_fresh=True)
    row = pack_row(sequences)
    with torch.no_grad():
        logprobs_T = trainer.logprobs(row).numpy()
    # Sampled by the policy itself, so that the objective starts at minus the mean advantage.
    row.behavior_logprobs_L[row.mask_L] = logprobs_T
    base, before = base_weights(trainer), adapters(trainer)
    assert not any(tensor.any() for name, tensor in before.items() if "lora_B" in name)
    losses = [trainer.train_step([row]).metrics["loss"] for _ in range(30)]
    assert all(torch.equal(base[name], tensor) for name, tensor in base_weights(trainer).items())
    assert not any(torch.equal(tensor, before[name]) for name, tensor in adapters(trainer).items())
    advantages_T = np.concatenate([np.full(len(s.response_ids_T), s.advantage) for s in sequences])
    assert losses[0] == pytest.approx(-advantages_T.mean(), abs=1e-4)
    # Past these ratios a token has no gradient any more.
    best = -np.where(advantages_T > 0, 1.28 * advantages_T, 0.8 * advantages_T).mean()
    assert losses[-1] < best + 0.1 * (losses[0] - best)


def test_training_improves_the_objective_and_keeps_the_base(
    folder: Path, sequences: list[TrainingSequence]
) -> None:
    run_ranks(1, _train, folder, free(sequences))


def test_the_config_knows_what_can_be_adapted() -> None:
    assert {*ATTENTION_MODULES, *EXPERT_PARAMETERS} == {*ADAPTABLE}


@pytest.mark.parametrize("rank", [1, 3, 8, 12, 511])
def test_experts_have_adapters_of_every_rank_in_bfloat16(rank: int) -> None:
    """Grouped products of bfloat16 want rows that start at multiples of 16 bytes.

    They do so on GPUs as on torch's meta device, which has no data but the same rules
    (``torch/_meta_registrations.py`` of torch 2.13).
    """
    sizes = {"num_experts": 4, "in_features": 64, "out_features": 32, "rank": rank}
    with torch.device("meta"):
        adapter = GroupedAdapter.Config(**sizes, param_init={}).build().to(torch.bfloat16)
        x_RI = torch.empty(40, 64, dtype=torch.bfloat16, requires_grad=True)
        y_RO = adapter(x_RI, torch.empty(4, dtype=torch.int32))
        y_RO.backward(torch.empty_like(y_RO))
    assert y_RO.shape == (40, 32) and x_RI.grad.shape == x_RI.shape
    assert adapter.lora_a_ErI.grad.shape == (4, rank, 64)
    assert adapter.lora_b_EOr.grad.shape == (4, 32, rank)
