"""How weight versions get from the trainer into generators, also into those that join later.

Updates all generators of a host together, because they share one receive buffer. The generators of an update
are those that are live when it begins and have an older version. If one is lost before all have staged their
shares, the others keep their weights, and the next update is made without it.
"""

import asyncio
import contextlib
import functools
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from monarch.actor import ActorError

from forgeasync.config import Dtype, RunConfig, TimeoutSection
from forgeasync.generator import SwapReport
from forgeasync.runtime.generator_pool import GeneratorPool, LiveReplica
from forgeasync.runtime.jobs import HostRole
from forgeasync.runtime.process_manager import ProcessManager, make_folders
from forgeasync.runtime.replica_states import ReplicaTable
from forgeasync.runtime.supervised import ProcessLost
from forgeasync.waiting import DeadlineExceeded, deadline
from forgeasync.weights import (
    NUM_SLOTS,
    FetchReport,
    HostShare,
    Manifest,
    StagingSource,
    WeightLayout,
    WeightSet,
    build_transport,
    of_host,
    require_reach,
)

if TYPE_CHECKING:
    from forgeasync.runtime.router import GeneratorRouter
    from forgeasync.runtime.teachers import MovingTeacher
    from forgeasync.runtime.trainer_mesh import TrainerMesh

T = TypeVar("T")

MAX_FAILED_FETCHES = 5
"""In a row, of one generator, after which it is replaced; each has tried every bad block several times."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SwappedReplica:
    """One generator that samples under a new version."""

    number: int
    report: SwapReport


def named_generators(ranks: Sequence[int]) -> str:
    """Return how messages call them."""
    return f"generator{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


class HostUpdates:
    """The updates of one host's generators, one after the other."""

    def __init__(self, pool: GeneratorPool, host_id: str, timeouts: TimeoutSection) -> None:
        self._pool = pool
        self._host_id = host_id
        self._timeouts = timeouts
        self._taking_part: tuple[int, ...] = ()
        """Those of the update under way, or of the last one; by number."""
        self._num_failed: Counter[int] = Counter()
        """Fetches in a row that did not arrive, by number."""

    async def begin(self, manifest: Manifest) -> FetchReport | None:
        """Have the generators fetch a leased version; when this returns the lease may end.

        If a part of it does not arrive, all of them keep their weights. None: there was nobody to fetch it,
        or one of them was lost meanwhile, and the others keep their weights.
        """
        table = self._pool.table
        numbers = table.state.behind(self._host_id, manifest.version)
        replicas = [one for one in map(self._pool.get, numbers) if one is not None]
        if not replicas:
            return None
        is_new = numbers != self._taking_part
        self._taking_part = numbers
        shares = {
            one.number: HostShare(index=index, count=len(replicas)) for index, one in enumerate(replicas)
        }
        table.change(lambda state: state.published(manifest.version))
        for replica in replicas:
            number, version = replica.number, manifest.version
            table.change(functools.partial(ReplicaTable.begin_update, number=number, version=version))
        what = f"fetching version {manifest.version}"
        fetched = await self._of_all(
            replicas,
            what,
            lambda one: one.actor.begin_update.call_one(manifest, shares[one.number] if is_new else None),
        )
        reports = [report for report in fetched if report is not None]
        if len(reports) < len(replicas) or not all(report.is_complete for report in reports):
            await self._abandon(
                [one for one, report in zip(replicas, fetched, strict=True) if report is not None]
            )
        if len(reports) < len(replicas):
            return None
        for replica, report in zip(replicas, reports, strict=True):
            self._count(replica, report)
        return of_host(reports)

    async def finish(self, version: int) -> list[SwappedReplica]:
        """Wait until the generators sample under ``version``, which they have fetched; returns those that do.

        A generator that drains waits for its longest sequence. ``taken`` has to follow for each of them.
        """
        replicas = [one for one in map(self._pool.get, self._taking_part) if one is not None]
        what = f"swapping in version {version}"
        staged: list[bool | None] = [None]
        if len(replicas) == len(self._taking_part):
            # Each stages a part for all: none may swap before the last has staged.
            staged = await self._of_all(replicas, what, lambda one: _done(one.actor.stage_update.call_one()))
        if None in staged:
            await self._abandon([one for one in replicas if not one.lost.is_set()])
            return []
        swaps: list[SwapReport | None] = await self._of_all(
            replicas, what, lambda one: one.actor.finish_update.call_one()
        )
        return [
            SwappedReplica(number=one.number, report=swap)
            for one, swap in zip(replicas, swaps, strict=True)
            if swap is not None
        ]

    async def _abandon(self, replicas: Sequence[LiveReplica]) -> None:
        for number in self._taking_part:
            self._pool.table.change(functools.partial(ReplicaTable.abandon_update, number=number))
        await self._of_all(
            replicas, "giving up a version", lambda one: _done(one.actor.abandon_update.call_one())
        )

    def _count(self, replica: LiveReplica, report: FetchReport) -> None:
        if report.is_complete:
            del self._num_failed[replica.number]
            return
        self._num_failed[replica.number] += 1
        if (num_failed := self._num_failed[replica.number]) >= MAX_FAILED_FETCHES:
            replica.lose(
                f"could not fetch weights: {num_failed} fetches in a row did not arrive as their "
                "manifests say; a lease that is too short (weights.lease_timeout_s) or faulty memory does "
                "this"
            )

    async def _of_all(
        self, replicas: Sequence[LiveReplica], what: str, call: Callable[[LiveReplica], Awaitable[T]]
    ) -> list[T | None]:
        """Return the answer of each; None of those that were lost, or took too long and were given up."""
        limit_s = self._timeouts.weights_s + self._timeouts.generate_s
        key = "timeouts.weights_s + timeouts.generate_s"
        if what.startswith("fetching"):
            limit_s, key = self._timeouts.weights_s, "timeouts.weights_s"

        async def one_of_them(replica: LiveReplica) -> T | None:
            try:
                async with deadline(limit_s, call=f"{self._pool.title} {replica.rank} {what}", key=key):
                    return await replica.call(lambda: call(replica))
            except ProcessLost:
                return None
            except DeadlineExceeded as late:
                replica.lose(f"was too late: {late}")
                return None

        return list(await asyncio.gather(*map(one_of_them, replicas)))


async def _done(call: Awaitable[None]) -> bool:
    """Tell an answer that says nothing from none."""
    await call
    return True


class WeightConnections:
    """Connects generators to the staging buffers of the trainer's ranks."""

    def __init__(self, pool: GeneratorPool, timeouts: TimeoutSection) -> None:
        self._pool = pool
        self._timeouts = timeouts
        self._sources: Sequence[StagingSource] = ()
        """How to reach the trainer's staging buffers; once weights are connected."""

    async def connect(
        self, layout: WeightLayout, sources: Sequence[StagingSource], folders: Sequence[Path]
    ) -> list[str]:
        """Let every generator plan how versions get into its engine, by way of its host's folder.

        ``folders`` are by rank, one for each host. Generators that join later do the same. Returns in words,
        without repetition, how engines take versions.

        Raises:
            ValueError: trainer and engine do not have the same tensors, or a transport cannot work.
        """
        self._sources = sources
        routes: dict[str, None] = {}
        folder_of = {self._pool.host_of(rank).id: folder for rank, folder in enumerate(folders)}
        ranks_of: dict[str, list[LiveReplica]] = {}
        for replica in self._pool.replicas:
            ranks_of.setdefault(replica.host.id, []).append(replica)

        async def connect_host(replicas: Sequence[LiveReplica]) -> None:
            # The first makes the files that the others open.
            for index, one in enumerate(replicas):
                share = HostShare(index=index, count=len(replicas))
                connect = one.actor.connect_weights
                routes[await connect.call_one(layout, sources, folders[one.rank], share, False)] = None

        async def join(replica: LiveReplica) -> None:
            rank = replica.rank
            index = self._pool.rank_on_host(rank)
            # It is told its real share with its first version.
            share = HostShare(index=index, count=index + 1)
            folder = folder_of[self._pool.host_of(rank).id]
            call = f"connecting {self._pool.title} {rank} to the trainer's weights"
            async with deadline(self._timeouts.setup_s, call=call, key="timeouts.setup_s"):
                known = self._sources
                await replica.actor.connect_weights.call_one(layout, known, folder, share, True)
                while known is not self._sources:
                    # The trainer was started again meanwhile.
                    known = self._sources
                    await replica.actor.reconnect_weights.call_one(layout, known)

        call = f"connecting every {self._pool.title} to the trainer's weights"
        async with deadline(self._timeouts.setup_s, call=call, key="timeouts.setup_s"):
            try:
                await asyncio.gather(*map(connect_host, ranks_of.values()))
            except ActorError as error:
                if isinstance(error.exception, ValueError):
                    raise error.exception from error
                raise
        self._pool.connect = join
        return list(routes)

    async def reconnect(self, layout: WeightLayout, sources: Sequence[StagingSource]) -> None:
        """Have every generator read from the buffers of a trainer that was started again.

        One that is just joining does so before it has joined.
        """
        self._sources = sources

        async def reconnect(replica: LiveReplica) -> None:
            with contextlib.suppress(ProcessLost):
                await replica.call(lambda: replica.actor.reconnect_weights.call_one(layout, sources))

        call = f"connecting every {self._pool.title} to the trainer that was started again"
        async with deadline(self._timeouts.setup_s, call=call, key="timeouts.setup_s"):
            await asyncio.gather(*map(reconnect, self._pool.replicas))


async def connect_weights(
    procs: ProcessManager,
    config: RunConfig,
    trainer: "TrainerMesh",
    generators: "GeneratorRouter",
    teachers: "Sequence[MovingTeacher]" = (),
) -> list[str]:
    """Allocate the trainer's staging buffers, and let every generator plan how it reads them.

    So do the engines of ``teachers``, those that move; each of these has a receive buffer of its own.

    Returns in words how engines take versions.

    Raises:
        ValueError: trainer and engines do not have the same tensors, the transport asked for cannot work,
            or a host has not enough shared memory.
    """
    trainer_hosts = procs.hosts.of_procs(HostRole.TRAINER, trainer.num_procs)
    generator_hosts = procs.hosts.of_procs(HostRole.GENERATORS, config.generator.num_engines)
    choice = config.weights.transport
    transport = build_transport(choice)
    teacher_hosts = [host for one in teachers for host in one.router.pool.hosts]
    readers = (*generator_hosts, *teacher_hosts)
    require_reach(transport, choice, (host.id for host in (*trainer_hosts, *readers)))
    await transport.start(procs.spawn_here)
    # Adapters are small, and merged in float32.
    dtype = config.generator.dtype if config.lora is None else Dtype.FLOAT32
    layout = await trainer.lay_out_weights(dtype)
    staged = [NUM_SLOTS * rank.num_bytes for rank in layout.ranks]
    receive_buffer = layout.of(WeightSet.POLICY).num_bytes
    # The generators of a host share one.
    received = [
        receive_buffer * (generators.pool.rank_on_host(rank) == 0) for rank in range(len(generator_hosts))
    ]
    folders = await make_folders([*trainer_hosts, *generator_hosts], [*staged, *received])
    sources = await trainer.open_staging(
        folders[: trainer.num_procs],
        choice,
        generator_hosts=frozenset(host.id for host in readers),
    )
    policy = layout.of(WeightSet.POLICY)
    of_generators = folders[trainer.num_procs :]
    routes = dict.fromkeys(await generators.connect_weights(policy, sources, of_generators))
    for one in teachers:
        # Generators of the same host have a receive buffer too, in a folder of their own.
        (folder,) = await make_folders(one.router.pool.hosts, [layout.of(one.weights).num_bytes])
        of_engines = [folder] * len(one.router.pool.replicas)
        taken = await one.router.connect_weights(layout.of(one.weights), sources, of_engines)
        routes |= dict.fromkeys(taken)
    return list(routes)
