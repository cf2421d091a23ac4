"""Versions of the weights on their way to simulated generators.

The order of things is that of ``forgeasync.controller.serving``: one version is staged at a time, each host
fetches the newest one whenever it is behind, and its generators swap together. Who may write and read which
staging buffer is decided by the real ledger, and which generator has what by the real table.
"""

from collections.abc import Callable

from forgeasync.config import Interruption, KvAfterSwap, WeightsSection
from forgeasync.profile import Cores, WeightTimes
from forgeasync.rollouts import GroupProgress
from forgeasync.simulation.clock import Clock
from forgeasync.simulation.draws import Draws
from forgeasync.simulation.generators import Generators
from forgeasync.weights import Manifest, WeightLedger

_RECOMPUTING = (Interruption.ABORT_AND_RESUME,)


class Serving:
    """Publishes and serves versions. ``on_served`` is told what all generators have, after ``on_progress``
    was told of the groups that cross the swap."""

    def __init__(
        self,
        section: WeightsSection,
        times: WeightTimes,
        generators: Generators,
        clock: Clock,
        draws: Draws,
        *,
        num_hosts: int,
        cores: Cores,
        on_progress: Callable[[list[GroupProgress]], None],
        on_served: Callable[[int], None],
    ) -> None:
        """One thread of the trainer stages, and one of each generator fetches: they keep one core busy where
        these compute on ``cores``."""
        self._section = section
        self._times = times
        self._generators = generators
        self._clock = clock
        self._draws = draws
        self._staging_cores = min(1.0, cores.trainer)
        self._fetching_cores = min(1.0, cores.generator)
        self._on_progress = on_progress
        self._on_served = on_served
        self.ledger = WeightLedger(lease_timeout_s=section.lease_timeout_s)
        self._is_busy = [False] * num_hosts
        self._wanted: list[Callable[[], None]] = []
        self._is_publishing = False
        self._version = 0
        self._told = 0
        self._swapping: dict[int, set[int]] = {}
        """By host, the generators that have fetched a version and do not sample under it yet."""
        generators.on_change = self._generators_changed

    def publish(self, version: int, begun: Callable[[], None]) -> None:
        """Have the trainer's weights, now of this version, staged; ``begun`` when training may go on."""
        self._version = version
        self._wanted.append(begun)
        self._publish_next()

    def _publish_next(self) -> None:
        if self._is_publishing or not self._wanted:
            return
        begun = self._wanted.pop(0)
        slot = self.ledger.begin(self._clock.now_s)
        if slot is None:
            # Skipped and owed: generators read both staging buffers.
            begun()
            self._publish_next()
            return
        self._is_publishing = True
        version = self._version

        def wait_ended() -> None:
            # Planned first: what follows from going on may publish again.
            publish_s = self._draws.time_s(self._times.publish_s)
            self._clock.compute(publish_s, self._staging_cores, lambda: self._staged(version, slot))
            begun()

        self._clock.compute(self._draws.time_s(self._times.wait_s), self._staging_cores, wait_ended)

    def _staged(self, version: int, slot: int) -> None:
        manifest = Manifest(
            version=version, slot=slot, layout_digest="", checksums=(), waited_s=0.0, staging_s=0.0
        )
        self.ledger.commit(manifest)
        self._generators.table.published(version)
        self._is_publishing = False
        self._publish_next()
        self._look_at_all()

    def _generators_changed(self) -> None:
        for host in list(self._swapping):
            self._end_update(host)
        self._look_at_all()

    def _look_at_all(self) -> None:
        for host in range(len(self._is_busy)):
            self._look_at(host)
        self._tell()
        self._catch_up()

    def _look_at(self, host: int) -> None:
        """Have a host that is behind fetch the newest version."""
        table = self._generators.table
        if self._is_busy[host] or not table.is_behind(str(host)):
            return
        older = table.lowest_version(str(host))
        manifest = self.ledger.acquire(host, newer_than=older, now_s=self._clock.now_s)
        if manifest is not None:
            self._fetch(host, manifest.version)

    def _catch_up(self) -> None:
        """Publish what had to be skipped."""
        if self.ledger.is_owing and not self._is_publishing and self.ledger.can_begin(self._clock.now_s):
            self.publish(self._version, lambda: None)

    def _fetch(self, host: int, version: int) -> None:
        table = self._generators.table
        numbers = table.behind(str(host), version)
        for number in numbers:
            table.begin_update(number, version)
            if self._section.interruption is Interruption.BLOCKING:
                self._generators.engines[number].pause()
        self._is_busy[host] = True
        fetch_s = self._draws.time_s(self._times.fetch_s)
        cores = len(numbers) * self._fetching_cores
        self._clock.compute(fetch_s, cores, lambda: self._fetched(host, numbers, version))

    def _fetched(self, host: int, numbers: tuple[int, ...], version: int) -> None:
        self.ledger.release(host)
        engines = self._generators.engines
        there = [number for number in numbers if number in engines]
        if self._section.interruption is Interruption.BLOCKING:
            for number in there:
                engines[number].resume()
        if len(there) < len(numbers):
            # One was lost on the way: the others keep their weights, and the next update is without it.
            for number in there:
                self._generators.table.abandon_update(number)
            self._is_busy[host] = False
            self._look_at_all()
            return
        self._swapping[host] = set(there)
        for number in there:
            if self._section.interruption is Interruption.DRAIN:
                engines[number].drain(lambda number=number: self._swap(host, number, version))
            else:
                self._swap(host, number, version)
        self._catch_up()

    def _swap(self, host: int, number: int, version: int) -> None:
        stall_s = self._draws.time_s(self._times.swap_s)
        recompute = (
            self._section.kv_cache is KvAfterSwap.RECOMPUTE or self._section.interruption in _RECOMPUTING
        )
        progress = self._generators.swap(number, version, stall_s, recompute=recompute)
        self._clock.wall.after(stall_s, lambda: self._swapped(host, number, progress))

    def _swapped(self, host: int, number: int, progress: list[GroupProgress]) -> None:
        if number in self._generators.engines:
            # First: with it groups that run on become younger than their start says.
            self._on_progress(progress)
            self._generators.table.updated(number)
            self._swapping[host].discard(number)
            self._end_update(host)
        self._generators.assign()
        self._tell()

    def _end_update(self, host: int) -> None:
        """Let a host fetch again once all of its generators that are still there have swapped."""
        left = self._swapping[host]
        left &= self._generators.engines.keys()
        if not left:
            del self._swapping[host]
            self._is_busy[host] = False
            self._look_at(host)

    def _tell(self) -> None:
        if self._generators.table.served > self._told:
            self._told = self._generators.table.served
            self._on_served(self._told)
