"""Reads YAML files and ``key.path=value`` overrides into a validated ``RunConfig``, and writes it back.

Each file is merged over the earlier ones, and overrides are merged over all files. A section of another
``kind`` replaces the earlier section entirely, because different kinds have different keys.

omegaconf reads the files: 1e-4 is a number, ``${other.key}`` refers to another key and ``\\${`` is a literal.
pydantic validates the values in its strict JSON mode: "3" is a string, never the number 3. Its errors become
problems with the dotted field, the value and a remedy. Sections whose kind an installed package adds
(docs/plugins.md) are read and checked here too.
"""

import difflib
import functools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import get_args, get_origin

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from forgeasync.config.buffer import AgeOf
from forgeasync.config.data import PythonSource, SourceSection
from forgeasync.config.environments import EnvironmentSection
from forgeasync.config.plugin_sections import InstalledEnvironment, InstalledSource
from forgeasync.config.rewards import PythonReward, RewardSection
from forgeasync.config.run import RunConfig, all_sources, is_served
from forgeasync.config.weights import BUILT_IN_TRANSPORTS, Interruption
from forgeasync.schema import (
    ConfigError,
    PluginGroup,
    Problem,
    PythonCode,
    installed_kinds,
    python_form,
    raise_if_any,
    section_class,
)

_MISSING = "???"
"""omegaconf's marker for a required value that is not set."""

_KEY_PATH = re.compile(r"[A-Za-z_]\w*(\.\w+)*")


def load_config(paths: str | Path | Sequence[str | Path], overrides: Sequence[str] = ()) -> RunConfig:
    """Return the validated config of YAML files and overrides, both applied in order.

        config = fa.load_config("configs/tiny_moe_cpu.yaml", ["max_steps=20", "trainer.tokens_per_row=4096"])

    A run, also with ``--dry-run``, then checks rules across sections, and those that need the model or data.

    Args:
        paths: A YAML file, or several. Values of later files replace those of earlier ones.
        overrides: Values that replace those of the files, as ``key.path=value`` with the value in YAML.

    Raises:
        ConfigError: The config is invalid. The message lists all problems.
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


PLUGIN_GROUPS = {
    "environment": PluginGroup.ENVIRONMENTS,
    "reward": PluginGroup.REWARDS,
    "source": PluginGroup.SOURCES,
}
"""Plug-in group by the key of a section; installed packages can add kinds of these sections."""

_EXPECTED = {
    "int_type": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
    "dict_type": "a mapping of keys",
    "tuple_type": "a list",
}

_SECTION_EXPECTED = ("model_type", "model_attributes_type", "dict_type")

_FOUND = {
    int: "a whole number",
    float: "a number with a fraction",
    bool: "true or false",
    str: "text",
    dict: "a mapping",
    list: "a list",
    type(None): "nothing",
}

_BOUNDS = {
    "greater_than": ("gt", "greater than"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "less than"),
    "less_than_equal": ("le", "at most"),
    "multiple_of": ("multiple_of", "a multiple of"),
}


def explain(error: ValidationError, values: object) -> list[Problem]:
    """Return one problem for every field of ``RunConfig`` that failed validation on ``values``."""
    by_field: dict[tuple[str | int, ...], list[ErrorDetails]] = {}
    for details in error.errors(include_url=False):
        by_field.setdefault(_without_tags(details, values), []).append(details)
    return [_problem(errors, location, values) for location, errors in by_field.items()]


def _without_tags(details: ErrorDetails, values: object) -> tuple[str | int, ...]:
    """Return the location of an error in the file, without the union tags that pydantic inserts."""
    location: list[str | int] = []
    node = values
    last = len(details["loc"]) - 1
    for depth, part in enumerate(details["loc"]):
        if isinstance(node, Mapping) and part in node:
            node = node[part]
        elif isinstance(node, Sequence) and isinstance(part, int) and part < len(node):
            node = node[part]
        elif isinstance(node, str) and depth and details["loc"][depth - 1] == node:
            # A key of a section given by its kind alone; pydantic puts the kind before the key.
            pass
        elif not (depth == last and details["type"] == "missing"):
            continue
        location.append(part)
    return tuple(location)


def _problem(errors: Sequence[ErrorDetails], location: tuple[str | int, ...], values: object) -> Problem:
    details = errors[0]
    field = _dotted(location) or "config"
    value, remedy = details["input"], details["msg"]
    context: Mapping[str, object] = details["ctx"] if "ctx" in details else {}
    match details["type"]:
        case "missing" if isinstance(location[-1], int):
            field, remedy = _dotted(location[:-1]), f"entry {location[-1] + 1} of this list is missing"
        case "missing":
            value, remedy = None, f"required key is missing{_meaning(location, values)}"
        case "extra_forbidden":
            remedy = _unknown_key(location, values)
        case "dict_type" if _has_names(location, values):
            remedy = f"expected sections by name, such as {{a: {{...}}}}{_meaning(location, values)}"
        case kind if kind in _SECTION_EXPECTED and (classes := _candidates(location, values)):
            keys = ", ".join(classes[0].model_fields)
            if len(classes) > 1:
                keys = f"kind (one of {_kinds(location, values)}) and those of its kind"
            remedy = f"expected a section with the keys {keys}"
            if len(classes) > 1 and value in kinds_of(classes[:1]):
                remedy = f"expected a section; write {{kind: {value}}}"
        case "union_tag_not_found":
            field, value = f"{field}.kind", None
            remedy = f"required key is missing: one of {_kinds(location, values)}"
        case "union_tag_invalid":
            field = field if _is_kind_alone(location, values) else f"{field}.kind"
            value, remedy = context["tag"], f"expected one of {_kinds(location, values)}"
        case "key_of_section":
            # Error of a rule across the keys of one section; its context names the key to change.
            field, value = f"{field}.{context['key']}", None
        case "finite_number":
            remedy = "must be a finite number"
        case "too_short":
            entries = "one entry" if context["min_length"] == 1 else f"{context['min_length']} entries"
            remedy = f"must have at least {entries}{_meaning(location, values)}"
        case "too_long":
            remedy = f"must have {context['max_length']} entries"
        case "enum" | "literal_error":
            remedy = f"expected {context['expected']}"
        case kind if kind in _EXPECTED:
            # Each member of a union of plain types reports its own error; merge them into one problem.
            expected = " or ".join(_EXPECTED[error["type"]] for error in errors if error["type"] in _EXPECTED)
            remedy = f"expected {expected}, got {_FOUND[type(value)]}"
            if details["type"] == "int_type" and isinstance(value, float) and value.is_integer():
                remedy = f"expected {expected}; write {value:.0f}"
        case kind if kind in _BOUNDS:
            key, words = _BOUNDS[kind]
            remedy = f"must be {words} {context[key]}{_meaning(location, values)}"
    return Problem(field=field, value=value, remedy=remedy)


def _is_kind_alone(location: tuple[str | int, ...], values: object) -> bool:
    """Return whether the file has only a string (a kind) where a section is expected."""
    return isinstance(_value(location, values), str)


def _value(location: tuple[str | int, ...], values: object) -> object:
    """Return the file's value at a location; None if there is none."""
    node = values
    for part in location:
        node = _member(node, part)
    return node


def _member(node: object, part: str | int) -> object:
    """Return the value of a section or a list at ``part``; None if there is none."""
    if isinstance(node, Mapping):
        return node.get(part)
    return node[part] if isinstance(node, list) and isinstance(part, int) else None


def _dotted(location: tuple[str | int, ...]) -> str:
    return ".".join(str(part) for part in location)


def _kinds(location: tuple[str | int, ...], values: object) -> str:
    """Return the kinds that a section at a location can have, as text."""
    kinds = kinds_of(_candidates(location, values))
    key = next(part for part in reversed(location) if isinstance(part, str))
    kinds += installed_kinds(PLUGIN_GROUPS[key]) if key in PLUGIN_GROUPS else []
    return ", ".join(map(repr, kinds))


def kinds_of(sections: Sequence[type[BaseModel]]) -> list[str]:
    """Return the kinds of the section classes of a union."""
    return [kind for one in sections for kind in get_args(one.model_fields["kind"].annotation)]


def members(annotation: object) -> list[type[BaseModel]]:
    """Return the section classes that a field may hold, alone or as entries of a list or mapping."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    found = [member for part in get_args(annotation) for member in members(part)]
    # A section that is allowed both alone and in a list is found twice.
    return list(dict.fromkeys(found))


def _maps_names(annotation: object) -> bool:
    """Return whether a field maps user-defined names to sections, such as ``agents``."""
    if get_origin(annotation) is dict:
        return bool(members(annotation))
    return any(_maps_names(part) for part in get_args(annotation))


def _has_names(location: tuple[str | int, ...], values: object) -> bool:
    """Return whether the field at a location maps user-defined names to sections."""
    section, last = _section(location[:-1], values), location[-1]
    return last in section.model_fields and _maps_names(section.model_fields[str(last)].annotation)


def _candidates(location: tuple[str | int, ...], values: object) -> list[type[BaseModel]]:
    """Return the section classes that a location allows; first the one whose kind the file has."""
    candidates: list[type[BaseModel]] = [RunConfig]
    node = values
    is_name = False
    for part in location:
        if isinstance(part, str) and not is_name:
            annotation = candidates[0].model_fields[part].annotation
            candidates, is_name = members(annotation), _maps_names(annotation)
        else:
            is_name = False
        node = _member(node, part)
        # A section can be given by its kind alone.
        kind = node.get("kind") if isinstance(node, Mapping) else node
        group = PLUGIN_GROUPS.get(part) if isinstance(part, str) else None
        if group is not None and (installed := section_class(group, kind)) is not None:
            candidates = [installed, *candidates]
        elif len(candidates) > 1:
            candidates.sort(key=lambda member: kind not in get_args(member.model_fields["kind"].annotation))
    return candidates


def _section(location: tuple[str | int, ...], values: object) -> type[BaseModel]:
    """Return the section class at a location; of several kinds, the one that the file names."""
    return _candidates(location, values)[0]


def _unknown_key(location: tuple[str | int, ...], values: object) -> str:
    key, known = str(location[-1]), list(_section(location[:-1], values).model_fields)
    meant = [path for path in _paths(RunConfig) if path.rpartition(".")[2] == key]
    if not meant:
        meant = [_dotted((*location[:-1], near)) for near in difflib.get_close_matches(key, known, n=1)]
    question = f"; did you mean {' or '.join(meant)}?" if meant else "."
    return f"unknown key{question} Known keys here: {', '.join(known)}"


def _paths(section: type[BaseModel], at: str = "") -> Iterator[str]:
    """Yield the dotted path of every key of a section, without those in lists and in sections with kinds."""
    for name, field in section.model_fields.items():
        yield f"{at}{name}"
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _paths(field.annotation, f"{at}{name}.")


def _meaning(location: tuple[str | int, ...], values: object) -> str:
    """Return the docstring of a field in parentheses; for an entry of a list, the docstring of the list."""
    while isinstance(location[-1], int):
        location = location[:-1]
    description = _section(location[:-1], values).model_fields[str(location[-1])].description
    return f" ({' '.join(description.split())})" if description else ""


_BUILT_IN = {
    PluginGroup.ENVIRONMENTS: kinds_of(members(EnvironmentSection)),
    PluginGroup.REWARDS: kinds_of(members(RewardSection)),
    PluginGroup.SOURCES: kinds_of(members(SourceSection)),
    PluginGroup.TRANSPORTS: [*BUILT_IN_TRANSPORTS, "python"],
}
"""Built-in kinds of each plug-in group, which packages cannot replace."""

_PYTHON = {
    PluginGroup.ENVIRONMENTS: PythonCode,
    PluginGroup.REWARDS: PythonReward,
    PluginGroup.SOURCES: PythonSource,
    PluginGroup.TRANSPORTS: PythonCode,
}


def with_installed_kinds(values: object) -> object:
    """Convert sections whose kind names a package's code to ``kind: python``; returns the config's values.

    Raises:
        ConfigError: such a section has a key that is not allowed.
    """
    if not isinstance(values, Mapping):
        return values
    found = dict(values)
    if "environment" in found:
        found["environment"] = _read(PluginGroup.ENVIRONMENTS, "environment", found["environment"])
    for name in ("data", "evaluation"):
        if name in found:
            found[name] = _within(name, found[name])
    weights = found.get("weights")
    if isinstance(weights, Mapping) and isinstance(choice := weights.get("transport"), str | Mapping):
        section = {"kind": choice} if isinstance(choice, str) else choice
        read = _read(PluginGroup.TRANSPORTS, "weights.transport", section)
        if read is not section:
            found["weights"] = {**weights, "transport": read}
    return found


def _within(field: str, value: object) -> object:
    """Convert the reward and source sections within ``value``, which is at the dotted path ``field``."""
    if isinstance(value, list):
        return [_within(f"{field}.{index}", one) for index, one in enumerate(value)]
    if not isinstance(value, Mapping):
        return value
    found = {}
    for key, one in value.items():
        where = f"{field}.{key}"
        if (group := PLUGIN_GROUPS.get(key)) is None:
            found[key] = _within(where, one)
        elif isinstance(one, list):
            found[key] = [_read(group, f"{where}.{index}", each) for index, each in enumerate(one)]
        else:
            found[key] = _read(group, where, one)
    return found


def _read(group: PluginGroup, field: str, section: object) -> object:
    if not isinstance(section, Mapping) or section.get("kind") in _BUILT_IN[group]:
        return section
    return python_form(group, field, section, own_keys=_PYTHON[group].model_fields)


def check_installed(config: RunConfig) -> Iterator[Problem]:
    """Yield the problems that the sections of plug-ins find in the config.

    Also yields the problem of a run without held-out problems that does not serve people.
    """
    if isinstance(config.environment, InstalledEnvironment):
        yield from config.environment.check(config)
    for source in all_sources(config):
        if isinstance(source.source, InstalledSource):
            yield from source.source.check(config, source.field)
    if not config.evaluation.num_problems and not is_served(config):
        yield Problem(
            field="evaluation.num_problems",
            value=0,
            remedy="must be at least 1; only a run that serves people (data.source.kind = 'served') has "
            "no held-out problems",
        )
