"""Detects generators that are slower than their peers: a pure policy on the times of their decode steps.

A decode step adds one token to every sequence, and takes longer with more sequences. Therefore steps are
compared only with those of peers at a similar load, within a factor of two. A generator's ratio is the time
of its steps in the last ``WINDOW_S`` seconds, divided by the time that the same steps would take at the
median pace of its peers. It is slow while the ratio is above a factor.

If no peer has a similar load, a lower bound of the ratio is used if it is above the factor. Without evidence,
the time for which a generator counts as slow does not change; a single generator never has evidence. Prefills
and updates are not decode steps (``generator/reports.py``).
"""

import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

WINDOW_S = 10.0
"""Length of the window in which steps are compared, in seconds."""

MIN_STEPS = 20
"""Number of comparable steps in a window that is enough evidence."""

MIN_BUSY_S = 5.0
"""Duration of comparable steps that is enough evidence, even if the steps are few, in seconds."""

MIN_STEPS_OF_PEER = 5
"""Minimum number of a peer's steps at a load, within the window, for a comparison."""

SUSPECT_S = 15.0
"""Seconds of being slow after which a generator gets no new groups; a long step counts for a window."""

REPLACE_S = 40.0
"""Time of being slow after which a generator is replaced, in seconds."""

Counts = Mapping[int, tuple[int, float]]
"""Number of steps and their total seconds since a generator started, by load."""


class Pace(StrEnum):
    """Pace of a generator compared with its peers."""

    LIKE_PEERS = "like its peers"
    """Similar pace, or no evidence."""
    SUSPECT = "suspect"
    SLOW = "slow"


@dataclass(slots=True)
class _Seen:
    heard: deque[tuple[float, Counts]] = field(default_factory=deque)
    """Counts with the times of their arrival; the first is at least as old as the window."""
    slow_s: float = 0.0
    """Time for which the generator has been slow."""
    ratio: float | None = None

    def within(self) -> dict[int, tuple[int, float]]:
        """Return the number and the seconds of the steps in the window, by load."""
        first, last = self.heard[0][1], self.heard[-1][1]
        steps = {}
        for load, (num_steps, took_s) in last.items():
            num_before, before_s = first.get(load, (0, 0.0))
            if num_steps > num_before:
                steps[load] = num_steps - num_before, took_s - before_s
        return steps


class SlowReplicas:
    """Compares the pace of all generators. The caller passes in the times."""

    def __init__(self, factor: float) -> None:
        """``factor`` is ``generator.slow_factor``."""
        assert factor > 1.0
        self._factor = factor
        self._seen: dict[int, _Seen] = {}
        self._judged_s: float | None = None

    def heard(self, number: int, counts: Counts, *, now_s: float) -> None:
        """Add the counts of a generator."""
        heard = self._seen.setdefault(number, _Seen()).heard
        heard.append((now_s, counts))
        while len(heard) > 1 and heard[1][0] <= now_s - WINDOW_S:
            heard.popleft()

    def forget(self, number: int) -> None:
        """Remove a generator."""
        self._seen.pop(number, None)

    def restart(self) -> None:
        """Discard all counts, because the comparing process was stopped for a while."""
        self._judged_s = None
        for seen in self._seen.values():
            seen.heard.clear()

    def judge(self, *, now_s: float) -> None:
        """Compare all generators."""
        passed_s = 0.0 if self._judged_s is None else now_s - self._judged_s
        self._judged_s = now_s
        steps = {
            number: seen.within() for number, seen in self._seen.items() if self._is_current(seen, now_s)
        }
        for number, seen in self._seen.items():
            seen.ratio = _ratio(number, steps)
            if seen.ratio is None and (least := _least_ratio(number, steps)) is not None:
                # The true ratio may be higher, so a bound below the factor is no evidence.
                seen.ratio = least if least > self._factor else None
            if seen.ratio is not None:
                seen.slow_s = seen.slow_s + passed_s if seen.ratio > self._factor else 0.0

    def _is_current(self, seen: _Seen, now_s: float) -> bool:
        return bool(seen.heard) and seen.heard[-1][0] > now_s - WINDOW_S

    def pace(self, number: int) -> Pace:
        """Return the pace of a generator at the last ``judge``."""
        seen = self._seen.get(number)
        if seen is None or seen.slow_s < SUSPECT_S:
            return Pace.LIKE_PEERS
        return Pace.SLOW if seen.slow_s >= REPLACE_S else Pace.SUSPECT

    def ratio(self, number: int) -> float | None:
        """Return the time of a generator's steps divided by that of its peers; None without evidence."""
        seen = self._seen.get(number)
        return None if seen is None else seen.ratio


def _ratio(number: int, steps: Mapping[int, Mapping[int, tuple[int, float]]]) -> float | None:
    num_compared, took_s, expected_s = 0, 0.0, 0.0
    for load, (num_steps, load_s) in steps.get(number, {}).items():
        peers = [
            other[load][1] / other[load][0]
            for peer, other in steps.items()
            if peer != number and load in other and other[load][0] >= MIN_STEPS_OF_PEER
        ]
        if peers:
            num_compared += num_steps
            took_s += load_s
            expected_s += num_steps * statistics.median(peers)
    is_enough = num_compared >= MIN_STEPS or took_s >= MIN_BUSY_S
    return took_s / expected_s if is_enough and expected_s > 0.0 else None


def _least_ratio(number: int, steps: Mapping[int, Mapping[int, tuple[int, float]]]) -> float | None:
    """Return a lower bound of the ratio, from loads that no peer has.

    The time of a step rises with the number of sequences, but at most in proportion. A load is the bit length
    of that number, so that numbers of equal load differ by less than a factor of two.
    """
    own = steps.get(number, {})
    num_steps, took_s, most_s = 0, 0.0, 0.0
    for load, (num_at_load, load_s) in own.items():
        bounds = [
            min(
                at_s / num * (1.0 if other > load else 2.0 ** (load - other + 1)) for other, num, at_s in peer
            )
            for peer in _known_steps(number, steps)
        ]
        if bounds:
            num_steps, took_s = num_steps + num_at_load, took_s + load_s
            most_s += num_at_load * statistics.median(bounds)
    is_enough = num_steps >= MIN_STEPS or took_s >= MIN_BUSY_S
    return took_s / most_s if is_enough and most_s > 0.0 else None


def _known_steps(
    number: int, steps: Mapping[int, Mapping[int, tuple[int, float]]]
) -> list[list[tuple[int, int, float]]]:
    """Return the loads of each peer at which it has made enough steps, with their numbers and times."""
    known = [
        [(load, num, took_s) for load, (num, took_s) in of_peer.items() if num >= MIN_STEPS_OF_PEER]
        for peer, of_peer in steps.items()
        if peer != number
    ]
    return [loads for loads in known if loads]
