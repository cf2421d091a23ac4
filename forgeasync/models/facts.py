"""Finds the model at ``model.path``, reads its config.json, and checks the shapes of its tensors.

config.json is searched in a folder, in the local hub cache, on the hub (one short attempt) and, for models
whose published config ships with this repository, in ``configs/models/<org>--<name>/config.json``.

A checkpoint is checked against its config.json by the headers of its files, before weights are loaded.
"""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import httpx
import torch
from huggingface_hub import (
    get_hf_file_metadata,
    hf_hub_download,
    hf_hub_url,
    snapshot_download,
    try_to_load_from_cache,
)
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)
from safetensors import SafetensorError, safe_open

from forgeasync.config import ModelFacts
from forgeasync.models.family import ConfigReader, Shape
from forgeasync.models.hf_folder import CheckpointTensors, logical_shapes
from forgeasync.models.rules import FAMILIES, expected_shapes, is_untrained
from forgeasync.schema import ConfigError, Problem, raise_if_any

SHIPPED_MODELS = Path(__file__).resolve().parents[2] / "configs" / "models"
"""Folder with the config.json of published models, for planning a run without the model and the hub."""

HUB_TIMEOUT_S = 5.0
"""Time limit of the attempt to reach the hub, in seconds."""

MAX_PROBLEMS = 8
"""Maximum number of tensors to list. With a wrong config.json, thousands of tensors disagree."""

_HEAD = "lm_head.weight"

_HUB_ERRORS = (OSError, HfHubHTTPError, httpx.HTTPError)

_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


def read_model_facts(path: str) -> ModelFacts:
    """Read the facts of the model at ``model.path``, a folder or a hub id.

    Raises:
        ConfigError: The model does not exist or has no readable config.json, a key is missing or has the
            wrong type, or the model's family or options are not supported. Every problem names
            ``model.path``.
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
    """Return the facts in a parsed config.json. ``path`` is for error messages.

    Raises:
        ConfigError: See ``read_model_facts``.
    """
    names = raw.get("architectures")
    architecture = names[0] if isinstance(names, list) and len(names) == 1 else names
    families = {name: family for name, family in FAMILIES.items() if family.architecture == architecture}
    if not families:
        # Other families lack most of the keys below, and listing these would hide the real problem.
        supported = ", ".join(dict.fromkeys(family.architecture for family in FAMILIES.values()))
        remedy = f"its config.json has architectures = {names!r}; only {supported} are supported"
        raise _error(path, f"{remedy} (to add one: docs/models.md#new-families)")
    if (model_type := raw.get("model_type")) not in families:
        expected = " or ".join(map(repr, families))
        remedy = f"its config.json has model_type = {model_type!r}; {architecture} has {expected}"
        raise _error(path, remedy)
    reader = ConfigReader(raw, path)
    facts = families[str(model_type)].read(reader)
    reader.refuse_unread()
    raise_if_any(reader.problems)
    if facts.rotary_dim % 2 or not 0 < facts.rotary_dim <= facts.head_dim:
        keys = "head_dim, partial_rotary_factor" if facts.latent is None else "qk_rope_head_dim"
        rotated = f"rotates {facts.rotary_dim} of {facts.head_dim} dimensions of a head ({keys})"
        raise _error(path, f"its config.json {rotated}; must be an even part")
    return facts


def model_config_file(path: str) -> Path:
    """Find the config.json of the model at ``model.path``. ``SHIPPED_MODELS`` is the last resort.

    Raises:
        ConfigError: No config.json was found.
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
        raise _error(path, _not_on_hub(path, error)) from None


def model_folder(path: str) -> Path:
    """Return the folder with weights and tokenizer of ``model.path``. A hub id is downloaded unless cached.

    Raises:
        ConfigError: The folder does not exist, and the hub does not have the model or cannot be reached.
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
            raise _error(path, _not_on_hub(path, error)) from None


def _probe_hub(hub_id: str) -> None:
    """Make one short request, because downloads of huggingface_hub without a network retry for 30 s."""
    get_hf_file_metadata(hf_hub_url(hub_id, "config.json"), timeout=HUB_TIMEOUT_S)


def _not_on_hub(path: str, error: Exception) -> str:
    match error:
        case OfflineModeIsEnabled():
            why = "HF_HUB_OFFLINE=1 is set, as make sets it: unset it"
        case GatedRepoError():
            why = "the hub requires that you accept the model's license on its page and log in: hf auth login"
        case RepositoryNotFoundError():
            why = "the hub has no such model, or a private one: check the name, or log in: hf auth login"
        case _:
            why = f"the hub did not give it ({type(error).__name__})"
    return (
        f"no such folder, not in the hub cache, and {why}; to fetch it before the run: hf download {path}; "
        "or give a folder"
    )


def _error(path: str, remedy: str) -> ConfigError:
    return ConfigError([Problem(field="model.path", value=path, remedy=remedy)])


def check_checkpoint_shapes(folder: Path, facts: ModelFacts) -> list[Problem]:
    """Return problems for missing, unexpected and wrongly shaped tensors of a folder.

    Also for an output layer that config.json ties to the embedding, if its values are others. Lists at most
    ``MAX_PROBLEMS``, followed by the number of the others.
    """
    headers: dict[str, Shape] = {}
    problems: list[Problem] = []
    for file in _weight_files(folder, problems):
        try:
            with safe_open(file, framework="np") as tensors:
                # get_slice reads only the header.
                for name in tensors.keys():
                    headers[name] = tuple(tensors.get_slice(name).get_shape())
        except (OSError, SafetensorError) as error:
            problems.append(_problem(folder, f"{file.name} is not a readable safetensors file: {error}"))
    if problems:
        return problems
    problems = _compare(folder, logical_shapes(headers, expected_shapes(facts)), facts)
    if not problems and facts.tie_word_embeddings and _HEAD in headers:
        tensors, embedding = CheckpointTensors(folder), f"{facts.checkpoint_prefix}embed_tokens.weight"
        if not torch.equal(tensors[embedding], tensors[_HEAD]):
            # transformers would use both, and vLLM only the embedding.
            remedy = f"has tie_word_embeddings = True; must be false: {_HEAD} differs from {embedding}"
            problems.append(_problem(folder, f"its config.json {remedy}"))
    return problems


def _problem(folder: Path, remedy: str) -> Problem:
    return Problem(field="model.path", value=str(folder), remedy=remedy)


def _weight_files(folder: Path, problems: list[Problem]) -> Iterator[Path]:
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        if (folder / "model.safetensors").is_file():
            yield folder / "model.safetensors"
        else:
            problems.append(_problem(folder, "has no model.safetensors and no model.safetensors.index.json"))
        return
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        problems.append(_problem(folder, f"{index.name} is not a JSON file with a weight_map"))
        return
    for name in names:
        if (folder / name).is_file():
            yield folder / name
        else:
            problems.append(_problem(folder, f"lacks {name}, which {index.name} lists; download it again"))


def _compare(folder: Path, found: dict[str, Shape], facts: ModelFacts) -> list[Problem]:
    expected = expected_shapes(facts)
    remedies: list[str] = []
    for name, shape in expected.items():
        if name not in found:
            remedies.append(f"lacks tensor {name} of shape {shape}, which its config.json asks for")
        elif found[name] != shape:
            remedies.append(f"tensor {name} has shape {found[name]}, its config.json says {shape}")
    # Some exporters also write a tied output layer. It equals the embedding and is not read.
    ignored = {_HEAD} if facts.tie_word_embeddings else set()
    ignored |= {name for name in found if is_untrained(name, facts)}
    for name in sorted(found.keys() - expected.keys() - ignored):
        remedies.append(f"tensor {name} of shape {found[name]} has no place in its config.json")
    problems = [_problem(folder, remedy) for remedy in remedies[:MAX_PROBLEMS]]
    if len(remedies) > MAX_PROBLEMS:
        problems.append(_problem(folder, f"and {len(remedies) - MAX_PROBLEMS} more tensors that disagree"))
    return problems
