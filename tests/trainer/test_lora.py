"""Adapters: against merged weights and transformers' gradients, saved for peft and vLLM, and trained."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from forgeasync.config import ADAPTABLE, ParallelSection
from forgeasync.models import read_model_facts
from forgeasync.trainer import CONFIG_FILE, WEIGHTS_FILE, GroupedAdapter, TrainingSequence, pack_row
from forgeasync.weights import merge_adapter
from tests.support.families import write_family
from tests.support.lora import LORA, PREFIX, base_weights, free, make_trainer
from tests.support.peft_adapters import write_merged
from tests.support.processes import run_alone, run_ranks
from tests.support.references import reference_logprobs
from tests.support.trainers import make_sequences, named_tensors

CHOICES = (ADAPTABLE, ("q_proj", "v_proj"), ("o_proj", "gate_proj"), ("down_proj",))


def _logprobs_and_gradients(
    folder: Path, sequences: list[TrainingSequence]
) -> tuple[torch.Tensor, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Log-probabilities, adapters, and gradients of the sum of each times its index + 1."""
    trainer = make_trainer(folder)
    logprobs_T = trainer.logprobs(pack_row(sequences))
    (logprobs_T * torch.arange(1, len(logprobs_T) + 1)).sum().backward()
    return logprobs_T.detach(), named_tensors(trainer), named_tensors(trainer, gradients=True)


def test_logprobs_and_gradients_match_the_merged_model(
    folder: Path, sequences: list[TrainingSequence], tmp_path: Path
) -> None:
    """With W' = W + s B A and G the gradient of W': that of A is s B^T G, that of B is s G A^T."""
    logprobs_T, tensors, gradients = run_ranks(1, _logprobs_and_gradients, folder, free(sequences))[0]
    merged_folder = write_merged(folder, tensors, LORA, tmp_path / "merged")
    reference = AutoModelForCausalLM.from_pretrained(
        merged_folder, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
    )
    expected_T = torch.cat([reference_logprobs(reference, sequence) for sequence in free(sequences)])
    torch.testing.assert_close(logprobs_T.double(), expected_T.detach(), atol=1e-4, rtol=0)
    (expected_T * torch.arange(1, len(expected_T) + 1)).sum().backward()
    of_weights = {name: parameter.grad for name, parameter in reference.named_parameters()}
    assert gradients.keys() == tensors.keys(), "every adapter has a gradient"
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


def _save(model: Path, sequences: list[TrainingSequence], out: Path) -> dict[tuple[str, ...], torch.Tensor]:
    """What the saved adapters of each choice of targets compute."""
    logprobs = {}
    for targets in CHOICES:
        lora = LORA.model_copy(update={"targets": targets})
        trainer = make_trainer(model, ParallelSection(num_procs=2, expert=2), lora=lora)
        trainer.save_hf(out / "+".join(targets), source=model)
        # Two data ranks, of which each has the same row.
        with torch.no_grad():
            logprobs[targets] = trainer.logprobs(pack_row(sequences))
    return logprobs


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Has a folder for each choice of targets, once ``logprobs`` are there."""
    return tmp_path_factory.mktemp("adapters")


@pytest.fixture(scope="module")
def logprobs(
    folder: Path, sequences: list[TrainingSequence], saved: Path
) -> dict[tuple[str, ...], torch.Tensor]:
    return run_ranks(2, _save, folder, free(sequences), saved)[0]


def assert_peft_agrees(
    model: Path, adapters: Path, sequences: list[TrainingSequence], logprobs_T: torch.Tensor
) -> None:
    from peft import PeftModel

    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        plain_T = torch.cat([reference_logprobs(base, sequence) for sequence in sequences])
        adapted = PeftModel.from_pretrained(base, adapters)
        expected_T = torch.cat([reference_logprobs(adapted, sequence) for sequence in sequences])
    torch.testing.assert_close(logprobs_T.double(), expected_T, atol=1e-4, rtol=0)
    assert (plain_T - expected_T).abs().mean() > 0.01, "adapters that do nothing would hide mistakes"


@pytest.mark.parametrize("targets", CHOICES, ids="+".join)
def test_peft_computes_what_the_trainer_does(
    folder: Path,
    sequences: list[TrainingSequence],
    saved: Path,
    logprobs: dict[tuple[str, ...], torch.Tensor],
    targets: tuple[str, ...],
) -> None:
    own = saved / "+".join(targets)
    assert_peft_agrees(folder, own, free(sequences), logprobs[targets])
    weights, config = own / WEIGHTS_FILE, own / CONFIG_FILE
    assert weights.stat().st_mode == config.stat().st_mode, "whoever may read one file may read all"


def _save_dense(model: Path, sequences: list[TrainingSequence], out: Path) -> torch.Tensor:
    trainer = make_trainer(model, ParallelSection(num_procs=2, tensor=2))
    trainer.save_hf(out, source=model)
    with torch.no_grad():
        return trainer.logprobs(pack_row(sequences))


def test_networks_without_experts_have_adapters_too(tmp_path: Path) -> None:
    model = write_family(tmp_path / "hf", "llama3_rope")
    sequences = free(make_sequences(3, read_model_facts(str(model))))
    logprobs_T = run_ranks(2, _save_dense, model, sequences, tmp_path / "adapters")[0]
    assert_peft_agrees(model, tmp_path / "adapters", sequences, logprobs_T)
    written = load_file(tmp_path / "adapters" / WEIGHTS_FILE)
    assert len(written) == 2 * 2 * len(ADAPTABLE)
    assert all(tensor.any() for tensor in written.values())


def _packed_by_vllm(folder: Path, num_experts: int) -> tuple[float, torch.Tensor, list[torch.Tensor]]:
    """Rank-0 scaling, B of a q_proj, and A and B of a layer's experts, packed as for vLLM's kernels."""
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.lora_weights import PackedLoRALayerWeights
    from vllm.lora.peft_helper import PEFTHelper

    # The order in which vLLM's mapping of experts names them: w1, w2, w3.
    names = [f"experts.{e}.{p}" for e in range(num_experts) for p in ("gate_proj", "down_proj", "up_proj")]
    model = LoRAModel.from_local_checkpoint(
        str(folder),
        {"q_proj", "k_proj", "v_proj", "o_proj", *names},
        peft_helper=PEFTHelper.from_local_dir(str(folder), None),
        device="cpu",
        dtype=torch.float32,
    )
    layer = "model.layers.1"
    packed = PackedLoRALayerWeights.pack_moe(
        [model.loras[f"{layer}.mlp.{name}"] for name in names], f"{layer}.mlp.experts"
    )
    attention = model.loras[f"{layer}.self_attn.q_proj"]
    return attention.scaling, attention.lora_b, [*packed.lora_a, *packed.lora_b]


@pytest.mark.usefixtures("logprobs")
def test_vllm_reads_the_same_folder(saved: Path) -> None:
    out = saved / "+".join(ADAPTABLE)
    tensors = load_file(out / WEIGHTS_FILE)
    scaling, attention_b, packed = run_alone(_packed_by_vllm, out, 8)
    layer = f"{PREFIX}model.layers.1"
    assert scaling == LORA.alpha / LORA.rank
    assert torch.equal(attention_b, tensors[f"{layer}.self_attn.q_proj.lora_B.weight"])
    expected = [
        torch.stack([tensors[f"{layer}.mlp.experts.{e}.{p}.lora_{side}.weight"] for e in range(8)])
        for side in "AB"
        for p in ("gate_proj", "down_proj", "up_proj")
    ]
    assert all(torch.equal(a, b) for a, b in zip(packed, expected, strict=True))


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
    row.behavior_logprobs_T[:] = logprobs_T
    base, before = base_weights(trainer), named_tensors(trainer)
    losses = [trainer.train_step([row]).metrics["loss"] for _ in range(30)]
    is_kept = all(torch.equal(base[name], tensor) for name, tensor in base_weights(trainer).items())
    moved = [name for name, tensor in named_tensors(trainer).items() if not torch.equal(tensor, before[name])]
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
