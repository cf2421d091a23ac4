"""Whether generators answer, and whether they are slow beyond their peers; by their heartbeats."""

import asyncio
import time
from collections.abc import Callable, Iterable

from forgeasync.actors.replica import LiveReplica, is_engine_dead
from forgeasync.config import GeneratorSection
from forgeasync.faults import LIVE, Pace, ReplicaTable, SlowReplicas
from forgeasync.generator import EngineStats
from forgeasync.waiting import Monitor, forget

LOOK_S = 0.5
"""Seconds between two looks at the generators."""

BEAT_S = 1.0
"""Seconds between two heartbeats of a generator."""

SUSPECT_SHARE = 0.5
"""A generator whose answer takes so much of ``generator.heartbeat_s`` gets no new groups until it comes."""

STALL_S = 1.0
"""A look that comes later than this says that the controller itself stood still, not the generators."""


class ReplicaHealth:
    """Looks at the heartbeats of generators: ``begin_look`` at all of them, then ``look_at`` each."""

    def __init__(
        self,
        section: GeneratorSection,
        table: Monitor[ReplicaTable],
        heard: Callable[[LiveReplica, EngineStats], None],
    ) -> None:
        """``heard`` takes in what a generator has counted."""
        self._heartbeat_s = section.heartbeat_s
        self._slow_factor = section.slow_factor
        self._slow = None if section.slow_factor is None else SlowReplicas(section.slow_factor)
        self._table = table
        self._heard = heard
        self._looked_s = time.monotonic()

    def begin(self) -> None:
        """The looks begin now."""
        self._looked_s = time.monotonic()

    def begin_look(self, replicas: Iterable[LiveReplica]) -> None:
        """Do not hold against generators that this process stood still; compare their paces."""
        now_s = time.monotonic()
        late_s = now_s - self._looked_s - LOOK_S
        self._looked_s = now_s
        if late_s > STALL_S:
            for replica in replicas:
                replica.beat_since_s += late_s
            if self._slow is not None:
                self._slow.restart()
        elif self._slow is not None:
            self._slow.judge(now_s=now_s)

    def look_at(self, replica: LiveReplica) -> str | None:
        """Look at one generator; returns what is wrong with it, if it is to be given up."""
        now_s = time.monotonic()
        if replica.beat is None:
            if now_s >= replica.beat_since_s:
                replica.beat_since_s = now_s
                replica.beat = asyncio.ensure_future(replica.actor.beat.call_one())
                replica.beat.add_done_callback(forget)
        elif replica.beat.done():
            error = replica.beat.exception()
            if error is None:
                self._take_in(replica, replica.beat.result(), now_s)
            elif is_engine_dead(error):
                return "has an engine that has died"
            replica.beat, replica.beat_since_s = None, now_s + BEAT_S
        elif now_s - replica.beat_since_s > self._heartbeat_s:
            return f"has not answered for generator.heartbeat_s = {self._heartbeat_s:g} s"
        elif now_s - replica.beat_since_s > SUSPECT_SHARE * self._heartbeat_s:
            self._suspect(replica, "it does not answer")
        return self._slowness(replica)

    def _take_in(self, replica: LiveReplica, stats: EngineStats, now_s: float) -> None:
        self._heard(replica, stats)
        if self._slow is not None and self._table.state.of(replica.number).state in LIVE:
            counts = {load: (one.num_steps, one.took_s) for load, one in stats.decode_steps.items()}
            self._slow.heard(replica.number, counts, now_s=now_s)
        if self._slow is None or self._slow.pace(replica.number) is Pace.LIKE_PEERS or self._is_idle(replica):
            # One that is slow and has nothing to do is given groups: nothing else shows whether it still is.
            self._table.change(lambda table: table.clear(replica.number))

    def _is_idle(self, replica: LiveReplica) -> bool:
        return self._table.state.of(replica.number).num_live == 0

    def _slowness(self, replica: LiveReplica) -> str | None:
        if self._slow is None or (ratio := self._slow.ratio(replica.number)) is None:
            return None
        what = f"its steps take {ratio:.1f} times as long as those of its peers"
        match self._slow.pace(replica.number):
            case Pace.SLOW:
                return f"is slow: {what} (generator.slow_factor = {self._slow_factor:g})"
            case Pace.SUSPECT if not self._is_idle(replica):
                self._suspect(replica, f"it is slow: {what}")
        return None

    def _suspect(self, replica: LiveReplica, why: str) -> None:
        self._table.change(lambda table: table.suspect(replica.number, why))

    def forget(self, replica: LiveReplica) -> None:
        """A generator is gone."""
        if replica.beat is not None:
            replica.beat.cancel()
        if self._slow is not None:
            self._slow.forget(replica.number)
