"""Weights of one engine: the part of a version that its workers need, and how they install it.

``EngineWeights`` makes the workers stage and install versions, through remote calls between two steps of the
engine. The workers may be in this process or in others. Slow work runs in a thread of the worker
(``stage_in_thread``). ``AdapterMerger`` merges adapters that an engine cannot serve into whole tensors.
"""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence, Set
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from vllm.v1.engine.core import EngineCore

from forgeasync.config import ShadowMemory
from forgeasync.generator.workarounds.load_trace import LoadTrace, WorkerTrace
from forgeasync.models import CheckpointTensors
from forgeasync.weights import (
    ALIGNMENT,
    ALONE,
    BLOCK_BYTES,
    Box,
    HostShare,
    Piece,
    RankLayout,
    ReceiveBuffer,
    StridedCopy,
    WeightLayout,
    merge_adapter,
    needed_blocks,
    received_images,
    whole_tensors,
)

PREFIX = "base_model.model."

SIDES = (".lora_A.weight", ".lora_B.weight")

MAX_NAMES = 20
"""Maximum number of names in an error message."""

MAX_REASONS = 3
"""Maximum number of reasons in the log."""

POLL_START_S, POLL_MAX_S = 0.0005, 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMemory:
    """Receive buffer of a host and, with ``shadow: host``, the shadows of its workers."""

    receive_buffer: Path
    shadow: ShadowMemory = ShadowMemory.HOST
    share: HostShare = ALONE
    """Part of every version that this generator fetches and copies into the host's shadows.

    It is valid until the host's generators change. The generator with index 0 creates the files.
    """
    is_joining: bool = False
    """Whether other generators of the host use the files already."""

    @property
    def makes_files(self) -> bool:
        """Whether this engine creates the files that the engines of its host share."""
        return self.share.index == 0 and not self.is_joining

    def shadow_file(self, worker_rank: int) -> Path:
        """Return the file of a worker rank's shadow; workers of equal rank in all generators share it."""
        return self.receive_buffer.with_name(f"{self.receive_buffer.name}-shadow-{worker_rank}")


def stage_in_thread(stage: Callable[[], None]) -> Future[None]:
    """Run a worker's staging in a thread, concurrently with the engine's steps."""
    staged: Future[None] = Future()

    def run() -> None:
        try:
            stage()
        except Exception as error:
            staged.set_exception(error)
        else:
            staged.set_result(None)

    threading.Thread(target=run, name="weight-staging", daemon=True).start()
    return staged


def by_parameter(copies: Iterable[StridedCopy]) -> dict[str, list[StridedCopy]]:
    """Group copies by the parameter that they write to."""
    found: dict[str, list[StridedCopy]] = {}
    for copy in copies:
        found.setdefault(copy.parameter, []).append(copy)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightRoute:
    """How an engine installs versions."""

    reload_because: tuple[str, ...] = ()
    """Reasons for loading versions with vLLM's ``reload_weights``; empty if versions are copied."""

    @property
    def is_copy(self) -> bool:
        """Whether versions are copied into the engine's parameters instead of loaded by vLLM."""
        return not self.reload_because

    def __str__(self) -> str:
        if self.is_copy:
            return "weights are copied into the engine's parameters"
        reasons = "; ".join(self.reload_because[:MAX_REASONS])
        rest = len(self.reload_because) - MAX_REASONS
        more = f" and {rest} more" if rest > 0 else ""
        return f"weights are loaded by vLLM's reload_weights, while decoding stands still: {reasons}{more}"


class BetweenSteps(Protocol):
    """``GeneratorEngine.between_steps``."""

    def __call__(
        self, function: Callable[[EngineCore], Any], *, needs_drain: bool = True
    ) -> Awaitable[Any]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineNeeds:
    """Part of every version that an engine needs."""

    blocks: list[np.ndarray]
    """Masks (bool) of the blocks of each trainer rank's staging buffer that the engine needs, by rank."""
    num_bytes: int
    """Bytes of the elements that at least one worker copies."""


class EngineWeights:
    """Stages and installs versions in all workers of one engine."""

    def __init__(self, between_steps: BetweenSteps) -> None:
        self._between_steps = between_steps
        self._route = WeightRoute()
        self._traces: list[LoadTrace] = []

    async def _call(self, method: str, *arguments: object, needs_drain: bool = True) -> list[Any]:
        return await self._between_steps(
            lambda core: core.collective_rpc(method, args=arguments), needs_drain=needs_drain
        )

    async def trace(self, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> WeightRoute:
        """Find where each worker stores the tensors of a model, and return how it can install new ones.

        Raises:
            ValueError: The engine has other tensors; the message names them.
        """
        answers: list[WorkerTrace] = await self._call("trace_weights", shapes, dtype)
        reasons = dict.fromkeys(reason for answer in answers for reason in answer.reload_because)
        self._route = WeightRoute(reload_because=tuple(reasons))
        self._traces = [answer.trace for answer in answers]
        foreign = {name for answer in answers for name in answer.foreign}
        check_traces(self._traces, shapes, dtype, foreign=foreign, is_copy=self._route.is_copy)
        return self._route

    async def connect(self, layout: WeightLayout, host_memory: HostMemory) -> EngineNeeds:
        """Plan every worker's copies of versions out of the receive buffer. Call after ``trace``."""
        is_copy = self._route.is_copy
        plans: list[Sequence[StridedCopy]] = await self._call("connect_weights", layout, host_memory, is_copy)
        if not is_copy:
            return all_of(layout)
        copies = [copy for plan in plans for copy in plan]
        blocks = needed_blocks(layout, copies)
        distinct = {(copy.rank, copy.source_offset, copy.size, copy.source_strides): copy for copy in copies}
        num_elements = sum(copy.num_elements for copy in distinct.values())
        return EngineNeeds(blocks=blocks, num_bytes=num_elements * layout.dtype.itemsize)

    def sharing_parameters(self, names: Iterable[str]) -> set[str]:
        """Return all tensors that share a parameter of the engine with any of ``names``, these included.

        Call after ``trace``. Returns all tensors if vLLM loads versions whole.
        """
        regions = [region for trace in self._traces for region in trace.regions]
        if not self._route.is_copy:
            return {region.name for region in regions}
        wanted = set(names)
        touched = {region.parameter for region in regions if region.name in wanted}
        return {region.name for region in regions if region.parameter in touched}

    async def stage(self, share: HostShare) -> None:
        """Make every worker stage the version in the receive buffer, and wait until all have.

        ``share`` is the engine's share among the generators that stage the version together.
        """
        await self._call("start_staging", share, needs_drain=False)
        delay_s = POLL_START_S
        while not all(await self._call("staging_done", needs_drain=False)):
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, POLL_MAX_S)

    @staticmethod
    def install(core: EngineCore) -> None:
        """Install the staged version. Runs between two steps."""
        core.collective_rpc("swap_weights")


def all_of(layout: WeightLayout) -> EngineNeeds:
    """Return needs that cover every tensor of a layout."""
    blocks = [np.zeros(rank.num_blocks, bool) for rank in layout.ranks]
    for needed, rank in zip(blocks, layout.ranks, strict=True):
        for piece in rank.pieces:
            end = piece.offset + piece.num_elements * layout.dtype.itemsize
            needed[piece.offset // BLOCK_BYTES : -(-end // BLOCK_BYTES)] = True
    return EngineNeeds(blocks=blocks, num_bytes=layout.num_bytes)


def check_traces(
    traces: Sequence[LoadTrace],
    shapes: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype,
    *,
    foreign: Set[str] = frozenset(),
    is_copy: bool = True,
) -> None:
    """Check that the engine's workers need exactly the tensors that the trainer publishes.

    Args:
        foreign: Tensors that the engine's own folder does not have.
        is_copy: Whether workers copy; otherwise only ``foreign`` is checked, and vLLM's loaders check the
            rest.

    Raises:
        ValueError: They differ; the message names the tensors and parameters.
    """
    traced = {region.name for trace in traces for region in trace.regions}
    untraceable = {line for trace in traces for line in trace.untraceable}
    problems = {"the engine's own folder does not have": set(foreign)}
    if is_copy:
        problems |= {
            "the engine cannot take": untraceable,
            "the engine does not know": set(shapes) - traced - {line.split(" ")[0] for line in untraceable},
            "nothing is published for the engine's": {line for trace in traces for line in trace.unfilled},
            f"weights are published as {dtype}, but these parameters of the engine are not": {
                line for trace in traces for line in trace.other_dtypes
            },
        }
    found = [f"{text}: {_some(sorted(lines))}" for text, lines in problems.items() if lines]
    if found:
        raise ValueError("trainer and engine do not have the same weights: " + "; ".join(found))


def _some(lines: Sequence[str]) -> str:
    rest = len(lines) - MAX_NAMES
    return ", ".join(lines[:MAX_NAMES]) + (f" and {rest} more" if rest > 0 else "")


def base_name(adapter_name: str) -> str:
    """Return the name of the base tensor that an adapter tensor, named as in peft, adapts."""
    for side in SIDES:
        if adapter_name.startswith(PREFIX) and adapter_name.endswith(side):
            return adapter_name.removeprefix(PREFIX).removesuffix(side) + ".weight"
    raise AssertionError(f"{adapter_name} is not the tensor of an adapter")


def merged_layout(
    shapes: Mapping[str, tuple[int, ...]], names: Iterable[str], dtype: torch.dtype
) -> WeightLayout:
    """Return the layout of whole tensors ``names``, one after the other, as if published by one rank."""
    pieces, end = [], 0
    for name in names:
        box = Box(start=(0,) * len(shapes[name]), size=shapes[name])
        start = -(-end // ALIGNMENT) * ALIGNMENT
        pieces.append(Piece(names=(name,), shape=shapes[name], box=box, offset=start))
        end = start + box.num_elements * dtype.itemsize
    rank = RankLayout(rank=0, host_id="", pieces=tuple(pieces), num_bytes=end)
    return WeightLayout(dtype=dtype, ranks=(rank,))


class AdapterMerger:
    """Merges adapters from one receive buffer into whole weights in another one.

    Used for engines that cannot serve adapters of experts: only adapters are transferred, and the generator
    merges them with the base model's own files while the engine decodes. Tensors that share a parameter of
    the engine with an adapted one (q with k and v, gate with up) are included, because parameters are
    replaced as a whole.
    """

    def __init__(
        self,
        *,
        base: Path,
        scaling: float,
        adapters: WeightLayout,
        fetched: Path,
        merged: WeightLayout,
        out: Path,
    ) -> None:
        """Read the base model from the Hugging Face folder ``base``.

        ``fetched`` and ``out`` are the files of the two receive buffers.

        Raises:
            ValueError: An adapter cannot be merged, because half of it is missing or the engine does not need
                the tensor that it adapts.
        """
        self._base = CheckpointTensors(base)
        self._scaling = scaling
        self._adapters = adapters
        self._images = received_images(fetched, adapters)
        image = ReceiveBuffer(out, merged).image(0).view(merged.dtype)
        self._targets = dict(whole_tensors(merged, [image]))
        self._adapted = {base_name(name) for name in adapters.shapes}
        self._check(adapters.shapes.keys())
        for name in self._targets.keys() - self._adapted:
            self._targets[name].copy_(self._base[name])

    def _check(self, published: Set[str]) -> None:
        whole = {PREFIX + name.removesuffix(".weight") + side for name in self._adapted for side in SIDES}
        problems = {
            "the other half is missing of": sorted(whole - published),
            "the engine does not take": sorted(self._adapted - self._targets.keys()),
        }
        found = [f"{text} {_some(names)}" for text, names in problems.items() if names]
        if found:
            raise ValueError("adapters that would not be merged: " + "; ".join(found))

    @torch.no_grad()
    def merge(self) -> None:
        """Merge every adapted tensor. Takes long and may run in any thread."""
        sides = dict(whole_tensors(self._adapters, self._images))
        for name in self._adapted:
            stem = PREFIX + name.removesuffix(".weight")
            lora_a, lora_b = (sides[stem + side] for side in SIDES)
            self._targets[name].copy_(merge_adapter(self._base[name].float(), lora_a, lora_b, self._scaling))
