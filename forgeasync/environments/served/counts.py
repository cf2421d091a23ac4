"""What has happened at a front desk, as the worker reports it and as metrics.jsonl has it."""

import threading
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from forgeasync.config import ScoreSource
from forgeasync.environments.sessions.session import SessionEnd

NUM_LATENCIES = 1024
"""So many of the last turns tell how long turns take."""


class Untrained(StrEnum):
    """Why a session is not trained on."""

    NO_TICKET = "no_ticket"
    """When it was opened no group had been started for it: the bounds of the buffer, the room for payloads or
    the KV cache allowed none."""
    NO_TURN = "no_turn"
    """It ended before its first turn."""
    NO_SCORE = "no_score"
    """Nothing in ``serving.score_from`` gave a score."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingReport:
    """The state of a front desk."""

    counts: Mapping[str, float]
    """Counts and sums since the worker began, by name."""
    num_open: int
    """Sessions that are open, trained on or not."""
    num_on_offer: int
    """Episodes that wait for a client."""
    turn_p50_s: float | None
    """Median time from a request for a turn to its end, over the last turns; None before the first one."""
    turn_p99_s: float | None


class ServingCounts:
    """Counts of one worker. May be used from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        names = (
            "num_opened",
            "num_refused",
            "num_feedback",
            "feedback_sum",
            "num_judged",
            "num_unreadable_judgements",
            *(f"num_ended_{end}" for end in SessionEnd),
            *(f"num_untrained_{reason}" for reason in Untrained),
            *(f"num_scored_by_{source}" for source in ScoreSource),
        )
        self._counts: dict[str, float] = dict.fromkeys(names, 0)
        self._turns_s: deque[float] = deque(maxlen=NUM_LATENCIES)

    def add(self, name: str, number: float = 1) -> None:
        """Add to a count."""
        with self._lock:
            assert name in self._counts, name
            self._counts[name] += number

    def took(self, turn_s: float) -> None:
        """A turn has ended after so many seconds."""
        with self._lock:
            self._turns_s.append(turn_s)

    def report(self, *, num_open: int, num_on_offer: int) -> ServingReport:
        """Return the counts as they are."""
        with self._lock:
            turns_s = list(self._turns_s)
            counts = dict(self._counts)
        return ServingReport(
            counts=counts,
            num_open=num_open,
            num_on_offer=num_on_offer,
            turn_p50_s=float(np.percentile(turns_s, 50)) if turns_s else None,
            turn_p99_s=float(np.percentile(turns_s, 99)) if turns_s else None,
        )


def serving_metrics(lost: Mapping[str, float], last: ServingReport | None) -> dict[str, float]:
    """Return metrics under their names in metrics.jsonl.

    ``lost`` are the counts of workers that are gone, ``last`` the report of the one that serves now, or None
    while none does.
    """
    counts = Counter(lost)
    if last is not None:
        counts.update(last.counts)
    feedback_sum = counts.pop("feedback_sum", 0)
    metrics: dict[str, float] = {f"serving/{name}": number for name, number in counts.items()}
    if counts["num_feedback"]:
        metrics["serving/feedback_mean"] = feedback_sum / counts["num_feedback"]
    metrics["serving/num_open"] = 0 if last is None else last.num_open
    metrics["serving/num_on_offer"] = 0 if last is None else last.num_on_offer
    if last is not None and last.turn_p50_s is not None and last.turn_p99_s is not None:
        metrics |= {"serving/turn_p50_s": last.turn_p50_s, "serving/turn_p99_s": last.turn_p99_s}
    return metrics
