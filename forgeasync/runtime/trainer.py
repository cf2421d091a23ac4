"""The trainer actor: one rank of the policy trainer.

Consumes packed rows, or references to rollouts, from the training loop; produces weight versions in its
staging buffers. All ranks get every call at the same time and wait for each other in its collectives.

Everything that uses the model or a collective runs in one thread, in the order of the calls. A version's
copies, checksums and transport run concurrently: the next optimizer step waits for the copies, generators for
all of it.
"""

import asyncio
import dataclasses
import logging
import os
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist
from monarch.actor import Actor, concurrent_endpoint, current_rank

from forgeasync.config import Dtype, TransportChoice
from forgeasync.observability import (
    State,
    bad_batch_folder,
    doing,
    open_trace,
    redirect_process_output,
    span,
    started,
)
from forgeasync.processes import MemoryMonitor
from forgeasync.rollouts import (
    EVERY_HOST,
    Arrays,
    PayloadNotFound,
    PayloadReader,
    PayloadRef,
    PayloadTorn,
    RemotePayloadReader,
    decode_rollout,
)
from forgeasync.runtime.generator import GeneratorActor
from forgeasync.runtime.supervised import unless_lost
from forgeasync.trainer import (
    PackedRow,
    StepResult,
    TokenPlaces,
    TrainerSetup,
    TrainingItem,
    TrainingSequence,
    pack_row,
    training_sequence,
    write_rows,
)
from forgeasync.waiting import deadline, happens_within
from forgeasync.weights import (
    TORCH_DTYPES,
    ArchivePlan,
    Publication,
    RankLayout,
    StagedShard,
    StagingSource,
    WeightPublisher,
    build_transport,
)

if TYPE_CHECKING:
    from forgeasync.trainer import CheckpointWriter, PolicyTrainer


T = TypeVar("T")


class SerialExecutor:
    """Runs functions one after another in a thread; the callers are coroutines of one event loop.

    Monarch 0.7.0 starts concurrent endpoints in the order of one caller's calls
    (``monarch.actor.concurrent_endpoint``), on every rank. A call that requests its turn before it waits for
    anything else keeps that order, so that all ranks run the collectives of different calls in the same
    order.
    """

    def __init__(self, name: str) -> None:
        self._turn = asyncio.Lock()
        """Wakes waiting calls in the order of their arrival."""
        self._work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        # The thread is a daemon, so that a stuck collective does not keep the process alive.
        threading.Thread(target=self._serve, name=name, daemon=True).start()

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Wait until earlier calls have ended; later calls wait for the body."""
        async with self._turn:
            yield

    async def run(self, work: Callable[[], T]) -> T:
        """Run ``work`` in the thread, within the caller's turn. Raises what ``work`` raises.

        If the calling coroutine is cancelled, ``work`` continues, and later work waits for it.
        """
        assert self._turn.locked(), "a call that is not in its turn"
        result: Future[T] = Future()

        def do() -> None:
            if not result.set_running_or_notify_cancel():
                return
            try:
                found = work()
            except BaseException as error:
                # As in the standard executors: the caller gets any exception.
                result.set_exception(error)
            else:
                result.set_result(found)

        self._work.put(do)
        return await asyncio.wrap_future(result)

    async def call(self, work: Callable[[], T]) -> T:
        """Run ``work`` in the caller's turn."""
        async with self.turn():
            return await self.run(work)

    def _serve(self) -> None:
        while True:
            # No reference to finished work is kept here: its arguments may be large.
            self._work.get()()


logger = logging.getLogger(__name__)

AGAIN_S = 0.5
"""Seconds until the generators of a host are called again."""


class PayloadOwners:
    """Generators by host; each can expose the payloads in its host's shared memory."""

    def __init__(self) -> None:
        self._generators: Mapping[str, Sequence[GeneratorActor]] = {}
        self._changed = asyncio.Event()

    def change(self, generators: Mapping[str, Sequence[GeneratorActor]]) -> None:
        """Set the live generators; reads from others start again."""
        self._generators = generators
        self._changed.set()
        self._changed = asyncio.Event()

    async def read(self, ref: PayloadRef, reader: RemotePayloadReader, *, limit_s: float) -> Arrays:
        """Read a payload through any generator of its host, as soon as one exposes it.

        Raises:
            PayloadNotFound: the file was freed, or never existed.
            PayloadTorn: the bytes that arrived differ from those that were written.
            DeadlineExceeded: no generator has exposed it within ``limit_s``.
        """
        call = f"reading payload {ref.payload_id} of host {ref.host_id}"
        async with deadline(limit_s, call=call, key="timeouts.weights_s"):
            while True:
                changed = self._changed
                for owner in self._generators.get(ref.host_id, ()):
                    try:
                        reading = reader.read(ref, owner.expose_payload.call_one)
                        return await unless_lost(reading, changed.wait(), _Changed)
                    except (PayloadNotFound, PayloadTorn):
                        raise
                    except _Changed:
                        break
                    except Exception:
                        # Monarch raises various errors for a lost owner; its replacement exposes the same
                        # payloads.
                        logger.warning("cannot read payload %s; trying again", ref.payload_id, exc_info=True)
                await happens_within(AGAIN_S, changed.wait())


class _Changed(Exception):
    """The generators have changed."""


PAYLOAD_TIMEOUT_S = 60
"""Time limit of reading one payload from another host, in seconds."""


class TrainerActor(Actor):
    """One rank of the trainer mesh."""

    def __init__(self, log_dir: Path) -> None:
        self._rank = current_rank().rank
        redirect_process_output(log_dir / f"trainer-{self._rank}.log")
        open_trace(log_dir, f"trainer-{self._rank}", idle=State.WAITING_FOR_BATCH)
        self._thread = SerialExecutor("trainer")
        self._built: PolicyTrainer | None = None
        self._checkpoints: CheckpointWriter | None = None
        self._publications: dict[int, Publication] = {}
        """Versions that are being staged, by slot."""
        self._flush_archive: Callable[[], str | None] = lambda: None
        self._memory = MemoryMonitor(with_descendants=True)
        self._owners = PayloadOwners()

    @concurrent_endpoint
    async def setup(self, setup: TrainerSetup, host_id: str) -> int:
        """Join the process group and build the model; return the data-parallel rank of this process.

        Raises:
            ValueError: as in ``PolicyTrainer``.
        """
        self._section = setup.section
        self._bad_steps, self._empties_cache = setup.bad_steps, setup.empties_cache
        self._host_id = host_id
        self._payloads = PayloadReader(host_id)
        # The model's folder includes the tokenizer.
        self._places = TokenPlaces(setup.checkpoint)
        self._remote_payloads = RemotePayloadReader(PAYLOAD_TIMEOUT_S)
        data_rank = await self._thread.call(lambda: self._build(setup))
        started()
        return data_rank

    def _build(self, setup: TrainerSetup) -> int:
        # TorchTitan takes seconds to import, so only processes that train import it.
        from forgeasync.models import DEVICE_TYPE
        from forgeasync.trainer import CheckpointWriter, PolicyTrainer

        backend = "gloo" if DEVICE_TYPE == "cpu" else "cpu:gloo,cuda:nccl"
        if DEVICE_TYPE != "cpu":
            # This process sees only this GPU; LOCAL_RANK counts the GPUs of the host.
            torch.accelerator.set_device_index(0)
            if setup.gpu_share is not None:
                # Without a limit the allocator keeps freed blocks until the GPU is full, and an engine that
                # replaces a lost one does not start.
                torch.cuda.set_per_process_memory_fraction(setup.gpu_share)
        dist.init_process_group(backend)
        # Recomputation in the backward pass needs this thread's mesh context.
        torch.autograd.set_multithreading_enabled(False)
        self._checkpoints = CheckpointWriter()
        self._built = PolicyTrainer(setup, checkpoints=self._checkpoints)
        return self._built.data_rank

    @property
    def _trainer(self) -> "PolicyTrainer":
        assert self._built is not None
        return self._built

    @concurrent_endpoint
    async def pid(self) -> int:
        """Return the id of this process on its host."""
        return os.getpid()

    @concurrent_endpoint
    async def beat(self) -> None:
        """Answer, to show that the event loop runs; the computing thread may be busy."""

    @concurrent_endpoint
    async def snapshot_bytes(self) -> int:
        """Return the bytes of shared memory that this rank's snapshots need."""
        return await self._thread.call(lambda: self._trainer.snapshot_bytes())

    @concurrent_endpoint
    async def open_snapshots(self, folder: Path, every_steps: int, at_most: int) -> int:
        """Continue from the newest snapshot of all ranks, and start taking snapshots; return its version."""
        return await self._thread.call(
            lambda: self._trainer.open_snapshots(folder, every_steps=every_steps, at_most=at_most)
        )

    @concurrent_endpoint
    async def finish_snapshot(self) -> int | None:
        """Wait for the last snapshot that was begun; return the version of this rank's newest complete one.

        No other call waits for this one.
        """
        return await asyncio.to_thread(self._trainer.finish_snapshot)

    @concurrent_endpoint
    async def connect(
        self, generators: Mapping[str, Sequence[GeneratorActor]], payload_limit_s: float
    ) -> None:
        """Set the generators, by host, that expose payloads of other hosts; call again when they change.

        A payload that cannot be read for ``payload_limit_s`` (``timeouts.weights_s``) is an error.
        """
        self._owners.change(generators)
        self._payload_limit_s = payload_limit_s

    @concurrent_endpoint
    async def train_rows(self, rows: list[PackedRow]) -> StepResult:
        """Make one optimizer step on this data rank's rows."""
        async with self._thread.turn():
            with doing(State.COMPUTING), span("train", {"version": self._trainer.policy_version}):
                result = await self._thread.run(lambda: self._trainer.train_step(rows))
        result = await self._keep_if_bad(result, rows)
        return dataclasses.replace(result, memory=self._memory.peak())

    async def _keep_if_bad(self, result: StepResult, rows: list[PackedRow]) -> StepResult:
        """Write the rows of a bad step to a file for inspection; the result records if that fails."""
        if result.skip_reason is None or self._bad_steps is None:
            return result
        folder = bad_batch_folder(self._bad_steps, result.policy_version)
        try:
            # Compression takes time, and heartbeats must be answered.
            await asyncio.to_thread(write_rows, folder, rows, rank=self._rank, reason=result.skip_reason)
        except OSError as error:
            return dataclasses.replace(result, not_kept=f"rows of trainer rank {self._rank}: {error}")
        return result

    @concurrent_endpoint
    async def train_items(self, minibatches: list[list[list[TrainingItem]]]) -> StepResult:
        """Train on a batch of rollouts by reference, with one optimizer step for each minibatch of rows.

        Their arrays are read here, once.

        Raises:
            MismatchTooLarge: trainer and generator do not compute the same distribution.
        """
        async with self._thread.turn():
            trained_version = self._trainer.policy_version
            start_s = time.perf_counter()
            self._num_read = {"shared": 0, "remote": 0, "disk": 0}
            # The rollouts of a group share their prompt's payload, which is read once.
            prompts: dict[str, Arrays] = {}
            facts = {"version": trained_version}
            with doing(State.FETCHING), span("read rollouts", facts):
                packed = [
                    [
                        pack_row(
                            [await self._read(item, trained_version, prompts) for item in items],
                            share_prefixes=self._section.shares_prefixes,
                        )
                        for items in rows
                    ]
                    for rows in minibatches
                ]
            read_s = time.perf_counter() - start_s
            limit = self._section.max_fresh_mismatch
            with doing(State.COMPUTING), span("train", facts):
                result = await self._thread.run(
                    lambda: self._trainer.train_batch(packed, max_fresh_mismatch=limit)
                )
                if self._empties_cache:
                    torch.cuda.empty_cache()
        result = await self._keep_if_bad(result, [row for rows in packed for row in rows])
        read = {f"payload/num_read_{how}": float(count) for how, count in self._num_read.items()}
        metrics = result.metrics | read | {"time/read_payloads_s": read_s}
        return dataclasses.replace(result, metrics=metrics, memory=self._memory.peak())

    async def _read_payload(self, ref: PayloadRef) -> Arrays:
        if ref.host_id in (self._host_id, EVERY_HOST):
            self._num_read["disk" if ref.host_id == EVERY_HOST else "shared"] += 1
            # These are views; packing copies them before the group can be freed.
            return self._payloads.read(ref, copy=False)
        self._num_read["remote"] += 1
        return await self._owners.read(ref, self._remote_payloads, limit_s=self._payload_limit_s)

    async def _read(
        self, item: TrainingItem, trained_version: int, prompts: dict[str, Arrays]
    ) -> TrainingSequence:
        branch = item.branch
        key = branch.prompt.payload_id
        if key not in prompts:
            prompts[key] = await self._read_payload(branch.prompt)
        response = await self._read_payload(branch.response)
        trace = decode_rollout(prompts[key], response)
        return training_sequence(
            item,
            trace,
            trained_version=trained_version,
            routing_replay=self._section.routing_replay,
            keep_sampling_mask=self._section.keep_sampling_mask,
            places=self._places,
        )

    @concurrent_endpoint
    async def lay_out_weights(self, dtype: Dtype, has_patches: bool = False) -> RankLayout:
        """Agree with the other ranks on who publishes what; return what this rank publishes."""

        def lay_out() -> WeightPublisher:
            weights = self._trainer.published_weights()
            return WeightPublisher(
                weights, TORCH_DTYPES[dtype], host_id=self._host_id, has_patches=has_patches
            )

        self._publisher = await self._thread.call(lay_out)
        self._flush_archive = self._publisher.flush_archive
        return self._publisher.layout

    @concurrent_endpoint
    async def open_staging(
        self,
        folder: Path,
        transport: TransportChoice,
        generator_hosts: frozenset[str],
        archive: ArchivePlan | None = None,
    ) -> StagingSource:
        """Allocate the staging buffers in a folder of this host; return how generators reach them."""
        async with self._thread.turn():
            return await self._publisher.open(
                folder, build_transport(transport), generator_hosts=generator_hosts, archive=archive
            )

    @concurrent_endpoint
    async def begin_staging(self, slot: int) -> None:
        """Start copying this rank's part of the current weights into a staging buffer.

        Afterwards the next call may train. ``finish_staging`` must follow.

        Raises:
            NonFiniteWeights: on every rank, if any rank's weights have nan or inf.
        """

        def begin() -> None:
            trainer = self._trainer
            with doing(State.PUBLISHING), span("begin publishing", {"version": trainer.policy_version}):
                trainer.require_finite_weights(f"publishing version {trainer.policy_version}")
                publication = self._publisher.begin(slot, trainer.policy_version, trainer.published_weights())
            trainer.let_read(publication.until_copied)
            self._publications[slot] = publication

        await self._thread.call(begin)

    @concurrent_endpoint
    async def finish_staging(self, slot: int) -> StagedShard:
        """Wait until the version begun in the slot is staged there; no other call waits for this one."""
        with doing(State.PUBLISHING), span("publish"):
            return await self._publications.pop(slot).finished()

    @concurrent_endpoint
    async def begin_checkpoint(self, folder: Path, run_state: bytes, keep: int) -> None:
        """Start writing a checkpoint while training continues."""
        await self._thread.call(
            lambda: self._trainer.begin_checkpoint(folder, run_state=run_state, keep=keep)
        )

    @concurrent_endpoint
    async def finish_checkpoint(self) -> None:
        """Wait until the last checkpoint that was begun is on disk."""
        await self._thread.call(lambda: self._trainer.finish_checkpoint())

    @concurrent_endpoint
    async def is_writing_checkpoint(self) -> bool:
        """Return whether the last checkpoint is still being written; waits for no other call."""
        return self._checkpoints is not None and self._checkpoints.is_writing

    @concurrent_endpoint
    async def policy_version(self) -> int:
        """Return the version of this rank's weights, once earlier calls have ended."""
        return await self._thread.call(lambda: self._trainer.policy_version)

    @concurrent_endpoint
    async def flush_archive(self) -> str | None:
        """Wait until the archive has all versions; return why it leaves out some, if so."""
        return await self._thread.call(self._flush_archive)

    @concurrent_endpoint
    async def save_hf(self, folder: Path, source: Path) -> int:
        """Write the weights as a Hugging Face folder, and wait for the archive; return their version.

        Raises:
            NonFiniteWeights: on every rank, if any rank's weights have nan or inf.
        """

        def save() -> int:
            self._trainer.save_hf(folder, source=source)
            self._flush_archive()
            return self._trainer.policy_version

        return await self._thread.call(save)
