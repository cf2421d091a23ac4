"""The actors of ``weight_sync.py``: trainer ranks and a generator that also time themselves.

They are those of a run with endpoints added; every reference copy is made in the proc, and at the moment, of
what it is compared with.
"""

import asyncio
import dataclasses
import itertools
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import torch
from monarch.actor import concurrent_endpoint, endpoint
from torch.distributed.tensor import DTensor
from weight_clock import StepClock
from weight_modes import PROMPT, ModeRun, Streams, run_mode

from forgeasync.actors import GeneratorActor, TrainerActor
from forgeasync.config import Interruption, WeightsSection
from forgeasync.generator import SwapReport
from forgeasync.weights import (
    FetchReport,
    Manifest,
    StagingSource,
    WeightLayout,
    build_transport,
    connect_transports,
)

MAX_ELEMENTS = 128 * 2**20
"""Size limit of the buffers behind a reference copy; longer copies use them several times."""


class Memcpy:
    """Plain copies of up to ``num_elements`` between two flat tensors that were written before."""

    def __init__(self, num_elements: int, source: torch.dtype, target: torch.dtype) -> None:
        size = min(num_elements, MAX_ELEMENTS)
        self._source, self._target = torch.ones(size, dtype=source), torch.ones(size, dtype=target)

    def run(self, num_elements: int) -> float:
        """Seconds."""
        start_s = time.perf_counter()
        left = num_elements
        while left:
            count = min(left, len(self._target))
            self._target[:count].copy_(self._source[:count])
            left -= count
        return time.perf_counter() - start_s


class Change(StrEnum):
    """The difference between the next version and the current one."""

    NOTHING = "nothing"
    ONE_TENSOR = "one tensor"
    EVERYTHING = "everything"


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishReference:
    """Copies of as many elements as a rank publishes, in seconds."""

    cast_s: float
    """Copying from the master weights' dtype to the generator's."""
    same_s: float
    """Within the generator's dtype."""


class ProbedTrainer(TrainerActor):
    """A trainer rank whose weights change on demand."""

    @endpoint
    async def prepare_reference(self, dtype: torch.dtype) -> None:
        """Allocate buffers for ``publish_reference``; ``dtype`` is the generator's."""
        self._num_elements = sum(piece.num_elements for piece in self._publisher.layout.pieces)
        self._cast = Memcpy(self._num_elements, torch.float32, dtype)
        self._same = Memcpy(self._num_elements, dtype, dtype)

    @endpoint
    async def publish_reference(self) -> PublishReference:
        cast_s, same_s = self._cast.run(self._num_elements), self._same.run(self._num_elements)
        return PublishReference(cast_s=cast_s, same_s=same_s)

    @endpoint
    async def next_version(self, change: Change) -> None:
        """Change weights and version as a train step does, as far as publishing can see."""
        weights = self._trainer.named_weights()
        changed = {Change.NOTHING: [], Change.ONE_TENSOR: weights[-1:], Change.EVERYTHING: weights}[change]
        with torch.no_grad():
            for weight in changed:
                tensor = weight.tensor
                local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
                local.mul_(1.01)
        self._trainer.policy_version += 1

    @endpoint
    async def open_all(self, folder: Path, choices: Sequence[str]) -> dict[str, StagingSource]:
        """One pair of staging buffers for every transport; how the generator, on this host, reaches them."""
        hosts = frozenset({self._host_id})
        self._transports = {choice: build_transport(choice) for choice in choices}
        first = await self._publisher.open(folder, self._transports[choices[0]], generator_hosts=hosts)
        sources = {choices[0]: first}
        for choice in choices[1:]:
            address = await self._transports[choice].open(self._publisher.staging)
            sources[choice] = dataclasses.replace(first, address=address)
        return sources

    @endpoint
    async def publish_by(self, choice: str) -> None:
        """Which transport has the next versions."""
        self._publisher.transport = self._transports[choice]


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """One version on its way into the engine while it decodes; seconds."""

    fetch: FetchReport
    swap: SwapReport
    memcpy_s: float
    """A plain copy of as many bytes as were moved."""
    engine_memcpy_s: float
    """A plain copy of as many bytes as the engine takes."""
    total_s: float
    swap_gap_s: float
    """Between the last tokens of the old weights and the first of the new ones."""
    longest_gap_s: float
    """Between two tokens, from the start of the fetch to the first token of the new weights."""


class ProbedGenerator(GeneratorActor):
    """A generator that fetches by every transport into one receive buffer, and knows when its tokens came."""

    @concurrent_endpoint
    async def connect_transports(
        self,
        layout: WeightLayout,
        sources: Sequence[Mapping[str, StagingSource]],
        folder: Path,
        choices: Sequence[str],
    ) -> None:
        """Plan once, for all transports: workers know one receive buffer. ``sources`` are by rank."""
        from forgeasync.generator import HostMemory, WeightReceiver

        self._layout = layout
        self._transports = {
            choice: connect_transports(
                WeightsSection(transport=choice),
                layout,
                [source[choice] for source in sources],
                generator_host=self._host_id,
            )
            for choice in choices
        }
        self._first_receiver = await WeightReceiver.connect(
            self._engine,
            layout=layout,
            transports=self._transports[choices[0]],
            host_memory=HostMemory(receive_buffer=folder / "receive-buffer-0"),
            delta=False,
        )
        self._receiver_of: dict[str, WeightReceiver] = {}
        self._memcpy = Memcpy(layout.num_bytes, torch.uint8, torch.uint8)

    @concurrent_endpoint
    async def forget(self, choice: str, is_delta: bool) -> None:
        """Start anew with nothing fetched by this transport; before its first ``update``."""
        from forgeasync.generator import WeightReceiver
        from forgeasync.weights import WeightFetcher

        known = self._first_receiver._fetcher
        fetcher = WeightFetcher(
            layout=self._layout,
            needed=known._needed,
            num_bytes_needed=known._num_bytes_needed,
            receive_buffer=known._receive_buffer,
            transports=self._transports[choice],
            delta=is_delta,
        )
        self._receiver_of[choice] = WeightReceiver(
            self._engine, fetcher, self._first_receiver._make_ready, self._first_receiver.route
        )

    @concurrent_endpoint
    async def update(self, choice: str, manifest: Manifest) -> Update:
        """Fetch, stage and swap; to be called while decoding."""
        receiver, first_step, start_s = self._receiver_of[choice], len(self._clock.ends), time.perf_counter()
        fetch = await receiver.begin(manifest)
        assert fetch.is_complete, fetch
        await receiver.stage()
        swap = await receiver.finish()
        total_s = time.perf_counter() - start_s
        swap_gap_s = await self._clock.gap_before(manifest.version)
        longest_gap_s = max(self._clock.gaps(first_step - 1))
        return Update(
            fetch=fetch,
            swap=swap,
            memcpy_s=await asyncio.to_thread(self._memcpy.run, fetch.num_bytes_moved),
            engine_memcpy_s=await asyncio.to_thread(self._memcpy.run, fetch.num_bytes_needed),
            total_s=total_s,
            swap_gap_s=swap_gap_s,
            longest_gap_s=longest_gap_s,
        )

    @concurrent_endpoint
    async def start_decoding(self, num_sequences: int) -> None:
        """Keep this many sequences in flight until ``stop_decoding``; returns when they are."""
        self._clock = StepClock(self._engine._client)
        self._streams = Streams(self._engine, "probe")
        for _ in range(num_sequences):
            self._streams.start(itertools.repeat(self._setup.max_context_length - len(PROMPT)))
        await self._clock.steps(20)

    @concurrent_endpoint
    async def median_gap_s(self) -> float:
        """Between two tokens, since decoding started."""
        return statistics.median(self._clock.gaps())

    @concurrent_endpoint
    async def stop_decoding(self) -> None:
        await self._streams.stop()

    @concurrent_endpoint
    async def run_mode(self, mode: Interruption, manifest: Manifest, num_sequences: int) -> ModeRun:
        """Fetch and swap under a mode, with streams of its own; after ``stop_decoding``."""
        receiver = self._receiver_of["shared_memory"]
        return await run_mode(self._engine, self._clock, receiver, manifest, mode, num_sequences)
