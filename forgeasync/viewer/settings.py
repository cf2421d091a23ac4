"""The configs of runs as they were written, and in what they differ.

A config is read as plain YAML: that of another version of forgeasync is shown like any other.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

NOT_ABOUT_THE_METHOD = frozenset({"seed", "name", "run_dir"})
"""Runs that differ in these alone are seeds of one experiment."""

MISSING = "(not there)"


MAX_BYTES = 1 << 20

# Neither knows tags of Python: no object is made of a file.
_LOADER = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader


class ConfigUnreadable(ValueError):
    """A config.yaml that cannot be shown; the text says why."""


def read_settings(file: Path) -> dict[str, str]:
    """Return a config's values as text by their dotted keys, in the order of the file.

    Raises:
        ConfigUnreadable: it is not there, or no mapping in YAML.
    """
    try:
        if file.stat().st_size > MAX_BYTES:
            raise ConfigUnreadable(f"{file.name} has more than {MAX_BYTES} bytes, and is not shown")
        found = yaml.load(file.read_text(encoding="utf-8"), Loader=_LOADER)
    except OSError as error:
        raise ConfigUnreadable(f"{file.name} cannot be read: {error.strerror}") from None
    except ConfigUnreadable:
        raise
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise ConfigUnreadable(f"{file.name} is no YAML ({type(error).__name__})") from None
    if not isinstance(found, dict):
        raise ConfigUnreadable(f"{file.name} holds no keys")
    settings: dict[str, str] = {}
    _flatten(found, "", settings)
    return settings


def differing(runs: Sequence[Mapping[str, str]]) -> dict[str, tuple[str, ...]]:
    """Keys whose values are not the same in all runs, each with the value of every run."""
    keys = dict.fromkeys(key for run in runs for key in run)
    rows = {key: tuple(run.get(key, MISSING) for run in runs) for key in keys}
    return {key: values for key, values in rows.items() if len(set(values)) > 1}


def seed_groups(runs: Sequence[Mapping[str, str]]) -> list[tuple[int, ...]]:
    """Put the numbers of runs together that differ in nothing but their seeds, names and folders.

    A run without a config that can be read, which has no settings, is on its own.
    """
    groups: dict[object, list[int]] = {}
    for number, run in enumerate(runs):
        method = frozenset((key, value) for key, value in run.items() if key not in NOT_ABOUT_THE_METHOD)
        groups.setdefault(method if run else number, []).append(number)
    return [tuple(group) for group in groups.values()]


def _flatten(value: object, key: str, into: dict[str, str]) -> None:
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            _flatten(inner, f"{key}.{name}" if key else str(name), into)
    else:
        into[key] = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
