"""Reads tensors of Hugging Face folders, whole or in blocks, and writes new folders.

Also loads tokenizers, and makes small ones that need no training.
"""

from __future__ import annotations

import json
import shutil
import string
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from forgeasync.config import ModelFacts
from forgeasync.files import publish_folder
from forgeasync.models.rules import FAMILIES, is_untrained

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

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
    "chat_template.json",
    "processor_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
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
            config = json.loads((source / "config.json").read_text(encoding="utf-8"))
            if config.pop("quantization_config", None) is not None:
                (self._partial / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")

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


_BLOCKS, _SCALES = "_blocks", "_scales"
"""Ends of the names of the two tensors that gpt-oss's files have of each stack of experts in MXFP4.

Blocks [E, rows, G, 16] have two numbers of 4 bits in each byte, the low bits' first. Scales [E, rows, G] are
the exponents of a row's G blocks of 32 numbers. Source: Open Compute Project, "OCP Microscaling Formats
(MX)", 2023. The stack in bfloat16 is transposed: [E, columns, rows].
"""

_MXFP4_BLOCK = 32

_MXFP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def from_mxfp4(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return the stack [E, columns, rows] in bfloat16, to the bits of transformers 5.19."""
    values = torch.tensor(_MXFP4_VALUES, dtype=torch.bfloat16, device=blocks.device)
    halves = torch.stack([blocks & 0x0F, blocks >> 4], dim=-1).flatten(-2).int()
    exponents = scales.int()[..., None] - 127
    return torch.ldexp(torch.cat([values, -values])[halves], exponents).flatten(-2).transpose(-2, -1)


def dequantized(tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of files, with stacks in MXFP4 as they are in bfloat16."""
    waiting: dict[str, torch.Tensor] = {}
    for name, tensor in tensors:
        stack = name.removesuffix(_BLOCKS).removesuffix(_SCALES)
        if stack == name:
            yield name, tensor
        elif stack not in waiting:
            waiting[stack] = tensor
        else:
            blocks, scales = sorted((waiting.pop(stack), tensor), key=torch.Tensor.dim, reverse=True)
            yield stack, from_mxfp4(blocks, scales)


def logical_shapes(
    headers: Mapping[str, tuple[int, ...]], expected: Collection[str]
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors of a folder by the names that ``CheckpointTensors`` has for them."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, shape in headers.items():
        stack = name.removesuffix(_BLOCKS).removesuffix(_SCALES)
        blocks = headers.get(stack + _BLOCKS, ())
        if stack != name and len(blocks) == 4 and headers.get(stack + _SCALES) == blocks[:3]:
            shapes[stack] = (blocks[0], blocks[2] * _MXFP4_BLOCK, blocks[1])
        elif name in expected:
            shapes[name] = shape
        else:
            shapes |= single_experts(name, shape)
    return shapes


def single_experts(name: str, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of the experts' matrices in a tensor, or those of another tensor."""
    module, _, kind = name.rpartition(".")
    if not module.endswith(".experts") or kind not in STACKED or len(shape) != 3:
        return {name: shape}
    rows = (shape[1] // len(STACKED[kind]), shape[2])
    return {f"{module}.{i}.{part}.weight": rows for i in range(shape[0]) for part in STACKED[kind]}


class CheckpointTensors:
    """Random access to the tensors of a Hugging Face folder by name.

    If the folder stacks matrices of experts, each one has a name too (``single_experts``). Stacks in
    MXFP4 have the names and shapes that they have in bfloat16.
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
        return (name.removesuffix(_BLOCKS) for name in self._file_of if not name.endswith(_SCALES))

    def __contains__(self, name: str) -> bool:
        return name in self._file_of or self._is_mxfp4(name)

    def _is_mxfp4(self, name: str) -> bool:
        return name + _BLOCKS in self._file_of

    def __getitem__(self, name: str) -> torch.Tensor:
        if self._stack_of(name) is not None or self._is_mxfp4(name):
            shape = self.shape(name)
            return self.part(name, (0,) * len(shape), shape)
        return self._file(name).get_tensor(name)

    def _stack_of(self, name: str) -> tuple[str, int, int, int] | None:
        """Return the tensor that stacks an expert's matrix, the expert, and which of how many parts it is."""
        if name in self or ".experts." not in name:
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
        if self._is_mxfp4(name):
            experts, rows, num_blocks, _ = self.shape(name + _BLOCKS)
            return experts, num_blocks * _MXFP4_BLOCK, rows
        return tuple(self._file(name).get_slice(name).get_shape())

    def part(self, name: str, start: Sequence[int], size: Sequence[int]) -> torch.Tensor:
        """Read the block of a tensor that begins at the indices ``start`` and has the shape ``size``."""
        if (place := self._stack_of(name)) is not None:
            stack, expert, part, _ = place
            first = part * self.shape(name)[0] + start[0]
            return self.part(stack, (expert, first, start[1]), (1, *size)).squeeze(0)
        if self._is_mxfp4(name):
            # Only whole blocks can be read.
            first, end = start[1] // _MXFP4_BLOCK, -(-(start[1] + size[1]) // _MXFP4_BLOCK)
            at, shape = (start[0], start[2], first), (size[0], size[2], end - first)
            columns = from_mxfp4(
                self.part(name + _BLOCKS, (*at, 0), (*shape, _MXFP4_BLOCK // 2)),
                self.part(name + _SCALES, at, shape),
            )
            return columns[:, start[1] - first * _MXFP4_BLOCK :][:, : size[1]]
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


END = "<eos>"

PADDING = "<pad>"

UNKNOWN = "<unk>"
"""Token for characters that a character tokenizer does not have."""

TURN_START, TURN_END = "<|im_start|>", "<|im_end|>"
"""Start and end marks of a turn in ChatML. The end mark ends a response."""

NUM_CHARACTER_TOKENS = 128
"""Size of the vocabulary of ``character_tokenizer``."""

_TOKEN = Regex(r"[A-Za-z][A-Za-z ]*[A-Za-z]|[A-Za-z]| ?[-+=:] ?|[0-9]|[^A-Za-z0-9]")


def build_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """Build a tokenizer whose vocabulary are the pieces of the texts. The same texts give the same ids.

    It is for templated tasks, and has one token for each digit or sign, and one for each run of words. The
    fixed sentence around a problem becomes one token, so prompts are short.
    """
    from transformers import PreTrainedTokenizerFast

    split = pre_tokenizers.Split(_TOKEN, behavior="isolated")
    found = {piece for text in texts for piece, _ in split.pre_tokenize_str(text)}
    vocabulary = {token: index for index, token in enumerate([PADDING, END, UNKNOWN, *sorted(found)])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = split
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, pad_token=PADDING, unk_token=UNKNOWN
    )


def character_tokenizer(
    *, chat_template: bool, template_arguments: Iterable[str] = ()
) -> PreTrainedTokenizerFast:
    """Build a tokenizer of printable ASCII characters. All other characters become one unknown token.

    With ``chat_template``, the template is ChatML. It accepts ``template_arguments`` and ignores them.
    """
    from transformers import PreTrainedTokenizerFast

    ordinary = [UNKNOWN, PADDING, *sorted(set(string.printable))]
    # A model with this vocabulary can sample every id, so each id needs a text.
    fillers = [f"<|unused_{index}|>" for index in range(NUM_CHARACTER_TOKENS - len(ordinary) - 2)]
    vocabulary = {token: index for index, token in enumerate([*ordinary, *fillers])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in (TURN_START, TURN_END)])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=TURN_END, pad_token=PADDING, unk_token=UNKNOWN
    )
    if chat_template:
        read = "".join(f"{{% if {name} %}}{{% endif %}}" for name in template_arguments)
        fast.chat_template = read + _CHATML
    return fast


_CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def load_tokenizer(folder: str | Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model's folder.

    If the folder names no tokenizer class of a model, it is loaded exactly as in ``tokenizer.json``. For
    some types of models, ``AutoTokenizer`` of transformers 5.19.0 builds the published model's tokenizer
    instead, which splits text differently and drops words without an error. Can go when it does not.

    Raises:
        OSError, ValueError: The folder has no readable tokenizer.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    file = Path(folder) / "tokenizer_config.json"
    named = json.loads(file.read_text(encoding="utf-8")).get("tokenizer_class") if file.exists() else None
    is_plain = named in ("TokenizersBackend", "PreTrainedTokenizerFast")
    tokenizer: PreTrainedTokenizerBase
    if is_plain and (Path(folder) / "tokenizer.json").exists():
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    else:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    return tokenizer


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json."""
    tokenizer.save_pretrained(str(folder))
