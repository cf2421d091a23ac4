"""Reading and writing Hugging Face folders, one tensor at a time.

No rank ever holds the model: a parameter is read whole (a layer's experts together), cut to this rank's
shard and dropped; on writing it is gathered, handed to rank 0 and dropped.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

from forgeasync.config.model_facts import ModelFacts
from forgeasync.data.checkpoint_tensors import CheckpointTensors
from forgeasync.trainer.hf_names import hf_names, stack_experts, unstack_experts
from forgeasync.trainer.lora import copy_whole, is_adapter

MAX_FILE_BYTES = 4 * 2**30
"""A weight file is closed and the next one opened at this size."""

COPIED_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
)


@torch.no_grad()
def load(model: torch.nn.Module, facts: ModelFacts, folder: Path) -> None:
    """Fill this rank's shards from a Hugging Face folder; adapters stay as they are.

    Raises:
        ValueError: a tensor is missing or its shape is not the model's; names both.
    """
    tensors = CheckpointTensors(folder)
    for name, parameter in model.named_parameters():
        if is_adapter(name):
            continue
        names = hf_names(name, facts)
        full = stack_experts([tensors[hf_name] for hf_name in names], name)
        if full.shape != parameter.shape:
            raise ValueError(
                f"model.path: {names[0]!r} in {folder} has shape {tuple(full.shape)}, "
                f"config.json says {tuple(parameter.shape)}"
            )
        copy_whole(parameter, full)


@torch.no_grad()
def save(model: torch.nn.Module, facts: ModelFacts, folder: Path, *, source: Path) -> None:
    """Write the model as a Hugging Face folder with an index; collective, files appear on rank 0.

    Config, tokenizer and generation settings are copied from ``source``; the dtype written is the
    master weights' (float32).
    """
    is_writer = dist.get_rank() == 0
    partial = folder.with_name(folder.name + ".partial")
    if is_writer:
        partial.mkdir(parents=True)
        for file in COPIED_FILES:
            if (source / file).exists():
                shutil.copy(source / file, partial / file)
    weight_map: dict[str, str] = {}
    shard: dict[str, torch.Tensor] = {}
    num_files = 0

    def flush() -> None:
        nonlocal num_files
        num_files += 1
        file = f"model-{num_files:05d}.safetensors"
        save_file(shard, partial / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(shard, file))
        shard.clear()

    for name, tensor in full_tensors(model, facts):
        if is_writer:
            shard[name] = tensor.cpu().clone()
            if sum(t.nbytes for t in shard.values()) >= MAX_FILE_BYTES:
                flush()
    if is_writer:
        flush()
        index = {"metadata": {}, "weight_map": weight_map}
        (partial / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
        partial.rename(folder)
    dist.barrier()


def full_tensors(model: torch.nn.Module, facts: ModelFacts) -> Iterator[tuple[str, torch.Tensor]]:
    """Every weight whole, under its Hugging Face name; collective over the mesh."""
    for name, parameter in model.named_parameters():
        full = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        yield from zip(hf_names(name, facts), unstack_experts(full, name), strict=True)
