"""Reads tensors of Hugging Face folders, whole or in blocks, and writes new folders."""

import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from forgeasync.config import ModelFacts
from forgeasync.files import publish_folder
from forgeasync.models.rules import FAMILIES, is_untrained

MAX_FILE_BYTES = 4 * 2**30
"""Maximum size of a weight file in bytes, unless one tensor is larger."""


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


class FolderNotWritten(OSError):
    """A folder could not be written. Its files are removed, and writing can be tried again."""


@contextmanager
def writing(folder: Path) -> Iterator[Path]:
    """Yield a partial folder, and rename it to ``folder`` after the body has written all files.

    A leftover partial folder is removed first.

    Raises:
        FolderNotWritten: The disk is full or fails, or the folder cannot be created.
    """
    partial = begin_folder(folder)
    with removing(partial, folder):
        yield partial
        publish_folder(partial, folder)


def begin_folder(folder: Path) -> Path:
    """Create and return an empty partial folder, which is later renamed to ``folder``.

    Raises:
        FolderNotWritten: The folder cannot be created.
    """
    partial = folder.with_name(folder.name + ".partial")
    with removing(partial, folder):
        if partial.exists():
            shutil.rmtree(partial)
        partial.mkdir(parents=True)
    return partial


@contextmanager
def removing(partial: Path, folder: Path) -> Iterator[None]:
    """Remove the partial folder if the body raises an I/O error, which frees its space on disk.

    Raises:
        FolderNotWritten: The disk is full or fails. (safetensors 0.8 raises its own error for that.)
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise FolderNotWritten(f"{folder} could not be written: {error}") from error


class HfFolderWriter:
    """Writes a Hugging Face folder: numbered safetensors files, in the order of ``add``, and their index.

    Untrained tensors (``is_untrained``) are copied from the source, one at a time. Every call raises
    FolderNotWritten if the disk is full or fails, and then removes all files.
    """

    def __init__(
        self, folder: Path, *, source: Path, facts: ModelFacts, max_file_bytes: int = MAX_FILE_BYTES
    ) -> None:
        """Begin ``folder`` with copies of the config, tokenizer and generation settings of ``source``."""
        self._folder = folder
        self._source = source
        self._untrained = untrained_tensors(source, facts)
        self._max_file_bytes = max_file_bytes
        self._waiting: dict[str, torch.Tensor] = {}
        self._names_of_files: list[list[str]] = []
        self._total_bytes = 0
        self._partial = begin_folder(folder)
        with removing(self._partial, folder):
            for file in COPIED_FILES:
                if (source / file).exists():
                    shutil.copy(source / file, self._partial / file)

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Add a tensor. Files are at most ``max_file_bytes`` long, unless one tensor is larger."""
        waiting_bytes = sum(waiting.nbytes for waiting in self._waiting.values())
        if self._waiting and waiting_bytes + tensor.nbytes > self._max_file_bytes:
            self._write()
        self._waiting[name] = tensor.cpu().clone()
        self._total_bytes += tensor.nbytes

    def _file(self, index: int) -> Path:
        return self._partial / f"model-{index + 1:05d}.safetensors"

    def _write(self) -> None:
        file = self._file(len(self._names_of_files))
        with removing(self._partial, self._folder):
            save_file(self._waiting, file, metadata={"format": "pt"})
            use_umask(file)
        self._names_of_files.append(list(self._waiting))
        self._waiting.clear()

    def finish(self) -> None:
        """Write the remaining tensors and the index, and rename the folder to its final name."""
        if self._untrained:
            tensors = CheckpointTensors(self._source)
            for name in self._untrained:
                self.add(name, tensors[name])
        self._write()
        weight_map: dict[str, str] = {}
        for index, names in enumerate(self._names_of_files):
            # The final names include the number of files.
            file = f"model-{index + 1:05d}-of-{len(self._names_of_files):05d}.safetensors"
            self._file(index).rename(self._partial / file)
            weight_map |= dict.fromkeys(names, file)
        index_json = {"metadata": {"total_size": self._total_bytes}, "weight_map": weight_map}
        with removing(self._partial, self._folder):
            (self._partial / "model.safetensors.index.json").write_text(json.dumps(index_json, indent=1))
            publish_folder(self._partial, self._folder)


STACKED = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""Projections in each tensor of Qwen3.5's files that stacks experts [E, rows of all projections, columns]."""


def single_experts(name: str, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of the experts' matrices in a tensor, or those of another tensor."""
    module, _, kind = name.rpartition(".")
    if not module.endswith(".experts") or kind not in STACKED or len(shape) != 3:
        return {name: shape}
    rows = (shape[1] // len(STACKED[kind]), shape[2])
    return {f"{module}.{i}.{part}.weight": rows for i in range(shape[0]) for part in STACKED[kind]}


class CheckpointTensors:
    """Random access to the tensors of a Hugging Face folder by name.

    Matrices of experts also have names of their own if the folder stacks them (``single_experts``).
    """

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

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of)

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def __getitem__(self, name: str) -> torch.Tensor:
        if self._stack_of(name) is not None:
            return self.part(name, (0, 0), self.shape(name))
        return self._file(name).get_tensor(name)

    def _stack_of(self, name: str) -> tuple[str, int, int, int] | None:
        """Return the tensor that stacks an expert's matrix, the expert, and which of how many parts it is."""
        if name in self._file_of or ".experts." not in name:
            return None
        module, _, own = name.rpartition(".experts.")
        expert, part, _ = own.split(".")
        for kind, parts in STACKED.items():
            if part in parts and (stack := f"{module}.experts.{kind}") in self._file_of:
                return stack, int(expert), parts.index(part), len(parts)
        return None

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor from the file's header."""
        if (place := self._stack_of(name)) is not None:
            _, rows, columns = self.shape(place[0])
            return rows // place[3], columns
        return tuple(self._file(name).get_slice(name).get_shape())

    def part(self, name: str, start: Sequence[int], size: Sequence[int]) -> torch.Tensor:
        """Read the block of a tensor that begins at the indices ``start`` and has the shape ``size``."""
        if (place := self._stack_of(name)) is not None:
            stack, expert, part, _ = place
            first = part * self.shape(name)[0] + start[0]
            return self.part(stack, (expert, first, start[1]), (1, *size)).squeeze(0)
        block = tuple(slice(first, first + count) for first, count in zip(start, size, strict=True))
        return self._file(name).get_slice(name)[block]

    def _file(self, name: str) -> safe_open:
        """Return the open file that contains a tensor.

        Raises:
            ValueError: The folder has no such tensor.
        """
        if name not in self._file_of:
            raise ValueError(f"model.path: {self._folder} has no tensor {name!r}")
        file = self._file_of[name]
        if file not in self._open:
            self._open[file] = safe_open(file, framework="pt").__enter__()
        return self._open[file]


def untrained_tensors(folder: Path, facts: ModelFacts) -> list[str]:
    """Return the names of the tensors of a Hugging Face folder that are exported as they are."""
    if not facts.num_mtp_layers and not FAMILIES[facts.model_type].unused:
        return []
    return [name for name in CheckpointTensors(folder) if is_untrained(name, facts)]


def use_umask(file: Path) -> None:
    """Give a file the permissions that the process's umask gives to new files."""
    # os.umask can only read the umask by changing it for all threads. A new file shows it too.
    probe = file.with_name(file.name + ".mode")
    probe.touch(exist_ok=False)
    try:
        file.chmod(probe.stat().st_mode & 0o777)
    finally:
        probe.unlink()
