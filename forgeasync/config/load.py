"""Reads YAML files and ``key.path=value`` overrides into a validated ``RunConfig``, and writes it back.

Each file is merged over the earlier ones, and overrides are merged over all files. A section of another
``kind`` replaces the earlier section entirely, because different kinds have different keys.

omegaconf reads the files: 1e-4 is a number, ``${other.key}`` refers to another key and ``\\${`` is a literal.
pydantic validates the values in its strict JSON mode: "3" is a string, never the number 3.
"""

import functools
import json
import re
from collections.abc import Sequence
from pathlib import Path

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError

from forgeasync.config.buffer import AgeOf
from forgeasync.config.explain import explain
from forgeasync.config.installed import with_installed_kinds
from forgeasync.config.run import RunConfig
from forgeasync.config.weights import Interruption
from forgeasync.schema import ConfigError, Problem, raise_if_any

_MISSING = "???"
"""omegaconf's marker for a required value that is not set."""

_KEY_PATH = re.compile(r"[A-Za-z_]\w*(\.\w+)*")


def load_config(paths: str | Path | Sequence[str | Path], overrides: Sequence[str] = ()) -> RunConfig:
    """Return the validated config of YAML files and overrides, both applied in order.

    Raises:
        ConfigError: the config is invalid; lists all problems found. Rules across sections are checked later,
            by ``forgeasync.models.rules.check_config``.
    """
    problems: list[Problem] = []
    config = _read_files([paths] if isinstance(paths, str | Path) else paths, problems)
    # Kinds come first, because a section's kind determines its other keys.
    for override in sorted(overrides, key=lambda text: not text.partition("=")[0].endswith(".kind")):
        config = _apply_override(config, override, problems)
    if config is None:
        raise ConfigError(problems)
    values = _with_age_of_tokens(with_installed_kinds(_resolve(config, problems)))
    # From JSON, pydantic's strict mode accepts enums, tuples, and integers for floats.
    text = json.dumps(values, default=str)
    try:
        validated = RunConfig.model_validate_json(text, strict=True)
    except ValidationError as error:
        problems.extend(explain(error, json.loads(text)))
        raise ConfigError(problems) from None
    raise_if_any(problems)
    return validated


def dump_config(config: RunConfig) -> str:
    """Return the resolved config as YAML text, which ``load_config`` reads back to an equal object."""
    values = {key: _escape(value) for key, value in config.model_dump(mode="json").items()}
    return OmegaConf.to_yaml(OmegaConf.create(values))


def _read_files(paths: Sequence[str | Path], problems: list[Problem]) -> DictConfig | None:
    """Read and merge all files; if one cannot be read, add problems and return None."""
    files = [_read_file(Path(path), problems) for path in paths]
    readable = [file for file in files if file is not None]
    if len(readable) < len(files):
        return None
    try:
        return functools.reduce(_merge, readable)
    except OmegaConfBaseException as error:
        problems.append(_interpolation_problem(error))
        return None


def _merge(earlier: DictConfig, later: DictConfig) -> DictConfig:
    """Merge ``later`` over ``earlier``; a section of another kind is replaced entirely."""
    kept = OmegaConf.to_container(earlier, resolve=False)
    _drop_other_kinds(kept, OmegaConf.to_container(later, resolve=False))
    merged = OmegaConf.merge(OmegaConf.create(kept), later)
    assert isinstance(merged, DictConfig), "two mappings make one"
    return merged


def _drop_other_kinds(earlier: object, later: object) -> None:
    """Empty, in place, the sections of ``earlier`` that have another kind in ``later``."""
    if not (isinstance(earlier, dict) and isinstance(later, dict)):
        return
    if "kind" in earlier and "kind" in later and earlier["kind"] != later["kind"]:
        earlier.clear()
    for key in earlier.keys() & later.keys():
        _drop_other_kinds(earlier[key], later[key])


def _read_file(path: Path, problems: list[Problem]) -> DictConfig | None:
    """Parse a file; if it cannot be read, add a problem and return None."""
    remedy = "must be a readable YAML file"
    try:
        loaded = OmegaConf.create(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        remedy = "no such file; give the path of a YAML file"
    except (OSError, UnicodeDecodeError) as error:
        remedy = f"cannot be read ({type(error).__name__}); give the path of a YAML text file"
    except yaml.YAMLError as error:
        remedy = f"not valid YAML: {_yaml_error(error)}"
    except OmegaConfBaseException as error:
        problems.append(_interpolation_problem(error))
        return None
    else:
        # A DictConfig is not always a mapping in the file: omegaconf parses the text "hello" to {"hello":
        # None}.
        if isinstance(loaded, DictConfig):
            return loaded
        remedy = "must hold a mapping of keys such as 'name: my_run'"
    problems.append(Problem(field="config", value=str(path), remedy=remedy))
    return None


def _apply_override(config: DictConfig | None, override: str, problems: list[Problem]) -> DictConfig | None:
    """Merge one override; if that fails, add a problem and return ``config`` unchanged."""
    key, equals, text = override.partition("=")
    if not equals or not _KEY_PATH.fullmatch(key):
        remedy = "must read key.path=value, such as algorithm.group_size=8"
        problems.append(Problem(field="override", value=override, remedy=remedy))
        return config
    if text == _MISSING:
        # Merging would silently keep the file's value.
        problems.append(Problem(field=key, value=text, remedy="give it a value"))
        return config
    try:
        parsed = OmegaConf.from_dotlist([override])
        return config if config is None else _merge(config, parsed)
    except yaml.YAMLError as error:
        remedy = f"not a valid YAML value: {_yaml_error(error)}; quote it if it is text"
        problems.append(Problem(field=key, value=text, remedy=remedy))
    except OmegaConfBaseException as error:
        problems.append(_interpolation_problem(error))
    except TypeError:
        remedy = "leads into a list; give the whole list, such as key.path=[1,2]"
        problems.append(Problem(field="override", value=override, remedy=remedy))
    return config


def _with_age_of_tokens(values: object) -> object:
    """Set ``buffer.age_of: token`` if the config has an environment and does not set the key.

    Episodes can be long; with the age of each token, a long one loses only its oldest turns.
    """
    if not isinstance(values, dict) or values.get("environment") is None:
        return values
    buffer, weights = values.get("buffer", {}), values.get("weights", {})
    if not isinstance(buffer, dict) or not isinstance(weights, dict) or "age_of" in buffer:
        return values
    if weights.get("interruption") == Interruption.CANCEL_STALE:
        # cancel_stale determines the age of whole groups only.
        return values
    return values | {"buffer": buffer | {"age_of": AgeOf.TOKEN.value}}


def _resolve(config: DictConfig, problems: list[Problem]) -> object:
    """Return the config as plain values; if a reference cannot be resolved, all references stay as text."""
    try:
        values = OmegaConf.to_container(config, resolve=True)
        missing = sorted(OmegaConf.missing_keys(config))
    except OmegaConfBaseException as error:
        # Continue, in order to find the other problems too.
        problems.append(_interpolation_problem(error))
        return OmegaConf.to_container(config, resolve=False)
    problems.extend(Problem(field=key, value=_MISSING, remedy="give it a value") for key in missing)
    return values


def _yaml_error(error: yaml.YAMLError) -> str:
    """Return the message of a YAML error, which has several lines, as one line."""
    if not isinstance(error, yaml.MarkedYAMLError):
        return " ".join(str(error).split())
    what = " ".join(part for part in (error.context, error.problem) if part)
    mark = error.problem_mark
    return what if mark is None else f"{what} (line {mark.line + 1}, column {mark.column + 1})"


def _interpolation_problem(error: OmegaConfBaseException) -> Problem:
    what = str(error).splitlines()[0]
    remedy = f"{what}; ${{other.key}} refers to another key of the config, \\${{ is a literal"
    return Problem(field=error.full_key or "config", remedy=remedy)


def _escape(value: object) -> object:
    r"""Return values with every ``${`` in their strings escaped as omegaconf's literal ``\${``."""
    if isinstance(value, dict):
        return {key: _escape(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_escape(item) for item in value]
    if isinstance(value, str) and "${" in value:
        return re.sub(r"(\\*)\$\{", lambda match: match[1] * 2 + r"\${", value)
    return value
