"""Spreads requests over generators: each goes to the one with the fewest rollouts in flight."""

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import numpy as np
from monarch.actor import ActorError

from forgeasync.actors.generator import CancelledGroup, GeneratorActor, GeneratorSetup, RefusedGroup
from forgeasync.config.generator import SamplingSection
from forgeasync.config.run import TimeoutSection
from forgeasync.environments.reward import Response
from forgeasync.generator.reports import EngineStats, SwapReport
from forgeasync.rollouts.rollout import StoredRollout
from forgeasync.waiting import deadline
from forgeasync.weights.fetcher import FetchReport, HostShare, of_host
from forgeasync.weights.layout import WeightLayout
from forgeasync.weights.manifest import Manifest
from forgeasync.weights.transports.transport import StagingSource


def named_generators(ranks: Sequence[int]) -> str:
    """Return how messages call them."""
    return f"generator{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


class GeneratorRouter:
    """The generator mesh as one generator."""

    def __init__(self, generators: GeneratorActor, host_ids: Sequence[str], timeouts: TimeoutSection) -> None:
        """``host_ids`` says for every replica of the mesh which host it is on."""
        self.actors = generators
        self._replicas = [generators.slice(procs=rank) for rank in range(len(host_ids))]
        self._host_ids = host_ids
        self.hosts = tuple(
            tuple(rank for rank, of_rank in enumerate(host_ids) if of_rank == name)
            for name in dict.fromkeys(host_ids)
        )
        """The replicas on every host: they take versions together."""
        self._num_in_flight = [0] * len(host_ids)
        self._timeouts = timeouts

    async def setup(self, setup: GeneratorSetup, folders: Sequence[Path]) -> None:
        """Load every engine; ``folders`` are for payloads, by replica."""
        async with deadline(
            self._timeouts.setup_s, call="loading the generators' engines", key="timeouts.setup_s"
        ):
            await asyncio.gather(
                *(
                    replica.setup.call_one(setup, host_id, folder)
                    for replica, host_id, folder in zip(self._replicas, self._host_ids, folders, strict=True)
                )
            )

    async def sample_group(
        self,
        group_id: int,
        prompt_ids_P: np.ndarray,
        *,
        num_samples: int,
        sampling: SamplingSection,
        seed: int | None = None,
    ) -> tuple[StoredRollout, ...] | RefusedGroup | CancelledGroup:
        """Sample a group of responses to one prompt; its arrays stay with the generator until freed.

        A seed makes them reproducible.

        Raises:
            DeadlineExceeded: no answer within ``timeouts.generate_s``.
        """
        async with self._least_busy(num_samples, f"sampling group {group_id}") as rank:
            return await self._replicas[rank].sample_group.call_one(
                group_id, prompt_ids_P, num_samples, sampling, seed
            )

    async def cancel_groups(self, group_ids: Sequence[int]) -> None:
        """Give up groups wherever they are sampled."""
        call = f"giving up groups {list(group_ids)} on the generators"
        async with deadline(self._timeouts.weights_s, call=call, key="timeouts.weights_s"):
            await self.actors.cancel_groups.call(group_ids)

    async def respond(
        self,
        prompt_ids_P: np.ndarray,
        *,
        num_samples: int,
        sampling: SamplingSection,
        seed: int | None = None,
    ) -> tuple[Response, ...]:
        """Responses to one prompt that are not trained on; a seed makes them reproducible.

        Raises:
            DeadlineExceeded: no answer within ``timeouts.generate_s``.
        """
        what = f"answering a prompt of {len(prompt_ids_P)} tokens"
        async with self._least_busy(num_samples, what) as rank:
            return await self._replicas[rank].respond.call_one(prompt_ids_P, num_samples, sampling, seed)

    async def free_payloads(self, rollouts: Iterable[StoredRollout]) -> None:
        """Free the arrays of whole groups, all rollouts of each, that nobody will read any more."""
        by_owner: dict[int, dict[str, None]] = {}
        for rollout in rollouts:
            by_owner.setdefault(rollout.generator_rank, {})[rollout.response.file] = None
        call = f"freeing payloads on generators {sorted(by_owner)}"
        async with deadline(self._timeouts.weights_s, call=call, key="timeouts.weights_s"):
            await asyncio.gather(
                *(
                    self._replicas[rank].free_payloads.call_one(list(files))
                    for rank, files in by_owner.items()
                )
            )

    async def drop_episodes(self, rank: int, group_id: int) -> None:
        """Have one generator forget the episodes of a group."""
        call = f"generator {rank} dropping the episodes of group {group_id}"
        async with deadline(self._timeouts.weights_s, call=call, key="timeouts.weights_s"):
            await self._replicas[rank].drop_episodes.call_one(group_id)

    @contextmanager
    def pinned(self, num_samples: int) -> Iterator[int]:
        """The rank of the generator with the least to do, which counts as busy with so many rollouts."""
        rank = min(range(len(self._replicas)), key=self._num_in_flight.__getitem__)
        self._num_in_flight[rank] += num_samples
        try:
            yield rank
        finally:
            self._num_in_flight[rank] -= num_samples

    @asynccontextmanager
    async def _least_busy(self, num_samples: int, what: str) -> AsyncIterator[int]:
        with self.pinned(num_samples) as rank:
            call = f"generator {rank} {what}"
            async with deadline(self._timeouts.generate_s, call=call, key="timeouts.generate_s"):
                yield rank

    @property
    def num_replicas(self) -> int:
        return len(self._replicas)

    async def connect_weights(
        self, layout: WeightLayout, sources: Sequence[StagingSource], folders: Sequence[Path]
    ) -> list[str]:
        """Let every generator plan how versions get into its engine, by way of its host's folder.

        Returns in words, without repetition, how engines take versions.

        Raises:
            ValueError: trainer and engine do not have the same tensors, or a transport cannot work.
        """
        routes: dict[str, None] = {}

        async def connect_host(replicas: Sequence[int]) -> None:
            # The first makes the files that the others open.
            for index, rank in enumerate(replicas):
                share = HostShare(index=index, count=len(replicas))
                connect = self._replicas[rank].connect_weights
                routes[await connect.call_one(layout, sources, folders[rank], share)] = None

        call = "connecting the generators to the trainer's weights"
        async with deadline(self._timeouts.setup_s, call=call, key="timeouts.setup_s"):
            try:
                await asyncio.gather(*map(connect_host, self.hosts))
            except ActorError as error:
                if isinstance(error.exception, ValueError):
                    raise error.exception from error
                raise
        return list(routes)

    async def begin_update(self, host: int, manifest: Manifest) -> FetchReport:
        """Have the generators of a host fetch a leased version; when this returns the lease may end.

        If a part of it does not arrive, all of them keep their weights.
        """
        replicas = [self._replicas[rank] for rank in self.hosts[host]]
        call = f"{named_generators(self.hosts[host])} fetching version {manifest.version}"
        async with deadline(self._timeouts.weights_s, call=call, key="timeouts.weights_s"):
            fetched = of_host(
                await asyncio.gather(*(one.begin_update.call_one(manifest) for one in replicas))
            )
            if not fetched.is_complete:
                await asyncio.gather(*(one.abandon_update.call_one() for one in replicas))
        return fetched

    async def finish_update(self, host: int, version: int) -> list[SwapReport]:
        """Wait until all generators of a host sample under ``version``, which they have fetched.

        A generator that drains waits for its longest sequence.
        """
        replicas = [self._replicas[rank] for rank in self.hosts[host]]
        limit_s = self._timeouts.weights_s + self._timeouts.generate_s
        call = f"{named_generators(self.hosts[host])} swapping in version {version}"
        async with deadline(limit_s, call=call, key="timeouts.weights_s + timeouts.generate_s"):
            # Each stages a part for all: none may swap before the last has staged.
            await asyncio.gather(*(one.stage_update.call_one() for one in replicas))
            return list(await asyncio.gather(*(one.finish_update.call_one() for one in replicas)))

    async def stats(self) -> list[EngineStats]:
        """Counters of every engine since it started."""
        call = "asking the generators for their counters"
        async with deadline(self._timeouts.generate_s, call=call, key="timeouts.generate_s"):
            return list(await asyncio.gather(*(replica.stats.call_one() for replica in self._replicas)))

    async def shutdown(self) -> None:
        """Stop every engine."""
        call = "stopping the generators' engines"
        async with deadline(self._timeouts.weights_s, call=call, key="timeouts.weights_s"):
            await asyncio.gather(*(replica.shutdown.call_one() for replica in self._replicas))
