"""Spreads requests over generators: each goes to the healthy one with the fewest rollouts in flight.

What a generator was sampling when it was lost is continued by another, from the tokens that it has logged;
what is not trained on is sampled again. A group that takes longer than its limit is sampled again too: the
same prompt with the same seed. Both have a budget, after which the group is given up.
"""

import asyncio
import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TypeVar

import numpy as np
from monarch.actor import Channel, Port, PortReceiver

from forgeasync.buffer import DropReason
from forgeasync.config import ModelFacts, RoutingReplay, RunConfig, SamplingSection, TimeoutSection
from forgeasync.environments import Response
from forgeasync.generator import EngineStats
from forgeasync.planning import Machine, count_parameters, generator_memory, least_bytes, total_bytes
from forgeasync.rollouts import CaptureSpec, EpisodeId, StoredRollout
from forgeasync.runtime.generator import (
    CancelledGroup,
    EndedEpisode,
    FinishedResponse,
    GeneratorActor,
    GeneratorSetup,
    RefusedGroup,
    SampledResponse,
)
from forgeasync.runtime.generator_pool import GeneratorPool, LiveReplica, sampling_group, spawn_engine
from forgeasync.runtime.generator_weights import (
    HostUpdates,
    SwappedReplica,
    WeightConnections,
)
from forgeasync.runtime.jobs import HostRole
from forgeasync.runtime.process_manager import GENERATOR, ProcessManager, make_folders
from forgeasync.runtime.supervised import ProcessLost, Spawned
from forgeasync.waiting import DeadlineExceeded, deadline, forget
from forgeasync.weights import (
    FetchReport,
    Manifest,
    StagingSource,
    WeightLayout,
)

OnFinished = Callable[[int, Response], None]
"""Is told of a response and of its place in its group."""


@contextmanager
def told_of_finished(on_finished: OnFinished | None) -> Iterator[Port[FinishedResponse] | None]:
    """While it lasts, ``on_finished`` is called for what is sent to the port; None where nobody wants it."""
    if on_finished is None:
        yield None
        return
    port, receiver = Channel[FinishedResponse].open()
    telling = asyncio.create_task(_tell(receiver, on_finished))
    try:
        yield port
    finally:
        telling.cancel()
        telling.add_done_callback(forget)


async def _tell(receiver: PortReceiver[FinishedResponse], on_finished: OnFinished) -> None:
    while True:
        one = await receiver.recv()
        on_finished(one.index, one.response)


T = TypeVar("T")

MAX_LATE = 2
"""So often a group that took longer than ``timeouts.generate_s`` is sampled again."""

CANCEL_S = 10.0
"""Time for a group to end on a generator that was told to give it up."""


class GroupGivenUp(RuntimeError):
    """A request has used up its budget."""

    def __init__(self, problem: str, reason: DropReason) -> None:
        super().__init__(problem)
        self.reason = reason


class GeneratorRouter:
    """All generators of a run as one."""

    def __init__(self, pool: GeneratorPool, timeouts: TimeoutSection, *, max_lost_per_group: int) -> None:
        self.pool = pool
        self._timeouts = timeouts
        self._max_lost_per_group = max_lost_per_group
        self._connections = WeightConnections(pool, timeouts)
        self._updates = [HostUpdates(pool, host.id, timeouts) for host in pool.hosts]
        self._cancelled: dict[int, bool] = {}
        """Groups that are being sampled, and whether they were given up meanwhile."""
        self._num_moved = self._num_late = 0

    async def sample_group(
        self,
        group_id: int,
        prompt_ids_P: np.ndarray,
        *,
        num_samples: int,
        sampling: SamplingSection,
        seed: int | None = None,
        on_finished: OnFinished | None = None,
    ) -> tuple[StoredRollout, ...] | RefusedGroup | CancelledGroup:
        """Sample a group of responses to one prompt; its arrays stay with the generator until freed.

        A seed makes them reproducible. A group whose generators are lost, or take longer than
        ``timeouts.generate_s``, again and again is refused. ``on_finished`` gets every response that ends
        while others of the group go on; it comes again if its generator is lost.
        """

        def call(
            replica: LiveReplica, continued: bytes | None
        ) -> Awaitable[tuple[StoredRollout, ...] | RefusedGroup | CancelledGroup]:
            return replica.actor.sample_group.call_one(
                group_id, prompt_ids_P, num_samples, sampling, seed, continued, finished
            )

        what = f"sampling group {group_id}"
        with self.cancellable(group_id) as is_cancelled, told_of_finished(on_finished) as finished:
            try:
                return await self._retried(what, num_samples, call, group_id=group_id)
            except GroupGivenUp as given_up:
                if is_cancelled():
                    return CancelledGroup()
                return RefusedGroup(problem=str(given_up), reason=given_up.reason)

    async def respond(
        self,
        prompt_ids_P: np.ndarray,
        *,
        num_samples: int,
        sampling: SamplingSection,
        seed: int | None = None,
    ) -> tuple[SampledResponse, ...]:
        """Responses to one prompt that are not trained on; a seed makes them reproducible.

        Raises:
            GroupGivenUp: generators were lost over it, or took longer than ``timeouts.generate_s``, again
                and again.
        """

        def call(replica: LiveReplica, continued: bytes | None) -> Awaitable[tuple[SampledResponse, ...]]:
            return replica.actor.respond.call_one(prompt_ids_P, num_samples, sampling, seed)

        return await self._retried(f"answering a prompt of {len(prompt_ids_P)} tokens", num_samples, call)

    async def _retried(
        self,
        what: str,
        num_samples: int,
        call: Callable[[LiveReplica, bytes | None], Awaitable[T]],
        *,
        group_id: int | None = None,
    ) -> T:
        """Make a call to one generator after the other, until one has answered.

        ``call`` is given what the one before had of the group.

        Raises:
            GroupGivenUp: the budget is used up, or the group was cancelled between two generators.
        """
        num_lost = num_late = 0
        continued: bytes | None = None
        while True:
            if group_id is not None and self._cancelled[group_id]:
                raise GroupGivenUp(f"{what} was cancelled", DropReason.CANCELLED)
            async with self._sampling(num_samples, group_id) as replica:
                answer = asyncio.ensure_future(replica.call(functools.partial(call, replica, continued)))
                try:
                    async with deadline(
                        self._timeouts.generate_s,
                        call=f"generator {replica.rank} {what}",
                        key="timeouts.generate_s",
                    ):
                        return await asyncio.shield(answer)
                except ProcessLost as lost:
                    num_lost += 1
                    self._num_moved += 1
                    if num_lost >= self._max_lost_per_group:
                        problem = f"{what}: {lost}, as {num_lost - 1} before it"
                        raise GroupGivenUp(problem, DropReason.LOST) from lost
                    if group_id is not None:
                        # One that was lost before it had begun has left nothing.
                        left = await asyncio.shield(replica.left)
                        continued = left.groups.get(group_id, continued)
                except DeadlineExceeded as late:
                    num_late += 1
                    self._num_late += 1
                    # What took so long may lie in what was sampled.
                    continued = None
                    if group_id is not None:
                        await self._end_late(replica, group_id, answer)
                    if num_late > MAX_LATE:
                        raise GroupGivenUp(f"{late}; so often already: {num_late}", DropReason.LATE) from late
                finally:
                    answer.add_done_callback(forget)
                    answer.cancel()

    @asynccontextmanager
    async def _sampling(self, num_samples: int, group_id: int | None) -> AsyncIterator[LiveReplica]:
        async with self.pinned(num_samples) as replica:
            with sampling_group(replica, group_id):
                yield replica

    async def _end_late(self, replica: LiveReplica, group_id: int, answer: "asyncio.Future[T]") -> None:
        """Have a generator give up a group that is late, before it is sampled anew."""
        await self._cancel(replica, [group_id])
        await asyncio.wait([answer], timeout=CANCEL_S)

    async def cancel_groups(self, group_ids: Sequence[int]) -> None:
        """Give up groups wherever they are sampled."""
        for group_id in self._cancelled.keys() & set(group_ids):
            self._cancelled[group_id] = True
        await asyncio.gather(*(self._cancel(one, group_ids) for one in self.pool.replicas))

    async def _cancel(self, replica: LiveReplica, group_ids: Sequence[int]) -> None:
        await self._tolerantly(replica, lambda: replica.actor.cancel_groups.call_one(group_ids))

    async def free_payloads(self, rollouts: Iterable[StoredRollout]) -> None:
        """Free the arrays of whole groups, all rollouts of each, that nobody will read any more.

        What a generator has left that is gone is freed by the one that has its place, else by its host.
        """
        by_place: dict[tuple[str, int], dict[str, None]] = {}
        for rollout in rollouts:
            ref = rollout.branches[0].response
            by_place.setdefault((ref.host_id, rollout.generator_rank), {})[ref.file] = None
        await asyncio.gather(
            *(self._free(host_id, rank, list(files)) for (host_id, rank), files in by_place.items())
        )

    async def _free(self, host_id: str, rank: int, files: list[str]) -> None:
        replica = self.pool.at(rank)
        if replica is not None and replica.host.id == host_id:
            if await self._tolerantly(replica, lambda: replica.actor.free_payloads.call_one(files)):
                return
        host = next((host for host in self.pool.hosts if host.id == host_id), None)
        # What a host that is gone had in its memory is gone as well.
        if host is not None:
            await host.remove_files(files)

    async def _tolerantly(self, replica: LiveReplica, call: Callable[[], Awaitable[None]]) -> bool:
        """Make a small call to a generator; false if it is gone, or does not answer and is given up."""
        limit_s = self._timeouts.weights_s
        try:
            async with deadline(limit_s, call="a small call", key="timeouts.weights_s"):
                await replica.call(call)
        except ProcessLost:
            return False
        except DeadlineExceeded:
            replica.lose(f"has not answered a small call for timeouts.weights_s = {limit_s:g} s")
            return False
        return True

    @contextmanager
    def cancellable(self, group_id: int) -> Iterator[Callable[[], bool]]:
        """Within the block, what it is given says whether the group was given up meanwhile."""
        self._cancelled[group_id] = False
        try:
            yield lambda: self._cancelled[group_id]
        finally:
            del self._cancelled[group_id]

    async def restore_episodes(
        self, replica: LiveReplica, group_id: int, data: bytes
    ) -> Mapping[EpisodeId, frozenset[int]] | CancelledGroup:
        """Have one generator take over the episodes of a group; see ``GeneratorActor.restore_episodes``.

        Raises:
            ProcessLost: it is gone.
        """
        self._num_moved += 1
        call = f"generator {replica.rank} taking over the episodes of group {group_id}"
        async with deadline(self._timeouts.generate_s, call=call, key="timeouts.generate_s"):
            return await replica.call(lambda: replica.actor.restore_episodes.call_one(group_id, data))

    async def store_episodes(
        self, replica: LiveReplica, group_id: int, ended: Sequence[EndedEpisode]
    ) -> tuple[StoredRollout, ...] | RefusedGroup:
        """Have one generator store what was sampled in these episodes of a group, and close the group.

        Raises:
            ProcessLost: it is gone.
        """
        call = f"generator {replica.rank} storing the episodes of group {group_id}"
        async with deadline(self._timeouts.generate_s, call=call, key="timeouts.generate_s"):
            return await replica.call(lambda: replica.actor.store_episodes.call_one(group_id, ended))

    async def drop_episode(self, replica: LiveReplica, episode: EpisodeId) -> None:
        """Have one generator forget one attempt at an episode; no error if it is gone."""
        await self._tolerantly(replica, lambda: replica.actor.drop_episode.call_one(episode))

    async def drop_episodes(self, replica: LiveReplica, group_id: int) -> None:
        """Have one generator forget the episodes of a group; no error if it is gone."""
        await self._tolerantly(replica, lambda: replica.actor.drop_episodes.call_one(group_id))

    async def kv_usage(self, replica: LiveReplica) -> float:
        """Share of one generator's KV cache that running requests hold.

        Raises:
            ProcessLost: it is gone.
        """
        call = f"asking generator {replica.rank} how full its KV cache is"
        async with deadline(self._timeouts.generate_s, call=call, key="timeouts.generate_s"):
            return await replica.call(lambda: replica.actor.kv_usage.call_one())

    @asynccontextmanager
    async def pinned(self, num_samples: int) -> AsyncIterator[LiveReplica]:
        """The healthy generator with the least to do, which counts as busy with so many rollouts.

        Waits while there is none.
        """
        replica = await self.pool.assigned(num_samples)
        try:
            yield replica
        finally:
            self.pool.table.change(lambda table: table.ended(replica.number, num_samples))

    @property
    def num_replicas(self) -> int:
        """Generators that have not been lost."""
        return len(self.pool.replicas)

    @property
    def actors(self) -> Mapping[str, tuple[GeneratorActor, ...]]:
        """The generators' actors by host: all of a host show what lies in its shared memory."""
        actors: dict[str, tuple[GeneratorActor, ...]] = {}
        for one in self.pool.replicas:
            actors[one.host.id] = (*actors.get(one.host.id, ()), one.actor)
        return actors

    def known(self) -> tuple[tuple[GeneratorActor, ...], tuple[int, ...]]:
        """The generators that there are, and the numbers of those that are gone."""
        return tuple(one.actor for one in self.pool.replicas), self.pool.table.state.ended_numbers

    @property
    def num_hosts(self) -> int:
        return len(self._updates)

    def lowest_version(self, host: int) -> int:
        """The oldest version that a generator of a host has; it must have some."""
        return self.pool.table.state.lowest_version(self.pool.hosts[host].id)

    async def until_behind(self, host: int) -> None:
        """Wait until a host has a generator that does not have the newest version."""
        host_id = self.pool.hosts[host].id
        await self.pool.table.until(lambda table: table.is_behind(host_id))

    async def until_all_have(self, version: int) -> None:
        """Wait until there are healthy generators and all of them sample under ``version``."""
        await self.pool.table.until(lambda table: table.all_have(version))

    async def until_served(self, newer_than: int) -> int:
        """Wait until all healthy generators have a version newer than that; returns what they serve."""
        return await self.pool.table.until(lambda table: table.served if table.served > newer_than else None)

    def published(self, version: int) -> None:
        """A version can be fetched: generators that join have to take it."""
        self.pool.table.change(lambda table: table.published(version))

    async def connect_weights(
        self, layout: WeightLayout, sources: Sequence[StagingSource], folders: Sequence[Path]
    ) -> list[str]:
        """Let every generator plan how versions get into its engine; see ``WeightConnections.connect``."""
        return await self._connections.connect(layout, sources, folders)

    async def reconnect_weights(self, layout: WeightLayout, sources: Sequence[StagingSource]) -> None:
        """Have every generator read from the buffers of a trainer that was started again."""
        await self._connections.reconnect(layout, sources)

    async def begin_update(self, host: int, manifest: Manifest) -> FetchReport | None:
        """Have the generators of a host fetch a leased version; see ``HostUpdates.begin``."""
        return await self._updates[host].begin(manifest)

    async def finish_update(self, host: int, version: int) -> list[SwappedReplica]:
        """Wait until generators of a host sample under a version; see ``HostUpdates.finish``."""
        return await self._updates[host].finish(version)

    def taken(self, number: int) -> None:
        """Count a generator as one that samples under the version that it has swapped in."""
        self.pool.table.change(lambda table: table.updated(number))
        self.pool.look_for_healed()

    async def stats(self) -> list[EngineStats]:
        """Counters of every engine since it started; one entry is of all that were lost."""

        async def ask(one: LiveReplica) -> EngineStats | None:
            try:
                async with deadline(self._timeouts.weights_s, call="counters", key="timeouts.weights_s"):
                    return await one.call(lambda: one.actor.stats.call_one())
            except (ProcessLost, DeadlineExceeded):
                return None

        replicas = self.pool.replicas
        for one, stats in zip(replicas, await asyncio.gather(*map(ask, replicas)), strict=True):
            if stats is not None:
                self.pool.heard(one, stats)
        return self.pool.stats()

    def metrics(self) -> dict[str, float]:
        """Return counts since the run began, and current values, under their names in metrics.jsonl."""
        return dict(self.pool.metrics()) | {
            "generator/num_moved_groups": self._num_moved,
            "generator/num_late_groups": self._num_late,
        }


async def start_generators(
    procs: ProcessManager, config: RunConfig, facts: ModelFacts, model_path: Path
) -> GeneratorRouter:
    """Start the generators, with their engines loaded, behind a router that replaces those that are lost."""
    section = config.generator
    capacity_bytes = int(config.payload.capacity_gib * 2**30)
    procs.hosts.allot(HostRole.GENERATORS, section.num_engines, gpus_per_proc=section.tensor_parallel)
    hosts = procs.hosts.of_procs(HostRole.GENERATORS, section.num_engines)
    # All generators together hold no more than that: on every host it is asked for once.
    ids = [host.id for host in hosts]
    sizes = [capacity_bytes if ids.index(name) == index else 0 for index, name in enumerate(ids)]
    folders = procs.payload_folders = await make_folders(hosts, sizes)
    setup = GeneratorSetup(
        model_path=model_path,
        facts=facts,
        section=section,
        max_context_length=config.model.max_context_length,
        seed=config.seed,
        records=CaptureSpec(
            routing=config.trainer.routing_replay is not RoutingReplay.OFF,
            kept_tokens=config.trainer.keep_sampling_mask and config.sampling.cuts_vocabulary,
            num_dense_layers=facts.num_dense_layers,
        ),
        weights=config.weights,
        lora=config.lora,
        payload_capacity_bytes=capacity_bytes,
        gpu_bytes=least_bytes(
            total_bytes(generator_memory(config, facts, count_parameters(facts), Machine.GPU))
        ),
    )

    folder_of = dict(zip(ids, folders, strict=True))

    async def spawn(rank: int, number: int) -> Spawned[GeneratorActor]:
        # More ranks may be added later.
        name, host = f"{GENERATOR}{rank}-{number}", pool.host_of(rank)
        return await spawn_engine(
            procs,
            config,
            HostRole.GENERATORS,
            name,
            rank,
            host,
            call=f"loading the engine of generator {rank}",
            spawn=lambda mesh: mesh.spawn(name, GeneratorActor, procs.log_dir, rank),
            set_up=lambda actor: actor.setup.call_one(setup, host.id, folder_of[host.id]),
        )

    pool = GeneratorPool(spawn, section, hosts, faults=procs.faults, listing=procs.listing)
    procs.generators = pool
    call = "loading the generators' engines"
    async with deadline(config.timeouts.setup_s, call=call, key="timeouts.setup_s"):
        await pool.start(len(hosts))
    return GeneratorRouter(pool, config.timeouts, max_lost_per_group=section.max_lost_per_group)
