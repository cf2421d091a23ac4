"""Saved adapters, read by peft and by vLLM."""

from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from forgeasync.config import ADAPTABLE, ParallelSection
from forgeasync.models import read_model_facts
from forgeasync.testing import write_tiny_model
from forgeasync.trainer import CONFIG_FILE, WEIGHTS_FILE, TrainingSequence, pack_row
from tests.support.families import write_family
from tests.support.lora import LORA, PREFIX, free, make_trainer, reference_logprobs
from tests.support.processes import run_alone, run_ranks
from tests.support.trainers import make_sequences

CHOICES = (ADAPTABLE, ("q_proj", "v_proj"), ("o_proj", "gate_proj"), ("down_proj",))


MOE, DENSE = "moe", "llama3_rope"


class Saved(NamedTuple):
    """A model, sequences, and the folder of adapters with what the trainer computes with them."""

    model: Path
    sequences: list[TrainingSequence]
    folder: Path
    logprobs_T: torch.Tensor


def _save(
    model: Path,
    sequences: list[TrainingSequence],
    out: Path,
    targets: tuple[str, ...],
    degrees: dict[str, int],
) -> torch.Tensor:
    lora = LORA.model_copy(update={"targets": targets})
    trainer = make_trainer(model, ParallelSection(num_procs=2, **degrees), lora=lora)
    trainer.save_hf(out, source=model)
    # Two data ranks have the same row.
    with torch.no_grad():
        return trainer.logprobs(pack_row(sequences))


def save(path: Path, family: str, targets: tuple[str, ...]) -> Saved:
    if family == MOE:
        model = write_tiny_model(path / "hf", scale=4.0, num_experts=8, top_k=3)
    else:
        model = write_family(path / "hf", family)
    sequences = free(make_sequences(3, read_model_facts(str(model))))
    degrees = {"expert": 2} if family == MOE else {"tensor": 2}
    out = path / "adapters"
    return Saved(model, sequences, out, run_ranks(2, _save, model, sequences, out, targets, degrees)[0])


@pytest.mark.parametrize(("family", "targets"), [*((MOE, one) for one in CHOICES), (DENSE, ADAPTABLE)])
def test_peft_computes_what_the_trainer_does(family: str, targets: tuple[str, ...], tmp_path: Path) -> None:
    from peft import PeftModel

    saved = save(tmp_path, family, targets)
    base = AutoModelForCausalLM.from_pretrained(saved.model, dtype=torch.float32)
    with torch.no_grad():
        plain_T = torch.cat([reference_logprobs(base, sequence) for sequence in saved.sequences])
        model = PeftModel.from_pretrained(base, saved.folder)
        expected_T = torch.cat([reference_logprobs(model, sequence) for sequence in saved.sequences])
    torch.testing.assert_close(saved.logprobs_T, expected_T, atol=1e-4, rtol=0)
    assert (plain_T - expected_T).abs().mean() > 0.01, "adapters that do nothing would hide mistakes"
    modes = {(saved.folder / file).stat().st_mode for file in (WEIGHTS_FILE, CONFIG_FILE)}
    assert len(modes) == 1, "whoever may read one file may read all"
    if family == DENSE:
        written = load_file(saved.folder / WEIGHTS_FILE)
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


def test_vllm_reads_the_same_folder(tmp_path: Path) -> None:
    out = save(tmp_path, MOE, ADAPTABLE).folder
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
