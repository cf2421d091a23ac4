"""Kinds that installed packages add: how their sections are read and checked (docs/plugins.md)."""

from collections.abc import Iterator, Mapping

from forgeasync.config.data import PythonSource, SourceSection
from forgeasync.config.environments import EnvironmentSection
from forgeasync.config.explain import PLUGIN_GROUPS, kinds_of, members
from forgeasync.config.plugin_sections import InstalledEnvironment, InstalledSource
from forgeasync.config.rewards import PythonReward, RewardSection
from forgeasync.config.run import RunConfig, all_sources, is_served
from forgeasync.config.weights import BUILT_IN_TRANSPORTS
from forgeasync.schema import PluginGroup, Problem, PythonCode, python_form

_BUILT_IN = {
    PluginGroup.ENVIRONMENTS: kinds_of(members(EnvironmentSection)),
    PluginGroup.REWARDS: kinds_of(members(RewardSection)),
    PluginGroup.SOURCES: kinds_of(members(SourceSection)),
    PluginGroup.TRANSPORTS: [*BUILT_IN_TRANSPORTS, "python"],
}
"""Kinds that no package can replace."""

_PYTHON = {
    PluginGroup.ENVIRONMENTS: PythonCode,
    PluginGroup.REWARDS: PythonReward,
    PluginGroup.SOURCES: PythonSource,
    PluginGroup.TRANSPORTS: PythonCode,
}


def with_installed_kinds(values: object) -> object:
    """Return a config's values with each section whose kind stands for code as one of ``kind: python``.

    Raises:
        ConfigError: such a section has a key that it must not have.
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
    """Read the sections of rewards and sources within a section or a list of them."""
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
    """Have the sections of plug-ins check themselves against the rest of the config."""
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
