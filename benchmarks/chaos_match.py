"""Matches injected faults with the lines of faults.jsonl."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from chaos_faults import CONTROLLER, HOST, STORAGE, UNNOTICED, Injected, Moment

EARLY_S = 0.01
"""Tolerance in seconds, because times in faults.jsonl are rounded."""

AS_CONTROLLER = (Moment.START, Moment.RESUME, Moment.SHUTDOWN)
"""Moments at which roles are not supervised, so the loss of any process can end the run and then counts as a
fault of the controller."""


ON_HOSTS = ("generator", "trainer")


@dataclass(frozen=True, slots=True)
class Match:
    """An injected fault with the run's lines about it."""

    injected: Injected
    detected: Mapping[str, Any] | None
    recovered: Mapping[str, Any] | None

    @property
    def is_expected(self) -> bool:
        """Whether the run must detect the fault: not for delays, nor for losses at the run's end."""
        is_delay = self.injected.kind in UNNOTICED
        is_over = self.injected.moment is Moment.SHUTDOWN and self.injected.role != CONTROLLER
        return not is_delay and not is_over


def match(
    injected: Sequence[Injected], events: Sequence[Mapping[str, Any]]
) -> tuple[list[Match], list[Mapping[str, Any]]]:
    """Assign to each injected fault, in order of time, the first later line about its role.

    Outages of a disk can overlap, because writes that one has refused may succeed only after the next has
    begun. So a line belongs to the outage during which it was written, if possible. An outage without its own
    line is part of the previous one if that is open. Later faults of the role ``storage`` belong to the same
    outage, and faults of generators and the trainer belong to that of their lost host.

    Also returns the lines with "detected" that match no injected fault.
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


def _goes_with(event: Mapping[str, Any], one: Match) -> bool:
    """Return whether a line belongs to a fault that is matched with an earlier line."""
    if event["time_s"] < one.injected.time_s - EARLY_S:
        return False
    if one.injected.role == STORAGE:
        return event["role"] == STORAGE
    # What was on a host is lost with it, and nothing comes back before the run does.
    end_s = math.inf if one.recovered is None else one.recovered["time_s"]
    return one.injected.role == HOST and event["role"] in ON_HOSTS and event["time_s"] <= end_s
