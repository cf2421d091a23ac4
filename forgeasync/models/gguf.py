"""Reads models in GGUF, the file format of llama.cpp, as Hugging Face config, tensors and tokenizer.

GGUF stores most weights quantized in blocks, which are dequantized to float32. The rows of queries and keys
are in the order of ``LlamaModel.permute`` in llama.cpp's convert_hf_to_gguf.py.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import numpy as np
from gguf import GGUFReader, ReaderTensor, dequantize
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, LlamaConfig, PreTrainedTokenizerFast

from forgeasync.models.facts import parse_model_facts
from forgeasync.models.rules import expected_shapes
from forgeasync.schema import ConfigError, Problem

Value = TypeVar("Value")


ARCHITECTURE = "llama"
"""The only supported ``general.architecture``, which SmolLM2 has."""


_SIZES = frozenset(
    {
        "block_count",
        "context_length",
        "embedding_length",
        "feed_forward_length",
        "attention.head_count",
        "attention.head_count_kv",
        "attention.layer_norm_rms_epsilon",
        "attention.key_length",
        "attention.value_length",
        "rope.freq_base",
        "rope.dimension_count",
        "vocab_size",
    }
)
"""Supported metadata keys of the architecture. Any other key might change the computation."""


_OF_MODEL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}

_OF_LAYER = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}


class GgufModel:
    """One GGUF file. Its header is checked before a tensor is dequantized.

    Raises:
        ConfigError: The file is not a readable GGUF file, its architecture, metadata or tensors are not
            supported, or its tensors do not fit the metadata.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        if not file.is_file():
            raise self.error("no such file")
        try:
            self._reader = GGUFReader(file)
        except (ValueError, IndexError) as error:
            raise self.error(f"is not a readable GGUF file: {error}") from None
        architecture = self.text("general.architecture")
        if architecture != ARCHITECTURE:
            raise self.error(f"has general.architecture {architecture!r}; only {ARCHITECTURE!r} is supported")
        prefix = f"{ARCHITECTURE}."
        others = sorted(
            name
            for name in self._reader.fields
            if name.startswith(prefix) and name.removeprefix(prefix) not in _SIZES
        )
        if others:
            raise self.error(f"has {others[0]} = {self.value(others[0])!r}, which is not supported")
        self._tensors = {self._hf_name(tensor.name): tensor for tensor in self._reader.tensors}
        self.config = self._read_config()
        self._check_shapes()

    def error(self, remedy: str) -> ConfigError:
        """Return an error about this file."""
        return ConfigError([Problem(field="gguf", value=str(self._file), remedy=remedy)])

    def has(self, name: str) -> bool:
        """Whether the metadata has this key."""
        return name in self._reader.fields

    def value(self, name: str) -> object:
        """Return a value of the metadata.

        Raises:
            ConfigError: The key does not exist.
        """
        if not self.has(name):
            raise self.error(f"lacks {name}")
        return self._reader.fields[name].contents()

    def text(self, name: str) -> str:
        """Return a value that must be a string."""
        return self._typed(name, str)

    def integer(self, name: str) -> int:
        """Return a value that must be an integer."""
        return self._typed(name, int)

    def texts(self, name: str) -> list[str]:
        """Return a value that must be a list of strings."""
        return self._typed(name, list)

    def generation_config(self) -> GenerationConfig:
        """Return the special tokens as a generation config. GGUF has no other settings of sampling."""
        return GenerationConfig(
            bos_token_id=self.config.bos_token_id,
            eos_token_id=self.config.eos_token_id,
            pad_token_id=self.config.pad_token_id,
        )

    def quantization(self) -> dict[str, int]:
        """Return the number of tensors by GGUF type."""
        kinds = [tensor.tensor_type.name for tensor in self._reader.tensors]
        return {kind: kinds.count(kind) for kind in sorted(set(kinds))}

    def tensors(self) -> Iterator[tuple[str, np.ndarray]]:
        """Yield the Hugging Face name and the float32 weights of each tensor."""
        for name, tensor in self._tensors.items():
            try:
                weight = dequantize(tensor.data, tensor.tensor_type)
            except NotImplementedError as error:
                raise self.error(f"tensor {tensor.name} cannot be read: {error}") from None
            weight = np.ascontiguousarray(weight, dtype=np.float32)
            if name.endswith("q_proj.weight"):
                weight = _rotate_halves(weight, self.config.num_attention_heads)
            elif name.endswith("k_proj.weight"):
                assert self.config.num_key_value_heads is not None, "the header has it"
                weight = _rotate_halves(weight, self.config.num_key_value_heads)
            yield name, weight

    def _typed(self, name: str, kind: type[Value]) -> Value:
        value = self.value(name)
        if not isinstance(value, kind):
            raise self.error(f"has {name} = {value!r}; expected {kind.__name__}")
        return value

    def _size(self, name: str) -> int:
        return self.integer(f"{ARCHITECTURE}.{name}")

    def _number(self, name: str) -> float:
        # GGUF stores float32. This gives its shortest decimal, such as 1e-05 and not 9.99...e-06.
        value = self._typed(f"{ARCHITECTURE}.{name}", float)
        return float(str(np.float32(value)))

    def _hf_name(self, name: str) -> str:
        if name in _OF_MODEL:
            return _OF_MODEL[name]
        block, _, rest = name.partition(".")
        index, _, part = rest.partition(".")
        if block == "blk" and index.isdecimal() and part in _OF_LAYER:
            return f"model.layers.{index}.{_OF_LAYER[part]}"
        raise self.error(f"tensor {name} has no place in the model; it may change what is computed")

    def _read_config(self) -> LlamaConfig:
        num_heads, hidden_size = self._size("attention.head_count"), self._size("embedding_length")
        head_dim = hidden_size // num_heads
        for name in ("rope.dimension_count", "attention.key_length", "attention.value_length"):
            if self.has(f"{ARCHITECTURE}.{name}") and self._size(name) != head_dim:
                raise self.error(f"has {ARCHITECTURE}.{name} = {self._size(name)}; only {head_dim}, the head")
        return LlamaConfig(
            architectures=["LlamaForCausalLM"],
            vocab_size=len(self.texts("tokenizer.ggml.tokens")),
            hidden_size=hidden_size,
            intermediate_size=self._size("feed_forward_length"),
            num_hidden_layers=self._size("block_count"),
            num_attention_heads=num_heads,
            num_key_value_heads=self._size("attention.head_count_kv"),
            head_dim=head_dim,
            max_position_embeddings=self._size("context_length"),
            rms_norm_eps=self._number("attention.layer_norm_rms_epsilon"),
            rope_parameters={"rope_type": "default", "rope_theta": self._number("rope.freq_base")},
            tie_word_embeddings="lm_head.weight" not in self._tensors,
            bos_token_id=self.integer("tokenizer.ggml.bos_token_id"),
            eos_token_id=self.integer("tokenizer.ggml.eos_token_id"),
            pad_token_id=self.integer("tokenizer.ggml.padding_token_id"),
            dtype="float32",
        )

    def _check_shapes(self) -> None:
        expected = expected_shapes(parse_model_facts(self.config.to_dict(), str(self._file)))
        for name, shape in expected.items():
            if name not in self._tensors:
                raise self.error(f"lacks the tensor of {name}")
            # GGUF lists the fastest-varying dimension first.
            found = _shape(self._tensors[name])
            if found != shape:
                raise self.error(f"tensor of {name} has shape {found}, its metadata says {shape}")
        for name in self._tensors.keys() - expected.keys():
            raise self.error(f"has a tensor of {name}, for which its metadata has no place")


def _shape(tensor: ReaderTensor) -> tuple[int, ...]:
    return tuple(int(size) for size in reversed(tensor.shape))


def _rotate_halves(weight_OI: np.ndarray, num_heads: int) -> np.ndarray:
    """Reorder the rows of each head from llama.cpp's rotary layout (pairs) to transformers' (halves)."""
    out_size, in_size = weight_OI.shape
    pairs = weight_OI.reshape(num_heads, out_size // num_heads // 2, 2, in_size)
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(out_size, in_size))


_CONTROL = 3
"""Token type of special tokens in llama.cpp."""


_NORMAL = 1
"""Token type of ordinary tokens in llama.cpp."""


def _splits(name: str) -> pre_tokenizers.PreTokenizer | None:
    """Return the pre-tokenizer for its name in llama.cpp (llama-vocab.cpp); None if it is not supported."""
    if name == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    return None


def read_tokenizer(model: GgufModel) -> PreTrainedTokenizerFast:
    """Read the vocabulary, merges, special tokens and chat template of a byte-level BPE tokenizer.

    Raises:
        ConfigError: The type of the tokenizer, or its pre-tokenizer, is not supported.
    """
    split = _check(model)
    tokens = model.texts("tokenizer.ggml.tokens")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    pairs = (merge.split(" ") for merge in model.texts("tokenizer.ggml.merges"))
    merges = [(left, right) for left, right in pairs]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = split
    tokenizer.decoder = decoders.ByteLevel()
    kinds = model.value("tokenizer.ggml.token_type")
    assert isinstance(kinds, list)
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=tokens[model.integer("tokenizer.ggml.bos_token_id")],
        eos_token=tokens[model.integer("tokenizer.ggml.eos_token_id")],
        pad_token=tokens[model.integer("tokenizer.ggml.padding_token_id")],
        unk_token=tokens[model.integer("tokenizer.ggml.unknown_token_id")],
        model_max_length=model.config.max_position_embeddings,
        clean_up_tokenization_spaces=False,
    )
    if model.has("tokenizer.chat_template"):
        fast.chat_template = model.text("tokenizer.chat_template")
    return fast


def _check(model: GgufModel) -> pre_tokenizers.PreTokenizer:
    kind, splitting = model.text("tokenizer.ggml.model"), model.text("tokenizer.ggml.pre")
    if kind != "gpt2":
        raise model.error(f"has tokenizer.ggml.model {kind!r}; only 'gpt2' (byte-level BPE) is supported")
    split = _splits(splitting)
    if split is None:
        raise model.error(f"has tokenizer.ggml.pre {splitting!r}; only 'smollm' is supported")
    for name in ("tokenizer.ggml.add_bos_token", "tokenizer.ggml.add_space_prefix"):
        if model.has(name) and model.value(name) is not False:
            raise model.error(f"has {name} = {model.value(name)!r}; only False is supported")
    kinds = model.value("tokenizer.ggml.token_type")
    if not isinstance(kinds, list) or not set(kinds) <= {_NORMAL, _CONTROL}:
        raise model.error("has tokens that are neither normal (type 1) nor control tokens (type 3)")
    return split
