"""Reading and writing adapters as a peft folder, one tensor at a time.

Every adapted expert is a module of its own, ``mlp.experts.{e}.gate_proj``. peft (0.21) understands that for
models whose experts transformers 5 fuses into [E, 2F, D] parameters: on loading it joins gate and up to one
adapter of twice the rank, block-diagonal in B, which computes the same. vLLM (0.32) reads the same names.

Of experts all three projections are written, with zeros for those without adapters: vLLM takes no fewer, and
peft silently drops gate and up where down is missing.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

from forgeasync.config import LoraSection, ModelFacts
from forgeasync.models import use_umask, writing
from forgeasync.trainer.hf_checkpoint import hf_names, stack_experts, unstack_experts
from forgeasync.trainer.lora import EXPERT_PARAMETERS, adapter_parameters, copy_whole

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"


@torch.no_grad()
def save(model: torch.nn.Module, facts: ModelFacts, lora: LoraSection, folder: Path, *, source: Path) -> None:
    """Write the adapters of the model at ``source``, in float32; collective, files appear on rank 0."""
    tensors: dict[str, torch.Tensor] = {}
    for name, parameter in adapter_parameters(model):
        full = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        if dist.get_rank() == 0:
            of_experts = unstack_experts(full, name)
            tensors |= {
                peft_name: tensor.cpu().clone()
                for peft_name, tensor in zip(hf_names(name, facts), of_experts, strict=True)
            }
    try:
        if dist.get_rank() == 0:
            write_folder(tensors, facts, lora, folder, source=source)
    finally:
        # The others wait here, also where rank 0 could not write.
        dist.barrier()


def write_folder(
    tensors: Mapping[str, torch.Tensor], facts: ModelFacts, lora: LoraSection, folder: Path, *, source: Path
) -> None:
    """Write whole adapters, by peft's names, as a folder that gets its name when all of it is there.

    Raises:
        FolderNotWritten: the disk is full or fails; nothing of it is left.
    """
    with writing(folder) as partial:
        file = partial / WEIGHTS_FILE
        save_file(dict(tensors) | dict(_zeros(facts, lora)), file, metadata={"format": "pt"})
        use_umask(file)
        (partial / CONFIG_FILE).write_text(json.dumps(_peft_config(facts, lora, source), indent=1))


def _filled_up(facts: ModelFacts, lora: LoraSection) -> list[str]:
    """The projections of experts that are written although they have no adapters."""
    if not facts.num_experts or not EXPERT_PARAMETERS.keys() & lora.targets:
        return []
    return [target for target in EXPERT_PARAMETERS if target not in lora.targets]


def _zeros(facts: ModelFacts, lora: LoraSection) -> Iterator[tuple[str, torch.Tensor]]:
    """Adapters that do nothing, for those."""
    for target in _filled_up(facts, lora):
        sizes = (facts.hidden_size, facts.expert_hidden_size)
        in_features, out_features = reversed(sizes) if target == "down_proj" else sizes
        for layer in range(facts.num_layers):
            for expert in range(facts.num_experts):
                module = f"base_model.model.model.layers.{layer}.mlp.experts.{expert}.{target}"
                yield f"{module}.lora_A.weight", torch.zeros(lora.rank, in_features)
                yield f"{module}.lora_B.weight", torch.zeros(out_features, lora.rank)


def _peft_config(facts: ModelFacts, lora: LoraSection, source: Path) -> dict[str, object]:
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(source),
        "r": lora.rank,
        "lora_alpha": int(lora.alpha) if lora.alpha.is_integer() else lora.alpha,
        "target_modules": [*lora.targets, *_filled_up(facts, lora)],
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }


@torch.no_grad()
def load(model: torch.nn.Module, facts: ModelFacts, lora: LoraSection, folder: Path) -> None:
    """Fill this rank's shards of the adapters from a peft folder with the same rank, scaling and targets.

    Raises:
        ValueError: the folder's adapters are others than ``lora`` describes; names the difference.
    """
    _check_config(json.loads((folder / CONFIG_FILE).read_text()), lora, folder)
    with safe_open(folder / WEIGHTS_FILE, framework="pt") as tensors:
        unread = set(tensors.keys())
        for name, parameter in adapter_parameters(model):
            names = hf_names(name, facts)
            if not unread.issuperset(names):
                missing = sorted(set(names) - unread)
                raise ValueError(f"{folder / WEIGHTS_FILE} lacks {missing[0]!r}")
            full = stack_experts([tensors.get_tensor(peft_name) for peft_name in names], name)
            if full.shape != parameter.shape:
                raise ValueError(
                    f"{names[0]!r} in {folder} has shape {tuple(full.shape)}, "
                    f"the model has {tuple(parameter.shape)}"
                )
            copy_whole(parameter, full)
            unread.difference_update(names)
        for peft_name in sorted(unread):
            if ".lora_B." in peft_name and tensors.get_tensor(peft_name).any():
                raise ValueError(
                    f"lora.targets: {folder} has an adapter {peft_name!r}; must have none but of the targets"
                )


def _check_config(saved: dict[str, object], lora: LoraSection, folder: Path) -> None:
    expected = {"r": lora.rank, "lora_alpha": lora.alpha}
    for key, value in expected.items():
        if saved[key] != value:
            raise ValueError(f"lora: {folder} was saved with {key} = {saved[key]}, must be {value}")
