"""The tensors of a Hugging Face folder, read one at a time."""

import json
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
        if name not in self._file_of:
            raise ValueError(f"model.path: {self._folder} has no tensor {name!r}")
        file = self._file_of[name]
        if file not in self._open:
            self._open[file] = safe_open(file, framework="pt").__enter__()
        return self._open[file].get_tensor(name)
