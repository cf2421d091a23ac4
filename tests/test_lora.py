"""Adapters against merged weights, transformers' gradients, peft, and themselves under other layouts."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from forgeasync.algorithms.objectives import ppo_clip
from forgeasync.config.model_facts import read_model_facts
from forgeasync.config.schema import (
    ActivationCheckpointing,
    Dtype,
    LoraSection,
    OptimizerSection,
    ParallelSection,
    TrainerSection,
)
from forgeasync.trainer import lora_checkpoint
from forgeasync.trainer.lora import adapter_parameters, copy_whole, is_adapter
from forgeasync.trainer.packing import TrainingSequence, pack_row, pack_rows
from forgeasync.trainer.policy_trainer import PolicyTrainer
from forgeasync.weights.lora_merge import merged
from tests.support.models import write_random_model
from tests.support.processes import run_ranks
from tests.test_trainer import TOKENS_PER_ROW, make_sequences

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
# A rank that grouped matrix products do not take as it is.
LORA = LoraSection(rank=3, alpha=6.0, targets=TARGETS)
PREFIX = "base_model.model."


def make_trainer(
    folder: Path,
    parallel: ParallelSection,
    *,
    lora: LoraSection = LORA,
    checkpointing: ActivationCheckpointing = ActivationCheckpointing.NONE,
    compile: bool = False,
    dtype: Dtype = Dtype.FLOAT32,
) -> PolicyTrainer:
    """A trainer whose adapters are not zero."""
    section = TrainerSection(
        parallel=parallel,
        tokens_per_row=TOKENS_PER_ROW,
        activation_checkpointing=checkpointing,
        compile=compile,
        dtype=dtype,
        # A large step, so that a wrong gradient shows in the weights.
        optimizer=OptimizerSection(learning_rate=1e-2, max_grad_norm=0.1, eps=1e-3),
    )
    trainer = PolicyTrainer(
        section=section,
        facts=read_model_facts(str(folder)),
        temperature=1.0,
        objective=ppo_clip(),
        seed=0,
        checkpoint=folder,
        lora=lora,
    )
    generator = torch.Generator().manual_seed(1)
    for name, parameter in adapter_parameters(trainer.model):
        if "lora_b" in name:
            copy_whole(parameter, 0.1 * torch.randn(parameter.shape, generator=generator))
    return trainer


def adapters(trainer: PolicyTrainer, *, gradients: bool = False) -> dict[str, torch.Tensor]:
    """All adapters (or their gradients) whole, one tensor per expert."""
    tensors = {}
    for weight in trainer.named_weights():
        tensor = weight.tensor.grad if gradients else weight.tensor.detach()
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        tensors |= dict(zip(weight.names, full if len(weight.names) > 1 else [full], strict=True))
    return {name: tensor.clone() for name, tensor in tensors.items()}


def base_weights(trainer: PolicyTrainer) -> dict[str, torch.Tensor]:
    """This rank's shards of everything that is no adapter."""
    return {
        name: (p.to_local() if isinstance(p, DTensor) else p).detach().clone()
        for name, p in trainer.model.named_parameters()
        if not is_adapter(name)
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_model(tmp_path_factory.mktemp("model") / "hf", scale=4.0, num_experts=8, top_k=3)


@pytest.fixture(scope="module")
def sequences(folder: Path) -> list[TrainingSequence]:
    return make_sequences(11, read_model_facts(str(folder)))


def free(sequences: list[TrainingSequence]) -> list[TrainingSequence]:
    """Three of the sequences, routed by the model itself, over the whole vocabulary."""
    return [dataclasses.replace(s, expert_ids_SMK=None, kept_tokens=None) for s in sequences[:3]]


def reference_logprobs(model: torch.nn.Module, sequence: TrainingSequence) -> torch.Tensor:
    """Of a sequence's response, by a transformers (or peft) model."""
    ids = torch.from_numpy(np.concatenate([sequence.prompt_ids_P, sequence.response_ids_T])).long()
    logits = model(ids[None]).logits[0, len(sequence.prompt_ids_P) - 1 : -1]
    return torch.log_softmax(logits, -1).gather(-1, ids[len(sequence.prompt_ids_P) :, None])[:, 0]


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
    trainer = make_trainer(folder, ParallelSection())
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
    saved = load_file(out / lora_checkpoint.WEIGHTS_FILE)
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
    result = merged(base, a, b, 0.5)
    assert result.dtype == torch.bfloat16
    torch.testing.assert_close(result, by_hand.bfloat16(), atol=0, rtol=2**-7)
    assert torch.equal(merged(base, a, torch.zeros_like(b), 0.5), base)


def _step(
    folder: Path,
    parallel: ParallelSection,
    sequences: list[TrainingSequence],
    checkpointing: ActivationCheckpointing,
    lora: LoraSection,
) -> tuple[dict[str, float], dict[str, torch.Tensor], dict[str, torch.Tensor], bool]:
    trainer = make_trainer(folder, parallel, checkpointing=checkpointing, lora=lora)
    base = base_weights(trainer)
    rows = pack_rows(sequences, tokens_per_row=TOKENS_PER_ROW, num_ranks=trainer.num_data_ranks)
    num_targets = sum(row.num_targets for of_rank in rows for row in of_rank)
    # More microbatches than one, and an uneven last one: nothing but padding on some rank.
    rows = [[*of_rank, pack_row([])] for of_rank in rows]
    gradients: dict[str, torch.Tensor] = {}
    trainer._optimizer.register_step_pre_hook(lambda *_: gradients.update(adapters(trainer, gradients=True)))
    result = trainer.train_step(rows[trainer.data_rank], num_targets=num_targets)
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
        pytest.param(ParallelSection(num_procs=2), ActivationCheckpointing.NONE, id="fsdp2"),
        pytest.param(ParallelSection(num_procs=2, expert=2), ActivationCheckpointing.NONE, id="fsdp2-ep2"),
        pytest.param(ParallelSection(num_procs=2, expert=2), ActivationCheckpointing.FULL, id="ep2-full-ac"),
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
        ),
        pytest.param(
            ParallelSection(num_procs=2, context=2, expert=2), ActivationCheckpointing.FULL, id="cp2-ep2-ac"
        ),
        pytest.param(
            ParallelSection(num_procs=4, tensor=2, expert=4),
            ActivationCheckpointing.SELECTIVE,
            id="fsdp2-tp2-ep4-selective-ac",
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
