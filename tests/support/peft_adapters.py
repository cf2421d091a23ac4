"""Random adapters by peft's names, and the model that they make of a base model."""

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from forgeasync.config import LoraSection

WEIGHTS = "model.safetensors"


def random_adapter(folder: Path, lora: LoraSection) -> dict[str, torch.Tensor]:
    """Tensors for every target in a Hugging Face folder; large enough to change what a model says."""
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, weight in load_file(folder / WEIGHTS).items():
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] in lora.targets:
            stem = f"base_model.model.{module}"
            num_outputs, num_inputs = weight.shape
            for side, shape in (("A", (lora.rank, num_inputs)), ("B", (num_outputs, lora.rank))):
                tensors[f"{stem}.lora_{side}.weight"] = 0.2 * torch.randn(shape, generator=generator)
    return tensors


def write_merged(folder: Path, adapter: dict[str, torch.Tensor], lora: LoraSection, out: Path) -> Path:
    """Write the model with W + (alpha / rank) B A (Hu et al., "LoRA", 2021, section 4.1), from float64."""
    shutil.copytree(folder, out)
    weights = load_file(folder / WEIGHTS)
    for name, weight in weights.items():
        stem = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{stem}.lora_A.weight" in adapter:
            a, b = (adapter[f"{stem}.lora_{side}.weight"].double() for side in "AB")
            weights[name] = (weight.double() + lora.alpha / lora.rank * b @ a).float()
    save_file(weights, out / WEIGHTS, metadata={"format": "pt"})
    return out
