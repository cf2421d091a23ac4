"""Reading and checking of config sections whose kinds installed packages add (docs/plugins.md)."""

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
