"""The shape of the model at ``model.path``, read from its Hugging Face config.json alone.

Looked for in this order: a folder, the local hub cache, the hub itself (one short attempt), and for models
whose published shape ships with this repository, ``configs/models/<org>--<name>/config.json``.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import httpx
from huggingface_hub import (
    get_hf_file_metadata,
    hf_hub_download,
    hf_hub_url,
    snapshot_download,
    try_to_load_from_cache,
)
from huggingface_hub.errors import HfHubHTTPError

from forgeasync.config.problems import ConfigError, Problem, raise_if_any

SHIPPED_MODELS = Path(__file__).resolve().parents[2] / "configs" / "models"
"""Shapes of published models, for planning a run where neither the model nor the hub is at hand."""

SUPPORTED_MODEL_TYPE = "qwen3_moe"

HUB_TIMEOUT_S = 5.0
"""How long a machine without network may take to learn that the hub cannot be reached."""

_HUB_ERRORS = (OSError, HfHubHTTPError, httpx.HTTPError)

_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What the config.json of a Qwen3-MoE says about its shape."""

    model_type: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_experts: int
    top_k: int
    vocab_size: int
    expert_hidden_size: int
    max_position_embeddings: int
    tie_word_embeddings: bool
    rope_theta: float
    rms_norm_eps: float


def read_model_facts(path: str) -> ModelFacts:
    """The facts of the model at ``model.path``, a folder or a hub id.

    Raises:
        ConfigError: no such model, no readable config.json, a key missing or of the wrong type, or a
            model that is no plain Qwen3-MoE; every problem names ``model.path``.
    """
    file = model_config_file(path)
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _error(path, f"{file} is not a readable JSON file: {error}") from None
    if not isinstance(raw, dict):
        raise _error(path, f"{file} must hold a JSON object")
    return parse_model_facts(raw, path)


def parse_model_facts(raw: Mapping[str, object], path: str) -> ModelFacts:
    """The facts in a parsed config.json; ``path`` is for the messages.

    Raises:
        ConfigError: as ``read_model_facts``.
    """
    model_type = raw["model_type"] if "model_type" in raw else None
    if model_type != SUPPORTED_MODEL_TYPE:
        # Other families lack most keys below: naming those too would only hide this.
        remedy = f"its config.json has model_type {model_type!r}; only {SUPPORTED_MODEL_TYPE!r} is supported"
        raise _error(path, remedy)
    reader = _Reader(raw, path)
    facts = ModelFacts(
        model_type=SUPPORTED_MODEL_TYPE,
        num_layers=reader.integer("num_hidden_layers"),
        hidden_size=reader.integer("hidden_size"),
        num_heads=reader.integer("num_attention_heads"),
        num_kv_heads=reader.integer("num_key_value_heads"),
        head_dim=reader.integer("head_dim"),
        # transformers 5 writes num_local_experts, earlier versions num_experts.
        num_experts=reader.integer("num_experts", "num_local_experts"),
        top_k=reader.integer("num_experts_per_tok"),
        vocab_size=reader.integer("vocab_size"),
        expert_hidden_size=reader.integer("moe_intermediate_size"),
        max_position_embeddings=reader.integer("max_position_embeddings"),
        tie_word_embeddings=reader.boolean("tie_word_embeddings"),
        rope_theta=reader.rope_theta(),
        rms_norm_eps=reader.number("rms_norm_eps"),
    )
    reader.refuse_unsupported()
    raise_if_any(reader.problems)
    return facts


def model_config_file(path: str) -> Path:
    """The config.json of the model at ``model.path``; under ``SHIPPED_MODELS`` if it was found only there.

    Raises:
        ConfigError: there is none.
    """
    folder = Path(path)
    if folder.is_dir():
        if (folder / "config.json").is_file():
            return folder / "config.json"
        raise _error(path, "the folder has no config.json; it must be a Hugging Face model folder")
    if not _HUB_ID.fullmatch(path):
        raise _error(path, "no such folder; give a Hugging Face model folder or a hub id such as org/name")
    cached = try_to_load_from_cache(path, "config.json")
    if isinstance(cached, str):
        return Path(cached)
    try:
        _probe_hub(path)
        return Path(hf_hub_download(path, "config.json"))
    except _HUB_ERRORS as error:
        shipped = SHIPPED_MODELS / path.replace("/", "--") / "config.json"
        if shipped.is_file():
            return shipped
        raise _error(path, _not_on_hub(error)) from None


def model_folder(path: str) -> Path:
    """The folder with the weights and tokenizer of ``model.path``; a hub id is downloaded unless cached.

    Raises:
        ConfigError: no such folder, and not on the hub or the hub cannot be reached.
    """
    if Path(path).is_dir():
        return Path(path)
    if not _HUB_ID.fullmatch(path):
        raise _error(path, "no such folder; give a Hugging Face model folder or a hub id such as org/name")
    patterns = ["*.json", "*.safetensors", "*.jinja", "merges.txt"]
    try:
        _probe_hub(path)
        return Path(snapshot_download(path, allow_patterns=patterns))
    except _HUB_ERRORS as error:
        try:
            return Path(snapshot_download(path, allow_patterns=patterns, local_files_only=True))
        except _HUB_ERRORS:
            raise _error(path, _not_on_hub(error)) from None


def _probe_hub(hub_id: str) -> None:
    """One request: without network, huggingface_hub's own downloads retry for half a minute."""
    get_hf_file_metadata(hf_hub_url(hub_id, "config.json"), timeout=HUB_TIMEOUT_S)


def _not_on_hub(error: Exception) -> str:
    return (
        "no such folder, not in the hub cache, and the hub did not give it "
        f"({type(error).__name__}); give a folder, or download the model first"
    )


def _error(path: str, remedy: str) -> ConfigError:
    return ConfigError([Problem(field="model.path", value=path, remedy=remedy)])


class _Reader:
    """Reads keys of a config.json; what is missing or wrong becomes a problem and a placeholder."""

    def __init__(self, raw: Mapping[str, object], path: str) -> None:
        self._raw = raw
        self._path = path
        self.problems: list[Problem] = []

    def _add(self, remedy: str) -> None:
        remedy = f"its config.json {remedy}"
        self.problems.append(Problem(field="model.path", value=self._path, remedy=remedy))

    def integer(self, *names: str) -> int:
        """A positive whole number under the first of ``names`` that is there."""
        for name in names:
            if name in self._raw:
                value = self._raw[name]
                if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                    return value
                self._add(f"has {name} = {value!r}; expected a positive whole number")
                return 1
        self._add(f"lacks {' or '.join(names)}, a positive whole number")
        return 1

    def boolean(self, name: str) -> bool:
        if name in self._raw and isinstance(self._raw[name], bool):
            return self._raw[name] is True
        found = f"has {name} = {self._raw[name]!r}" if name in self._raw else f"lacks {name}"
        self._add(f"{found}; expected true or false")
        return False

    def number(self, name: str) -> float:
        if name not in self._raw:
            self._add(f"lacks {name}, a positive number")
            return 1.0
        return self._positive(name, self._raw[name])

    def rope_theta(self) -> float:
        """From ``rope_parameters``, where transformers 5 writes it, or from the top level."""
        nested = self._raw["rope_parameters"] if "rope_parameters" in self._raw else None
        if isinstance(nested, dict) and "rope_theta" in nested:
            return self._positive("rope_parameters.rope_theta", nested["rope_theta"])
        if "rope_theta" not in self._raw:
            self._add("lacks rope_theta (or rope_parameters.rope_theta), a positive number")
            return 1.0
        return self._positive("rope_theta", self._raw["rope_theta"])

    def _positive(self, name: str, value: object) -> float:
        if isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0:
            return float(value)
        self._add(f"has {name} = {value!r}; expected a positive number")
        return 1.0

    def refuse_unsupported(self) -> None:
        """Variants of the architecture that the trainer would silently compute differently."""
        supported: dict[str, tuple[object, ...]] = {
            "norm_topk_prob": (True,),
            "attention_bias": (False,),
            "hidden_act": ("silu",),
            "decoder_sparse_step": (1,),
            "mlp_only_layers": ([], None),
            "rope_scaling": (None,),
            "use_sliding_window": (False,),
        }
        for name, accepted in supported.items():
            if name in self._raw and self._raw[name] not in accepted:
                self._add(f"has {name} = {self._raw[name]!r}; only {accepted[0]!r} is supported")
        if "norm_topk_prob" not in self._raw:
            self._add("lacks norm_topk_prob, which must be true (absent means false)")
        nested = self._raw["rope_parameters"] if "rope_parameters" in self._raw else None
        if isinstance(nested, dict) and "rope_type" in nested and nested["rope_type"] != "default":
            self._add(f"has rope_type = {nested['rope_type']!r}; only 'default' is supported")
