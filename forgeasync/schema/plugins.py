"""Kinds that installed packages add to a section: entry points that stand for code of ``kind: python``.

A package declares them in its pyproject.toml:

    [project.entry-points."forgeasync.environments"]
    alfworld = "my_package.alfworld:AlfWorld"

Where that package is installed, a config can say ``environment: {kind: alfworld, max_turns: 30}``. It means
``{kind: python, factory: my_package.alfworld.AlfWorld, options: {max_turns: 30}}``, and the resolved config
of a run has this form.
"""

import functools
from collections.abc import Mapping
from enum import StrEnum
from importlib.metadata import entry_points
from typing import Any, get_args

from pydantic import BeforeValidator
from pydantic_core import PydanticCustomError

from forgeasync.schema.python_code import PythonCode
from forgeasync.schema.section import Section


class PluginGroup(StrEnum):
    """Groups of entry points, by what they add a kind of."""

    ENVIRONMENTS = "forgeasync.environments"
    REWARDS = "forgeasync.rewards"
    SOURCES = "forgeasync.sources"
    TRANSPORTS = "forgeasync.transports"


def with_installed_kinds(
    group: PluginGroup, python: type[PythonCode], *built_in: type[Section]
) -> BeforeValidator:
    """Annotate a union of sections: a kind that is not ``built_in`` is looked up among installed packages.

    ``python`` is the section of the union for code of one's own. Keys that it has keep their meaning; all
    others are options of the code.
    """
    kinds = {kind for section in built_in for kind in get_args(section.model_fields["kind"].annotation)}

    def read(value: object) -> object:
        if not isinstance(value, Mapping):
            return value
        kind = value.get("kind")
        if not isinstance(kind, str) or kind in kinds or kind == "python":
            return value
        return python_form(group, kind, value, own_keys=set(python.model_fields))

    return BeforeValidator(read)


def python_form(
    group: PluginGroup, kind: str, value: Mapping[str, Any], *, own_keys: set[str]
) -> Mapping[str, Any]:
    """Return a section of an installed kind as one of ``kind: python``.

    A section whose kind no package adds is returned as it is.
    """
    factory = installed_kinds(group).get(kind)
    if factory is None:
        return value
    if (taken := {"factory", "pickled", "options"} & value.keys()) != set():
        raise PydanticCustomError(
            "key_of_section",
            "must be left out: the kind {kind} is {factory}, and its options stand beside kind",
            {"key": min(taken), "kind": repr(kind), "factory": factory},
        )
    own = {key: one for key, one in value.items() if key in own_keys - {"kind"}}
    options = {key: one for key, one in value.items() if key not in own_keys}
    return {"kind": "python", "factory": factory, "options": options, **own}


@functools.cache
def installed_kinds(group: PluginGroup) -> dict[str, str]:
    """Return the factory of each kind that installed packages add to a group.

    Raises:
        PydanticCustomError: two packages add the same kind.
    """
    found: dict[str, str] = {}
    for point in entry_points(group=group):
        factory = point.value.replace(":", ".")
        if found.setdefault(point.name, factory) != factory:
            raise PydanticCustomError(
                "installed_twice",
                "two installed packages add the kind {kind} to {group}: {first} and {second}; uninstall one",
                {
                    "kind": repr(point.name),
                    "group": group.value,
                    "first": found[point.name],
                    "second": factory,
                },
            )
    return found
