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


class Saved(NamedTuple):
    """A model, sequences, and for every choice of targets the saved adapters and what they compute."""

    model: Path
    sequences: list[TrainingSequence]
    adapters: Path
    logprobs: dict[tuple[str, ...], torch.Tensor]

    def folder(self, targets: tuple[str, ...]) -> Path:
        return self.adapters / "+".join(targets)


def _save(model: Path, sequences: list[TrainingSequence], out: Path) -> dict[tuple[str, ...], torch.Tensor]:
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
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    path = tmp_path_factory.mktemp("lora")
    model = write_tiny_model(path / "hf", scale=4.0, num_experts=8, top_k=3)
    sequences = free(make_sequences(3, read_model_facts(str(model))))
    logprobs = run_ranks(2, _save, model, sequences, path / "adapters")[0]
    return Saved(model, sequences, path / "adapters", logprobs)


def test_all_files_can_be_read_by_the_same_people(saved: Saved) -> None:
    folder = saved.folder(CHOICES[0])
    assert (folder / WEIGHTS_FILE).stat().st_mode == (folder / CONFIG_FILE).stat().st_mode


@pytest.mark.parametrize("targets", CHOICES, ids="+".join)
def test_peft_computes_what_the_trainer_does(saved: Saved, targets: tuple[str, ...]) -> None:
    from peft import PeftModel

    base = AutoModelForCausalLM.from_pretrained(saved.model, dtype=torch.float32)
    with torch.no_grad():
        plain_T = torch.cat([reference_logprobs(base, sequence) for sequence in saved.sequences])
        model = PeftModel.from_pretrained(base, saved.folder(targets))
        expected_T = torch.cat([reference_logprobs(model, sequence) for sequence in saved.sequences])
    torch.testing.assert_close(saved.logprobs[targets], expected_T, atol=1e-4, rtol=0)
    assert (plain_T - expected_T).abs().mean() > 0.01, "adapters that do nothing would hide mistakes"


def _save_dense(model: Path, sequences: list[TrainingSequence], out: Path) -> torch.Tensor:
    trainer = make_trainer(model, ParallelSection(num_procs=2, tensor=2))
    trainer.save_hf(out, source=model)
    with torch.no_grad():
        return trainer.logprobs(pack_row(sequences))


def test_networks_without_experts_have_adapters_too(tmp_path: Path) -> None:
    from peft import PeftModel

    model = write_family(tmp_path / "hf", "llama3_rope")
    sequences = free(make_sequences(3, read_model_facts(str(model))))
    found_T = run_ranks(2, _save_dense, model, sequences, tmp_path / "adapters")[0]
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    adapted = PeftModel.from_pretrained(base, tmp_path / "adapters")
    with torch.no_grad():
        expected_T = torch.cat([reference_logprobs(adapted, sequence) for sequence in sequences])
    torch.testing.assert_close(found_T, expected_T, atol=1e-4, rtol=0)
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


def test_vllm_reads_the_same_folder(saved: Saved) -> None:
    out = saved.folder(ADAPTABLE)
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
