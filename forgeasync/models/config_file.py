"""The shape of the model at ``model.path``, read from its Hugging Face config.json alone.

Looked for in this order: a folder, the local hub cache, the hub itself (one short attempt), and for models
whose published shape ships with this repository, ``configs/models/<org>--<name>/config.json``.
"""

import json
import re
from collections.abc import Mapping
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

from forgeasync.config import ModelFacts
from forgeasync.models.config_json import ConfigReader
from forgeasync.models.registry import FAMILIES
from forgeasync.schema import ConfigError, Problem, raise_if_any

SHIPPED_MODELS = Path(__file__).resolve().parents[2] / "configs" / "models"
"""Shapes of published models, for planning a run where neither the model nor the hub is at hand."""


HUB_TIMEOUT_S = 5.0
"""Seconds that a machine without network may take to learn that the hub cannot be reached."""


_HUB_ERRORS = (OSError, HfHubHTTPError, httpx.HTTPError)


_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


def read_model_facts(path: str) -> ModelFacts:
    """The facts of the model at ``model.path``, a folder or a hub id.

    Raises:
        ConfigError: no such model, no readable config.json, a key missing or of the wrong type, or a
            model of another family or with options the trainer has not; every problem names ``model.path``.
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
    if model_type not in FAMILIES:
        # Other families lack most keys below: naming those too would only hide this.
        supported = ", ".join(map(repr, FAMILIES))
        raise _error(path, f"its config.json has model_type {model_type!r}; only {supported} are supported")
    family = FAMILIES[str(model_type)]
    reader = ConfigReader(raw, path)
    reader.only("architectures", [family.architecture], None)
    facts = family.read(reader)
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
