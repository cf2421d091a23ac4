"""Checks a run with injected faults: counts, the ledger, the accuracy band, and no leftovers."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from chaos_faults import Injected, Kind, Moment, Planned
from chaos_lengths import Lengths
from chaos_match import Match, match
from rich.table import Table


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """The files and leftovers of a run, and the faults injected into it."""

    planned: Sequence[Planned]
    injected: Sequence[Injected]
    """Faults that were injected, by the witness file."""
    events: Sequence[Mapping[str, Any]]
    """Lines of faults.jsonl."""
    steps: Sequence[Mapping[str, Any]]
    """Lines of metrics.jsonl."""
    rollouts: Sequence[Mapping[str, Any]]
    """Lines of rollouts.jsonl, with every trained rollout."""
    ledger: Sequence[Mapping[str, Any]]
    """Lines of ledger.jsonl."""
    max_steps: int
    groups_per_step: int
    exit_code: int
    ledger_problem: str | None
    """Contradiction found by ``apps.verify``, if any."""
    witness_problem: str | None = None
    """Problem found by ``chaos_witness`` in the exported weights, if any."""
    band: tuple[float, float] | None
    """Range of held-out accuracies of runs without faults."""
    lengths: Lengths | None = None
    """Comparison of response lengths with those of runs without faults."""
    left: Sequence[str]
    """Processes and files of the run that remain."""


def accuracy_of(steps: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the last held-out accuracy; None if there is none after step 0."""
    found = [line["eval/accuracy"] for line in steps if line["step"] and "eval/accuracy" in line]
    return found[-1] if found else None


def counting_problem(
    rollouts: Sequence[Mapping[str, Any]], *, max_steps: int, groups_per_step: int
) -> str | None:
    """Return a problem if the trained batches do not contain every group exactly once.

    This check does not use the ledger: the rollouts' lines are written from the trainer's batches.
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


def batches_problem(ledger: Sequence[Mapping[str, Any]], rollouts: Sequence[Mapping[str, Any]]) -> str | None:
    """Return the first step for which the ledger and rollouts.jsonl name different groups, as a problem.

    This check has its own reader of both files: a line ``resumed`` undoes all later steps.
    """
    said: dict[int, set[int]] = {}
    for line in ledger:
        if line["event"] == "trained":
            said[line["step"]] = set(line["groups"])
        elif line["event"] == "resumed":
            said = {step: groups for step, groups in said.items() if step <= line["step"]}
    given: dict[int, set[int]] = {}
    for line in rollouts:
        given.setdefault(line["step"], set()).add(line["group_id"])
    for step in sorted(said.keys() | given.keys()):
        if said.get(step) != given.get(step):
            other = sorted(said.get(step, set()) ^ given.get(step, set()))
            return f"step {step} was trained on other groups than in the ledger: {other} are in one only"
    return None


def first_difference(evidence: Evidence) -> str | None:
    """Return the first problem found; None if there is none."""
    if evidence.exit_code:
        return f"the run ended with exit code {evidence.exit_code}"
    matches, extra = match(evidence.injected, evidence.events)
    return (
        _fault_problem(evidence, matches, extra)
        or _step_problem(evidence)
        or _metrics_problem(evidence, matches)
        or _end_problem(evidence)
    )


def _fault_problem(
    evidence: Evidence, matches: Sequence[Match], extra: Sequence[Mapping[str, Any]]
) -> str | None:
    for one in matches:
        if one.injected.kind is Kind.DELAYED_MESSAGES and "num_messages: 0" in one.injected.words:
            return f"{_name(one)} has held no message"
        if one.is_expected and one.detected is None:
            return f"{_name(one)} was not detected"
        # What nobody needs any more at the end need not come back.
        if one.is_expected and one.recovered is None:
            return f"{_name(one)} was not recovered from"
    done = {(one.number, one.role, one.kind) for one in evidence.injected}
    for number, fault in enumerate(evidence.planned):
        if (number, fault.role, fault.kind) not in done:
            num = sum(one.role == fault.role for one in evidence.planned)
            num_done = sum(
                (at, one.role, one.kind) in done
                for at, one in enumerate(evidence.planned)
                if one.role == fault.role
            )
            return f"{fault.role}: {num} faults were to be injected, {num_done} were injected"
    for event in extra:
        return f"{event['role']}: nobody has injected this: {event['who']} {event['what']}"
    return None


def _name(one: Match) -> str:
    fault = one.injected
    return f"{fault.role}: fault {fault.number + 1} ({fault.kind}, {fault.moment})"


def _step_problem(evidence: Evidence) -> str | None:
    numbers = [line["step"] for line in evidence.steps if line["step"]]
    if numbers != list(range(1, evidence.max_steps + 1)):
        return f"metrics.jsonl has steps {numbers[:3]} ... {numbers[-3:]}, not 1 to {evidence.max_steps}"
    counting = counting_problem(
        evidence.rollouts, max_steps=evidence.max_steps, groups_per_step=evidence.groups_per_step
    )
    counting = counting or batches_problem(evidence.ledger, evidence.rollouts)
    return None if counting is None else f"rollouts.jsonl: {counting}"


def _metrics_problem(evidence: Evidence, matches: Sequence[Match]) -> str | None:
    """Return a problem if the last line of metrics.jsonl disagrees with faults.jsonl up to that step."""
    later = {
        one.detected["number"]
        for one in matches
        if one.injected.moment is Moment.SHUTDOWN and one.detected is not None
    }
    last = evidence.steps[-1]
    counts = Counter((one["event"], one["role"]) for one in evidence.events if one["number"] not in later)
    for key, value in last.items():
        if key.startswith(("faults/detected_", "faults/recovered_")):
            what, _, role = key.removeprefix("faults/").partition("_")
            if value != counts[what, role]:
                return f"metrics.jsonl: {key} = {value:g}, and faults.jsonl has {counts[what, role]}"
    return None


def _end_problem(evidence: Evidence) -> str | None:
    if evidence.ledger_problem is not None:
        return f"apps.verify: {evidence.ledger_problem}"
    if evidence.witness_problem is not None:
        return f"the counting witness: {evidence.witness_problem}"
    if evidence.band is not None:
        low, high = evidence.band
        accuracy = accuracy_of(evidence.steps)
        if accuracy is None or not low <= accuracy <= high:
            return f"the held-out accuracy is {accuracy}, and that of runs without faults {low:g} to {high:g}"
    if evidence.lengths is not None and evidence.lengths.problem is not None:
        return evidence.lengths.problem
    if evidence.left:
        return f"left behind: {', '.join(evidence.left)}"
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Outcome of the faults of one kind in one role.

    Times are seconds from the injection. A disk fault during an open outage counts as noticed immediately.
    """

    role: str
    kind: str
    num_injected: int
    num_expected: int
    """Faults that must be noticed: all except delays below the heartbeat and losses at the run's end."""
    num_detected: int
    num_recovered: int
    detection_p50_s: float | None
    detection_p95_s: float | None
    recovery_p50_s: float | None
    recovery_p95_s: float | None
    moments: dict[str, int]


ALL_KINDS = "all"
"""Value for the kind in rows that sum up a role."""


def rows(matches: Sequence[Match], *, by_kind: bool = True) -> list[Row]:
    """Summarize faults by role and kind, or by role alone."""
    found: dict[tuple[str, str], list[Match]] = {}
    for one in matches:
        kind = one.injected.kind.value if by_kind else ALL_KINDS
        found.setdefault((one.injected.role, kind), []).append(one)
    result = []
    for (role, kind), of_kind in sorted(found.items()):
        detection = [
            max(0.0, one.detected["time_s"] - one.injected.time_s) for one in of_kind if one.detected
        ]
        recovery = [one.recovered["time_s"] - one.injected.time_s for one in of_kind if one.recovered]
        result.append(
            Row(
                role=role,
                kind=kind,
                num_injected=len(of_kind),
                num_expected=sum(one.is_expected for one in of_kind),
                num_detected=len(detection),
                num_recovered=len(recovery),
                detection_p50_s=_percentile(detection, 50),
                detection_p95_s=_percentile(detection, 95),
                recovery_p50_s=_percentile(recovery, 50),
                recovery_p95_s=_percentile(recovery, 95),
                moments=dict(Counter(one.injected.moment.value for one in of_kind)),
            )
        )
    return result


def _percentile(values: Sequence[float], percent: float) -> float | None:
    return float(np.percentile(values, percent)) if values else None


def table(found: Sequence[Row]) -> Table:
    """Return a table with a row for each role and kind."""
    shown = Table(title="faults")
    for name in ("role", "kind"):
        shown.add_column(name)
    for name in (
        "injected",
        "to notice",
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
            str(row.num_expected),
            str(row.num_detected),
            str(row.num_recovered),
            *("-" if time_s is None else f"{time_s:.1f}" for time_s in times),
        )
    return shown
