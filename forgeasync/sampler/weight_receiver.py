"""Takes published versions into one engine: fetched and made ready beside it, then swapped in.

Who waits for whom: ``begin`` returns once the version lies in this generator's own memory, from when on the
trainer may overwrite the staging buffer; ``finish`` once the engine samples under it.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from forgeasync.sampler.adapter_merger import AdapterMerger, base_name, merged_layout
from forgeasync.sampler.engine import SamplerEngine
from forgeasync.sampler.engine_weights import EngineWeights, all_of, sharing_parameters
from forgeasync.sampler.swap import SwapReport
from forgeasync.weights.fetcher import FetchReport, Landing, WeightFetcher
from forgeasync.weights.layout import WeightLayout
from forgeasync.weights.manifest import Manifest
from forgeasync.weights.transports.transport import Transport


class IncompleteFetch(RuntimeError):
    """A version did not arrive as its manifest says; the engine goes on under the old weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterBase:
    """What published adapters are adapters of."""

    folder: Path
    shapes: Mapping[str, tuple[int, ...]]
    """Of all tensors of the model."""
    dtype: torch.dtype
    """Of the engine's parameters."""
    scaling: float


class WeightReceiver:
    """The versions of one engine, one update at a time."""

    def __init__(
        self,
        engine: SamplerEngine,
        fetcher: WeightFetcher,
        weights: EngineWeights,
        merger: AdapterMerger | None,
    ) -> None:
        self._engine = engine
        self._fetcher = fetcher
        self._weights = weights
        self._merger = merger
        self._update: asyncio.Task[SwapReport] | None = None

    @classmethod
    async def connect(
        cls,
        engine: SamplerEngine,
        *,
        layout: WeightLayout,
        transports: Mapping[int, Transport],
        landing: Path,
        delta: bool,
        base: AdapterBase | None = None,
    ) -> "WeightReceiver":
        """Plan how versions of this layout get into the engine; with ``base`` they are adapters of it.

        Raises:
            ValueError: engine and layout do not have the same tensors.
        """
        memory = Landing(landing, layout)
        weights = EngineWeights(engine.between_steps)
        merger = None
        if base is None:
            await weights.trace(layout.shapes, layout.dtype)
            needs = await weights.connect(layout, landing)
        else:
            merger = await _connect_adapters(weights, base, layout, landing)
            needs = all_of(layout)
        fetcher = WeightFetcher(
            layout=layout,
            needed=needs.blocks,
            num_bytes_needed=needs.num_bytes,
            landing=memory,
            transports=transports,
            delta=delta,
        )
        return cls(engine, fetcher, weights, merger)

    async def begin(self, manifest: Manifest) -> FetchReport:
        """Start an update; returns when the version was fetched, or could not be fetched whole."""
        assert self._update is None, "an update is under way: finish it first"
        fetched: asyncio.Future[FetchReport] = asyncio.get_running_loop().create_future()

        async def prefetch() -> None:
            report = await self._fetcher.fetch(manifest)
            fetched.set_result(report)
            if not report.is_complete:
                raise IncompleteFetch(f"version {manifest.version}: {report.num_bad_blocks} bad blocks")
            if self._merger is not None:
                await asyncio.to_thread(self._merger.merge)
            await self._weights.stage()

        update = asyncio.create_task(
            self._engine.update_weights(manifest.version, prefetch=prefetch, install=EngineWeights.install)
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


async def _connect_adapters(
    weights: EngineWeights, base: AdapterBase, adapters: WeightLayout, landing: Path
) -> AdapterMerger:
    """Have the engine take merged weights out of a second landing."""
    traces = await weights.trace(base.shapes, base.dtype)
    adapted = {base_name(name) for name in adapters.shapes}
    made = sharing_parameters(traces, adapted) if traces else set(base.shapes)
    layout = merged_layout(base.shapes, sorted(made), base.dtype)
    out = landing.with_name(f"{landing.name}-merged")
    merger = AdapterMerger(
        base=base.folder, scaling=base.scaling, adapters=adapters, fetched=landing, merged=layout, out=out
    )
    await weights.connect(layout, out)
    return merger
