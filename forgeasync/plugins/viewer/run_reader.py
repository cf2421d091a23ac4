"""Reads the contents of one run folder while the run writes it; writes nothing."""

import contextlib
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from forgeasync.observability import RunDir
from forgeasync.plugins.viewer.appended_lines import FollowedFile
from forgeasync.plugins.viewer.groups import GroupLives
from forgeasync.plugins.viewer.metrics import MetricTable, meaning_of
from forgeasync.plugins.viewer.processes import FaultLines, Traces
from forgeasync.plugins.viewer.rollouts import RolloutIndex, TokenIndex

DEMO_RUN = Path(__file__).parent / "demo"
"""Folder of a small recorded run whose generator was killed."""

MAX_SHOWN_KEYS = 5
MAX_DIGITS = 18
MAX_CONFIG_BYTES = 1 << 20

_LAST_LOG_BYTES = 4096

# Both loaders ignore Python tags, so no object is created from a file.
_YAML_LOADER = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader


class NoRun(ValueError):
    """A folder is not the folder of a run; the text has the reason."""


class RunReader:
    """One run. Not thread-safe: use a lock."""

    def __init__(self, path: Path, *, with_rollouts: bool = True, with_traces: bool = True) -> None:
        """Keeps no file open. Without ``with_rollouts``, neither rollouts nor tokens are read; without
        ``with_traces``, no traces.

        Raises:
            NoRun: there is no such folder, or it has none of a run's files.
        """
        self.run_dir = run_dir = RunDir(path=path)
        if not path.is_dir():
            raise NoRun(f"{path} is no folder; must be the folder of a run")
        files = (run_dir.metrics, run_dir.ledger, run_dir.config)
        if not any(file.is_file() for file in files):
            names = ", ".join(file.name for file in files)
            raise NoRun(f"{path} has none of {names}; must be the folder of a run")
        self.name = path.resolve().name
        self.traces = Traces(run_dir.logs)
        self._metrics = FollowedFile(run_dir.metrics, MetricTable)
        self._faults = FollowedFile(run_dir.faults, FaultLines)
        self._groups = FollowedFile(run_dir.ledger, partial(GroupLives, run_dir.ledger))
        self._rollouts = FollowedFile(run_dir.rollouts, partial(RolloutIndex, run_dir.rollouts))
        self._tokens = FollowedFile(run_dir.tokens, partial(TokenIndex, run_dir.tokens))
        rollouts, tokens = ([self._rollouts], [self._tokens]) if with_rollouts else ([], [])
        early: list[FollowedFile[Any]] = [self._metrics, self._faults, self._groups, *rollouts]
        self._files: list[FollowedFile[Any]] = [*early, *tokens]
        traces = [self.traces] if with_traces else []
        # The page can show each of these before the next one was read.
        self._in_order: list[FollowedFile[Any] | Traces] = [*early, *traces, *tokens]
        self._settings: dict[str, str] = {}
        self._settings_problem: str | None = None
        self._settings_time: float | None = None

    def read_some(self) -> bool:
        """Read a piece of the first file that has anything new; return whether one had."""
        self._read_settings()
        return any(each.read_some() for each in self._in_order)

    def read_all(self) -> None:
        """Read everything that is available."""
        while self.read_some():
            pass

    def _read_settings(self) -> None:
        with contextlib.suppress(OSError):
            time_s = self.run_dir.config.stat().st_mtime
            if time_s == self._settings_time:
                return
            self._settings_time = time_s
        self._settings, self._settings_problem = _settings_of(self.run_dir.config)

    @property
    def metrics(self) -> MetricTable:
        return self._metrics.contents

    @property
    def faults(self) -> FaultLines:
        return self._faults.contents

    @property
    def groups(self) -> GroupLives:
        return self._groups.contents

    @property
    def rollouts(self) -> RolloutIndex:
        return self._rollouts.contents

    @property
    def tokens(self) -> TokenIndex:
        return self._tokens.contents

    @property
    def settings(self) -> Mapping[str, str]:
        """The config's values as text, by dotted key; empty if the config cannot be read."""
        return self._settings

    def whole_setting(self, key: str) -> int | None:
        """Return an integer value of the config; None if the key has no such value."""
        text = self._settings.get(key, "")
        return int(text) if text.isascii() and text.isdecimal() and len(text) < MAX_DIGITS else None

    @property
    def progress(self) -> list[dict[str, object]]:
        """Number of bytes of each file that were read, and that were not."""
        return [
            {"file": lines.path.name, "read": lines.position, "unread": lines.num_unread_bytes}
            for lines in (file.lines for file in self._files)
        ]

    @property
    def problems(self) -> list[str]:
        """Messages about parts of the folder that could not be read or were skipped."""
        found = [file.lines.problem for file in self._files if file.lines.problem is not None]
        found += self.traces.problems
        if self._settings_problem is not None:
            found.append(self._settings_problem)
        found += self.groups.problems
        damaged: list[FollowedFile[Any]] = [self._metrics, self._faults, self._rollouts, self._tokens]
        for file in damaged:
            if num := file.contents.num_damaged:
                found.append(f"{file.lines.path.name}: {num} damaged lines were left out")
        for file in self._files:
            if num := file.num_overlong:
                found.append(f"{file.lines.path.name}: {num} lines were too long to be read")
        if keys := [key for key in self.metrics.keys if meaning_of(key) is None]:
            more = "" if len(keys) <= MAX_SHOWN_KEYS else f" and {len(keys) - MAX_SHOWN_KEYS} more"
            named = ", ".join(keys[:MAX_SHOWN_KEYS])
            found.append(f"metrics that this version of forgeasync does not define: {named}{more}")
        return found

    def last_log_line(self) -> str | None:
        """Return the last line of run.log, which describes how a run ended; None if there is none."""
        try:
            with self.run_dir.run_log.open("rb") as file:
                size = file.seek(0, 2)
                file.seek(max(0, size - _LAST_LOG_BYTES))
                lines = file.read().decode("utf-8", "replace").splitlines()
        except OSError:
            return None
        return lines[-1] if lines else None


def _settings_of(file: Path) -> tuple[dict[str, str], str | None]:
    """Return a config's values as text by dotted key, in the order of the file, and an error or None.

    The config is read as plain YAML, so that the config of another version of forgeasync is shown too.
    """
    try:
        if file.stat().st_size > MAX_CONFIG_BYTES:
            return {}, f"{file.name} has more than {MAX_CONFIG_BYTES} bytes, and is not shown"
        found = yaml.load(file.read_text(encoding="utf-8"), Loader=_YAML_LOADER)
    except OSError as error:
        return {}, f"{file.name} cannot be read: {error.strerror}"
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        return {}, f"{file.name} is no YAML ({type(error).__name__})"
    if not isinstance(found, dict):
        return {}, f"{file.name} holds no keys"
    settings: dict[str, str] = {}
    _flatten(found, "", settings)
    return settings, None


def _flatten(value: object, key: str, into: dict[str, str]) -> None:
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            _flatten(inner, f"{key}.{name}" if key else str(name), into)
    else:
        into[key] = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
