"""Writing a Hugging Face folder tensor by tensor; it gets its name when all of it is there."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from forgeasync.data.file_mode import use_umask

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


class HfFolderWriter:
    """Writes tensors as they come into numbered safetensors files, and their index."""

    def __init__(self, folder: Path, *, source: Path, max_file_bytes: int = MAX_FILE_BYTES) -> None:
        """Begin ``folder``; config, tokenizer and generation settings are copied from ``source``."""
        self._folder = folder
        self._partial = folder.with_name(folder.name + ".partial")
        self._max_file_bytes = max_file_bytes
        self._waiting: dict[str, torch.Tensor] = {}
        self._names_of_files: list[list[str]] = []
        self._total_bytes = 0
        self._partial.mkdir(parents=True)
        for file in COPIED_FILES:
            if (source / file).exists():
                shutil.copy(source / file, self._partial / file)

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Take a tensor; only one that is larger by itself makes a file larger than ``max_file_bytes``."""
        waiting_bytes = sum(waiting.nbytes for waiting in self._waiting.values())
        if self._waiting and waiting_bytes + tensor.nbytes > self._max_file_bytes:
            self._write()
        self._waiting[name] = tensor.cpu().clone()
        self._total_bytes += tensor.nbytes

    def _file(self, index: int) -> Path:
        return self._partial / f"model-{index + 1:05d}.safetensors"

    def _write(self) -> None:
        file = self._file(len(self._names_of_files))
        save_file(self._waiting, file, metadata={"format": "pt"})
        use_umask(file)
        self._names_of_files.append(list(self._waiting))
        self._waiting.clear()

    def finish(self) -> None:
        """Write what is left and the index, and give the folder its name."""
        self._write()
        weight_map: dict[str, str] = {}
        for index, names in enumerate(self._names_of_files):
            # How many files there are is part of their names.
            file = f"model-{index + 1:05d}-of-{len(self._names_of_files):05d}.safetensors"
            self._file(index).rename(self._partial / file)
            weight_map |= dict.fromkeys(names, file)
        index_json = {"metadata": {"total_size": self._total_bytes}, "weight_map": weight_map}
        (self._partial / "model.safetensors.index.json").write_text(json.dumps(index_json, indent=1))
        self._partial.rename(self._folder)
