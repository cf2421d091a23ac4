"""Compares a run's files with the faults that were injected: counts, order of groups, ledger, weights.

``match`` finds the line of faults.jsonl for each fault, ``first_difference`` makes all comparisons, ``rows``
and ``lost_times`` give the numbers that docs/failures.md has.
"""

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from chaos_faults import CONTROLLER, HOST, STORAGE, UNNOTICED, Injected, Kind, Moment, Planned
from common import print_table

from forgeasync.files import read_json_lines

Line = Mapping[str, Any]

EARLY_S = 0.01
"""Times in faults.jsonl are rounded."""

AS_CONTROLLER = (Moment.START, Moment.RESUME, Moment.SHUTDOWN)
"""Moments at which the loss of any process may end the run, so that faults.jsonl has a fault of the
controller."""


def read_lines(file: Path) -> list[dict[str, Any]]:
    """Return the complete lines of a file of JSON lines; none if the file does not exist."""
    return read_json_lines(file) if file.exists() else []


@dataclass(frozen=True, slots=True)
class Match:
    """An injected fault and its lines in faults.jsonl."""

    injected: Injected
    detected: Line | None
    recovered: Line | None

    @property
    def is_expected(self) -> bool:
        """Whether the run has to detect it: not a delay, nor a process that dies at the end of the run."""
        is_over = self.injected.moment is Moment.SHUTDOWN and self.injected.role != CONTROLLER
        return self.injected.kind not in UNNOTICED and not is_over


def match(injected: Sequence[Injected], events: Sequence[Line]) -> tuple[list[Match], list[Line]]:
    """Match each injected fault with the first later line of faults.jsonl about its role, in order of time.

    Outages of a disk can overlap. An outage prefers a line from before the next one. Without a line of its
    own it belongs to an outage before it that still lasts. Further lines of the role ``storage`` belong to an
    outage, and those of generators and the trainer to the loss of their host. Also returns "detected" lines
    without a fault.
    """
    detected = [one for one in events if one["event"] == "detected"]
    recovered = {one["number"]: one for one in events if one["event"] == "recovered"}
    left = list(detected)
    found: list[Match] = []
    ordered = sorted(injected, key=lambda one: one.time_s)
    outages_s = [one.time_s for one in ordered if one.role == STORAGE]
    for one in ordered:
        event = None
        if one.kind not in UNNOTICED:
            roles = [one.role, *([CONTROLLER] if one.moment in AS_CONTROLLER else [])]
            fitting = [at for at in left if at["time_s"] >= one.time_s - EARLY_S and at["role"] in roles]
            if one.role == STORAGE:
                next_s = min((time_s for time_s in outages_s if time_s > one.time_s), default=math.inf)
                during = [at for at in fitting if at["time_s"] < next_s - EARLY_S]
                open_then = [
                    at
                    for at in detected
                    if at["role"] == STORAGE
                    and outages_s[0] - EARLY_S <= at["time_s"] < one.time_s
                    and (at["number"] not in recovered or recovered[at["number"]]["time_s"] > one.time_s)
                ]
                fitting = during or open_then or fitting
            event = min(fitting, key=lambda at: (roles.index(at["role"]), at["time_s"]), default=None)
        if event in left:
            left.remove(event)
        found.append(Match(one, event, None if event is None else recovered.get(event["number"])))
    return found, [event for event in left if not any(_goes_with(event, one) for one in found)]


def _goes_with(event: Line, one: Match) -> bool:
    """Whether a further line belongs to a fault that has another line."""
    if event["time_s"] < one.injected.time_s - EARLY_S:
        return False
    if one.injected.role == STORAGE:
        return event["role"] == STORAGE
    # Processes of a host are lost with it, and none returns before the run does.
    end_s = math.inf if one.recovered is None else one.recovered["time_s"]
    return (
        one.injected.role == HOST and event["role"] in ("generator", "trainer") and event["time_s"] <= end_s
    )


# ---- the comparison


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Files of a run and the faults that were injected into it.

    Attributes:
        faults: Lines of faults.jsonl.
        metrics: Lines of metrics.jsonl.
        rollouts: Lines of rollouts.jsonl, with every rollout of every batch.
        ledger: Lines of ledger.jsonl.
        problems: What else is wrong, by the name of what finds it; None if nothing is.
        left: Processes and files of the run that remain.
    """

    planned: Sequence[Planned]
    injected: Sequence[Injected]
    faults: Sequence[Line]
    metrics: Sequence[Line]
    rollouts: Sequence[Line]
    ledger: Sequence[Line]
    max_steps: int
    groups_per_step: int
    exit_code: int
    problems: Mapping[str, str | None]
    left: Sequence[str]


def first_difference(evidence: Evidence) -> str | None:
    """Return the first difference from a run that lost nothing; None if there is none."""
    if evidence.exit_code:
        return f"the run ended with exit code {evidence.exit_code}"
    matches, extra = match(evidence.injected, evidence.faults)
    return (
        _fault_problem(evidence, matches, extra)
        or _step_problem(evidence)
        or _metrics_problem(evidence, matches)
        or _end_problem(evidence)
    )


def _fault_problem(evidence: Evidence, matches: Sequence[Match], extra: Sequence[Line]) -> str | None:
    for one in matches:
        fault = one.injected
        name = f"{fault.role}: fault {fault.number + 1} ({fault.kind}, {fault.moment})"
        if fault.kind is Kind.DELAYED_MESSAGES and "num_messages: 0" in fault.words:
            return f"{name} has held no message"
        if one.is_expected and one.detected is None:
            return f"{name} was not detected"
        if one.is_expected and one.recovered is None:
            return f"{name} was not recovered from"
    wanted = Counter(one.role for one in evidence.planned)
    injected = {(one.number, one.role, one.kind) for one in evidence.injected}
    done = Counter(
        one.role for place, one in enumerate(evidence.planned) if (place, one.role, one.kind) in injected
    )
    for role, num in wanted.items():
        if done[role] != num:
            return f"{role}: {num} faults were to be injected, {done[role]} were injected"
    for event in extra:
        return f"{event['role']}: nobody has injected this: {event['who']} {event['what']}"
    return None


def _step_problem(evidence: Evidence) -> str | None:
    numbers = [line["step"] for line in evidence.metrics if line["step"]]
    if numbers != list(range(1, evidence.max_steps + 1)):
        return f"metrics.jsonl has steps {numbers[:3]} ... {numbers[-3:]}, not 1 to {evidence.max_steps}"
    problem = _counting_problem(evidence) or _batches_problem(evidence)
    return None if problem is None else f"rollouts.jsonl: {problem}"


def _counting_problem(evidence: Evidence) -> str | None:
    """Return why the batches in rollouts.jsonl do not have every group once. The ledger is not used."""
    step_of: dict[int, int] = {}
    seen: set[tuple[int, int, str]] = set()
    for line in evidence.rollouts:
        group, step = line["group_id"], line["step"]
        if step_of.setdefault(group, step) != step:
            return f"group {group} was trained on in steps {step_of[group]} and {step}"
        one = group, line["episode"], line["agent"]
        if one in seen:
            return f"episode {one[1]} of group {group} was trained on twice in step {step}"
        seen.add(one)
    num_groups, wanted = Counter(step_of.values()), evidence.groups_per_step
    for step in range(1, evidence.max_steps + 1):
        if num_groups[step] != wanted:
            return f"step {step} was trained on {num_groups[step]} groups, not on {wanted}"
    return None


def _batches_problem(evidence: Evidence) -> str | None:
    """Return where ledger.jsonl and rollouts.jsonl have different groups for a step.

    This reads both files without forgeasync's own reader. A ``resumed`` undoes the steps after its own.
    """
    said: dict[int, set[int]] = {}
    for line in evidence.ledger:
        if line["event"] == "trained":
            said[line["step"]] = set(line["groups"])
        elif line["event"] == "resumed":
            said = {step: groups for step, groups in said.items() if step <= line["step"]}
    given: dict[int, set[int]] = {}
    for line in evidence.rollouts:
        given.setdefault(line["step"], set()).add(line["group_id"])
    for step in sorted(said.keys() | given.keys()):
        if said.get(step) != given.get(step):
            other = sorted(said.get(step, set()) ^ given.get(step, set()))
            return f"step {step} was trained on other groups than in the ledger: {other} are in one only"
    return None


def _metrics_problem(evidence: Evidence, matches: Sequence[Match]) -> str | None:
    """Compare the last line of metrics.jsonl with faults.jsonl, without faults after that line."""
    later = {
        one.detected["number"]
        for one in matches
        if one.injected.moment is Moment.SHUTDOWN and one.detected is not None
    }
    counts = Counter((one["event"], one["role"]) for one in evidence.faults if one["number"] not in later)
    for key, value in evidence.metrics[-1].items():
        if key.startswith(("faults/detected_", "faults/recovered_")):
            what, _, role = key.removeprefix("faults/").partition("_")
            if value != counts[what, role]:
                return f"metrics.jsonl: {key} = {value:g}, and faults.jsonl has {counts[what, role]}"
    return None


def _end_problem(evidence: Evidence) -> str | None:
    for name, problem in evidence.problems.items():
        if problem is not None:
            return f"{name}: {problem}"
    return f"left behind: {', '.join(evidence.left)}" if evidence.left else None


def length_problem(rollouts: Sequence[Line], undisturbed: Sequence[Sequence[Line]]) -> str | None:
    """Return why trained lengths are not those of two runs without faults.

    A run that loses responses in flight loses long ones first. Its distance from the others, a mean over
    quantiles, must be at most twice theirs.
    """
    lengths = ([line["response_tokens"] for line in lines] for lines in (rollouts, *undisturbed))
    trained, one, other = (np.quantile(own, np.linspace(0.0, 1.0, 101)) for own in lengths)
    far, near = np.mean([abs(trained - one), abs(trained - other)]), np.mean(abs(one - other))
    words = f"{far:.3g} tokens from those of runs without faults, which differ by {near:.3g}"
    return words if far > 2.0 * near else None


# ---- numbers


def rows(matches: Sequence[Match]) -> list[dict[str, Any]]:
    """Summarize faults by role and kind, with times from the injection in seconds.

    ``num_expected`` leaves out delays below the heartbeat and losses at the very end. A disk whose outage
    already lasts is noticed at once.
    """
    found: dict[tuple[str, str], list[Match]] = {}
    for one in matches:
        found.setdefault((one.injected.role, one.injected.kind.value), []).append(one)
    result = []
    for (role, kind), own in sorted(found.items()):
        detection = [max(0.0, one.detected["time_s"] - one.injected.time_s) for one in own if one.detected]
        recovery = [one.recovered["time_s"] - one.injected.time_s for one in own if one.recovered]
        result.append(
            {
                "role": role,
                "kind": kind,
                "num_injected": len(own),
                "num_expected": sum(one.is_expected for one in own),
                "num_detected": len(detection),
                "num_recovered": len(recovery),
                **_percentiles("detection", detection),
                **_percentiles("recovery", recovery),
            }
        )
    return result


def _percentiles(name: str, values: Sequence[float]) -> dict[str, float | None]:
    return {f"{name}_p{q}_s": float(np.percentile(values, q)) if values else None for q in (50, 95)}


def print_faults(found: Sequence[Mapping[str, Any]]) -> None:
    """Print a row for each kind in each role."""

    def cell(value: object) -> str:
        return "-" if value is None else f"{value:.1f}" if isinstance(value, float) else str(value)

    columns = [name.removeprefix("num_").replace("_", " ") for name in (found[0] if found else ())]
    print_table("faults", columns, ([cell(one) for one in row.values()] for row in found), num_names=2)


def step_median_s(steps: Sequence[Line]) -> float:
    """Return the median time of a step without the evaluation that it waits for, in seconds."""
    return statistics.median(
        line["time/step_s"] - line.get("time/eval_s", 0.0) for line in steps if line["step"]
    )


def lost_times(
    injected: Sequence[Injected],
    seen_s: Mapping[int, float],
    steps: Sequence[Line],
    *,
    undisturbed_step_s: float,
) -> list[dict[str, Any]]:
    """Return the seconds of training time that each fault cost, in the order of their times.

    ``seen_s`` has the time (``time.time``) at which each step was first seen. The faults within a step share
    the time that it took beyond ``undisturbed_step_s``. If there are none, it counts for the last fault
    before. A fault and the kill of a controller before it have one number and count together, as the later of
    them. Faults before the first step and after the last one are left out.
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
            more_s = (seen_s[step] - seen_s[before] - expected_s) / max(1, len(within))
            lost_s[number] = lost_s.get(number, 0.0) + more_s
    return [
        {"role": one.role, "kind": one.kind, "moment": one.moment, "lost_s": lost_s[one.number]}
        for one in (last[number] for number in lost_s)
    ]
