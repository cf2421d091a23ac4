"""Reading and writing Hugging Face folders, one tensor at a time.

No rank ever holds the model: of every tensor a rank reads the part that its shard holds; on writing a
parameter is gathered (a layer's experts together), handed to rank 0 and dropped.
"""

import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

from forgeasync.config.model_facts import ModelFacts
from forgeasync.data.checkpoint_tensors import CheckpointTensors
from forgeasync.data.file_mode import use_umask
from forgeasync.trainer.hf_names import hf_names, is_experts, unstack_experts
from forgeasync.trainer.lora import is_adapter
from forgeasync.trainer.router_bias import checkpoint_weights
from forgeasync.weights.layout import shard_box

MAX_FILE_BYTES = 4 * 2**30
"""A weight file is closed and the next one opened at this size."""

COPIED_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "added_tokens.json",
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
    """
    partial = folder.with_name(folder.name + ".partial")
    writer = None
    if dist.get_rank() == 0:
        partial.mkdir(parents=True)
        for file in COPIED_FILES:
            if (source / file).exists():
                shutil.copy(source / file, partial / file)
        writer = _ShardWriter(partial, max_file_bytes)
    for name, tensor in full_tensors(model, facts):
        if writer is not None:
            writer.add(name, tensor)
    if writer is not None:
        writer.finish()
        partial.rename(folder)
    dist.barrier()


class _ShardWriter:
    """Writes tensors as they come into numbered safetensors files, and their index."""

    def __init__(self, folder: Path, max_file_bytes: int) -> None:
        self._folder = folder
        self._max_file_bytes = max_file_bytes
        self._waiting: dict[str, torch.Tensor] = {}
        self._names_of_files: list[list[str]] = []
        self._total_bytes = 0

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Take a tensor; only one that is larger by itself makes a file larger than ``max_file_bytes``."""
        waiting_bytes = sum(waiting.nbytes for waiting in self._waiting.values())
        if self._waiting and waiting_bytes + tensor.nbytes > self._max_file_bytes:
            self._write()
        self._waiting[name] = tensor.cpu().clone()
        self._total_bytes += tensor.nbytes

    def _file(self, index: int) -> Path:
        return self._folder / f"model-{index + 1:05d}.safetensors"

    def _write(self) -> None:
        file = self._file(len(self._names_of_files))
        save_file(self._waiting, file, metadata={"format": "pt"})
        use_umask(file)
        self._names_of_files.append(list(self._waiting))
        self._waiting.clear()

    def finish(self) -> None:
        """Write what is left, and the index."""
        self._write()
        weight_map: dict[str, str] = {}
        for index, names in enumerate(self._names_of_files):
            # How many files there are is part of their names.
            file = f"model-{index + 1:05d}-of-{len(self._names_of_files):05d}.safetensors"
            self._file(index).rename(self._folder / file)
            weight_map |= dict.fromkeys(names, file)
        index_json = {"metadata": {"total_size": self._total_bytes}, "weight_map": weight_map}
        (self._folder / "model.safetensors.index.json").write_text(json.dumps(index_json, indent=1))


def full_tensors(model: torch.nn.Module, facts: ModelFacts) -> Iterator[tuple[str, torch.Tensor]]:
    """Every weight whole, under its Hugging Face name; collective over the mesh."""
    for name, weight in checkpoint_weights(model):
        full = weight.full_tensor() if isinstance(weight, DTensor) else weight
        yield from zip(hf_names(name, facts), unstack_experts(full, name), strict=True)
