"""Converts pydantic's validation errors into problems with the dotted field, the value and a remedy."""

import difflib
from collections.abc import Mapping, Sequence
from typing import get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from forgeasync.config.run import RunConfig
from forgeasync.schema import PluginGroup, Problem, installed_kinds, section_class

PLUGIN_GROUPS = {
    "environment": PluginGroup.ENVIRONMENTS,
    "reward": PluginGroup.REWARDS,
    "source": PluginGroup.SOURCES,
}
"""Plug-in group by the key of a section; installed packages can add kinds of these sections."""

_EXPECTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
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
    field = _dotted(_shown_location(location, values)) or "config"
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
        case kind if kind in _SECTION_EXPECTED and _candidates(location, values):
            keys = ", ".join(_section(location, values).model_fields)
            if len(_candidates(location, values)) > 1:
                keys = f"kind (one of {_kinds(location, values)}) and those of its kind"
            remedy = f"expected a section with the keys {keys}"
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
        case kind if kind in _BOUNDS:
            key, words = _BOUNDS[kind]
            remedy = f"must be {words} {context[key]}{_meaning(location, values)}"
    return Problem(field=field, value=value, remedy=remedy)


def _shown_location(location: tuple[str | int, ...], values: object) -> tuple[str | int, ...]:
    """Return where a key belongs in the file: beside a section that is given by its kind alone."""
    return (*location[:-2], location[-1]) if _is_kind_alone(location[:-1], values) else location


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
        kind = node["kind"] if isinstance(node, Mapping) and "kind" in node else None
        group = PLUGIN_GROUPS.get(part) if isinstance(part, str) else None
        if group is not None and (installed := section_class(group, kind)) is not None:
            candidates = [installed, *candidates]
        elif len(candidates) > 1:
            candidates.sort(key=lambda member: kind not in get_args(member.model_fields["kind"].annotation))
    return candidates


def _section(location: tuple[str | int, ...], values: object) -> type[BaseModel]:
    """Return the section class at a location; of several kinds, the one that the file names."""
    candidates = _candidates(location, values)
    text = _value(location, values)
    if isinstance(text, str) and len(candidates) > 1:
        # The section is given by its kind alone.
        candidates.sort(key=lambda member: text not in get_args(member.model_fields["kind"].annotation))
    return candidates[0]


def _unknown_key(location: tuple[str | int, ...], values: object) -> str:
    known = list(_section(location[:-1], values).model_fields)
    nearest = difflib.get_close_matches(str(location[-1]), known, n=1, cutoff=0.0)[0]
    suggestion = _dotted((*location[:-1], nearest))
    return f"unknown key; did you mean {suggestion}? Known keys here: {', '.join(known)}"


def _meaning(location: tuple[str | int, ...], values: object) -> str:
    """Return the docstring of a field in parentheses; for an entry of a list, the docstring of the list."""
    while isinstance(location[-1], int):
        location = location[:-1]
    description = _section(location[:-1], values).model_fields[str(location[-1])].description
    return f" ({' '.join(description.split())})" if description else ""
