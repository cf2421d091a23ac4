"""States of the generators, and the choice of the one that gets the next group. Pure.

The states:

    starting ──► stale ──► healthy        every state but the last two:
        └──────────────────►  │              ──► dead (its process has died, or was killed)
                              ▼
                           draining ──► removed

A generator starts with version 0, the model folder. It is healthy at once if no version was published yet.
Otherwise it is stale until an update has ended. The update loads the version that is the newest when it
begins; that version must not be older than the version that all healthy generators serve. So the served
version, the lowest of all healthy generators, never decreases. Only healthy generators get groups.
"""

from dataclasses import dataclass, field
from enum import StrEnum


class ReplicaState(StrEnum):
    """State of a generator, which determines whether it gets groups and updates."""

    STARTING = "starting"
    STALE = "stale"
    """It runs, but its weights are not the newest yet."""
    HEALTHY = "healthy"
    DRAINING = "draining"
    """It finishes its groups and is then removed."""
    DEAD = "dead"
    REMOVED = "removed"


LIVE = frozenset({ReplicaState.STALE, ReplicaState.HEALTHY, ReplicaState.DRAINING})
"""States in which generators answer calls and load versions."""

ENDED = frozenset({ReplicaState.DEAD, ReplicaState.REMOVED})


@dataclass(slots=True, kw_only=True)
class Replica:
    """Entry of one generator in the table."""

    number: int
    rank: int
    """Place of the generator; its replacement gets the same."""
    host: str
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

    def start(self, rank: int, host: str) -> int:
        """Add a generator that starts at a free place; return its number."""
        assert all(one.rank != rank for one in self.present), f"rank {rank} is taken"
        number = self._next_number
        self._next_number += 1
        one = Replica(number=number, rank=rank, host=host)
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

    def assign(self, num_rollouts: int) -> int | None:
        """Assign rollouts to the healthy generator with the fewest; return its number, if there is one."""
        # This runs for every group, and there can be hundreds of generators.
        chosen: Replica | None = None
        for one in self._replicas.values():
            if one.state is not ReplicaState.HEALTHY:
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
        wanted = (one for one in self.present if one.state is not ReplicaState.DRAINING)
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
        """Whether at least one replica is healthy."""
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
