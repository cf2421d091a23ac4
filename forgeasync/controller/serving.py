"""Serves new weights from the trainer to the generators and to moving teachers, in the loops of a run.

publish       stages the trainer's weights when the training loop requests it; that loop waits only until the
              trainer's ranks have begun to copy
catch up      requests a version that was skipped because generators were reading both staging buffers
serve         one per host: its generators fetch and swap in the newest version whenever theirs is older; a
              generator that joins does so immediately
move          one per teacher that follows the policy's weights; training does not wait for it
tell served   reports to the buffer the version that all healthy generators have, which lets groups start
"""

import asyncio
import functools
import time
from collections.abc import Callable, Coroutine, Sequence

from forgeasync.buffer import ReplayBuffer
from forgeasync.config import WeightsSection
from forgeasync.controller.recorder import RunRecorder
from forgeasync.runtime import TEACHER_HOST, GeneratorRouter, RemoteBuffer, TeacherEngines, TrainerRecovery
from forgeasync.weights import WeightExchange, WeightLedger


class WeightServing:
    """Serves new versions to the generators, which start with version 0, the model that they loaded."""

    def __init__(
        self,
        section: WeightsSection,
        *,
        trainer: TrainerRecovery,
        generators: GeneratorRouter,
        buffer: RemoteBuffer,
        recorder: RunRecorder,
        teachers: Sequence[TeacherEngines] = (),
        archive: Callable[[str | None], None] = lambda refusal: None,
    ) -> None:
        """``archive`` is called after each publication, with why the archive leaves out versions, if so."""
        self._archive = archive
        self._trainer = trainer
        self._generators = generators
        self._buffer = buffer
        self._recorder = recorder
        self._teachers = teachers
        self._exchange = WeightExchange(WeightLedger(lease_timeout_s=section.lease_timeout_s))
        self._wanted: asyncio.Queue[asyncio.Event] = asyncio.Queue()
        """Requested publications; each event is set when the requesting loop may continue."""

    @property
    def ledger(self) -> WeightLedger:
        """State of the staging buffers: versions, readers and leases."""
        return self._exchange.state

    def loops(self) -> list[Coroutine[None, None, None]]:
        """Return the loops to run concurrently until the run ends."""
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
        """Request staging of the trainer's current weights.

        Returns when the trainer's ranks have begun to copy and the next step can start. One version is staged
        at a time, so this call waits for the previous one. A failure ends the publishing loop and the run.
        """
        begun = asyncio.Event()
        self._wanted.put_nowait(begun)
        await begun.wait()

    async def until_served(self, version: int) -> None:
        """Wait until there are healthy generators and all of them sample with ``version``."""
        await self._generators.until_all_have(version)

    async def until_taught_by(self, version: int) -> None:
        """Wait until every moving teacher has the weights that are due at ``version``."""
        for teacher in self._teachers:
            await teacher.until_current(version)

    async def _serve(self, host: int) -> None:
        """Update the generators of a host whenever there is a newer version, all of them together.

        They share one receive buffer, so the next fetch waits until the last generator has swapped.
        """
        while True:
            await self._generators.until_behind(host)
            older = self._generators.lowest_version(host)
            async with self._exchange.lease(host, newer_than=older) as manifest:
                fetched = await self._generators.begin_update(host, manifest)
            # The lease has ended: the host has its own copy, and the trainer may overwrite the staged one.
            if fetched is None:
                continue
            self._recorder.record_fetch(fetched)
            if fetched.is_complete:
                swaps = await self._generators.finish_update(host, manifest.version)
                for number, swap in swaps.items():
                    self._recorder.record_swap(swap)
                    # Before the generator counts as updated: the progress makes groups in flight younger.
                    await self._buffer.change(ReplayBuffer.progressed, swap.progress)
                    self._generators.record_swap(number, swap)

    async def _move(self, teacher: TeacherEngines, reader: int) -> None:
        """Update the engines of a teacher to each version that is due for it.

        If the trainer has overwritten that version meanwhile, the teacher gets the newest one.
        """
        while True:
            await teacher.until_behind(TEACHER_HOST)
            older = teacher.lowest_version(TEACHER_HOST)
            async with self._exchange.lease(reader, newer_than=older, preferred=teacher.wanted) as manifest:
                fetched = await teacher.begin_update(TEACHER_HOST, manifest)
            if fetched is not None and fetched.is_complete:
                swaps = await teacher.finish_update(TEACHER_HOST, manifest.version)
                for number, swap in swaps.items():
                    teacher.record_swap(number, swap)

    async def _tell_served(self) -> None:
        """Report to the buffer the version that all healthy generators have, whenever it grows."""
        # Generators start with version 0. In a resumed run they then load the checkpoint's version.
        version = 0
        while True:
            version = await self._generators.until_served(newer_than=version)
            await self._buffer.change(ReplayBuffer.set_served_version, version)

    async def _publish(self) -> None:
        """Stage the current weights for each request, one version at a time."""
        while True:
            begun = await self._wanted.get()
            start_s = time.perf_counter()
            stage = functools.partial(self._trainer.stage_weights, when_begun=begun.set)
            manifest = await self._exchange.publish(stage)
            if manifest is None:
                # Skipped, to be caught up later: generators are reading both staging buffers.
                begun.set()
            else:
                self._generators.published(manifest.version)
                for teacher in self._teachers:
                    teacher.published(manifest.version)
                self._archive(manifest.archive_refusal)
                self._recorder.record_publish(manifest, time.perf_counter() - start_s)

    async def _catch_up(self) -> None:
        """Publish a version after one was skipped because generators were reading both staging buffers."""
        while True:
            await self._exchange.until_owed()
            await self.publish()
