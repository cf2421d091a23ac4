"""Which generators are slow beyond their peers: a pure policy on the times of their decode steps.

In a step of decoding every sequence gets one token, so its time is the inverse of the tokens that a sequence
gets in a second. It grows with the number of sequences: steps are compared only with those of peers at a like
load, within a factor of two. A generator's ratio is the time of its steps in the last ``WINDOW_S`` seconds by
what the same steps would have taken at the median of its peers. It is slow while the ratio is above a factor.

Where no peer has a like load, a bound of the ratio counts if it is above the factor. What is no evidence
counts neither way, and time without it stands still; with one generator there never is any. Prompts that are
computed, and updates, are no steps of decoding (``generator/reports.py``).
"""

import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

WINDOW_S = 10.0
"""Seconds for which steps are compared."""

MIN_STEPS = 20
"""So many comparable steps in a window are evidence."""

MIN_BUSY_S = 5.0
"""Fewer are as well if they took so long."""

MIN_STEPS_OF_PEER = 5
"""A peer is compared with at a load where it has made so many steps in the window."""

SUSPECT_S = 15.0
"""One that has been slow for so long gets no new groups. One long step counts for a window, and no longer."""

REPLACE_S = 40.0
"""One that has been slow for so long is replaced."""

Counts = Mapping[int, tuple[int, float]]
"""Number of steps and the seconds that they took, since a generator began, by load."""


class Pace(StrEnum):
    """How a generator compares."""

    LIKE_PEERS = "like its peers"
    """Or nothing is known against it."""
    SUSPECT = "suspect"
    SLOW = "slow"


@dataclass(slots=True)
class _Seen:
    heard: deque[tuple[float, Counts]] = field(default_factory=deque)
    """What was counted at which time; the first one is as old as the window, or older."""
    slow_s: float = 0.0
    """For so long the evidence has said that it is slow."""
    ratio: float | None = None

    def within(self) -> dict[int, tuple[int, float]]:
        """Steps in the window, by load."""
        first, last = self.heard[0][1], self.heard[-1][1]
        steps = {}
        for load, (num_steps, took_s) in last.items():
            num_before, before_s = first.get(load, (0, 0.0))
            if num_steps > num_before:
                steps[load] = num_steps - num_before, took_s - before_s
        return steps


class SlowReplicas:
    """What is known of the pace of all generators. Times are given from outside."""

    def __init__(self, factor: float) -> None:
        """``factor`` is ``generator.slow_factor``."""
        assert factor > 1.0
        self._factor = factor
        self._seen: dict[int, _Seen] = {}
        self._judged_s: float | None = None

    def heard(self, number: int, counts: Counts, *, now_s: float) -> None:
        """Take in what a generator has counted."""
        heard = self._seen.setdefault(number, _Seen()).heard
        heard.append((now_s, counts))
        while len(heard) > 1 and heard[1][0] <= now_s - WINDOW_S:
            heard.popleft()

    def forget(self, number: int) -> None:
        """A generator is gone."""
        self._seen.pop(number, None)

    def restart(self) -> None:
        """Compare nothing from before now: whoever compares stood still."""
        self._judged_s = None
        for seen in self._seen.values():
            seen.heard.clear()

    def judge(self, *, now_s: float) -> None:
        """Compare all generators, and take note of those that are slow."""
        passed_s = 0.0 if self._judged_s is None else now_s - self._judged_s
        self._judged_s = now_s
        steps = {
            number: seen.within() for number, seen in self._seen.items() if self._is_current(seen, now_s)
        }
        for number, seen in self._seen.items():
            seen.ratio = _ratio(number, steps)
            if seen.ratio is None and (least := _least_ratio(number, steps)) is not None:
                # It may be more: that it is no more than the factor says nothing.
                seen.ratio = least if least > self._factor else None
            if seen.ratio is not None:
                seen.slow_s = seen.slow_s + passed_s if seen.ratio > self._factor else 0.0

    def _is_current(self, seen: _Seen, now_s: float) -> bool:
        return bool(seen.heard) and seen.heard[-1][0] > now_s - WINDOW_S

    def pace(self, number: int) -> Pace:
        """How a generator compares, as far as was judged."""
        seen = self._seen.get(number)
        if seen is None or seen.slow_s < SUSPECT_S:
            return Pace.LIKE_PEERS
        return Pace.SLOW if seen.slow_s >= REPLACE_S else Pace.SUSPECT

    def ratio(self, number: int) -> float | None:
        """Times of a generator's steps by those of its peers; None: there is no evidence now."""
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
    """A ratio that is not above the true one, where no peer has a like load.

    More sequences take no less time, and no more than in proportion to their number; loads are numbers of
    bits, so that a number is within a factor of two of another with as many.
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
    """The loads of each peer at which it has made steps enough, with their numbers and times."""
    known = [
        [(load, num, took_s) for load, (num, took_s) in of_peer.items() if num >= MIN_STEPS_OF_PEER]
        for peer, of_peer in steps.items()
        if peer != number
    ]
    return [loads for loads in known if loads]
