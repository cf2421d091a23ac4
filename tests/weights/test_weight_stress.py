"""Every weight of version v is f(v): at least five hundred swaps under load, and no forward pass sees two
versions.

The engine runs in a process of its own together with the publisher; two further readers are stopped and
killed, in the middle of their fetches too.
"""

import asyncio
import multiprocessing
import os
import random
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from forgeasync.config import GeneratorSection, SamplingSection
from forgeasync.testing import write_tiny_model
from forgeasync.weights import Manifest, WeightExchange, WeightLedger
from tests.support.engines import ROUTING, start_engine
from tests.support.processes import run_alone
from tests.support.weight_service import FolderPublisher, constant, read_versions

pytestmark = pytest.mark.exhaustive

NUM_SWAPS = 500
LEASE_TIMEOUT_S = 0.15
NUM_READERS = 2
NUM_COMPLETE = 20
"""Fetches that readers complete."""
NUM_TOKENS = 20
"""Fewer than the vocabulary has."""


@dataclass(slots=True)
class Seen:
    passes: list[float] = field(default_factory=list)
    """The one value that every weight had throughout a forward pass."""
    mixed: list[tuple[float, ...]] = field(default_factory=list)
    num_swaps: int = 0
    num_tokens: int = 0
    num_killed: int = 0
    num_stopped: int = 0
    num_complete: int = 0
    num_incomplete: int = 0
    torn: list[int] = field(default_factory=list)
    """Versions that a reader took for complete although they were not."""
    num_expired_leases: int = 0

    @property
    def readers_are_done(self) -> bool:
        """Whether the readers, which start slowly, have read, stopped and died."""
        return self.num_complete > NUM_COMPLETE and self.num_killed > 0 and self.num_stopped > 0


def _watch(model: torch.nn.Module, seen: Seen) -> None:
    """Look at all parameters before the forward pass, in every layer of it, and after it."""
    values: set[float] = set()

    def look(module: torch.nn.Module, *_: Any) -> None:
        for name, parameter in module.named_parameters():
            is_vocabulary = name.startswith(("lm_head", "model.embed_tokens"))
            # The padding of the vocabulary keeps its zeros.
            tensor = parameter.data[:NUM_TOKENS] if is_vocabulary else parameter.data
            values.update((float(tensor.min()), float(tensor.max())))

    def before(module: torch.nn.Module, *_: Any) -> None:
        values.clear()
        look(module)

    def after(module: torch.nn.Module, *_: Any) -> None:
        look(module)
        if len(values) == 1:
            seen.passes.extend(values)
        else:
            seen.mixed.append(tuple(sorted(values)))

    model.register_forward_pre_hook(before)
    for layer in model.model.layers:
        layer.register_forward_pre_hook(look)
    model.register_forward_hook(after)


class Readers:
    """Readers in processes of their own, on leases that nobody releases for the killed ones."""

    def __init__(
        self, publisher: FolderPublisher, exchange: WeightExchange, seen: Seen, folder: Path
    ) -> None:
        self._publisher, self._exchange, self._seen, self._folder = publisher, exchange, seen, folder
        self._context = multiprocessing.get_context("spawn")
        self._num_started = self._num_reads = 0
        self._random = random.Random(0)

    def _start(self) -> tuple[Any, Any]:
        here, there = self._context.Pipe()
        receive_buffer = self._folder / f"reader-{self._num_started}"
        self._num_started += 1
        arguments = (self._publisher.layout, self._publisher.source, receive_buffer, there)
        process = self._context.Process(target=read_versions, args=arguments, daemon=True)
        process.start()
        return process, here

    async def run(self, reader: int) -> None:
        ledger = self._exchange.state
        process, link = self._start()
        version = 0
        try:
            while True:
                await asyncio.sleep(self._random.random() * 0.02)
                manifest = ledger.acquire(reader, newer_than=version, now_s=time.monotonic())
                if manifest is None:
                    continue
                version = manifest.version
                if not await self._read(process, link, manifest):
                    # Its lease is left to run out.
                    process, link = self._start()
                    continue
                ledger.release(reader)
        finally:
            process.kill()

    async def _read(self, process: Any, link: Any, manifest: Manifest) -> bool:
        """False if the reader was killed over it."""
        link.send(manifest)
        self._num_reads += 1
        if self._num_reads % 16 == 0 and self._seen.num_killed < 6:
            await asyncio.sleep(self._random.random() * 0.002)
            process.kill()
            self._seen.num_killed += 1
            return False
        if self._num_reads % 16 == 8 and self._seen.num_complete:
            self._seen.num_stopped += 1
            os.kill(process.pid, signal.SIGSTOP)
            await asyncio.sleep(2 * LEASE_TIMEOUT_S)
            os.kill(process.pid, signal.SIGCONT)
        while not link.poll():
            await asyncio.sleep(0.002)
        version, is_complete, is_right = link.recv()
        self._seen.num_complete += int(is_complete)
        self._seen.num_incomplete += int(not is_complete)
        if is_complete and not is_right:
            self._seen.torn.append(version)
        return True


async def _stress(folder: Path, out: Path) -> Seen:
    seen = Seen()
    generator = GeneratorSection(max_num_seqs=16, max_num_batched_tokens=256, kv_cache_gib=0.02)
    engine = await start_engine(folder, generator, records=ROUTING)
    publisher = FolderPublisher(folder, out)
    exchange = WeightExchange(WeightLedger(lease_timeout_s=LEASE_TIMEOUT_S))
    receiver = await publisher.connect(engine, out / "receive-buffer")
    readers = Readers(publisher, exchange, seen, out)
    version = 0

    async def stage(slot: int) -> Manifest:
        nonlocal version
        version += 1
        tensors = {
            name: torch.full_like(tensor, constant(version)) for name, tensor in publisher.tensors.items()
        }
        return await asyncio.to_thread(publisher.stage, slot, version, tensors)

    async def publish() -> None:
        while True:
            await exchange.publish(stage)
            await asyncio.sleep(0.001)

    async def generate() -> None:
        while True:
            rollouts = await engine.generate(
                prompt_ids_P=np.arange(3, 9, dtype=np.int32),
                num_samples=8,
                sampling=SamplingSection(max_response_tokens=120),
            )
            seen.num_tokens += sum(rollout.num_response_tokens for rollout in rollouts)

    async def serve() -> None:
        served = 0
        while seen.num_swaps < NUM_SWAPS or not seen.readers_are_done:
            async with exchange.lease(NUM_READERS, newer_than=served) as manifest:
                report = await receiver.begin(manifest)
            served = manifest.version
            if not report.is_complete:
                await receiver.abandon()
            else:
                await receiver.stage()
                await receiver.finish()
                seen.num_swaps += 1
                if seen.num_swaps == 1:
                    # The weights that the engine started with were no constants.
                    await engine.between_steps(
                        lambda core: _watch(
                            core.model_executor.driver_worker.worker.model_runner.get_model(), seen
                        )
                    )

    others = [
        asyncio.create_task(task)
        for task in (publish(), generate(), *(readers.run(reader) for reader in range(NUM_READERS)))
    ]
    serving = asyncio.create_task(serve())
    await asyncio.wait([serving, *others], return_when=asyncio.FIRST_COMPLETED)
    for task in others:
        task.cancel()
    await asyncio.wait(others)
    failures = [task.exception() for task in others if not task.cancelled()]
    assert not failures, failures
    await serving
    seen.num_expired_leases = exchange.state.num_expired_leases
    engine.shutdown()
    return seen


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    folder = write_tiny_model(tmp_path_factory.mktemp("model") / "hf")
    return run_alone(_stress, folder, tmp_path_factory.mktemp("stress"))


def test_no_forward_pass_sees_two_versions(seen: Seen) -> None:
    assert seen.num_swaps >= NUM_SWAPS
    assert not seen.mixed, seen.mixed[:5]
    known = {constant(version) for version in range(251)}
    assert set(seen.passes) <= known
    assert len(set(seen.passes)) > 100, "too few versions were ever computed with"


def test_no_reader_takes_a_torn_version_for_whole(seen: Seen) -> None:
    assert not seen.torn
    assert seen.num_complete > NUM_COMPLETE


def test_the_publisher_outlives_readers_that_stop_or_die(seen: Seen) -> None:
    assert seen.num_killed > 0 and seen.num_stopped > 0
    assert seen.num_expired_leases > 0
