"""Kinds that installed packages add to a config, found by their entry points (docs/plugins.md).

A package declares a kind in its pyproject.toml, in one of two forms. The first names code:

    [project.entry-points."forgeasync.environments"]
    alfworld = "my_package.alfworld:AlfWorld"

Where that package is installed, a config can say ``environment: {kind: alfworld, max_turns: 30}``. It means
``{kind: python, factory: my_package.alfworld.AlfWorld, options: {max_turns: 30}}``, and the resolved config
of a run has this form.

The second names a class of sections, whose fields are the keys of the section:

    [project.entry-points."forgeasync.environment_sections"]
    coding = "forgeasync.plugins.coding.section:CodingAgent"
"""

import functools
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum
from importlib.metadata import EntryPoint, entry_points
from typing import Any, get_args

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from forgeasync.schema.sections import ConfigError, Problem, Section


class PluginGroup(StrEnum):
    """Groups of entry points, by what they add a kind of."""

    ENVIRONMENTS = "forgeasync.environments"
    REWARDS = "forgeasync.rewards"
    SOURCES = "forgeasync.sources"
    TRANSPORTS = "forgeasync.transports"


_SECTIONS = {
    PluginGroup.ENVIRONMENTS: "forgeasync.environment_sections",
    PluginGroup.SOURCES: "forgeasync.source_sections",
}
"""Groups of entry points that name classes of sections."""


class PluginSection(Section):
    """Base of the sections that installed packages add as classes."""

    kind: str


def python_form(
    group: PluginGroup, field: str, section: Mapping[str, Any], *, own_keys: Collection[str]
) -> Mapping[str, Any]:
    """Return a section whose kind stands for code as one of ``kind: python``.

    Every other section is returned as it is. Keys in ``own_keys``, those of the section for code of one's
    own, keep their meaning; all others are options of the code.

    Raises:
        ConfigError: the section has options in the form of ``kind: python``; names ``field``. Or the class of
            its kind cannot be loaded.
    """
    kind = section.get("kind")
    point = installed_kinds(group).get(kind) if isinstance(kind, str) else None
    if point is None or point.group != group:
        # One whose class cannot be loaded is refused here, before pydantic reads the config.
        section_class(group, kind)
        return section
    factory = point.value.replace(":", ".")
    for key in ("factory", "pickled", "options"):
        if key in section:
            remedy = f"must be left out: kind {kind!r} is {factory}, and its options stand beside kind"
            raise ConfigError([Problem(field=f"{field}.{key}", value=section[key], remedy=remedy)])
    own = {key: value for key, value in section.items() if key in own_keys and key != "kind"}
    options = {key: value for key, value in section.items() if key not in own_keys}
    return {"kind": "python", "factory": factory, "options": options, **own}


def section_class(group: PluginGroup, kind: object) -> type[PluginSection] | None:
    """Return the class of the sections of an installed kind; None for all other kinds.

    Imports the package that adds the kind.

    Raises:
        ConfigError: the package cannot be imported, or the entry point names no class of sections.
    """
    point = installed_kinds(group).get(kind) if isinstance(kind, str) else None
    if point is None or point.group == group:
        return None
    try:
        found = point.load()
        problem = "is no class derived from a section of forgeasync that packages may add"
    except Exception as error:
        # Whatever the package raises while it is imported is for the user to see.
        found, problem = None, f"cannot be imported ({type(error).__name__}: {error})"
    if not isinstance(found, type) or not issubclass(found, PluginSection):
        raise ConfigError([Problem(field=point.group, value=kind, remedy=f"{point.value} {problem}")])
    return found


@functools.cache
def installed_kinds(group: PluginGroup) -> Mapping[str, EntryPoint]:
    """Return the entry point of each kind that installed packages add to a group, in either form.

    Raises:
        ConfigError: two packages add the same kind.
    """
    found: dict[str, EntryPoint] = {}
    for name in (group.value, _SECTIONS.get(group, "")):
        for point in entry_points(group=name):
            if (first := found.setdefault(point.name, point)).value != point.value:
                values = " and ".join(one.value.replace(":", ".") for one in (first, point))
                remedy = f"two installed packages add this kind: {values}; uninstall one of them"
                raise ConfigError([Problem(field=group.value, value=point.name, remedy=remedy)])
    return found


_INSTALLED = "(installed)"
"""Stands in pydantic's locations for the kind of an installed section."""


@dataclass(frozen=True, slots=True)
class OrInstalled:
    """Annotation of a union of sections that packages can add to.

    The union has the built-in sections, told apart by ``kind``, and the base class of what packages add.
    """

    group: PluginGroup

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Return the schema by which pydantic reads and writes such a section."""
        built_in = [one for one in get_args(source) if not issubclass(one, PluginSection)]
        choices = {
            kind: handler.generate_schema(one)
            for one in built_in
            for kind in get_args(one.model_fields["kind"].annotation)
        }
        first = next(iter(choices))

        def tag(value: Any) -> str | None:
            if not isinstance(value, Mapping | Section):
                # Its schema says what is expected instead.
                return first
            kind = value.get("kind") if isinstance(value, Mapping) else getattr(value, "kind", None)
            if kind is None or str(kind) in choices or section_class(self.group, kind) is None:
                return None if kind is None else str(kind)
            return _INSTALLED

        return core_schema.tagged_union_schema(
            {**choices, _INSTALLED: core_schema.no_info_plain_validator_function(self._read)},
            tag,
            # By the class of the section at hand.
            serialization=core_schema.simple_ser_schema("any"),
        )

    def _read(self, value: Any) -> PluginSection:
        if isinstance(value, PluginSection):
            return value
        found = section_class(self.group, value["kind"])
        assert found is not None, "what tag has found"
        # Sections are read from JSON, see load_config.
        return found.model_validate_json(json.dumps(value), strict=True)
