"""Reads and writes Hugging Face folders, and writes peft folders of adapters.

No rank ever has the whole model in memory. To read, each rank reads only its shard's part of every tensor. To
write, one parameter at a time (a layer's experts together) is gathered, written by rank 0 and freed.

Every adapted expert is a separate peft module, ``mlp.experts.{e}.gate_proj``. peft (0.21) supports that for
models whose experts transformers 5 fuses into [E, 2F, D] parameters: on loading it joins gate and up into one
adapter of twice the rank, block-diagonal in B, which is equivalent. vLLM (0.32) reads the same names. All
three projections of experts are written, with zeros for those without adapters: vLLM requires all three, and
peft silently drops gate and up if down is missing.
"""

import functools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

from forgeasync.config import LoraSection, ModelFacts
from forgeasync.models import FAMILIES, MAX_FILE_BYTES, CheckpointTensors, HfFolderWriter, use_umask, writing
from forgeasync.trainer.lora import EXPERT_PARAMETERS, adapted_parameter, adapter_parameters, is_adapter
from forgeasync.trainer.model import titan_config
from forgeasync.trainer.replay_router import checkpoint_weights
from forgeasync.weights import NamedWeight, local_shard, shard_box

CONFIG_FILE = "adapter_config.json"
"""File with the config of an adapter, in PEFT's format."""
WEIGHTS_FILE = "adapter_model.safetensors"
"""File with the weights of an adapter, in PEFT's format."""


_WRAPPERS = re.compile(r"_checkpoint_wrapped_module\.|_orig_mod\.")


@functools.cache
def _templates(facts: ModelFacts) -> dict[str, str]:
    """Return the Hugging Face name template by TorchTitan name template."""
    adapter = FAMILIES[facts.model_type].titan().adapter(titan_config(facts), None)
    prefix = facts.checkpoint_prefix
    return {
        titan: prefix + hf.removeprefix("model.") if hf.startswith("model.") else hf
        for hf, titan in adapter.from_hf_map.items()
        if titan is not None
    }


def is_experts(name: str) -> bool:
    """Return whether a TorchTitan parameter stacks a layer's experts, which files have one by one."""
    return ".inner_experts." in name and "_proj" not in name


def canonical_name(name: str) -> str:
    """Return a TorchTitan parameter name without the parts that activation checkpointing and compile add."""
    return _WRAPPERS.sub("", name)


def hf_names(name: str, facts: ModelFacts) -> list[str]:
    """Return the Hugging Face (or peft) tensor names of a TorchTitan parameter: one, or one per expert."""
    if is_adapter(name):
        base, side = adapted_parameter(name)
        modules = (hf_name.removesuffix(".weight") for hf_name in hf_names(base, facts))
        return [f"base_model.model.{module}.lora_{side}.weight" for module in modules]
    layer_ids = re.findall(r"layers\.(\d+)\.", name)
    key = re.sub(r"layers\.\d+\.", "layers.{}.", canonical_name(name))
    if facts.tie_word_embeddings and key == "lm_head.weight":
        # The tied tensor has two names; files use the embedding's.
        key = "tok_embeddings.weight"
    template = _templates(facts)[key]
    if is_experts(name):
        return [template.format(*layer_ids, expert) for expert in range(facts.num_experts)]
    return [template.format(*layer_ids)]


def unstack_experts(tensor: torch.Tensor, name: str) -> list[torch.Tensor]:
    """Split a TorchTitan parameter into Hugging Face tensors."""
    return list(tensor.unbind(0)) if is_experts(name) else [tensor]


def published_tensors(model: torch.nn.Module, *, has_adapters: bool) -> Iterable[tuple[str, torch.Tensor]]:
    """Yield the published tensors by TorchTitan's names: the adapters, or else the whole model."""
    return adapter_parameters(model) if has_adapters else checkpoint_weights(model)


def named_weights(model: torch.nn.Module, facts: ModelFacts, *, has_adapters: bool) -> list[NamedWeight]:
    """Return this rank's shards of a policy's weights, by Hugging Face (peft) names, without a tied head."""
    return [
        NamedWeight(names=tuple(hf_names(name, facts)), tensor=tensor)
        for name, tensor in published_tensors(model, has_adapters=has_adapters)
    ]


@torch.no_grad()
def load(model: torch.nn.Module, facts: ModelFacts, folder: Path) -> None:
    """Fill this rank's shards from a Hugging Face folder; adapters are not changed.

    Raises:
        ValueError: A tensor is missing or its shape is not the model's; the message names both.
    """
    tensors = CheckpointTensors(folder)
    for name, weight in checkpoint_weights(model):
        if is_adapter(name):
            continue
        names, is_stacked = hf_names(name, facts), is_experts(name)
        expected = tuple(weight.shape[1:] if is_stacked else weight.shape)
        for hf_name in names:
            if tensors.shape(hf_name) != expected:
                raise ValueError(
                    f"model.path: {hf_name!r} in {folder} has shape {tensors.shape(hf_name)}, "
                    f"config.json says {expected}"
                )
        _fill_shard(weight, tensors, names, is_stacked=is_stacked)


def _fill_shard(
    weight: torch.Tensor, tensors: CheckpointTensors, names: Sequence[str], *, is_stacked: bool
) -> None:
    """Read this rank's part of a weight into the shard."""
    box = shard_box(weight)
    shard = local_shard(weight)
    if not box.num_elements:
        return
    if not is_stacked:
        shard.copy_(tensors.part(names[0], box.start, box.size))
        return
    mine = names[box.start[0] : box.start[0] + box.size[0]]
    for part, hf_name in zip(shard, mine, strict=True):
        part.copy_(tensors.part(hf_name, box.start[1:], box.size[1:]))


@torch.no_grad()
def save(
    model: torch.nn.Module,
    facts: ModelFacts,
    folder: Path,
    *,
    source: Path,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Write the model as a Hugging Face folder with an index. Collective; rank 0 writes the files.

    Config, tokenizer, generation settings and unused tensors are copied from ``source``. The dtype of the
    others is that of the master weights (float32).

    Raises:
        FolderNotWritten: On rank 0: the disk is full or fails, and nothing of the folder is left.
    """
    tensors = full_tensors(model, facts)
    try:
        if dist.get_rank() == 0:
            writer = HfFolderWriter(folder, source=source, facts=facts, max_file_bytes=max_file_bytes)
            for name, tensor in tensors:
                writer.add(name, tensor)
            writer.finish()
    finally:
        # All ranks take part in gathering every tensor, even if rank 0 cannot write.
        for _ in tensors:
            pass
        dist.barrier()


def full_tensors(model: torch.nn.Module, facts: ModelFacts) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every whole weight with its Hugging Face name; collective over the mesh."""
    for name, weight in checkpoint_weights(model):
        full = weight.full_tensor() if isinstance(weight, DTensor) else weight
        yield from zip(hf_names(name, facts), unstack_experts(full, name), strict=True)


@torch.no_grad()
def save_adapters(
    model: torch.nn.Module, facts: ModelFacts, lora: LoraSection, folder: Path, *, source: Path
) -> None:
    """Write the adapters of the model at ``source`` in float32. Collective; rank 0 writes the files."""
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
        # The other ranks wait here, even if rank 0 cannot write.
        dist.barrier()


def write_folder(
    tensors: Mapping[str, torch.Tensor], facts: ModelFacts, lora: LoraSection, folder: Path, *, source: Path
) -> None:
    """Write whole adapters, by peft's names, as a folder that gets its name once it is complete.

    Raises:
        FolderNotWritten: The disk is full or fails; nothing of the folder is left.
    """
    with writing(folder) as partial:
        file = partial / WEIGHTS_FILE
        save_file(dict(tensors) | dict(_zeros(facts, lora)), file, metadata={"format": "pt"})
        use_umask(file)
        (partial / CONFIG_FILE).write_text(json.dumps(_peft_config(facts, lora, source), indent=1))


def _filled_up(facts: ModelFacts, lora: LoraSection) -> list[str]:
    """Return the projections of experts that have no adapters and are written as zeros."""
    if not facts.num_experts or not EXPERT_PARAMETERS.keys() & lora.targets:
        return []
    return [target for target in EXPERT_PARAMETERS if target not in lora.targets]


def _zeros(facts: ModelFacts, lora: LoraSection) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield zeros as adapters of the projections in ``_filled_up``."""
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
