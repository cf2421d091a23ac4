"""Kinds that installed packages add to a section: entry points that stand for code of ``kind: python``.

A package declares them in its pyproject.toml:

    [project.entry-points."forgeasync.environments"]
    alfworld = "my_package.alfworld:AlfWorld"

Where that package is installed, a config can say ``environment: {kind: alfworld, max_turns: 30}``. It means
``{kind: python, factory: my_package.alfworld.AlfWorld, options: {max_turns: 30}}``, and the resolved config
of a run has this form.
"""

import functools
from collections.abc import Collection, Mapping
from enum import StrEnum
from importlib.metadata import entry_points
from typing import Any

from forgeasync.schema.sections import ConfigError, Problem


class PluginGroup(StrEnum):
    """Groups of entry points, by what they add a kind of."""

    ENVIRONMENTS = "forgeasync.environments"
    REWARDS = "forgeasync.rewards"
    SOURCES = "forgeasync.sources"
    TRANSPORTS = "forgeasync.transports"


def python_form(
    group: PluginGroup, field: str, section: Mapping[str, Any], *, own_keys: Collection[str]
) -> Mapping[str, Any]:
    """Return a section of an installed kind as one of ``kind: python``.

    A section whose kind no package adds is returned as it is. Keys in ``own_keys``, those of the section for
    code of one's own, keep their meaning; all others are options of the code.

    Raises:
        ConfigError: the section has options in the form of ``kind: python``; names ``field``.
    """
    kind = section.get("kind")
    factory = installed_kinds(group).get(kind) if isinstance(kind, str) else None
    if factory is None:
        return section
    for key in ("factory", "pickled", "options"):
        if key in section:
            remedy = f"must be left out: kind {kind!r} is {factory}, and its options stand beside kind"
            raise ConfigError([Problem(field=f"{field}.{key}", value=section[key], remedy=remedy)])
    own = {key: value for key, value in section.items() if key in own_keys and key != "kind"}
    options = {key: value for key, value in section.items() if key not in own_keys}
    return {"kind": "python", "factory": factory, "options": options, **own}


@functools.cache
def installed_kinds(group: PluginGroup) -> Mapping[str, str]:
    """Return the factory of each kind that installed packages add to a group.

    Raises:
        ConfigError: two packages add the same kind.
    """
    found: dict[str, str] = {}
    for point in entry_points(group=group):
        factory = point.value.replace(":", ".")
        if (first := found.setdefault(point.name, factory)) != factory:
            remedy = f"two installed packages add this kind: {first} and {factory}; uninstall one of them"
            raise ConfigError([Problem(field=group.value, value=point.name, remedy=remedy)])
    return found
