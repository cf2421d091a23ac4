"""Adapters against merged weights and transformers' gradients; training them."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from forgeasync.config import ADAPTABLE
from forgeasync.trainer import (
    ATTENTION_MODULES,
    EXPERT_PARAMETERS,
    WEIGHTS_FILE,
    GroupedAdapter,
    TrainingSequence,
    lora,
    pack_row,
)
from forgeasync.weights import merge_adapter
from tests.support.lora import LORA, PREFIX, adapters, base_weights, free, make_trainer, reference_logprobs
from tests.support.processes import run_ranks


def merge_into(folder: Path, tensors: dict[str, torch.Tensor], out: Path) -> Path:
    """The model with W + (alpha / rank) B A for every adapted weight, as a folder of its own."""
    weights = {name: tensor.double() for name, tensor in load_file(folder / "model.safetensors").items()}
    for name in tensors:
        if name.endswith(".lora_A.weight"):
            module = name.removesuffix(".lora_A.weight")
            a, b = tensors[name].double(), tensors[f"{module}.lora_B.weight"].double()
            weights[f"{module.removeprefix(PREFIX)}.weight"] += LORA.alpha / LORA.rank * b @ a
    out.mkdir()
    for file in ("config.json", "generation_config.json"):
        (out / file).write_text((folder / file).read_text())
    save_file(
        {n: t.float() for n, t in weights.items()}, out / "model.safetensors", metadata={"format": "pt"}
    )
    return out


def _logprobs_and_gradients(
    folder: Path, sequences: list[TrainingSequence], out: Path
) -> tuple[torch.Tensor, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Log-probabilities, and gradients of their sum, each times its index + 1."""
    trainer = make_trainer(folder)
    logprobs_T = trainer.logprobs(pack_row(sequences))
    (logprobs_T * torch.arange(1, len(logprobs_T) + 1)).sum().backward()
    trainer.save_hf(out, source=folder)
    return logprobs_T.detach(), adapters(trainer), adapters(trainer, gradients=True)


@pytest.fixture(scope="module")
def trained(
    folder: Path, sequences: list[TrainingSequence], tmp_path_factory: pytest.TempPathFactory
) -> tuple[torch.Tensor, dict[str, torch.Tensor], dict[str, torch.Tensor], Path]:
    out = tmp_path_factory.mktemp("adapter") / "peft"
    return *run_ranks(1, _logprobs_and_gradients, folder, free(sequences), out)[0], out


def test_names_and_shapes_are_those_of_peft(
    trained: tuple[torch.Tensor, dict[str, torch.Tensor], dict[str, torch.Tensor], Path],
) -> None:
    _, tensors, _, out = trained
    layer, rank = f"{PREFIX}model.layers.1", LORA.rank
    assert tensors[f"{layer}.self_attn.k_proj.lora_A.weight"].shape == (rank, 64)
    assert tensors[f"{layer}.self_attn.q_proj.lora_B.weight"].shape == (128, rank)
    assert tensors[f"{layer}.mlp.experts.7.up_proj.lora_B.weight"].shape == (64, rank)
    assert len(tensors) == 2 * 2 * (4 + 8 * 3)
    saved = load_file(out / WEIGHTS_FILE)
    assert saved.keys() == tensors.keys()
    assert all(torch.equal(saved[name], tensor) for name, tensor in tensors.items())


def test_logprobs_and_gradients_match_the_merged_model(
    folder: Path,
    sequences: list[TrainingSequence],
    trained: tuple[torch.Tensor, dict[str, torch.Tensor], dict[str, torch.Tensor], Path],
    tmp_path: Path,
) -> None:
    """With W' = W + s B A and G the gradient of W': that of A is s B^T G, that of B is s G A^T."""
    logprobs_T, tensors, gradients, _ = trained
    merged_folder = merge_into(folder, tensors, tmp_path / "merged")
    reference = AutoModelForCausalLM.from_pretrained(
        merged_folder, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
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


def _train(folder: Path, sequences: list[TrainingSequence]) -> tuple[list[float], bool, float, int]:
    """Losses of 30 steps on one batch, from adapters as they start; whether the base stayed as it was."""
    trainer = make_trainer(folder, is_fresh=True)
    row = pack_row(sequences)
    with torch.no_grad():
        logprobs_T = trainer.logprobs(row).numpy()
    # Sampled by the policy itself, so that the objective starts at minus the mean advantage.
    row.behavior_logprobs_L[row.mask_L] = logprobs_T
    base, before = base_weights(trainer), adapters(trainer)
    losses = [trainer.train_step([row]).metrics["loss"] for _ in range(30)]
    is_kept = all(torch.equal(base[name], tensor) for name, tensor in base_weights(trainer).items())
    moved = [name for name, tensor in adapters(trainer).items() if not torch.equal(tensor, before[name])]
    largest_b = max(float(t.abs().max()) for name, t in before.items() if "lora_B" in name)
    return losses, is_kept, largest_b, len(before) - len(moved)


def test_training_improves_the_objective_and_keeps_the_base(
    folder: Path, sequences: list[TrainingSequence]
) -> None:
    losses, is_base_kept, largest_b, num_unmoved = run_ranks(1, _train, folder, free(sequences))[0]
    assert is_base_kept and largest_b == 0.0 and num_unmoved == 0
    advantages_T = np.concatenate([np.full(len(s.response_ids_T), s.advantage) for s in free(sequences)])
    assert losses[0] == pytest.approx(-advantages_T.mean(), abs=1e-4)
    # Past these ratios a token has no gradient any more.
    best = -np.where(advantages_T > 0, 1.28 * advantages_T, 0.8 * advantages_T).mean()
    assert losses[-1] < best + 0.1 * (losses[0] - best)


def test_the_config_knows_what_can_be_adapted() -> None:
    assert {*ATTENTION_MODULES, *EXPERT_PARAMETERS} == {*ADAPTABLE}


NUM_EXPERTS, NUM_INPUTS, NUM_OUTPUTS, NUM_TOKENS = 4, 64, 32, 40


def forward_and_backward(rank: int) -> tuple[tuple[int, ...], ...]:
    """Shapes of the output and of the gradients of input, A and B."""
    with torch.device("meta"):
        adapter = GroupedAdapter.Config(
            num_experts=NUM_EXPERTS,
            in_features=NUM_INPUTS,
            out_features=NUM_OUTPUTS,
            rank=rank,
            param_init={},
        ).build()
        adapter = adapter.to(torch.bfloat16)
        x_RI = torch.empty(NUM_TOKENS, NUM_INPUTS, dtype=torch.bfloat16, requires_grad=True)
        y_RO = adapter(x_RI, torch.empty(NUM_EXPERTS, dtype=torch.int32))
        y_RO.backward(torch.empty_like(y_RO))
    tensors = (y_RO, x_RI.grad, adapter.lora_a_ErI.grad, adapter.lora_b_EOr.grad)
    return tuple(tuple(tensor.shape) for tensor in tensors)


@pytest.mark.parametrize("rank", [1, 3, 8, 12, 511])
def test_experts_have_adapters_of_every_rank_in_bfloat16(rank: int) -> None:
    """Grouped products of bfloat16 want rows that start at multiples of 16 bytes.

    They do so on GPUs as on torch's meta device, which has no data but the same rules
    (``torch/_meta_registrations.py`` of torch 2.13).
    """
    assert forward_and_backward(rank) == (
        (NUM_TOKENS, NUM_OUTPUTS),
        (NUM_TOKENS, NUM_INPUTS),
        (NUM_EXPERTS, rank, NUM_INPUTS),
        (NUM_EXPERTS, NUM_OUTPUTS, rank),
    )


@pytest.mark.parametrize("rank", [1, 3, 12])
def test_without_padding_these_ranks_are_refused(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lora, "_GROUPED_STRIDE_BYTES", 2)
    with pytest.raises(RuntimeError, match="multiple of 16 bytes"):
        forward_and_backward(rank)
