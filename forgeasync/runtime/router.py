"""Routes requests to the generators of a run, and loads weight versions into them.

Each request goes to the healthy generator with the fewest rollouts in flight. If a generator is lost, another
one continues its groups from the tokens that it has logged; responses that are not trained on are sampled
again. A group that exceeds its time limit is also sampled again, with the same prompt and seed. Both have a
budget, after which the group is given up.

All generators of a host are updated together, because they share one receive buffer. An update includes the
live generators with an older version. If one of them is lost before all have staged their shares, the others
keep their weights, and the next update is made without it.
"""

import asyncio
import contextlib
import functools
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from monarch.actor import ActorError, Channel, Port

from forgeasync.buffer import DropReason
from forgeasync.config import (
    ModelFacts,
    RoutingReplay,
    RunConfig,
    SamplingSection,
    TimeoutSection,
    shares_gpus,
)
from forgeasync.environments import Response
from forgeasync.generator import EngineStats, SwapReport
from forgeasync.planning import Machine, count_parameters, generator_memory, least_bytes, total_bytes
from forgeasync.rollouts import CaptureSpec, EpisodeId, SampledTurn, StoredRollout
from forgeasync.runtime.generator import (
    CANCELLED,
    EndedEpisode,
    GeneratorActor,
    GeneratorSetup,
    RefusedGroup,
)
from forgeasync.runtime.generator_pool import GeneratorPool, LiveReplica, spawn_engine
from forgeasync.runtime.jobs import HostRole
from forgeasync.runtime.process_manager import GENERATOR, ProcessManager, make_folders
from forgeasync.runtime.replica_states import ReplicaTable
from forgeasync.runtime.supervised import ProcessLost, Spawned, call_limit
from forgeasync.waiting import DeadlineExceeded, deadline, forget
from forgeasync.weights import (
    FetchReport,
    HostShare,
    Manifest,
    StagingSource,
    WeightLayout,
    merge_host_reports,
)

OnFinished = Callable[[int, Response], None]
"""Callback with the index of a finished response within its group, and the response."""


@contextmanager
def finished_port(on_finished: OnFinished | None) -> Iterator[Port[tuple[int, Response]] | None]:
    """Yield a port that calls ``on_finished`` with every message, until the end of the body."""
    if on_finished is None:
        yield None
        return
    port, receiver = Channel[tuple[int, Response]].open()

    async def tell() -> None:
        while True:
            on_finished(*await receiver.recv())

    telling = asyncio.create_task(tell())
    try:
        yield port
    finally:
        telling.cancel()
        telling.add_done_callback(forget)


T = TypeVar("T")

MAX_LATE = 2
"""Maximum number of times that a group is sampled again after exceeding ``timeouts.generate_s``."""

CANCEL_S = 10.0
"""Time limit for a cancelled group to end on its generator, in seconds."""

SWAP_KEYS = ("weights_s", "generate_s")
"""Timeouts whose sum limits a swap: a generator with ``drain`` waits for its longest sequence."""

MAX_FAILED_FETCHES = 5
"""Number of consecutive failed fetches after which a generator is replaced; each retries bad blocks."""


class GroupGivenUp(RuntimeError):
    """A request has used up its retry budget."""

    def __init__(self, problem: str, reason: DropReason) -> None:
        super().__init__(problem)
        self.reason = reason


class GeneratorRouter:
    """Routes requests and weight versions to the generators of a run."""

    def __init__(self, pool: GeneratorPool, timeouts: TimeoutSection, *, max_lost_per_group: int) -> None:
        self.pool = pool
        self._timeouts = timeouts
        self._max_lost_per_group = max_lost_per_group
        self._cancelled: dict[int, bool] = {}
        """Groups in flight, and whether each was cancelled."""
        self._num_moved = self._num_late = 0
        self._taking_part: dict[int, tuple[int, ...]] = {}
        """Numbers of the generators in the current or last update, by host."""
        self._num_failed: Counter[int] = Counter()
        """Consecutive incomplete fetches, by the generator's number."""
        self._sources: Sequence[StagingSource] = ()
        """Addresses of the trainer's staging buffers; empty until weights are connected."""

    async def sample_group(
        self,
        group_id: int,
        prompt_ids_P: np.ndarray,
        *,
        num_samples: int,
        sampling: SamplingSection,
        seed: int | None = None,
        on_finished: OnFinished | None = None,
    ) -> tuple[StoredRollout, ...] | RefusedGroup:
        """Sample a group of responses to one prompt; its arrays stay with the generator until freed.

        With a seed the responses are reproducible. A group is refused if its generators are lost, or exceed
        ``timeouts.generate_s``, too often. ``on_finished`` gets every response that ends before the rest of
        the group; it gets the response again if the generator is lost.
        """

        def call(
            replica: LiveReplica, continued: bytes | None
        ) -> Awaitable[tuple[StoredRollout, ...] | RefusedGroup]:
            return replica.actor.sample_group.call_one(
                group_id, prompt_ids_P, num_samples, sampling, seed, continued, finished
            )

        what = f"sampling group {group_id}"
        with self.cancellable(group_id) as is_cancelled, finished_port(on_finished) as finished:
            try:
                return await self._retried(what, num_samples, call, group_id=group_id)
            except GroupGivenUp as given_up:
                if is_cancelled():
                    return CANCELLED
                return RefusedGroup(problem=str(given_up), reason=given_up.reason)

    async def respond(
        self,
        prompt_ids_P: np.ndarray,
        *,
        num_samples: int,
        sampling: SamplingSection,
        seed: int | None = None,
    ) -> tuple[SampledTurn, ...]:
        """Sample responses to one prompt that are not trained on; with a seed they are reproducible.

        Raises:
            GroupGivenUp: generators were lost, or exceeded ``timeouts.generate_s``, too often.
        """

        def call(replica: LiveReplica, continued: bytes | None) -> Awaitable[tuple[SampledTurn, ...]]:
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
        """Call one generator after another until one answers.

        ``call`` gets what the previous generator had logged of the group.

        Raises:
            GroupGivenUp: the budget is used up, or the group was cancelled between two generators.
        """
        num_lost = num_late = 0
        continued: bytes | None = None
        while True:
            if group_id is not None and self._cancelled[group_id]:
                raise GroupGivenUp(f"{what} was cancelled", DropReason.CANCELLED)
            async with self.pinned(num_samples, group_id) as replica:
                answer = asyncio.ensure_future(replica.call(functools.partial(call, replica, continued)))
                try:
                    async with call_limit(self._timeouts, "generate_s", f"generator {replica.rank} {what}"):
                        return await asyncio.shield(answer)
                except ProcessLost as lost:
                    num_lost += 1
                    self._num_moved += 1
                    if num_lost >= self._max_lost_per_group:
                        problem = f"{what}: {lost}, the last of {num_lost} lost generators"
                        raise GroupGivenUp(problem, DropReason.LOST) from lost
                    if group_id is not None:
                        # A generator that was lost before it began has logged nothing.
                        left = await asyncio.shield(replica.recovered)
                        continued = left.groups.get(group_id, continued)
                except DeadlineExceeded as late:
                    num_late += 1
                    self._num_late += 1
                    # The tokens sampled so far may be the cause of the delay.
                    continued = None
                    if group_id is not None:
                        # It must have ended before it is sampled again.
                        await self._cancel([replica], [group_id])
                        await asyncio.wait([answer], timeout=CANCEL_S)
                    if num_late > MAX_LATE:
                        raise GroupGivenUp(f"{late}; attempt {num_late}", DropReason.LATE) from late
                finally:
                    answer.add_done_callback(forget)
                    answer.cancel()

    async def cancel_groups(self, group_ids: Sequence[int]) -> None:
        """Cancel groups on all generators."""
        for group_id in self._cancelled.keys() & set(group_ids):
            self._cancelled[group_id] = True
        await self._cancel(self.pool.replicas, group_ids)

    async def _cancel(self, replicas: Sequence[LiveReplica], group_ids: Sequence[int]) -> None:
        await self._ask_all(
            replicas, "cancelling groups", lambda one: one.actor.cancel_groups.call_one(group_ids)
        )

    async def free_payloads(self, rollouts: Iterable[StoredRollout]) -> None:
        """Free the arrays of whole groups that are not read again.

        Arrays of a lost generator are freed by its replacement, or else by its host.
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
            call = "freeing payloads"
            if await self._ask_all([replica], call, lambda one: one.actor.free_payloads.call_one(files)):
                return
        host = next((host for host in self.pool.hosts if host.id == host_id), None)
        # The memory of a lost host is gone with it.
        if host is not None:
            await host.remove_files(files)

    @contextmanager
    def cancellable(self, group_id: int) -> Iterator[Callable[[], bool]]:
        """Let a group be cancelled within the body; the yielded function returns whether it was."""
        self._cancelled[group_id] = False
        try:
            yield lambda: self._cancelled[group_id]
        finally:
            del self._cancelled[group_id]

    async def restore_episodes(
        self, replica: LiveReplica, group_id: int, data: bytes
    ) -> Mapping[EpisodeId, frozenset[int]] | None:
        """Let one generator take over the episodes of a group; see ``GeneratorActor.restore_episodes``.

        Raises:
            ProcessLost: the generator is lost.
        """
        self._num_moved += 1
        what = f"taking over the episodes of group {group_id}"
        return await self._ask(replica, what, lambda: replica.actor.restore_episodes.call_one(group_id, data))

    async def store_episodes(
        self, replica: LiveReplica, group_id: int, ended: Sequence[EndedEpisode]
    ) -> tuple[StoredRollout, ...] | RefusedGroup:
        """Let one generator store the sampled turns of these episodes, and close the group.

        Raises:
            ProcessLost: the generator is lost.
        """
        what = f"storing the episodes of group {group_id}"
        return await self._ask(replica, what, lambda: replica.actor.store_episodes.call_one(group_id, ended))

    async def drop_episode(self, replica: LiveReplica, episode: EpisodeId) -> None:
        """Drop one attempt at an episode on a generator; does nothing if the generator is lost."""
        call = f"dropping an episode of group {episode.group_id}"
        await self._ask_all([replica], call, lambda one: one.actor.drop_episode.call_one(episode))

    async def drop_episodes(self, replica: LiveReplica, group_id: int) -> None:
        """Drop the episodes of a group on a generator; does nothing if the generator is lost."""
        call = f"dropping the episodes of group {group_id}"
        await self._ask_all([replica], call, lambda one: one.actor.drop_episodes.call_one(group_id))

    async def _ask(
        self,
        replica: LiveReplica,
        what: str,
        make: Callable[[], Awaitable[T]],
        *,
        keys: Sequence[str] = ("generate_s",),
    ) -> T:
        """Call one generator; ``what`` names the call in messages.

        The limit is the sum of the timeouts in ``keys``.

        Raises:
            ProcessLost: the generator is lost, or is given up because it has not answered in time.
        """
        limit_s = sum(getattr(self._timeouts, key) for key in keys)
        named = " + ".join(f"timeouts.{key}" for key in keys)
        try:
            async with deadline(limit_s, call=f"{self.pool.title} {replica.rank} {what}", key=named):
                return await replica.call(make)
        except DeadlineExceeded as late:
            replica.lose(f"has not finished {what} within {named} = {limit_s:g} s")
            raise replica.lost_error() from late

    async def _ask_all(
        self,
        replicas: Sequence[LiveReplica],
        what: str,
        call: Callable[[LiveReplica], Awaitable[T]],
        *,
        keys: Sequence[str] = ("weights_s",),
    ) -> dict[int, T]:
        """Return the answers by the generators' numbers, without those that are lost; see ``_ask``."""
        answers: dict[int, T] = {}

        async def ask(one: LiveReplica) -> None:
            with contextlib.suppress(ProcessLost):
                answers[one.number] = await self._ask(one, what, lambda: call(one), keys=keys)

        await asyncio.gather(*map(ask, replicas))
        return answers

    def pinned(
        self, num_samples: int, group_id: int | None = None
    ) -> AbstractAsyncContextManager[LiveReplica]:
        """Assign rollouts to the least busy healthy generator during the body; see ``GeneratorPool``."""
        return self.pool.assigned(num_samples, group_id)

    @property
    def actors(self) -> Mapping[str, tuple[GeneratorActor, ...]]:
        """The generators' actors by host; each can expose the payloads in its host's shared memory."""
        actors: dict[str, tuple[GeneratorActor, ...]] = {}
        for one in self.pool.replicas:
            actors[one.host.id] = (*actors.get(one.host.id, ()), one.actor)
        return actors

    def known(self) -> tuple[tuple[GeneratorActor, ...], tuple[int, ...]]:
        """Return the live generators, and the numbers of the ended ones."""
        return tuple(one.actor for one in self.pool.replicas), self.pool.table.state.ended_numbers

    async def stats(self) -> list[EngineStats]:
        """Return the counters of every engine; the last entry is the sum over all ended engines."""
        replicas = self.pool.replicas
        counted = await self._ask_all(replicas, "counting", lambda one: one.actor.stats.call_one())
        for one in replicas:
            if one.number in counted:
                self.pool.heard(one, counted[one.number])
        return self.pool.stats()

    def metrics(self) -> dict[str, float]:
        """Return counts since the run began, and current values, by their names in metrics.jsonl."""
        return dict(self.pool.metrics()) | {
            "generator/num_moved_groups": self._num_moved,
            "generator/num_late_groups": self._num_late,
        }

    # Weight versions. Hosts are numbered in the order of ``pool.hosts``.

    @property
    def num_hosts(self) -> int:
        """Number of hosts with generators."""
        return len(self.pool.hosts)

    def lowest_version(self, host: int) -> int:
        """Return the oldest version of the generators of a host, which must have at least one."""
        return self.pool.table.state.lowest_version(self.pool.hosts[host].id)

    async def until_behind(self, host: int) -> None:
        """Wait until a generator of a host lacks the newest version."""
        host_id = self.pool.hosts[host].id
        await self.pool.table.until(lambda table: table.is_behind(host_id))

    async def until_all_have(self, version: int) -> None:
        """Wait until there are healthy generators and all of them sample with ``version``."""
        await self.pool.table.until(lambda table: table.all_have(version))

    async def until_served(self, newer_than: int) -> int:
        """Wait until all healthy generators are newer than ``newer_than``; return the version they serve."""
        return await self.pool.table.until(lambda table: table.served if table.served > newer_than else None)

    def published(self, version: int) -> None:
        """Record that a version can be fetched; generators that join must load it."""
        self.pool.table.change(lambda table: table.published(version))

    def record_swap(self, number: int, swap: SwapReport) -> None:
        """Record that a generator samples with the version that it has swapped in."""
        self.pool.table.change(lambda table: table.updated(number))
        self.pool.look_for_healed()

    @asynccontextmanager
    async def asleep(self) -> AsyncIterator[None]:
        """With ``generator.colocated: sleep``, keep all engines off their GPUs during the body.

        A generator that starts meanwhile waits.
        """
        if self.pool.gpu_turn is None:
            yield
            return
        async with self.pool.gpu_turn:
            engines = self.pool.replicas
            await self._ask_all(
                engines, "leaving its GPU", lambda one: one.actor.sleep.call_one(), keys=SWAP_KEYS
            )
            yield
            await self._ask_all(engines, "coming back", lambda one: one.actor.wake.call_one(), keys=SWAP_KEYS)

    # Updates of the generators of one host.

    async def begin_update(self, host: int, manifest: Manifest) -> FetchReport | None:
        """Let the generators of a host fetch a leased version; on return the lease may end.

        Returns None if none needs the version, or if one is lost; then, and if a part is missing, all keep
        their weights.
        """
        version = manifest.version
        numbers = self.pool.table.state.behind(self.pool.hosts[host].id, version)
        replicas = [one for one in map(self.pool.get, numbers) if one is not None]
        if not replicas:
            return None
        is_new, self._taking_part[host] = numbers != self._taking_part.get(host), numbers
        shares = {
            one.number: HostShare(index=index, count=len(replicas)) for index, one in enumerate(replicas)
        }

        def begin(table: ReplicaTable) -> None:
            table.published(version)
            for one in replicas:
                table.begin_update(one.number, version)

        self.pool.table.change(begin)
        fetched = await self._ask_all(
            replicas,
            f"fetching version {version}",
            lambda one: one.actor.begin_update.call_one(manifest, shares[one.number] if is_new else None),
        )
        if len(fetched) < len(replicas) or not all(report.is_complete for report in fetched.values()):
            await self._abandon(host, [one for one in replicas if one.number in fetched])
        if len(fetched) < len(replicas):
            return None
        for replica in replicas:
            self._count(replica, fetched[replica.number])
        return merge_host_reports([fetched[one.number] for one in replicas])

    async def finish_update(self, host: int, version: int) -> Mapping[int, SwapReport]:
        """Wait until the generators of a host sample with ``version``, which they have fetched.

        Returns the reports of those that do, by number; call ``record_swap`` for each. A generator with
        ``drain`` waits for its longest sequence.
        """
        numbers = self._taking_part[host]
        replicas = [one for one in map(self.pool.get, numbers) if one is not None]
        what = f"swapping in version {version}"
        staged: Mapping[int, None] = {}
        if len(replicas) == len(numbers):
            # Each generator stages a part for all, so none may swap before the last one has staged.
            staged = await self._ask_all(
                replicas, what, lambda one: one.actor.stage_update.call_one(), keys=SWAP_KEYS
            )
        if len(staged) < len(numbers):
            await self._abandon(host, [one for one in replicas if not one.lost.is_set()])
            return {}
        return await self._ask_all(
            replicas, what, lambda one: one.actor.finish_update.call_one(), keys=SWAP_KEYS
        )

    async def _abandon(self, host: int, replicas: Sequence[LiveReplica]) -> None:
        def abandon(table: ReplicaTable) -> None:
            for number in self._taking_part[host]:
                table.abandon_update(number)

        self.pool.table.change(abandon)
        await self._ask_all(
            replicas, "giving up a version", lambda one: one.actor.abandon_update.call_one(), keys=SWAP_KEYS
        )

    def _count(self, replica: LiveReplica, report: FetchReport) -> None:
        if report.is_complete:
            del self._num_failed[replica.number]
            return
        self._num_failed[replica.number] += 1
        if (num_failed := self._num_failed[replica.number]) >= MAX_FAILED_FETCHES:
            why = "failed their checksums; weights.lease_timeout_s may be too short, or memory faulty"
            if report.failure is not None:
                why = f"did not arrive ({report.failure}); check the network"
            replica.lose(f"could not fetch weights: {num_failed} consecutive fetches {why}")

    # Connections to the trainer's staging buffers.

    async def connect_weights(
        self, layout: WeightLayout, sources: Sequence[StagingSource], folders: Sequence[Path]
    ) -> list[str]:
        """Let every generator plan how versions get into its engine, through its host's folder.

        ``folders`` has one entry per rank, which ranks of one host share. Generators that join later do the
        same. Returns descriptions of how the engines load versions, without duplicates.

        Raises:
            ValueError: trainer and engine have different tensors, or a transport cannot work.
        """
        self._sources = sources
        routes: dict[str, None] = {}
        folder_of = {self.pool.host_of(rank).id: folder for rank, folder in enumerate(folders)}
        ranks_of: dict[str, list[LiveReplica]] = {}
        for replica in self.pool.replicas:
            ranks_of.setdefault(replica.host.id, []).append(replica)

        async def connect_host(replicas: Sequence[LiveReplica]) -> None:
            # The first generator creates the files that the others open.
            for index, one in enumerate(replicas):
                share = HostShare(index=index, count=len(replicas))
                connect = one.actor.connect_weights
                routes[await connect.call_one(layout, sources, folders[one.rank], share, False)] = None

        async def join(replica: LiveReplica) -> None:
            rank = replica.rank
            index = self.pool.rank_on_host(rank)
            # The generator gets its real share with its first version.
            share = HostShare(index=index, count=index + 1)
            folder = folder_of[self.pool.host_of(rank).id]
            call = f"connecting {self.pool.title} {rank} to the trainer's weights"
            async with call_limit(self._timeouts, "setup_s", call):
                known = self._sources
                await replica.actor.connect_weights.call_one(layout, known, folder, share, True)
                while known is not self._sources:
                    # The trainer was restarted meanwhile.
                    known = self._sources
                    await replica.actor.reconnect_weights.call_one(layout, known)

        call = f"connecting every {self.pool.title} to the trainer's weights"
        async with call_limit(self._timeouts, "setup_s", call):
            try:
                await asyncio.gather(*map(connect_host, ranks_of.values()))
            except ActorError as error:
                if isinstance(error.exception, ValueError):
                    raise error.exception from error
                raise
        self.pool.connect = join
        return list(routes)

    async def reconnect_weights(self, layout: WeightLayout, sources: Sequence[StagingSource]) -> None:
        """Let every generator read from the buffers of a restarted trainer.

        A generator that is joining reconnects before it has joined.
        """
        self._sources = sources
        await self._ask_all(
            self.pool.replicas,
            "connecting to the trainer that was started again",
            lambda one: one.actor.reconnect_weights.call_one(layout, sources),
            keys=["setup_s"],
        )


async def start_generators(
    processes: ProcessManager,
    config: RunConfig,
    facts: ModelFacts,
    model_path: Path,
    *,
    starting_trainer: asyncio.Future[Any] | None = None,
) -> GeneratorRouter:
    """Start the generators and load their engines; lost ones are replaced.

    On shared GPUs, an engine checks the free memory when it starts, so the trainer's weights must be there:
    this first waits for ``starting_trainer``. If the trainer fails to start, no generator is started.
    """
    if starting_trainer is not None and shares_gpus(config):
        await asyncio.wait([starting_trainer])
        if starting_trainer.cancelled() or starting_trainer.exception() is not None:
            # Whoever started both reports the trainer's error.
            raise asyncio.CancelledError
    section = config.generator
    capacity_bytes = int(config.payload.capacity_gib * 2**30)
    processes.hosts.allot(HostRole.GENERATORS, section.num_replicas, gpus_per_proc=section.tensor_parallel)
    hosts = processes.hosts.hosts_for(HostRole.GENERATORS, section.num_replicas)
    # All generators share this capacity, so it is requested once on every host.
    ids = [host.id for host in hosts]
    sizes = [capacity_bytes if ids.index(name) == index else 0 for index, name in enumerate(ids)]
    folders = processes.payload_folders = await make_folders(hosts, sizes)
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
            execution=config.record_execution,
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
        # Ranks can be added during the run.
        name, host = f"{GENERATOR}{rank}-{number}", pool.host_of(rank)
        return await spawn_engine(
            processes,
            config,
            HostRole.GENERATORS,
            name,
            rank,
            host,
            call=f"loading the engine of generator {rank}",
            spawn=lambda mesh: mesh.spawn(name, GeneratorActor, processes.log_dir, rank),
            set_up=lambda actor: actor.setup.call_one(setup, host.id, folder_of[host.id]),
        )

    pool = GeneratorPool(spawn, processes, section, hosts)
    processes.generators = pool
    async with call_limit(config.timeouts, "setup_s", "loading the generators' engines"):
        await pool.start(len(hosts))
    return GeneratorRouter(pool, config.timeouts, max_lost_per_group=section.max_lost_per_group)
