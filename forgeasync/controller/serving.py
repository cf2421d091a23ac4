"""New weights on their way from the trainer to the generators: the serving loops of a run.

publish       stages the trainer's weights when the training loop asks for it, which waits only until the
              ranks have begun to copy them
catch up      asks for a version that had to be skipped, because generators were reading both buffers
serve         one for each host: its generators fetch and swap in the newest version whenever it is newer
              than theirs. A generator that joins does so at once
move          one for each teacher that takes the policy's weights; nobody waits for it
tell served   tells the buffer which version all healthy generators have, which lets groups start
"""

import asyncio
import functools
import time
from collections.abc import Coroutine, Sequence

from forgeasync.config import WeightsSection
from forgeasync.controller.recorder import RunRecorder
from forgeasync.runtime import TEACHER_HOST, BufferActor, GeneratorRouter, MovingTeacher, TrainerRecovery
from forgeasync.weights import WeightExchange, WeightLedger


class WeightServing:
    """Serves new versions to the generators, which start under version 0, the model that they have loaded."""

    def __init__(
        self,
        section: WeightsSection,
        *,
        trainer: TrainerRecovery,
        generators: GeneratorRouter,
        buffer: BufferActor,
        recorder: RunRecorder,
        teachers: Sequence[MovingTeacher] = (),
    ) -> None:
        self._trainer = trainer
        self._generators = generators
        self._buffer = buffer
        self._recorder = recorder
        self._teachers = teachers
        self._exchange = WeightExchange(WeightLedger(lease_timeout_s=section.lease_timeout_s))
        self._wanted: asyncio.Queue[asyncio.Event] = asyncio.Queue()
        """Publications that were asked for; each event is set when its asker may go on."""

    @property
    def ledger(self) -> WeightLedger:
        return self._exchange.state

    def loops(self) -> list[Coroutine[None, None, None]]:
        """Return the loops that must run concurrently for as long as the run lasts."""
        self._trainer.when_buffers_are_new(self._forget_staged)
        hosts = range(self._generators.num_hosts)
        return [
            *(self._serve(host) for host in hosts),
            *(self._move(one, len(hosts) + index) for index, one in enumerate(self._teachers)),
            self._tell_served(),
            self._publish(),
            self._catch_up(),
        ]

    def _forget_staged(self) -> None:
        self._exchange.change(lambda ledger: ledger.forget_committed())

    async def publish(self) -> None:
        """Have the trainer's current weights staged for the generators.

        Returns when the trainer's ranks have begun to copy, so that it can make its next step. One version is
        staged at a time: this call waits for the one before. A failure ends the publishing loop, and with it
        the run.
        """
        begun = asyncio.Event()
        self._wanted.put_nowait(begun)
        await begun.wait()

    async def until_served(self, version: int) -> None:
        """Wait until there are healthy generators, and all of them sample under ``version``."""
        await self._generators.until_all_have(version)

    async def until_taught_by(self, version: int) -> None:
        """Wait until every teacher that moves has the weights that are due at ``version``."""
        for teacher in self._teachers:
            await teacher.until_current(version)

    async def _serve(self, host: int) -> None:
        """Have the generators of a host fetch and swap in the newest weights whenever there are newer ones.

        They share memory for them, so the next version has to wait until the last of them has swapped.
        """
        while True:
            await self._generators.until_behind(host)
            older = self._generators.lowest_version(host)
            async with self._exchange.lease(host, newer_than=older) as manifest:
                fetched = await self._generators.begin_update(host, manifest)
            # The host has a copy of its own now: the trainer may write over the one that was read.
            if fetched is None:
                continue
            self._recorder.record_fetch(fetched)
            if fetched.is_complete:
                for swapped in await self._generators.finish_update(host, manifest.version):
                    self._recorder.record_swap(swapped.report)
                    # First: with it groups that run on become younger than their start says.
                    await self._buffer.progressed.call_one(swapped.report.progress)
                    self._generators.taken(swapped.number)

    async def _move(self, teacher: MovingTeacher, reader: int) -> None:
        """Have the engines of a teacher fetch and swap in each version that is due for it.

        A version that the trainer has written over by then is replaced by the newest one.
        """
        engines = teacher.router
        while True:
            await engines.until_behind(TEACHER_HOST)
            older = engines.lowest_version(TEACHER_HOST)
            async with self._exchange.lease(reader, newer_than=older, preferred=teacher.wanted) as manifest:
                fetched = await engines.begin_update(TEACHER_HOST, manifest)
            if fetched is not None and fetched.is_complete:
                for swapped in await engines.finish_update(TEACHER_HOST, manifest.version):
                    teacher.taken(swapped)

    async def _tell_served(self) -> None:
        """Tell the buffer which version all healthy generators have, whenever that is a newer one."""
        # Below the version of a run that is resumed, others still load it.
        told = 0
        while True:
            told = await self._generators.until_served(newer_than=told)
            await self._buffer.set_served_version.call_one(told)

    async def _publish(self) -> None:
        """Stage the current weights whenever somebody asks for it, one version after the other."""
        while True:
            begun = await self._wanted.get()
            start_s = time.perf_counter()
            stage = functools.partial(self._trainer.stage_weights, when_begun=begun.set)
            manifest = await self._exchange.publish(stage)
            if manifest is None:
                # Skipped and owed: generators read both staging buffers.
                begun.set()
            else:
                self._generators.published(manifest.version)
                for teacher in self._teachers:
                    teacher.published(manifest.version)
                self._recorder.record_publish(time.perf_counter() - start_s)

    async def _catch_up(self) -> None:
        """Publish what had to be skipped while generators were reading both staging buffers."""
        while True:
            await self._exchange.until_owed()
            await self.publish()
