"""Computes the share of a run's time spent on effective work, and the cost of each fault."""

import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from chaos_faults import Injected


def step_median_s(steps: Sequence[Mapping[str, Any]]) -> float:
    """Return the median step time in seconds, excluding evaluations."""
    return statistics.median(
        line["time/step_s"] - line.get("time/eval_s", 0.0) for line in steps if line["step"]
    )


def evaluation_s(steps: Sequence[Mapping[str, Any]]) -> float:
    """Return the total time in seconds that steps waited for evaluations."""
    return sum(line.get("time/eval_s", 0.0) for line in steps if line["step"])


def effective_share(steps: Sequence[Mapping[str, Any]], wall_s: float, *, undisturbed_step_s: float) -> float:
    """Return the share of training time spent on effective work (ETTR), at most 1.

    ETTR = (number of steps x undisturbed step time + time of evaluations) / wall time including restarts.
    """
    num_steps = sum(line["step"] > 0 for line in steps)
    return min(1.0, (undisturbed_step_s * num_steps + evaluation_s(steps)) / wall_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """Cost of one fault."""

    role: str
    kind: str
    moment: str
    lost_s: float
    """Extra seconds of the affected steps over the undisturbed pace; negative if they were faster."""


def lost_times(
    injected: Sequence[Injected],
    seen_s: Mapping[int, float],
    steps: Sequence[Mapping[str, Any]],
    *,
    undisturbed_step_s: float,
) -> list[Lost]:
    """Return the cost of each fault, ordered by time.

    ``seen_s`` is the time (``time.time``) at which each step was first seen. The extra time of a step over
    the undisturbed pace is divided among the faults within the step; without any, it counts for the last
    earlier fault. Faults with the same number in the plan (a controller kill, and the fault while the run
    resumes) count as one, with the role and kind of the last. Faults before the first and after the last step
    are left out.
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
    """Return the share of effective time (ETTR), at most 1, with one such fault per ``num_steps`` steps."""
    work_s = num_steps * undisturbed_step_s
    return min(1.0, work_s / (work_s + statistics.mean(one.lost_s for one in lost)))
