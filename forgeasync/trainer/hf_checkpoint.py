"""Reading and writing Hugging Face folders, one tensor at a time.

No rank ever holds the model: of every tensor a rank reads the part that its shard holds; on writing a
parameter is gathered (a layer's experts together), handed to rank 0 and dropped.
"""

import functools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from forgeasync.config import ModelFacts
from forgeasync.models import FAMILIES, MAX_FILE_BYTES, CheckpointTensors, HfFolderWriter
from forgeasync.trainer.lora import adapted_parameter, is_adapter
from forgeasync.trainer.model import titan_config
from forgeasync.trainer.replay_router import checkpoint_weights
from forgeasync.weights import shard_box


@torch.no_grad()
def load(model: torch.nn.Module, facts: ModelFacts, folder: Path) -> None:
    """Fill this rank's shards from a Hugging Face folder; adapters stay as they are.

    Raises:
        ValueError: a tensor is missing or its shape is not the model's; names both.
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
    """Read what this rank holds of a weight, straight into its place."""
    box = shard_box(weight)
    shard = weight.to_local() if isinstance(weight, DTensor) else weight
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
    """Write the model as a Hugging Face folder with an index; collective, files appear on rank 0.

    Config, tokenizer and generation settings are copied from ``source``; the dtype written is the
    master weights' (float32).

    Raises:
        FolderNotWritten: on rank 0; the disk is full or fails, and nothing of the folder is left.
    """
    tensors = full_tensors(model, facts)
    try:
        if dist.get_rank() == 0:
            writer = HfFolderWriter(folder, source=source, max_file_bytes=max_file_bytes)
            for name, tensor in tensors:
                writer.add(name, tensor)
            writer.finish()
    finally:
        # The other ranks gather all tensors, also where rank 0 could not write them.
        for _ in tensors:
            pass
        dist.barrier()


def full_tensors(model: torch.nn.Module, facts: ModelFacts) -> Iterator[tuple[str, torch.Tensor]]:
    """Every weight whole, under its Hugging Face name; collective over the mesh."""
    for name, weight in checkpoint_weights(model):
        full = weight.full_tensor() if isinstance(weight, DTensor) else weight
        yield from zip(hf_names(name, facts), unstack_experts(full, name), strict=True)


_WRAPPERS = re.compile(r"_checkpoint_wrapped_module\.|_orig_mod\.")


@functools.cache
def _templates(facts: ModelFacts) -> dict[str, str]:
    """Hugging Face name template by TorchTitan name template."""
    adapter = FAMILIES[facts.model_type].titan().adapter(titan_config(facts), None)
    return {titan: hf for hf, titan in adapter.from_hf_map.items() if titan is not None}


def is_experts(name: str) -> bool:
    """Whether a TorchTitan parameter stacks a layer's experts."""
    return ".inner_experts." in name


def canonical_name(name: str) -> str:
    """A TorchTitan parameter name without what activation checkpointing and compile put into it."""
    return _WRAPPERS.sub("", name)


def hf_names(name: str, facts: ModelFacts) -> list[str]:
    """The Hugging Face (or peft) tensors that make up a TorchTitan parameter: one, or one per expert."""
    if is_adapter(name):
        base, side = adapted_parameter(name)
        modules = (hf_name.removesuffix(".weight") for hf_name in hf_names(base, facts))
        return [f"base_model.model.{module}.lora_{side}.weight" for module in modules]
    layer_ids = re.findall(r"layers\.(\d+)\.", name)
    key = re.sub(r"layers\.\d+\.", "layers.{}.", canonical_name(name))
    if facts.tie_word_embeddings and key == "lm_head.weight":
        # One tensor under two names; the files have it under the embedding's.
        key = "tok_embeddings.weight"
    template = _templates(facts)[key]
    if is_experts(name):
        return [template.format(*layer_ids, expert) for expert in range(facts.num_experts)]
    return [template.format(*layer_ids)]


def stack_experts(tensors: list[torch.Tensor], name: str) -> torch.Tensor:
    """Hugging Face tensors as one TorchTitan parameter."""
    return torch.stack(tensors) if is_experts(name) else tensors[0]


def unstack_experts(tensor: torch.Tensor, name: str) -> list[torch.Tensor]:
    """One TorchTitan parameter as Hugging Face tensors."""
    return list(tensor.unbind(0)) if is_experts(name) else [tensor]
