"""Takes published versions into one engine: fetched and made ready beside it, then swapped in.

Who waits for whom: ``begin`` returns once the version lies in this generator's own memory, from when on the
trainer may overwrite the staging buffer; ``finish`` once the engine samples under it.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from vllm.v1.engine.core import EngineCore

from forgeasync.generator.adapter_merger import AdapterMerger, base_name, merged_layout
from forgeasync.generator.engine import GeneratorEngine
from forgeasync.generator.engine_weights import EngineWeights, all_of, sharing_parameters
from forgeasync.generator.reports import SwapReport
from forgeasync.generator.workarounds.served_adapters import ServedAdapter, install
from forgeasync.weights.fetcher import FetchReport, ReceiveBuffer, WeightFetcher, received_images
from forgeasync.weights.layout import WeightLayout, whole_tensors
from forgeasync.weights.manifest import Manifest
from forgeasync.weights.transports.transport import Transport


class IncompleteFetch(RuntimeError):
    """A version did not arrive as its manifest says; the engine goes on under the old weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterBase:
    """The base model that published adapters adapt."""

    folder: Path
    shapes: Mapping[str, tuple[int, ...]]
    """Shapes of all tensors of the model, by name."""
    dtype: torch.dtype
    """Dtype of the engine's parameters."""
    scaling: float


Install = Callable[[EngineCore], None]

MakeReady = Callable[[int], Awaitable[Install]]
"""Makes a version that was fetched ready beside the engine; what then runs between two steps."""


class WeightReceiver:
    """The versions of one engine, one update at a time."""

    def __init__(self, engine: GeneratorEngine, fetcher: WeightFetcher, make_ready: MakeReady) -> None:
        self._engine = engine
        self._fetcher = fetcher
        self._make_ready = make_ready
        self._update: asyncio.Task[SwapReport] | None = None

    @classmethod
    async def connect(
        cls,
        engine: GeneratorEngine,
        *,
        layout: WeightLayout,
        transports: Mapping[int, Transport],
        receive_buffer: Path,
        delta: bool,
        base: AdapterBase | None = None,
    ) -> "WeightReceiver":
        """Plan how versions of this layout get into the engine; with ``base`` they are adapters of it.

        Raises:
            ValueError: engine and layout do not have the same tensors.
        """
        memory = ReceiveBuffer(receive_buffer, layout)
        weights = EngineWeights(engine.between_steps)
        needs = all_of(layout)
        if engine.adapter is not None:
            make_ready = _serve_adapters(engine.adapter, layout, receive_buffer)
        elif base is not None:
            make_ready = await _merge_adapters(weights, base, layout, receive_buffer)
        else:
            await weights.trace(layout.shapes, layout.dtype)
            needs = await weights.connect(layout, receive_buffer)
            make_ready = _take_whole(weights)
        fetcher = WeightFetcher(
            layout=layout,
            needed=needs.blocks,
            num_bytes_needed=needs.num_bytes,
            receive_buffer=memory,
            transports=transports,
            delta=delta,
        )
        return cls(engine, fetcher, make_ready)

    async def begin(self, manifest: Manifest) -> FetchReport:
        """Start an update; returns when the version was fetched, or could not be fetched whole."""
        assert self._update is None, "an update is under way: finish it first"
        fetched: asyncio.Future[FetchReport] = asyncio.get_running_loop().create_future()
        ready: list[Install] = []

        async def prefetch() -> None:
            report = await self._fetcher.fetch(manifest)
            fetched.set_result(report)
            if not report.is_complete:
                raise IncompleteFetch(f"version {manifest.version}: {report.num_bad_blocks} bad blocks")
            ready.append(await self._make_ready(manifest.version))

        update = asyncio.create_task(
            self._engine.update_weights(
                manifest.version, prefetch=prefetch, install=lambda core: ready[0](core)
            )
        )
        await asyncio.wait([fetched, update], return_when=asyncio.FIRST_COMPLETED)
        if not fetched.done():
            update.result()  # raises what went wrong before anything was fetched
        report = fetched.result()
        if report.is_complete:
            self._update = update
        else:
            await asyncio.wait([update])
            assert isinstance(update.exception(), IncompleteFetch), update.exception()
        return report

    async def finish(self) -> SwapReport:
        """Wait until the engine samples under the version that ``begin`` has fetched."""
        assert self._update is not None, "no update is under way"
        update, self._update = self._update, None
        return await update


def _take_whole(weights: EngineWeights) -> MakeReady:
    """The receive buffer holds what the engine's parameters are copied from."""

    async def make_ready(version: int) -> Install:
        await weights.stage()
        return EngineWeights.install

    return make_ready


def _serve_adapters(adapter: ServedAdapter, layout: WeightLayout, receive_buffer: Path) -> MakeReady:
    """The receive buffer holds adapters that vLLM loads."""
    images = received_images(receive_buffer, layout)

    async def make_ready(version: int) -> Install:
        tensors = dict(whole_tensors(layout, images))
        request = await asyncio.to_thread(adapter.write, version, tensors)
        return lambda core: install(core, request)

    return make_ready


async def _merge_adapters(
    weights: EngineWeights, base: AdapterBase, adapters: WeightLayout, receive_buffer: Path
) -> MakeReady:
    """The receive buffer holds adapters: the engine takes merged weights out of a second receive buffer."""
    traces = await weights.trace(base.shapes, base.dtype)
    adapted = {base_name(name) for name in adapters.shapes}
    made = sharing_parameters(traces, adapted) if traces else set(base.shapes)
    layout = merged_layout(base.shapes, sorted(made), base.dtype)
    out = receive_buffer.with_name(f"{receive_buffer.name}-merged")
    merger = AdapterMerger(
        base=base.folder,
        scaling=base.scaling,
        adapters=adapters,
        fetched=receive_buffer,
        merged=layout,
        out=out,
    )
    await weights.connect(layout, out)
    take_whole = _take_whole(weights)

    async def make_ready(version: int) -> Install:
        await asyncio.to_thread(merger.merge)
        return await take_whole(version)

    return make_ready
