"""New weights on their way from the trainer to the generators: the serving loops of a run.

The generators of each host have a loop of their own: they fetch and swap in the newest version whenever there
is one newer than theirs. One loop publishes: the training loop asks it to, and waits only until the trainer's
ranks have begun to copy their weights; one more loop asks for what had to be skipped.
"""

import asyncio
import functools
import time
from collections.abc import Coroutine, Sequence

from forgeasync.actors.buffer import BufferActor
from forgeasync.actors.router import GeneratorRouter, named_generators
from forgeasync.actors.trainer_mesh import TrainerMesh
from forgeasync.config.weights import WeightsSection
from forgeasync.controller.recorder import RunRecorder
from forgeasync.waiting import Monitor
from forgeasync.weights.exchange import WeightExchange
from forgeasync.weights.ledger import WeightLedger

MAX_FAILED_FETCHES = 5
"""In a row, of one generator; each has tried every bad block several times."""


class WeightServing:
    """Serves new versions to the generators, which start under version 0, the model that they have loaded."""

    def __init__(
        self,
        section: WeightsSection,
        *,
        trainer: TrainerMesh,
        generators: GeneratorRouter,
        buffer: BufferActor,
        recorder: RunRecorder,
    ) -> None:
        self._trainer = trainer
        self._generators = generators
        self._buffer = buffer
        self._recorder = recorder
        self._exchange = WeightExchange(WeightLedger(lease_timeout_s=section.lease_timeout_s))
        self._wanted: asyncio.Queue[asyncio.Event] = asyncio.Queue()
        """Publications that were asked for; each event is set when its asker may go on."""
        self._served = Monitor([0] * generators.num_replicas)
        """The version of every generator."""

    @property
    def ledger(self) -> WeightLedger:
        return self._exchange.state

    def loops(self) -> list[Coroutine[None, None, None]]:
        """Return the loops that must run concurrently for as long as the run lasts."""
        hosts = range(len(self._generators.hosts))
        return [*(self._serve(host) for host in hosts), self._publish(), self._catch_up()]

    async def publish(self) -> None:
        """Have the trainer's current weights staged for the generators.

        Returns as soon as the trainer may make its next step: when its ranks have begun to copy. One version
        is staged at a time: this one waits until the one before is. What goes wrong ends the publishing loop,
        and with it the run.
        """
        begun = asyncio.Event()
        self._wanted.put_nowait(begun)
        await begun.wait()

    async def until_served(self, version: int) -> None:
        """Wait until every generator samples under ``version``."""
        await self._served.until(lambda versions: min(versions) == version)

    async def _serve(self, host: int) -> None:
        """Have the generators of a host fetch and swap in the newest weights whenever there are newer ones.

        They share memory for them, so the next version has to wait until the last of them has swapped.
        """
        replicas = self._generators.hosts[host]
        num_failed = 0
        while num_failed < MAX_FAILED_FETCHES:
            newest = self._exchange.lease(host, newer_than=self._served.state[replicas[0]])
            async with newest as manifest:
                fetched = await self._generators.begin_update(host, manifest)
            # The host has a copy of its own now: the trainer may write over the one that was read.
            self._recorder.record_fetch(fetched)
            num_failed = 0 if fetched.is_complete else num_failed + 1
            if fetched.is_complete:
                for swap in await self._generators.finish_update(host, manifest.version):
                    self._recorder.record_swap(swap)
                    # First: with it groups that run on become younger than their start says.
                    await self._buffer.progressed.call_one(swap.progress)
                await self._set_served(replicas, manifest.version)
        raise RuntimeError(
            f"{named_generators(replicas)}: {num_failed} fetches in a row did not arrive as their manifests "
            "say; a lease that is too short (weights.lease_timeout_s) or faulty memory does this"
        )

    async def _set_served(self, replicas: Sequence[int], version: int) -> None:
        """Generators sample under ``version`` from now on."""

        def serve(versions: list[int]) -> None:
            for replica in replicas:
                versions[replica] = version

        self._served.change(serve)
        served = min(self._served.state)
        # Below the version of a run that is resumed, others still load it.
        if served:
            await self._buffer.set_served_version.call_one(served)

    async def _publish(self) -> None:
        """Stage the current weights whenever somebody asks for it, one version after the other."""
        while True:
            begun = await self._wanted.get()
            start_s = time.perf_counter()
            stage = functools.partial(self._trainer.stage_weights, when_begun=begun.set)
            if await self._exchange.publish(stage) is None:
                # Skipped and owed: generators read both staging buffers.
                begun.set()
            else:
                self._recorder.record_publish(time.perf_counter() - start_s)

    async def _catch_up(self) -> None:
        """Publish what had to be skipped while generators were reading both staging buffers."""
        while True:
            await self._exchange.until_owed()
            await self.publish()
