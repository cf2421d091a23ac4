"""What a run with injected faults has to show: counts that agree, a ledger without contradiction, an accuracy
within its band, and nothing left behind."""

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from chaos_faults import Injected, Planned
from rich.table import Table


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What a run has left, and what was done to it."""

    planned: Sequence[Planned]
    injected: Sequence[Injected]
    """By the witness."""
    events: Sequence[Mapping[str, Any]]
    """The lines of faults.jsonl."""
    steps: Sequence[Mapping[str, Any]]
    """The lines of metrics.jsonl."""
    rollouts: Sequence[Mapping[str, Any]]
    """The lines of rollouts.jsonl, with every rollout that was trained on."""
    max_steps: int
    groups_per_step: int
    exit_code: int
    ledger_problem: str | None
    """What ``apps.verify`` has found."""
    band: tuple[float, float] | None
    """Held-out accuracies of runs without faults."""
    left: Sequence[str]
    """Processes and files of the run that are still there."""


def accuracy_of(steps: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the last held-out accuracy; None if there is none after step 0."""
    found = [line["eval/accuracy"] for line in steps if line["step"] and "eval/accuracy" in line]
    return found[-1] if found else None


def counting_problem(
    rollouts: Sequence[Mapping[str, Any]], *, max_steps: int, groups_per_step: int
) -> str | None:
    """Return why the batches that were trained on do not have every group once.

    The ledger is not asked: these lines come from the batches that the trainer was given.
    """
    step_of: dict[int, int] = {}
    seen: set[tuple[int, int, str]] = set()
    for line in rollouts:
        group, step = line["group_id"], line["step"]
        if step_of.setdefault(group, step) != step:
            return f"group {group} was trained on in steps {step_of[group]} and {step}"
        one = group, line["episode"], line["agent"]
        if one in seen:
            return f"episode {one[1]} of group {group} was trained on twice in step {step}"
        seen.add(one)
    num_groups = Counter(step_of.values())
    for step in range(1, max_steps + 1):
        if num_groups[step] != groups_per_step:
            return f"step {step} was trained on {num_groups[step]} groups, not on {groups_per_step}"
    return None


def first_difference(evidence: Evidence) -> str | None:
    """Return the first thing that is not as it should be; None if all is."""
    planned = Counter(one.role for one in evidence.planned)
    counts = {
        "injected": Counter(one.role for one in evidence.injected),
        "detected": Counter(one["role"] for one in evidence.events if one["event"] == "detected"),
        "recovered": Counter(one["role"] for one in evidence.events if one["event"] == "recovered"),
    }
    if evidence.exit_code:
        return f"the run ended with exit code {evidence.exit_code}"
    for what, found in counts.items():
        for role in sorted(planned | found):
            if found[role] != planned[role]:
                return f"{role}: {planned[role]} faults were to be injected, {found[role]} were {what}"
    numbers = [line["step"] for line in evidence.steps if line["step"]]
    if numbers != list(range(1, evidence.max_steps + 1)):
        return f"metrics.jsonl has steps {numbers[:3]} ... {numbers[-3:]}, not 1 to {evidence.max_steps}"
    counting = counting_problem(
        evidence.rollouts, max_steps=evidence.max_steps, groups_per_step=evidence.groups_per_step
    )
    if counting is not None:
        return f"rollouts.jsonl: {counting}"
    last = evidence.steps[-1]
    for role in sorted(planned):
        for what in ("detected", "recovered"):
            if last[f"faults/{what}_{role}"] != planned[role]:
                return (
                    f"metrics.jsonl: faults/{what}_{role} = {last[f'faults/{what}_{role}']:g}, "
                    f"and {planned[role]} were injected"
                )
    if evidence.ledger_problem is not None:
        return f"apps.verify: {evidence.ledger_problem}"
    if evidence.band is not None:
        low, high = evidence.band
        accuracy = accuracy_of(evidence.steps)
        if accuracy is None or not low <= accuracy <= high:
            return f"the held-out accuracy is {accuracy}, and that of runs without faults {low:g} to {high:g}"
    if evidence.left:
        return f"left behind: {', '.join(evidence.left)}"
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What became of the faults of one kind in one role. Times are seconds from the injection."""

    role: str
    kind: str
    num_injected: int
    num_detected: int
    num_recovered: int
    detection_p50_s: float | None
    detection_p95_s: float | None
    recovery_p50_s: float | None
    recovery_p95_s: float | None


def rows(injected: Sequence[Injected], events: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Sum up faults by role and kind. The n-th injected fault of a role is the n-th that it has detected: one
    follows only when the role has recovered from the one before."""
    detected: dict[str, list[Mapping[str, Any]]] = {}
    for event in events:
        if event["event"] == "detected":
            detected.setdefault(event["role"], []).append(event)
    recovered = {event["number"]: event for event in events if event["event"] == "recovered"}
    found: dict[tuple[str, str], list[tuple[float | None, float | None]]] = {}
    num_seen: Counter[str] = Counter()
    for one in injected:
        of_role = detected.get(one.role, [])
        times: tuple[float | None, float | None] = (None, None)
        if num_seen[one.role] < len(of_role):
            event = of_role[num_seen[one.role]]
            end = recovered.get(event["number"])
            times = (
                event["time_s"] - one.time_s,
                None if end is None else end["time_s"] - one.time_s,
            )
        num_seen[one.role] += 1
        found.setdefault((one.role, one.kind.value), []).append(times)
    result = []
    for (role, kind), both in sorted(found.items()):
        detection = [time_s for time_s, _ in both if time_s is not None]
        recovery = [time_s for _, time_s in both if time_s is not None]
        result.append(
            Row(
                role=role,
                kind=kind,
                num_injected=len(both),
                num_detected=len(detection),
                num_recovered=len(recovery),
                detection_p50_s=_percentile(detection, 50),
                detection_p95_s=_percentile(detection, 95),
                recovery_p50_s=_percentile(recovery, 50),
                recovery_p95_s=_percentile(recovery, 95),
            )
        )
    return result


def _percentile(values: Sequence[float], percent: float) -> float | None:
    return float(np.percentile(values, percent)) if values else None


def step_median_s(steps: Sequence[Mapping[str, Any]]) -> float:
    """Return the median time of a step, in seconds."""
    return statistics.median(line["time/step_s"] for line in steps if line["step"])


def effective_share(steps: Sequence[Mapping[str, Any]], *, undisturbed_step_s: float) -> float:
    """Return the share of the time of training in which it did effective work (ETTR).

    That is what as many steps take at the undisturbed pace, by what they took; at most 1.
    """
    trained = [line for line in steps if line["step"]]
    elapsed_s = trained[-1]["time/elapsed_s"]
    return min(1.0, undisturbed_step_s * len(trained) / elapsed_s)


def table(found: Sequence[Row]) -> Table:
    """A row for each kind in each role."""
    shown = Table(title="faults")
    for name in ("role", "kind"):
        shown.add_column(name)
    for name in (
        "injected",
        "detected",
        "recovered",
        "detection p50 s",
        "p95",
        "recovery p50 s",
        "p95",
    ):
        shown.add_column(name, justify="right")
    for row in found:
        times = (row.detection_p50_s, row.detection_p95_s, row.recovery_p50_s, row.recovery_p95_s)
        shown.add_row(
            row.role,
            row.kind,
            str(row.num_injected),
            str(row.num_detected),
            str(row.num_recovered),
            *("-" if time_s is None else f"{time_s:.1f}" for time_s in times),
        )
    return shown
