"""The share of a run's time in which it did effective work, and how much of it each fault has cost."""

import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from chaos_faults import Injected


def step_median_s(steps: Sequence[Mapping[str, Any]]) -> float:
    """Return the median time of a step without the evaluation that it waits for, in seconds."""
    return statistics.median(
        line["time/step_s"] - line.get("time/eval_s", 0.0) for line in steps if line["step"]
    )


def evaluation_s(steps: Sequence[Mapping[str, Any]]) -> float:
    """Return the time for which steps have waited for evaluations, in seconds."""
    return sum(line.get("time/eval_s", 0.0) for line in steps if line["step"])


def effective_share(steps: Sequence[Mapping[str, Any]], wall_s: float, *, undisturbed_step_s: float) -> float:
    """Return the share of the time of training in which it did effective work (ETTR).

    That is what the steps of a run take at the undisturbed pace, and its evaluations, by what all of it took
    by the clock of whoever watched, restarts included; at most 1.
    """
    num_steps = sum(line["step"] > 0 for line in steps)
    return min(1.0, (undisturbed_step_s * num_steps + evaluation_s(steps)) / wall_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """What one fault has cost."""

    role: str
    kind: str
    moment: str
    lost_s: float
    """Seconds that its steps took longer than at the undisturbed pace; below 0 where they took less."""


def lost_times(
    injected: Sequence[Injected],
    seen_s: Mapping[int, float],
    steps: Sequence[Mapping[str, Any]],
    *,
    undisturbed_step_s: float,
) -> list[Lost]:
    """Return what each fault has cost, in the order of their times.

    ``seen_s`` is when each step was first seen, as ``time.time`` says it. The time that a step took beyond
    the undisturbed pace is shared by the faults within it; without any, it is the last one's before. What was
    injected for one place of the plan (a controller that is killed so that its run resumes, and what follows)
    counts together, as the last. Faults before the first step and after the last one are left out.
    """
    waited_s = {line["step"]: line.get("time/eval_s", 0.0) for line in steps}
    first_s: dict[int, float] = {}
    last: dict[int, Injected] = {}
    for one in sorted(injected, key=lambda one: one.time_s):
        first_s.setdefault(one.number, one.time_s)
        last[one.number] = one
    lost_s: dict[int, float] = {}
    for before, step in itertools.pairwise(sorted(seen_s)):
        expected_s = sum(undisturbed_step_s + waited_s.get(one, 0.0) for one in range(before + 1, step + 1))
        within = [number for number, at in first_s.items() if seen_s[before] < at <= seen_s[step]]
        for number in within or list(lost_s)[-1:]:
            share = 1 / max(1, len(within))
            more_s = share * (seen_s[step] - seen_s[before] - expected_s)
            lost_s[number] = lost_s.get(number, 0.0) + more_s
    return [
        Lost(role=one.role, kind=one.kind.value, moment=one.moment.value, lost_s=cost_s)
        for number, cost_s in lost_s.items()
        for one in [last[number]]
    ]


def share_with(lost: Sequence[Lost], *, num_steps: int, undisturbed_step_s: float) -> float:
    """Return the share of effective time (ETTR), at most 1, with one of them in every ``num_steps`` steps."""
    work_s = num_steps * undisturbed_step_s
    return min(1.0, work_s / (work_s + statistics.mean(one.lost_s for one in lost)))
