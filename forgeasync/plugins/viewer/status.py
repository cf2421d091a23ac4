"""Status of a run: whether it is alive, its progress, and its bottleneck (docs/viewer.md)."""

import socket
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np

from forgeasync.observability import (
    KEYS,
    OTHER_KEYS,
    WINDOW_STEPS,
    MeasuredSteps,
    MeasuredWindow,
    RunLock,
    num_steps_ahead,
    verdict_lines,
    visible_line,
)
from forgeasync.plugins.viewer.metrics import ELAPSED_S
from forgeasync.plugins.viewer.run_reader import RunReader
from forgeasync.processes import is_running

NUM_RECENT_STEPS = 20
"""Number of newest steps whose mean time estimates the time left."""

CLOCK_SLACK_S = 2.0
"""Maximum difference between a process's start time by the kernel and by run.lock, in seconds."""

SHOWN = (
    "policy_version",
    "eval/accuracy",
    "reward/mean",
    "off_policy/age_mean",
    "off_policy/age_max",
    "time/step_s",
    "time/wait_for_batch_s",
    "load/trainer_wait_share",
    "throughput/train_tokens_per_s",
    "throughput/generated_tokens_per_s",
    "generator/num_healthy",
)
"""Metrics whose newest values are part of a run's status."""


class Life(StrEnum):
    """State of the process that is the run."""

    RUNNING = "running"
    ENDED = "ended"
    """It ended in order: after its last step, when told to stop, or with an error that it reported."""
    DIED = "died"
    """It ended without a report."""
    ELSEWHERE = "elsewhere"
    """It runs, or ran, on another machine, which cannot be checked from here."""
    UNKNOWN = "unknown"
    """There is no run.lock, or it cannot be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLife:
    """State of a run's process, with a description."""

    life: Life
    words: str


def run_life(lock: Path) -> RunLife:
    """Return the state of the process that a run.lock names."""
    try:
        holder = RunLock.holder(lock)
    except FileNotFoundError:
        return RunLife(life=Life.UNKNOWN, words="has no run.lock")
    except OSError as error:
        return RunLife(life=Life.UNKNOWN, words=f"run.lock cannot be read: {error.strerror}")
    if holder is None:
        return RunLife(
            life=Life.UNKNOWN, words="run.lock says nothing that this version of forgeasync can read"
        )
    if holder.has_ended:
        return RunLife(life=Life.ENDED, words=f"in order; was {holder}")
    if holder.host != socket.gethostname():
        return RunLife(life=Life.ELSEWHERE, words=f"is {holder}; that machine cannot be asked from here")
    # A process that began later than the run only has the same id.
    if is_running(holder.pid, by_s=holder.since_s + CLOCK_SLACK_S):
        return RunLife(life=Life.RUNNING, words=f"is {holder}")
    return RunLife(life=Life.DIED, words=f"was {holder}")


def status_of(run: RunReader, *, now_s: float | None = None) -> dict[str, object]:
    """Return a run's status as JSON types; ``now_s`` is the time in seconds since 1970."""
    now_s = time.time() if now_s is None else now_s
    life = run_life(run.run_dir.lock)
    max_steps = run.whole_setting("max_steps")
    step_s = _recent_step_s(run)
    num_left = None if max_steps is None else max(0, max_steps - run.metrics.step)
    goes_on = life.life in (Life.RUNNING, Life.ELSEWHERE)
    left_s = num_left * step_s if goes_on and num_left is not None and step_s is not None else None
    elapsed = run.metrics.newest(ELAPSED_S)
    faults = run.faults.faults
    return {
        "run": run.name,
        "folder": str(run.run_dir.path),
        "life": life.life.value,
        "life_words": life.words,
        "last_log_line": run.last_log_line(),
        "written_ago_s": _written_ago_s(run, now_s),
        "step": run.metrics.step,
        "max_steps": max_steps,
        "elapsed_s": None if elapsed is None else elapsed[1],
        "recent_step_s": step_s,
        "left_s": left_s,
        "metrics": newest_values(run, SHOWN),
        "groups": {fate.word: num for fate, num in run.groups.num_of_fate().items() if num},
        "verdict": verdict_lines(_measured(run)),
        "num_resumptions": run.groups.num_resumptions,
        "num_faults": len(faults),
        "num_open_faults": run.faults.num_open,
        "last_fault": None if not faults else f"{faults[-1].who} {faults[-1].what}",
        "problems": run.problems,
    }


def newest_values(run: RunReader, keys: Iterable[str]) -> dict[str, dict[str, float]]:
    """Return the newest value of each metric that the run has, with its step."""
    found = {key: run.metrics.newest(key) for key in keys}
    return {key: {"value": one[1], "step": one[0]} for key, one in found.items() if one is not None}


def _recent_step_s(run: RunReader) -> float | None:
    """Return the mean seconds between the newest steps, by the run's clock; None before there are two."""
    elapsed = run.metrics.column(ELAPSED_S)
    is_step_N = elapsed.steps_N > 0
    steps_N, times_N = elapsed.steps_N[is_step_N], elapsed.values_N[is_step_N]
    steps_N, times_N = steps_N[-NUM_RECENT_STEPS - 1 :], times_N[-NUM_RECENT_STEPS - 1 :]
    if len(steps_N) < 2 or steps_N[-1] <= steps_N[0]:
        return None
    return float(np.maximum(times_N[-1] - times_N[0], 0.0) / (steps_N[-1] - steps_N[0]))


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
        column = run.metrics.column(key)
        for step, value in zip(
            column.steps_N[-num_lines:].tolist(), column.values_N[-num_lines:].tolist(), strict=True
        ):
            lines.setdefault(step, {})[key] = value
    for _, line in sorted(lines.items()):
        # The evaluation before the first step has a line without the step's times.
        if line.keys() >= set(KEYS):
            window.add(line)
    return window.measured()


def _written_ago_s(run: RunReader, now_s: float) -> float | None:
    """Return the seconds since the run last wrote metrics or ledger."""
    times = []
    for file in (run.run_dir.metrics, run.run_dir.ledger):
        try:
            times.append(file.stat().st_mtime)
        except OSError:
            continue
    return round(max(0.0, now_s - max(times)), 3) if times else None


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
