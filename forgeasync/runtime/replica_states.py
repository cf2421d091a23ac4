"""States of the generators, the choice of the one that gets the next group, and the detection of slow ones.

Both are pure. The states:

    starting ──► stale ──► healthy ◄──► suspect
        └──────────────────►  │            │          every state but the last two:
                              ▼            ▼             ──► dead (its process has died, or was killed)
                           draining ──► removed

A generator starts with version 0, the model folder. It is healthy at once if no version was published yet.
Otherwise it is stale until an update has ended. The update loads the version that is the newest when it
begins; that version must not be older than the version that all healthy generators serve. So the served
version, the lowest of all healthy generators, never decreases. Only healthy generators that are not spares
get groups.

A generator is slow if its decode steps take longer than those of its peers. A decode step adds one token to
every sequence, and takes longer with more sequences. Therefore steps are compared only with those of peers at
a similar load, within a factor of two. A generator's ratio is the time of its steps in the last ``WINDOW_S``
seconds, divided by the time that the same steps would take at the median pace of its peers. It is slow while
the ratio is above a factor. If no peer has a similar load, a lower bound of the ratio is used if it is above
the factor. Without evidence, the time for which a generator counts as slow does not change; a single
generator never has evidence. Prefills and updates are not decode steps (``generator/reports.py``).
"""

import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class ReplicaState(StrEnum):
    """State of a generator, which determines whether it gets groups and updates."""

    STARTING = "starting"
    STALE = "stale"
    """It runs, but its weights are not the newest yet."""
    HEALTHY = "healthy"
    SUSPECT = "suspect"
    """It does not answer, or is slower than its peers; it keeps its groups and gets no new ones."""
    DRAINING = "draining"
    """It finishes its groups and is then removed."""
    DEAD = "dead"
    REMOVED = "removed"


LIVE = frozenset({ReplicaState.STALE, ReplicaState.HEALTHY, ReplicaState.SUSPECT, ReplicaState.DRAINING})
"""States in which generators answer calls and load versions."""

ENDED = frozenset({ReplicaState.DEAD, ReplicaState.REMOVED})


@dataclass(slots=True, kw_only=True)
class Replica:
    """Entry of one generator in the table."""

    number: int
    rank: int
    """Place of the generator; its replacement gets the same."""
    host: str
    is_spare: bool
    state: ReplicaState = ReplicaState.STARTING
    version: int = 0
    updating_to: int | None = None
    """Version of the update in flight."""
    num_live: int = 0
    """Number of rollouts in flight."""
    was_healthy: bool = False


@dataclass(slots=True)
class ReplicaTable:
    """The generators by number; numbers are never reused."""

    newest: int = 0
    """Newest version that was published."""
    served: int = 0
    """Lowest version of the healthy generators; while there are none, that of the last ones."""
    _replicas: dict[int, Replica] = field(default_factory=dict)
    _by_host: dict[str, list[Replica]] = field(default_factory=dict)
    """Generators of each host, including ended ones."""
    _next_number: int = 0

    def start(self, rank: int, host: str, *, is_spare: bool = False) -> int:
        """Add a generator that starts at a free place; return its number."""
        assert all(one.rank != rank for one in self.present), f"rank {rank} is taken"
        number = self._next_number
        self._next_number += 1
        one = Replica(number=number, rank=rank, host=host, is_spare=is_spare)
        self._replicas[number] = one
        self._by_host.setdefault(host, []).append(one)
        return number

    def ready(self, number: int) -> None:
        """Record that a generator runs with version 0; does nothing if it has ended."""
        one = self._replicas[number]
        if one.state in ENDED:
            return
        assert one.state is ReplicaState.STARTING
        if self.newest == 0:
            self._heal(one)
        else:
            one.state = ReplicaState.STALE

    def published(self, version: int) -> None:
        """Record that a version can be fetched."""
        self.newest = max(self.newest, version)

    def behind(self, host: str, version: int) -> tuple[int, ...]:
        """Return the numbers of the live generators of a host that have an older version."""
        return tuple(
            one.number for one in self._by_host.get(host, ()) if one.state in LIVE and one.version < version
        )

    def is_behind(self, host: str) -> bool:
        """Return whether a host has a generator that lacks the newest version."""
        return bool(self.behind(host, self.newest))

    def lowest_version(self, host: str) -> int:
        """Return the oldest version of the live generators of a host, which must have at least one."""
        return min(one.version for one in self._by_host[host] if one.state in LIVE)

    def begin_update(self, number: int, version: int) -> None:
        """Record that a generator fetches a version."""
        one = self._replicas[number]
        assert one.state in LIVE and one.version < version <= self.newest
        one.updating_to = version

    def abandon_update(self, number: int) -> None:
        """Record that an update has failed; the generator keeps its weights."""
        self._replicas[number].updating_to = None

    def updated(self, number: int) -> None:
        """Record that a generator samples with the version of its update; does nothing if it has ended."""
        one = self._replicas[number]
        version, one.updating_to = one.updating_to, None
        if one.state in ENDED:
            return
        assert version is not None, "an update was begun"
        one.version = version
        if one.state is ReplicaState.STALE and version >= self.served:
            self._heal(one)
        self._settle()

    def suspect(self, number: int) -> None:
        """Assign no new groups to a healthy generator until ``clear``."""
        one = self._replicas[number]
        if one.state is ReplicaState.HEALTHY:
            one.state = ReplicaState.SUSPECT
            self._settle()

    def clear(self, number: int) -> None:
        """End the suspicion of a generator."""
        one = self._replicas[number]
        if one.state is not ReplicaState.SUSPECT:
            return
        if one.version >= self.served:
            self._heal(one)
        else:
            one.state = ReplicaState.STALE

    def drain(self, number: int) -> None:
        """Assign no more groups to a generator; it can be removed once it has none."""
        one = self._replicas[number]
        if one.state in LIVE:
            one.state = ReplicaState.DRAINING
            self._settle()

    def remove(self, number: int) -> None:
        """Remove a drained generator."""
        one = self._replicas[number]
        assert one.state is ReplicaState.DRAINING, one.state
        one.state = ReplicaState.REMOVED

    def lose(self, number: int) -> None:
        """Record that a generator is lost; does nothing if it has ended."""
        one = self._replicas[number]
        if one.state not in ENDED:
            one.state = ReplicaState.DEAD
            self._settle()

    def promote(self) -> int | None:
        """Turn a healthy spare into a working generator; return its number, or None without a spare."""
        spares = [one for one in self.present if one.is_spare and one.state is ReplicaState.HEALTHY]
        if not spares:
            return None
        spare = min(spares, key=lambda one: one.rank)
        spare.is_spare = False
        return spare.number

    def assign(self, num_rollouts: int) -> int | None:
        """Assign rollouts to the healthy generator with the fewest; return its number, if there is one."""
        # This runs for every group, and there can be hundreds of generators.
        chosen: Replica | None = None
        for one in self._replicas.values():
            if one.state is not ReplicaState.HEALTHY or one.is_spare:
                continue
            if chosen is None or (one.num_live, one.rank) < (chosen.num_live, chosen.rank):
                chosen = one
        if chosen is None:
            return None
        chosen.num_live += num_rollouts
        return chosen.number

    def ended(self, number: int, num_rollouts: int) -> None:
        """Record that rollouts of a generator have ended, or are lost with it."""
        one = self._replicas[number]
        one.num_live -= num_rollouts
        assert one.num_live >= 0, "ended once"

    @property
    def working(self) -> tuple[Replica, ...]:
        """Generators that get groups, or will once they have started; by rank."""
        wanted = (one for one in self.present if not one.is_spare and one.state is not ReplicaState.DRAINING)
        return tuple(sorted(wanted, key=lambda one: one.rank))

    def of(self, number: int) -> Replica:
        """Return the entry of a generator, also after its end."""
        return self._replicas[number]

    @property
    def present(self) -> tuple[Replica, ...]:
        """All generators that have not ended."""
        return tuple(one for one in self._replicas.values() if one.state not in ENDED)

    @property
    def ended_numbers(self) -> tuple[int, ...]:
        """Numbers of the generators that have ended."""
        return tuple(one.number for one in self._replicas.values() if one.state in ENDED)

    def count(self, state: ReplicaState) -> int:
        """Return the number of generators in a state."""
        return sum(one.state is state for one in self._replicas.values())

    @property
    def has_healthy(self) -> bool:
        return any(one.state is ReplicaState.HEALTHY for one in self.present)

    def all_have(self, version: int) -> bool:
        """Return whether there are healthy generators and all of them have ``version``."""
        healthy = [one.version for one in self.present if one.state is ReplicaState.HEALTHY]
        return bool(healthy) and min(healthy) == version

    def _heal(self, one: Replica) -> None:
        one.state, one.was_healthy = ReplicaState.HEALTHY, True
        self._settle()

    def _settle(self) -> None:
        healthy = [one.version for one in self.present if one.state is ReplicaState.HEALTHY]
        if healthy:
            assert min(healthy) >= self.served, "what is served never goes back"
            self.served = min(healthy)


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
