"""Installs published versions in one engine: fetched and staged while it decodes, then swapped in.

The generators of a host share its receive buffer and, on GPUs with ``shadow: host``, the shadow. Each fetches
and fills its share. So an update has three phases, each of which starts when all generators of the host have
completed the previous one: ``begin`` fetches, after which the trainer may overwrite its staging buffer;
``stage`` prepares the version while the engine decodes; ``finish`` returns once the engine samples with it.
The next version may be fetched when all of them have finished. If a share was not fetched or staged,
``abandon`` replaces the remaining phases. Generators may join or leave between two updates; ``begin`` then
gets the new share.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm.v1.engine.core import EngineCore

from forgeasync.generator.engine import GeneratorEngine
from forgeasync.generator.engine_weights import (
    AdapterMerger,
    EngineWeights,
    HostMemory,
    WeightRoute,
    all_of,
    base_name,
    merged_layout,
)
from forgeasync.generator.reports import SwapReport
from forgeasync.generator.workarounds.served_adapters import ServedAdapter, install
from forgeasync.observability import State, doing, span
from forgeasync.weights import (
    ALONE,
    FetchReport,
    HostShare,
    Manifest,
    ReceiveBuffer,
    Transport,
    WeightFetcher,
    WeightLayout,
    received_images,
    whole_tensors,
)


class IncompleteFetch(RuntimeError):
    """A version did not arrive completely; the engine continues with the old weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterBase:
    """Base model that published adapters adapt."""

    folder: Path
    shapes: Mapping[str, tuple[int, ...]]
    """Shapes of all tensors of the model, by name."""
    dtype: torch.dtype
    """Dtype of the engine's parameters."""
    scaling: float


Install = Callable[[EngineCore], None]
"""Swaps a staged version in; runs in the engine's thread between two decode steps."""

MakeReady = Callable[[int, HostShare], Awaitable[Install]]
"""Stages this engine's share of a fetched version; returns the function to run between two steps."""


@dataclass(slots=True, kw_only=True)
class _Update:
    """Update in progress, with futures for the points at which it waits or is waited for."""

    fetched: asyncio.Future[FetchReport]
    is_whole: asyncio.Future[bool]
    """Whether the host has received its whole part of the version; set by ``stage`` or ``abandon``."""
    staged: asyncio.Future[None]
    all_staged: asyncio.Future[None]
    task: asyncio.Task[SwapReport] | None = None


class WeightReceiver:
    """Runs the weight updates of one engine, one at a time."""

    def __init__(
        self,
        engine: GeneratorEngine,
        fetcher: WeightFetcher,
        make_ready: MakeReady,
        route: WeightRoute,
        share: HostShare,
    ) -> None:
        self._share = share
        self._engine = engine
        self._fetcher = fetcher
        self._make_ready = make_ready
        self.route = route
        """How versions are installed in the engine's parameters."""
        self._update: _Update | None = None

    @classmethod
    async def connect(
        cls,
        engine: GeneratorEngine,
        *,
        layout: WeightLayout,
        transports: Mapping[int, Transport],
        host_memory: HostMemory,
        delta: bool,
        base: AdapterBase | None = None,
    ) -> "WeightReceiver":
        """Plan how the engine installs versions of this layout, which are adapters if ``base`` is given.

        The host's first generator creates the files of ``host_memory``, so it must be connected before the
        others.

        Raises:
            ValueError: Engine and layout have different tensors.
        """
        share = host_memory.share
        memory = ReceiveBuffer(host_memory.receive_buffer, layout, is_new=host_memory.makes_files)
        weights = EngineWeights(engine.between_steps)
        needs, route = all_of(layout), WeightRoute()
        if engine.adapter is not None:
            make_ready = _serve_adapters(engine.adapter, layout, host_memory.receive_buffer)
        elif base is not None:
            make_ready = await _merge_adapters(weights, base, layout, host_memory)
        else:
            route = await weights.trace(layout.shapes, layout.dtype)
            needs = await weights.connect(layout, host_memory)
            make_ready = _take_whole(weights)
        fetcher = WeightFetcher(
            layout=layout,
            needed=needs.blocks,
            num_bytes_needed=needs.num_bytes,
            receive_buffer=memory,
            transports=transports,
            delta=delta,
            share=share,
        )
        return cls(engine, fetcher, make_ready, route, share)

    def reconnect(self, transports: Mapping[int, Transport]) -> None:
        """Fetch later versions from the staging buffers of a restarted trainer.

        A fetch in progress keeps its buffers: it completes or ends incomplete.
        """
        self._fetcher.connect(transports)

    async def begin(self, manifest: Manifest, new_share: HostShare | None = None) -> FetchReport:
        """Start an update; returns when the fetch of this generator's share has ended, complete or not.

        ``new_share`` is given if the set of generators has changed since the previous update.
        """
        assert self._update is None, "an update is in progress: finish it first"
        if new_share is not None:
            self._share = new_share
            self._fetcher.take_share(new_share)
        loop = asyncio.get_running_loop()
        update = self._update = _Update(
            fetched=loop.create_future(),
            is_whole=loop.create_future(),
            staged=loop.create_future(),
            all_staged=loop.create_future(),
        )
        ready: list[Install] = []

        async def prefetch() -> None:
            facts = {"version": manifest.version}
            with doing(State.FETCHING), span("fetch", facts):
                update.fetched.set_result(await self._fetcher.fetch(manifest))
            if not await update.is_whole:
                raise IncompleteFetch(f"version {manifest.version}")
            with doing(State.FETCHING), span("make ready", facts):
                ready.append(await self._make_ready(manifest.version, self._share))
            update.staged.set_result(None)
            await update.all_staged

        update.task = asyncio.create_task(
            self._engine.update_weights(
                manifest.version, prefetch=prefetch, install=lambda core: ready[0](core)
            )
        )
        await self._until(update.fetched)
        return update.fetched.result()

    async def stage(self) -> None:
        """Stage the version. Call after the shares of all generators of this host have arrived."""
        assert self._update is not None, "no update is in progress"
        self._update.is_whole.set_result(True)
        await self._until(self._update.staged)

    async def finish(self) -> SwapReport:
        """Wait until the engine samples with the version. Call when all generators of this host staged it."""
        assert self._update is not None and self._update.task is not None, "no update is in progress"
        update, task = self._update, self._update.task
        self._update = None
        update.all_staged.set_result(None)
        return await task

    async def _until(self, reached: asyncio.Future[Any]) -> None:
        """Wait for a point of the update; raises the update's error if it fails before."""
        assert self._update is not None and self._update.task is not None
        task = self._update.task
        await asyncio.wait([reached, task], return_when=asyncio.FIRST_COMPLETED)
        if not reached.done():
            self._update = None
            task.result()

    async def abandon(self) -> None:
        """End the update after ``begin`` or ``stage``; the engine keeps its weights.

        Used if a share did not arrive completely, or a generator died before it fetched or staged its share.
        """
        assert self._update is not None and self._update.task is not None, "no update is in progress"
        update, task = self._update, self._update.task
        self._update = None
        if update.is_whole.done():
            update.all_staged.set_exception(IncompleteFetch("another generator has not staged its share"))
        else:
            update.is_whole.set_result(False)
        await asyncio.wait([task])
        assert isinstance(task.exception(), IncompleteFetch), task.exception()


def _take_whole(weights: EngineWeights) -> MakeReady:
    """Return the staging function for whole tensors, which are copied from the receive buffer."""

    async def make_ready(version: int, share: HostShare) -> Install:
        await weights.stage(share)
        return EngineWeights.install

    return make_ready


def _serve_adapters(adapter: ServedAdapter, layout: WeightLayout, receive_buffer: Path) -> MakeReady:
    """Return the staging function for adapters that vLLM loads."""
    images = received_images(receive_buffer, layout)

    async def make_ready(version: int, share: HostShare) -> Install:
        tensors = dict(whole_tensors(layout, images))
        request = await asyncio.to_thread(adapter.write, version, tensors)
        return lambda core: install(core, request)

    return make_ready


async def _merge_adapters(
    weights: EngineWeights, base: AdapterBase, adapters: WeightLayout, host_memory: HostMemory
) -> MakeReady:
    """Return the staging function that merges adapters into a separate receive buffer of the engine."""
    await weights.trace(base.shapes, base.dtype)
    adapted = {base_name(name) for name in adapters.shapes}
    made = weights.sharing_parameters(adapted)
    layout = merged_layout(base.shapes, sorted(made), base.dtype)
    receive_buffer = host_memory.receive_buffer
    out = receive_buffer.with_name(f"{receive_buffer.name}-merged-{host_memory.share.index}")
    # Remove the file of the generator that this one replaces.
    out.unlink(missing_ok=True)
    merger = AdapterMerger(
        base=base.folder,
        scaling=base.scaling,
        adapters=adapters,
        fetched=receive_buffer,
        merged=layout,
        out=out,
    )
    own = HostMemory(receive_buffer=out, shadow=host_memory.shadow, share=ALONE)
    await weights.connect(layout, own)
    take_whole = _take_whole(weights)

    async def make_ready(version: int, share: HostShare) -> Install:
        await asyncio.to_thread(merger.merge)
        return await take_whole(version, ALONE)

    return make_ready
