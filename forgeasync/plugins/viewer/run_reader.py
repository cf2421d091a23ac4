"""Reads one run folder while the run writes it: its contents, metrics and status; writes nothing."""

import contextlib
import socket
import sys
import time
from array import array
from collections.abc import Mapping
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any, TypeGuard

import msgspec
import numpy as np
import yaml

from forgeasync.observability import (
    KEYS,
    OTHER_KEYS,
    WINDOW_STEPS,
    MeasuredSteps,
    MeasuredWindow,
    RunDir,
    RunLock,
    num_steps_ahead,
    verdict_lines,
    visible_line,
)
from forgeasync.plugins.viewer.followed_file import FollowedFile
from forgeasync.plugins.viewer.groups import GroupHistories
from forgeasync.plugins.viewer.processes import FaultLines, Traces
from forgeasync.plugins.viewer.rollouts import RolloutIndex, TokenIndex
from forgeasync.processes import is_running

STEP = "step"
ELAPSED_S = "time/elapsed_s"

MAIN_METRICS = (
    *("policy_version", "eval/accuracy", "reward/mean", "response/length_mean"),
    *("off_policy/age_mean", "off_policy/age_max", "mismatch/logprob_abs_mean", "grad_norm"),
    *("time/step_s", "time/wait_for_batch_s", "load/trainer_wait_share"),
    *("throughput/train_tokens_per_s", "throughput/generated_tokens_per_s", "generator/num_healthy"),
)
"""Metrics whose newest values are part of a run's status, and which are the counters of a trace file."""


class MetricTable:
    """All lines of metrics.jsonl so far; uses 16 bytes per value."""

    def __init__(self) -> None:
        self.num_lines = 0
        self.num_damaged = 0
        """Number of lines that are not a JSON object with a step."""
        self._steps: dict[str, array[int]] = {}
        self._values: dict[str, array[float]] = {}

    def add(self, line: bytes, offset: int) -> None:
        """Add the next line; damaged lines are counted and skipped."""
        try:
            record = msgspec.json.decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            record = None
        step = record.get(STEP) if isinstance(record, dict) else None
        if not isinstance(record, dict) or not _is_count(step):
            self.num_damaged += 1
            return
        self.num_lines += 1
        for key, value in record.items():
            # null represents a value that was not finite; the run has counted it.
            if isinstance(value, float) or (isinstance(value, int) and not isinstance(value, bool)):
                if key not in self._steps:
                    self._steps[key], self._values[key] = array("q"), array("d")
                self._steps[key].append(step)
                self._values[key].append(value)

    @property
    def keys(self) -> list[str]:
        """Names of all metrics so far, in the order of their first appearance."""
        return list(self._steps)

    @property
    def step(self) -> int:
        """Step of the last line; 0 before the first step."""
        newest = self.newest(STEP)
        return 0 if newest is None else newest[0]

    def by_step(self, key: str) -> dict[int, float]:
        """Return the values of a key by step; the newest one, if a step has several."""
        return dict(zip(self._steps.get(key, ()), self._values.get(key, ()), strict=True))

    def tail(self, key: str, num_lines: int) -> list[tuple[int, float]]:
        """Return the step and the value of the last lines that have a key, oldest first."""
        steps, values = self._steps.get(key, ()), self._values.get(key, ())
        return list(zip(steps[-num_lines:], values[-num_lines:], strict=True))

    def newest(self, key: str) -> tuple[int, float] | None:
        """Return the step and the value of the last line that has a key."""
        return next(iter(self.tail(key, 1)), None)


def _is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62


class RunClock:
    """Maps lines of the ledger, which has no times, to seconds on the run's clock (``time/elapsed_s``).

    The line of a trained step has the step's time. Lines between two steps are assumed to be evenly spaced,
    so their times are accurate to one step.
    """

    def __init__(self, groups: GroupHistories, metrics: MetricTable) -> None:
        elapsed = metrics.by_step(ELAPSED_S)
        known = sorted((line, elapsed[step]) for step, line in groups.line_of_step.items() if step in elapsed)
        self._lines = np.array([1.0, *(line for line, _ in known)])
        self._times = np.maximum.accumulate([0.0, *(at_s for _, at_s in known)])
        self._begins_late = groups.first_step > 0

    def about_s(self, line: int | None) -> float | None:
        """Return the approximate time of a line; None if there are no steps on both sides of it."""
        if line is None or not self._lines[0] <= line <= self._lines[-1] or len(self._lines) < 2:
            return None
        if self._begins_late and line < self._lines[1]:
            return None
        return float(np.interp(line, self._lines, self._times))


DEMO_RUN = Path(__file__).parent / "demo"
"""Folder of a small recorded run whose generator was killed."""

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
            raise NoRun(f"{path} is not a folder; must be the folder of a run")
        files = (run_dir.metrics, run_dir.ledger, run_dir.config)
        if not any(file.is_file() for file in files):
            names = ", ".join(file.name for file in files)
            raise NoRun(f"{path} has none of {names}; must be the folder of a run")
        self.name = path.resolve().name
        self.traces = Traces(run_dir.logs)
        self._metrics = FollowedFile(run_dir.metrics, MetricTable)
        self._faults = FollowedFile(run_dir.faults, FaultLines)
        self._groups = FollowedFile(run_dir.ledger, partial(GroupHistories, run_dir.ledger))
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
        """Contents of metrics.jsonl."""
        return self._metrics.contents

    @property
    def faults(self) -> FaultLines:
        """Contents of faults.jsonl."""
        return self._faults.contents

    @property
    def groups(self) -> GroupHistories:
        """History of every group, from ledger.jsonl."""
        return self._groups.contents

    @property
    def rollouts(self) -> RolloutIndex:
        """Index of rollouts.jsonl."""
        return self._rollouts.contents

    @property
    def tokens(self) -> TokenIndex:
        """Index of tokens.jsonl."""
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
            {"file": file.path.name, "read": file.position, "unread": file.num_unread_bytes}
            for file in self._files
        ]

    @property
    def problems(self) -> list[str]:
        """Messages about parts of the folder that could not be read or were skipped."""
        found = [file.problem for file in self._files if file.problem is not None]
        found += self.traces.problems
        if self._settings_problem is not None:
            found.append(self._settings_problem)
        found += self.groups.problems
        damaged: list[FollowedFile[Any]] = [self._metrics, self._faults, self._rollouts, self._tokens]
        for file in damaged:
            if num := file.contents.num_damaged:
                found.append(f"{file.path.name}: {num} damaged lines were left out")
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
        return {}, f"{file.name} is not YAML ({type(error).__name__})"
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


NUM_RECENT_STEPS = 20
"""Number of newest steps whose mean time estimates the time left."""

CLOCK_SLACK_S = 2.0
"""Maximum difference between a process's start time by the kernel and by run.lock, in seconds."""


class Life(StrEnum):
    """State of the process that is the run."""

    RUNNING = "running"
    ENDED = "ended"
    """It ended in order: after its last step, when it was stopped, or with an error that it reported."""
    DIED = "died"
    """It ended without a report."""
    ELSEWHERE = "elsewhere"
    """It runs, or ran, on another machine, which cannot be checked from here."""
    UNKNOWN = "unknown"
    """There is no run.lock, or it cannot be read."""


def run_life(lock: Path) -> tuple[Life, str]:
    """Return the state of the process that a run.lock names, and a description."""
    try:
        holder = RunLock.holder(lock)
    except FileNotFoundError:
        return Life.UNKNOWN, "has no run.lock"
    except OSError as error:
        return Life.UNKNOWN, f"run.lock cannot be read: {error.strerror}"
    if holder is None:
        return Life.UNKNOWN, "run.lock says nothing that this version of forgeasync can read"
    if holder.has_ended:
        return Life.ENDED, f"in order; was {holder}"
    if holder.host != socket.gethostname():
        return Life.ELSEWHERE, f"is {holder}; that machine cannot be checked from here"
    # A process that began later than the run only has the same id.
    if is_running(holder.pid, by_s=holder.since_s + CLOCK_SLACK_S):
        return Life.RUNNING, f"is {holder}"
    return Life.DIED, f"was {holder}"


def status_of(run: RunReader) -> dict[str, object]:
    """Return a run's status as JSON types."""
    life, words = run_life(run.run_dir.lock)
    max_steps = run.whole_setting("max_steps")
    step_s = _recent_step_s(run)
    num_left = None if max_steps is None else max(0, max_steps - run.metrics.step)
    goes_on = life in (Life.RUNNING, Life.ELSEWHERE)
    left_s = num_left * step_s if goes_on and num_left is not None and step_s is not None else None
    elapsed = run.metrics.newest(ELAPSED_S)
    faults = run.faults.faults
    newest = {key: found for key in MAIN_METRICS if (found := run.metrics.newest(key)) is not None}
    return {
        "run": run.name,
        "folder": str(run.run_dir.path),
        "life": life,
        "life_words": words,
        "last_log_line": run.last_log_line(),
        "written_ago_s": _written_ago_s(run),
        "step": run.metrics.step,
        "max_steps": max_steps,
        "elapsed_s": None if elapsed is None else elapsed[1],
        "recent_step_s": step_s,
        "left_s": left_s,
        "metrics": {key: {"value": value, "step": step} for key, (step, value) in newest.items()},
        "groups": {fate: num for fate, num in run.groups.num_of_fate().items() if num},
        "verdict": verdict_lines(_measured(run)),
        "num_resumptions": run.groups.num_resumptions,
        "num_faults": len(faults),
        "num_open_faults": run.faults.num_open,
        "last_fault": None if not faults else f"{faults[-1].who} {faults[-1].what}",
        "problems": run.problems,
    }


def _recent_step_s(run: RunReader) -> float | None:
    """Return the mean seconds between the newest steps, by the run's clock; None before there are two."""
    recent = [one for one in run.metrics.tail(ELAPSED_S, NUM_RECENT_STEPS + 1) if one[0] > 0]
    if not recent or recent[-1][0] <= recent[0][0]:
        return None
    (first, begin_s), (last, end_s) = recent[0], recent[-1]
    return max(end_s - begin_s, 0.0) / (last - first)


def _measured(run: RunReader) -> MeasuredSteps | None:
    """Return the means over the newest steps; None if there are too few.

    If the config cannot be read, no steps are left out at the end.
    """
    num_ahead = num_steps_ahead(
        max_off_policy_steps=run.whole_setting("max_off_policy_steps") or 0,
        max_groups=run.whole_setting("buffer.max_groups"),
        groups_per_step=run.whole_setting("algorithm.groups_per_step") or 1,
    )
    max_steps = run.whole_setting("max_steps") or sys.maxsize
    window = MeasuredWindow.of_run(max_steps, num_steps_ahead=num_ahead)
    num_lines = WINDOW_STEPS + window.num_left_out + num_ahead + 1
    lines: dict[int, dict[str, float]] = {}
    for key in (*KEYS, *OTHER_KEYS):
        for step, value in run.metrics.tail(key, num_lines):
            lines.setdefault(step, {})[key] = value
    for _, line in sorted(lines.items()):
        # The evaluation before the first step has a line without the step's times.
        if line.keys() >= set(KEYS):
            window.add(line)
    return window.measured()


def _written_ago_s(run: RunReader) -> float | None:
    """Return the seconds since the run last wrote metrics or ledger."""
    times = []
    for file in (run.run_dir.metrics, run.run_dir.ledger):
        try:
            times.append(file.stat().st_mtime)
        except OSError:
            continue
    return round(max(0.0, time.time() - max(times)), 3) if times else None


def status_lines(status: Mapping[str, Any]) -> list[str]:
    """Return a status as lines of text; control characters in texts of the run's files are escaped."""
    steps = f"step {status['step']}" + ("" if status["max_steps"] is None else f" of {status['max_steps']}")
    left_s = status["left_s"]
    lines = [f"{status['run']}: {status['life']} ({status['life_words']})", f"  {steps}"]
    if status["written_ago_s"] is not None:
        lines[-1] += f", last written {_duration(status['written_ago_s'])} ago"
    if left_s is not None:
        lines[-1] += f", about {_duration(left_s)} left"
    for key, newest in status["metrics"].items():
        lines.append(f"  {key:<36}{newest['value']:>12.6g}   at step {newest['step']}")
    lines += [f"  {line}" for line in status["verdict"]]
    groups = ", ".join(f"{num} {fate}" for fate, num in status["groups"].items())
    lines.append(f"  groups: {groups or 'none'}")
    lines.append(f"  faults: {status['num_faults']}, {status['num_open_faults']} of them not recovered from")
    if status["last_log_line"] is not None:
        lines.append(f"  last of run.log: {status['last_log_line']}")
    lines += [f"  note: {problem}" for problem in status["problems"]]
    return [visible_line(line) for line in lines]


def _duration(seconds: float) -> str:
    for unit, length in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.0f} s"
