"""Which generators there are, and which of them may be given a group: a pure state machine.

    starting ──► stale ──► healthy ◄──► suspect
        └──────────────────►  │            │          every state but the last two:
                              ▼            ▼             ──► dead (its process is gone, or was killed)
                           draining ──► removed

A generator starts with version 0, the model folder. It is healthy at once if no version was published yet.
Otherwise it is stale until an update has ended that took the version which was the newest when it began, and
that is not older than what all healthy generators are known to serve. So the version that is served, the
lowest of the healthy ones, never goes back. Only healthy generators that are no spares are given groups.
"""

from dataclasses import dataclass, field
from enum import StrEnum


class ReplicaState(StrEnum):
    """What a generator can be asked to do."""

    STARTING = "starting"
    STALE = "stale"
    """It is up, but its weights are not yet the newest."""
    HEALTHY = "healthy"
    SUSPECT = "suspect"
    """It does not answer, or is slow beyond its peers: it keeps its groups and gets no new ones."""
    DRAINING = "draining"
    """It is to be removed, and ends its groups."""
    DEAD = "dead"
    REMOVED = "removed"


LIVE = frozenset({ReplicaState.STALE, ReplicaState.HEALTHY, ReplicaState.SUSPECT, ReplicaState.DRAINING})
"""States of generators that answer calls and take versions."""

ENDED = frozenset({ReplicaState.DEAD, ReplicaState.REMOVED})


@dataclass(slots=True, kw_only=True)
class Replica:
    """What the table knows of one generator."""

    number: int
    rank: int
    """Its place: a generator that replaces another has the other's."""
    host: str
    is_spare: bool
    state: ReplicaState = ReplicaState.STARTING
    why: str = ""
    """Reason of the last change of state."""
    version: int = 0
    updating_to: int | None = None
    """Version of the update under way."""
    num_live: int = 0
    """Rollouts under way."""
    was_healthy: bool = False


@dataclass(slots=True)
class ReplicaTable:
    """The generators by their numbers, which are never used twice."""

    newest: int = 0
    """The newest version that was published."""
    served: int = 0
    """The highest version that all healthy generators have had at once, or a newer one."""
    num_lost: int = 0
    num_removed: int = 0
    num_suspected: int = 0
    """How often one became suspect."""
    _replicas: dict[int, Replica] = field(default_factory=dict)
    _by_host: dict[str, list[Replica]] = field(default_factory=dict)
    """Those of each host, also those that are gone."""
    _next_number: int = 0

    def start(self, rank: int, host: str, *, is_spare: bool = False) -> int:
        """A generator is being started at a place that nobody has; returns its number."""
        assert all(one.rank != rank for one in self.present), f"rank {rank} is taken"
        number = self._next_number
        self._next_number += 1
        one = Replica(number=number, rank=rank, host=host, is_spare=is_spare)
        self._replicas[number] = one
        self._by_host.setdefault(host, []).append(one)
        return number

    def ready(self, number: int) -> None:
        """A generator is up with version 0; no news if it is gone already."""
        one = self._replicas[number]
        if one.state in ENDED:
            return
        assert one.state is ReplicaState.STARTING
        if self.newest == 0:
            self._heal(one, "it has the weights that the run begins with")
        else:
            one.state, one.why = ReplicaState.STALE, f"it has version 0, the newest is {self.newest}"

    def published(self, version: int) -> None:
        """A version can be fetched."""
        self.newest = max(self.newest, version)

    def behind(self, host: str, version: int) -> tuple[int, ...]:
        """The live generators of a host that have an older version."""
        return tuple(
            one.number for one in self._by_host.get(host, ()) if one.state in LIVE and one.version < version
        )

    def is_behind(self, host: str) -> bool:
        """Whether a host has a generator that does not have the newest version."""
        return bool(self.behind(host, self.newest))

    def lowest_version(self, host: str) -> int:
        """The oldest version that a live generator of a host has; there must be one."""
        return min(one.version for one in self._by_host[host] if one.state in LIVE)

    def begin_update(self, number: int, version: int) -> None:
        """A generator fetches the newest version."""
        one = self._replicas[number]
        assert one.state in LIVE and one.version < version <= self.newest
        one.updating_to = version

    def abandon_update(self, number: int) -> None:
        """The update has failed: a generator keeps its weights."""
        self._replicas[number].updating_to = None

    def updated(self, number: int) -> None:
        """A generator samples under the version of its update; no news if it is gone already."""
        one = self._replicas[number]
        version, one.updating_to = one.updating_to, None
        if one.state in ENDED:
            return
        assert version is not None, "an update was begun"
        one.version = version
        if one.state is ReplicaState.STALE and version >= self.served:
            self._heal(one, f"it has taken version {version}")
        self._settle()

    def suspect(self, number: int, why: str) -> None:
        """A healthy generator gets no new groups until ``clear``."""
        one = self._replicas[number]
        if one.state is ReplicaState.HEALTHY:
            one.state, one.why = ReplicaState.SUSPECT, why
            self.num_suspected += 1
            self._settle()

    def clear(self, number: int) -> None:
        """A suspect generator is as its peers again."""
        one = self._replicas[number]
        if one.state is not ReplicaState.SUSPECT:
            return
        if one.version >= self.served:
            self._heal(one, "it is as its peers again")
        else:
            one.state, one.why = ReplicaState.STALE, f"version {self.served} is served"

    def drain(self, number: int, why: str) -> None:
        """A generator gets no more groups, to be removed when it has none."""
        one = self._replicas[number]
        if one.state in LIVE:
            one.state, one.why = ReplicaState.DRAINING, why
            self._settle()

    def remove(self, number: int) -> None:
        """A generator that was drained is gone."""
        one = self._replicas[number]
        assert one.state is ReplicaState.DRAINING, one.state
        one.state = ReplicaState.REMOVED
        self.num_removed += 1

    def lose(self, number: int, why: str) -> bool:
        """A generator is gone; false if it was already."""
        one = self._replicas[number]
        if one.state in ENDED:
            return False
        one.state, one.why = ReplicaState.DEAD, why
        self.num_lost += 1
        self._settle()
        return True

    def promote(self) -> int | None:
        """Let a healthy spare be given groups; None if there is none."""
        spares = [one for one in self.present if one.is_spare and one.state is ReplicaState.HEALTHY]
        if not spares:
            return None
        spare = min(spares, key=lambda one: one.rank)
        spare.is_spare = False
        return spare.number

    def assign(self, num_rollouts: int) -> int | None:
        """Give rollouts to the generator with the fewest of them; None while none may be given any."""
        # Every group comes here, and there can be hundreds of generators.
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
        """Rollouts of a generator have ended, or are lost with it."""
        one = self._replicas[number]
        one.num_live -= num_rollouts
        assert one.num_live >= 0, "ended once"

    @property
    def working(self) -> tuple[Replica, ...]:
        """Those that are wanted for groups, also while they start; by rank."""
        wanted = (one for one in self.present if not one.is_spare and one.state is not ReplicaState.DRAINING)
        return tuple(sorted(wanted, key=lambda one: one.rank))

    def may_take_groups(self, number: int) -> bool:
        """Whether a generator may be given a group now."""
        one = self._replicas[number]
        return one.state is ReplicaState.HEALTHY and not one.is_spare

    def of(self, number: int) -> Replica:
        """What is known of a generator, also of one that is gone."""
        return self._replicas[number]

    @property
    def present(self) -> tuple[Replica, ...]:
        """All that are not gone."""
        return tuple(one for one in self._replicas.values() if one.state not in ENDED)

    @property
    def ended_numbers(self) -> tuple[int, ...]:
        """Numbers of those that are gone."""
        return tuple(one.number for one in self._replicas.values() if one.state in ENDED)

    def count(self, state: ReplicaState) -> int:
        """How many are in a state."""
        return sum(one.state is state for one in self._replicas.values())

    @property
    def has_healthy(self) -> bool:
        return any(one.state is ReplicaState.HEALTHY for one in self.present)

    def all_have(self, version: int) -> bool:
        """Whether there are healthy generators, and all of them have that version."""
        healthy = [one.version for one in self.present if one.state is ReplicaState.HEALTHY]
        return bool(healthy) and min(healthy) == version

    def _heal(self, one: Replica, why: str) -> None:
        one.state, one.why, one.was_healthy = ReplicaState.HEALTHY, why, True
        self._settle()

    def _settle(self) -> None:
        healthy = [one.version for one in self.present if one.state is ReplicaState.HEALTHY]
        if healthy:
            assert min(healthy) >= self.served, "what is served never goes back"
            self.served = min(healthy)
