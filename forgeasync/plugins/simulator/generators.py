"""Generators of a simulated run, and the transfer of new weights to them.

The real table of replicas chooses a generator for every group. Updates follow ``forgeasync.controller``: one
version is staged at a time, each host fetches the newest one whenever it is behind, and its generators swap
together. The real ledger decides who may write and read which staging buffer.
"""

from collections.abc import Callable

from forgeasync.config import KvAfterSwap
from forgeasync.plugins.simulator.engine import Clock, Engine, EngineCost, Sequence, SimulatedGroup
from forgeasync.plugins.simulator.profile import DecodeTable, Distribution, Profile
from forgeasync.plugins.simulator.shape import SimulatedRun
from forgeasync.rollouts import GroupProgress
from forgeasync.runtime import ReplicaTable
from forgeasync.weights import Manifest, WeightLedger


class Generators:
    """The engines by number, and the groups on them. They are healthy for the whole run."""

    def __init__(
        self,
        run: SimulatedRun,
        profile: Profile,
        clock: Clock,
        *,
        on_response: Callable[[SimulatedGroup, int], None],
    ) -> None:
        """``on_response`` is called when a response has ended, with its group and its index in the group."""
        self._run = run
        self._on_response = on_response
        self.decode = DecodeTable(profile.decode)
        cost = EngineCost(
            decode=self.decode,
            prefill_s_per_token=1.0 / profile.prefill_tokens_per_s.mean,
            kv_block_tokens=profile.kv_block_tokens,
            max_num_seqs=run.max_num_seqs,
            max_kv_tokens=run.max_kv_tokens,
            shares_prefixes=run.weights.prefix_cache_across_versions,
        )
        self.table = ReplicaTable()
        self._engines: dict[int, Engine] = {}
        self._groups: dict[int, dict[int, SimulatedGroup]] = {}
        """Groups by generator and group id."""
        per_host = run.num_replicas // run.num_generator_hosts
        for rank in range(run.num_replicas):
            number = self.table.start(rank, str(rank // per_host))
            self._engines[number] = Engine(number, cost, clock, self._ended)
            self._groups[number] = {}
            self.table.ready(number)

    @property
    def busy_s(self) -> float:
        """Seconds in which a generator had a sequence, summed over generators."""
        return sum(engine.total_busy_s for engine in self._engines.values())

    @property
    def num_preempted(self) -> int:
        """Number of sequences that generators had to recompute."""
        return sum(engine.num_preempted for engine in self._engines.values())

    def sample(self, group: SimulatedGroup) -> None:
        """Sample a group on the generator with the fewest rollouts."""
        number = self.table.assign(self._run.group_size)
        assert number is not None, "generators are healthy"
        group.engine = number
        self._groups[number][group.group_id] = group
        self._engines[number].add(group.sequences)

    def swap(self, number: int, version: int, stall_s: float, *, recompute: bool) -> list[GroupProgress]:
        """Let a generator sample with a new version; return the progress of its groups."""
        running = self._engines[number].swap(version, stall_s, recompute=recompute)
        return [
            GroupProgress(
                group_id=group_id,
                version=version,
                num_running=self._run.group_size - group.num_finished,
                num_tokens=running[group_id] + sum(one.num_sampled for one in group.sequences),
            )
            for group_id, group in self._groups[number].items()
        ]

    def _ended(self, sequence: Sequence) -> None:
        group = sequence.group
        group.num_finished += 1
        if group.num_finished == self._run.group_size:
            assert group.engine is not None
            del self._groups[group.engine][group.group_id]
            self.table.ended(group.engine, self._run.group_size)
        self._on_response(group, sequence.index)


class WeightUpdates:
    """Publishes versions and lets the generators load them.

    At a swap, ``on_progress`` is called with each group that crosses it, and then ``on_served`` with the
    version that all generators have. ``draw_s`` draws a service time.
    """

    def __init__(
        self,
        run: SimulatedRun,
        profile: Profile,
        generators: Generators,
        clock: Clock,
        draw_s: Callable[[Distribution], float],
        *,
        on_progress: Callable[[GroupProgress], None],
        on_served: Callable[[int], None],
    ) -> None:
        self._times = profile.weights
        self._recomputes = run.weights.kv_cache is KvAfterSwap.RECOMPUTE
        self._generators = generators
        self._clock = clock
        self._draw_s = draw_s
        self._on_progress = on_progress
        self._on_served = on_served
        self._ledger = WeightLedger(lease_timeout_s=run.weights.lease_timeout_s)
        self._is_updating = [False] * run.num_generator_hosts
        self._requests: list[Callable[[], None]] = []
        """Requested publications; each is called when the training loop may continue."""
        self._is_publishing = False
        self._version = 0
        self._served = 0
        self._num_swapping = [0] * run.num_generator_hosts
        """By host, the number of generators that have fetched a version but do not sample with it yet."""

    def publish(self, version: int, begun: Callable[[], None]) -> None:
        """Stage the trainer's weights as this version; call ``begun`` when training may continue."""
        self._version = version
        self._requests.append(begun)
        self._publish_next()

    def _publish_next(self) -> None:
        if self._is_publishing or not self._requests:
            return
        begun = self._requests.pop(0)
        slot = self._ledger.begin(self._clock.now_s)
        if slot is None:
            # Skip this version and publish later: generators read both staging buffers.
            begun()
            self._publish_next()
            return
        self._is_publishing = True
        version = self._version

        def wait_ended() -> None:
            # Scheduled before ``begun``, which may publish again.
            publish_s = self._draw_s(self._times.publish_s)
            self._clock.after(publish_s, lambda: self._staged(version, slot))
            begun()

        self._clock.after(self._draw_s(self._times.wait_s), wait_ended)

    def _staged(self, version: int, slot: int) -> None:
        manifest = Manifest(
            version=version, slot=slot, layout_digest="", checksums=(), waited_s=0.0, staging_s=0.0
        )
        self._ledger.commit(manifest)
        self._generators.table.published(version)
        self._is_publishing = False
        self._publish_next()
        for host in range(len(self._is_updating)):
            self._fetch_if_behind(host)
        self._catch_up()

    def _catch_up(self) -> None:
        """Publish a version that had to be skipped."""
        if self._ledger.is_owing and not self._is_publishing and self._ledger.can_begin(self._clock.now_s):
            self.publish(self._version, lambda: None)

    def _fetch_if_behind(self, host: int) -> None:
        """Let a host that is behind fetch the newest version."""
        table = self._generators.table
        if self._is_updating[host] or not table.is_behind(str(host)):
            return
        older = table.lowest_version(str(host))
        manifest = self._ledger.acquire(host, newer_than=older, now_s=self._clock.now_s)
        if manifest is None:
            return
        version = manifest.version
        numbers = table.behind(str(host), version)
        for number in numbers:
            table.begin_update(number, version)
        self._is_updating[host] = True
        self._clock.after(self._draw_s(self._times.fetch_s), lambda: self._fetched(host, numbers, version))

    def _fetched(self, host: int, numbers: tuple[int, ...], version: int) -> None:
        self._ledger.release(host)
        self._num_swapping[host] = len(numbers)
        for number in numbers:
            self._swap(host, number, version)
        self._catch_up()

    def _swap(self, host: int, number: int, version: int) -> None:
        stall_s = self._draw_s(self._times.swap_s)
        progress = self._generators.swap(number, version, stall_s, recompute=self._recomputes)
        self._clock.after(stall_s, lambda: self._swapped(host, number, progress))

    def _swapped(self, host: int, number: int, progress: list[GroupProgress]) -> None:
        # Progress comes first: it makes running groups younger than their start suggests.
        for one in progress:
            self._on_progress(one)
        table = self._generators.table
        table.updated(number)
        self._num_swapping[host] -= 1
        if not self._num_swapping[host]:
            self._is_updating[host] = False
            self._fetch_if_behind(host)
        if table.served > self._served:
            self._served = table.served
            self._on_served(self._served)
