"""How a run is doing, for programs and for the first line of the page (docs/viewer.md)."""

import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from forgeasync.observability import visible_line
from forgeasync.viewer.metric_table import ELAPSED_S
from forgeasync.viewer.run_life import Life, run_life
from forgeasync.viewer.run_reader import RunReader
from forgeasync.viewer.run_verdict import verdict_of

NUM_RECENT_STEPS = 20
"""Steps whose times the estimate of the time that is left comes from."""

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


def status_of(run: RunReader, *, now_s: float | None = None) -> dict[str, object]:
    """Return a run's status as JSON's types. ``now_s`` is the time, as ``time.time`` says it."""
    now_s = time.time() if now_s is None else now_s
    life = run_life(run.run_dir.lock)
    max_steps = run.whole_setting("max_steps")
    step_s = recent_step_s(run)
    num_left = None if max_steps is None else max(0, max_steps - run.metrics.step)
    goes_on = life.life in (Life.RUNNING, Life.ELSEWHERE)
    left_s = num_left * step_s if goes_on and num_left is not None and step_s is not None else None
    faults = run.faults.faults
    lives = run.ledger.lives
    return {
        "run": run.name,
        "folder": str(run.run_dir.path),
        "life": life.life.value,
        "life_words": life.words,
        "last_log_line": run.last_log_line(),
        "written_ago_s": _written_ago_s(run, now_s),
        "step": run.metrics.step,
        "max_steps": max_steps,
        "elapsed_s": run.metrics.last.get(ELAPSED_S),
        "recent_step_s": step_s,
        "left_s": left_s,
        "metrics": {
            key: {"value": newest[1], "step": newest[0]}
            for key in SHOWN
            if (newest := run.metrics.newest(key)) is not None
        },
        "groups": {fate.word: num for fate, num in lives.num_of_fate().items() if num},
        "verdict": verdict_of(run),
        "num_resumptions": lives.num_resumptions,
        "num_faults": len(faults),
        "num_open_faults": run.faults.num_open,
        "last_fault": None if not faults else f"{faults[-1].who} {faults[-1].what}",
        "problems": run.problems,
    }


def recent_step_s(run: RunReader) -> float | None:
    """Return the mean seconds between the newest steps, by the run's clock; None before there are two."""
    elapsed = run.metrics.column(ELAPSED_S)
    is_step_N = elapsed.steps_N > 0
    steps_N, times_N = elapsed.steps_N[is_step_N], elapsed.values_N[is_step_N]
    steps_N, times_N = steps_N[-NUM_RECENT_STEPS - 1 :], times_N[-NUM_RECENT_STEPS - 1 :]
    if len(steps_N) < 2 or steps_N[-1] <= steps_N[0]:
        return None
    return float(np.maximum(times_N[-1] - times_N[0], 0.0) / (steps_N[-1] - steps_N[0]))


def _written_ago_s(run: RunReader, now_s: float) -> float | None:
    """Seconds since the run last wrote a line that is shown here."""
    times = []
    for file in (run.run_dir.metrics, run.run_dir.ledger):
        try:
            times.append(file.stat().st_mtime)
        except OSError:
            continue
    return round(max(0.0, now_s - max(times)), 3) if times else None


def status_lines(status: Mapping[str, Any]) -> list[str]:
    """Return a status in words; what a run's files say in their words is made visible."""
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
