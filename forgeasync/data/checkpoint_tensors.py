"""The tensors of a Hugging Face folder, read one at a time or in parts."""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import safe_open


class CheckpointTensors:
    """Random access to the tensors of a Hugging Face folder by name."""

    def __init__(self, folder: Path) -> None:
        index = folder / "model.safetensors.index.json"
        if index.exists():
            self._file_of: dict[str, Path] = {
                name: folder / file for name, file in json.loads(index.read_text())["weight_map"].items()
            }
        else:
            file = folder / "model.safetensors"
            with safe_open(file, framework="pt") as tensors:
                self._file_of = dict.fromkeys(tensors.keys(), file)
        self._open: dict[Path, safe_open] = {}
        self._folder = folder

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._file(name).get_tensor(name)

    def shape(self, name: str) -> tuple[int, ...]:
        """Read from the file's header."""
        return tuple(self._file(name).get_slice(name).get_shape())

    def part(self, name: str, start: Sequence[int], size: Sequence[int]) -> torch.Tensor:
        """A block of a tensor; nothing else of it is read."""
        block = tuple(slice(first, first + count) for first, count in zip(start, size, strict=True))
        return self._file(name).get_slice(name)[block]

    def _file(self, name: str) -> safe_open:
        """The open file that has the tensor.

        Raises:
            ValueError: there is no such tensor.
        """
        if name not in self._file_of:
            raise ValueError(f"model.path: {self._folder} has no tensor {name!r}")
        file = self._file_of[name]
        if file not in self._open:
            self._open[file] = safe_open(file, framework="pt").__enter__()
        return self._open[file]
