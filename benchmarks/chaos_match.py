"""Which line of faults.jsonl is about which injected fault."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from chaos_faults import CONTROLLER, HOST, STORAGE, UNNOTICED, Injected, Moment

EARLY_S = 0.01
"""Times in faults.jsonl are rounded."""

AS_CONTROLLER = (Moment.START, Moment.RESUME, Moment.SHUTDOWN)
"""Moments at which the loss of any process can end the run, which is then a fault of the controller: nobody
looks after the roles yet, or any more."""


ON_HOSTS = ("generator", "trainer")


@dataclass(frozen=True, slots=True)
class Match:
    """An injected fault, and what the run knows of it."""

    injected: Injected
    detected: Mapping[str, Any] | None
    recovered: Mapping[str, Any] | None

    @property
    def is_expected(self) -> bool:
        """Whether it has to be detected: delays have not, and what dies at the end may not be missed."""
        is_delay = self.injected.kind in UNNOTICED
        is_over = self.injected.moment is Moment.SHUTDOWN and self.injected.role != CONTROLLER
        return not is_delay and not is_over


def match(
    injected: Sequence[Injected], events: Sequence[Mapping[str, Any]]
) -> tuple[list[Match], list[Mapping[str, Any]]]:
    """Give every injected fault a line about its role, in the order of their times: the first one after it.

    Outages of a disk can overlap. What one has refused may be written only after the next one has begun, so
    that a line is of the outage during which it was written, where it can be. An outage without a line of its
    own is a part of the one before, if that goes on. Further faults of the role ``storage`` after one belong
    to it; so do those of generators and the trainer to a lost host's. Also returns lines that say "detected"
    of what nobody has injected.
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
    """Whether a further line belongs to a fault that was matched with another one."""
    if event["time_s"] < one.injected.time_s - EARLY_S:
        return False
    if one.injected.role == STORAGE:
        return event["role"] == STORAGE
    # What was on a host is lost with it, and nothing comes back before the run does.
    end_s = math.inf if one.recovered is None else one.recovered["time_s"]
    return one.injected.role == HOST and event["role"] in ON_HOSTS and event["time_s"] <= end_s
