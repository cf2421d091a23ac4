"""Reads YAML files and ``key.path=value`` overrides into a validated ``RunConfig``, and writes it back.

Each file is merged over the earlier ones, and overrides are merged over all files. A section of another
``kind`` replaces the earlier section whole: keys of one kind mean nothing to another.

Reading is omegaconf's: numbers such as 1e-4 are numbers, ``${other.key}`` refers to another key and ``\\${``
is a literal. Validation is pydantic's, in its strict JSON mode: "3" is text, never the number 3.
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
"""omegaconf's mark for a value that is still to be given."""

_KEY_PATH = re.compile(r"[A-Za-z_]\w*(\.\w+)*")


def load_config(paths: str | Path | Sequence[str | Path], overrides: Sequence[str] = ()) -> RunConfig:
    """Read a run's YAML file, or several in order, apply overrides in order and validate the result.

    Raises:
        ConfigError: lists every problem found. Rules across sections are checked later, by
            ``forgeasync.models.rules.check_config``.
    """
    problems: list[Problem] = []
    config = _read_files([paths] if isinstance(paths, str | Path) else paths, problems)
    # Kinds first: a section's kind decides which other keys it has.
    for override in sorted(overrides, key=lambda text: not text.partition("=")[0].endswith(".kind")):
        config = _apply_override(config, override, problems)
    if config is None:
        raise ConfigError(problems)
    values = _with_age_of_tokens(with_installed_kinds(_resolve(config, problems)))
    # Validated as JSON: from JSON, pydantic's strict mode accepts enums, tuples and whole numbers for floats.
    text = json.dumps(values, default=str)
    try:
        validated = RunConfig.model_validate_json(text, strict=True)
    except ValidationError as error:
        problems.extend(explain(error, json.loads(text)))
        raise ConfigError(problems) from None
    raise_if_any(problems)
    return validated


def dump_config(config: RunConfig) -> str:
    """Write the resolved config as YAML text; ``load_config`` reads it back to an equal object."""
    values = {key: _escape(value) for key, value in config.model_dump(mode="json").items()}
    return OmegaConf.to_yaml(OmegaConf.create(values))


def _read_files(paths: Sequence[str | Path], problems: list[Problem]) -> DictConfig | None:
    """Merge all files; return None, with problems added, if one of them cannot be read."""
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
    """Merge ``later`` over ``earlier``; sections of another kind are replaced."""
    kept = OmegaConf.to_container(earlier, resolve=False)
    _drop_other_kinds(kept, OmegaConf.to_container(later, resolve=False))
    merged = OmegaConf.merge(OmegaConf.create(kept), later)
    assert isinstance(merged, DictConfig), "two mappings make one"
    return merged


def _drop_other_kinds(earlier: object, later: object) -> None:
    """Empty the sections of ``earlier`` that are of another kind in ``later``."""
    if not (isinstance(earlier, dict) and isinstance(later, dict)):
        return
    if "kind" in earlier and "kind" in later and earlier["kind"] != later["kind"]:
        earlier.clear()
    for key in earlier.keys() & later.keys():
        _drop_other_kinds(earlier[key], later[key])


def _read_file(path: Path, problems: list[Problem]) -> DictConfig | None:
    """Parse a file; return None, with a problem added, if it cannot be read."""
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
        # omegaconf parses a text that is no mapping, such as "hello", to {"hello": None}.
        if isinstance(loaded, DictConfig):
            return loaded
        remedy = "must hold a mapping of keys such as 'name: my_run'"
    problems.append(Problem(field="config", value=str(path), remedy=remedy))
    return None


def _apply_override(config: DictConfig | None, override: str, problems: list[Problem]) -> DictConfig | None:
    """Merge one override; return ``config`` unchanged, with a problem added, if that fails."""
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
    """Bound the age of tokens where episodes can be long, so that one loses only its oldest turns.

    Whatever the config says of it stays.
    """
    if not isinstance(values, dict) or values.get("environment") is None:
        return values
    buffer, weights = values.get("buffer", {}), values.get("weights", {})
    if not isinstance(buffer, dict) or not isinstance(weights, dict) or "age_of" in buffer:
        return values
    if weights.get("interruption") == Interruption.CANCEL_STALE:
        # It can tell only of whole groups whether they are too old.
        return values
    return values | {"buffer": buffer | {"age_of": AgeOf.TOKEN.value}}


def _resolve(config: DictConfig, problems: list[Problem]) -> object:
    """The config as plain values; with its texts as they stand where a reference cannot be resolved."""
    try:
        values = OmegaConf.to_container(config, resolve=True)
        missing = sorted(OmegaConf.missing_keys(config))
    except OmegaConfBaseException as error:
        # Going on finds the other problems too.
        problems.append(_interpolation_problem(error))
        return OmegaConf.to_container(config, resolve=False)
    problems.extend(Problem(field=key, value=_MISSING, remedy="give it a value") for key in missing)
    return values


def _yaml_error(error: yaml.YAMLError) -> str:
    """Return a YAML error, which has several lines, as one line."""
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
    r"""Return values with every ``${`` in their texts escaped as omegaconf's literal ``\${``."""
    if isinstance(value, dict):
        return {key: _escape(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_escape(item) for item in value]
    if isinstance(value, str) and "${" in value:
        return re.sub(r"(\\*)\$\{", lambda match: match[1] * 2 + r"\${", value)
    return value
