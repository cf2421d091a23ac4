"""Adapters merged beside an engine: all that was published is merged, or nothing is."""

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from forgeasync.config import LoraSection
from forgeasync.generator import AdapterMerger, merged_layout
from forgeasync.testing import write_tiny_model
from forgeasync.weights import ReceiveBuffer, WeightLayout, received_images, whole_tensors
from tests.support.peft_adapters import random_adapter, write_merged

LORA = LoraSection(rank=3, alpha=6.0, targets=("q_proj", "up_proj"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "hf", num_experts=2, top_k=1)


def receive(tensors: Mapping[str, torch.Tensor], file: Path) -> WeightLayout:
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    layout = merged_layout(shapes, shapes, torch.float32)
    image = ReceiveBuffer(file, layout).image(0).view(torch.float32)
    for name, place in whole_tensors(layout, [image]):
        place.copy_(tensors[name])
    return layout


def merge(folder: Path, adapter: Mapping[str, torch.Tensor], taken: set[str]) -> dict[str, torch.Tensor]:
    """The tensors that the engine takes."""
    shapes = {name: tuple(t.shape) for name, t in load_file(folder / "model.safetensors").items()}
    merged = merged_layout(shapes, sorted(taken), torch.float32)
    fetched, out = folder.parent / "fetched", folder.parent / "out"
    merger = AdapterMerger(
        base=folder,
        scaling=LORA.alpha / LORA.rank,
        adapters=receive(adapter, fetched),
        fetched=fetched,
        merged=merged,
        out=out,
    )
    merger.merge()
    return {name: t.clone() for name, t in whole_tensors(merged, received_images(out, merged))}


def test_every_adapter_is_merged(folder: Path, tmp_path: Path) -> None:
    adapter = random_adapter(folder, LORA)
    expected = load_file(write_merged(folder, adapter, LORA, tmp_path / "merged") / "model.safetensors")
    found = merge(folder, adapter, set(expected))
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-6)
    base = load_file(folder / "model.safetensors")
    changed = [name for name, tensor in base.items() if not torch.equal(tensor, expected[name])]
    assert len(changed) == len(adapter) / 2 == 2 * (1 + 2), "of two layers: q_proj and two experts' up_proj"


def test_adapters_of_what_the_engine_does_not_take_are_refused(folder: Path) -> None:
    adapter = random_adapter(folder, LORA)
    taken = {name for name in load_file(folder / "model.safetensors") if "q_proj" not in name}
    with pytest.raises(ValueError, match=r"does not take model\.layers\.0\.self_attn\.q_proj\.weight, "):
        merge(folder, adapter, taken)


def test_half_an_adapter_is_refused(folder: Path) -> None:
    adapter = random_adapter(folder, LORA)
    half = {name: tensor for name, tensor in adapter.items() if "experts.1.up_proj.lora_B" not in name}
    taken = set(load_file(folder / "model.safetensors"))
    with pytest.raises(ValueError, match=r"half is missing of .*layers\.0\.mlp\.experts\.1\.up_proj\.lora_B"):
        merge(folder, half, taken)
