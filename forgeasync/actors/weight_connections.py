"""How the generators of a run, also those that join later, reach the trainer's weights."""

import asyncio
import contextlib
from collections.abc import Sequence
from pathlib import Path

from monarch.actor import ActorError

from forgeasync.actors.generator_pool import GeneratorPool
from forgeasync.actors.replica import LiveReplica, ReplicaLost, SpawnedReplica
from forgeasync.config import TimeoutSection
from forgeasync.waiting import deadline
from forgeasync.weights import HostShare, StagingSource, WeightLayout


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

        async def join(spawned: SpawnedReplica, rank: int) -> None:
            index = self._pool.rank_on_host(rank)
            # It is told its real share with its first version.
            share = HostShare(index=index, count=index + 1)
            folder = folder_of[self._pool.host_of(rank).id]
            call = f"connecting {self._pool.title} {rank} to the trainer's weights"
            async with deadline(self._timeouts.setup_s, call=call, key="timeouts.setup_s"):
                known = self._sources
                await spawned.actor.connect_weights.call_one(layout, known, folder, share, True)
                while known is not self._sources:
                    # The trainer was started again meanwhile.
                    known = self._sources
                    await spawned.actor.reconnect_weights.call_one(layout, known)

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
            with contextlib.suppress(ReplicaLost):
                await replica.while_there(lambda: replica.actor.reconnect_weights.call_one(layout, sources))

        call = f"connecting every {self._pool.title} to the trainer that was started again"
        async with deadline(self._timeouts.setup_s, call=call, key="timeouts.setup_s"):
            await asyncio.gather(*map(reconnect, self._pool.replicas))
