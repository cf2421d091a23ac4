"""The workers of one engine, asked for what they need of a version, to make it ready, and to take it.

Everything runs as remote calls between two steps of the engine, which work for workers in this process and in
others; what takes long runs in a thread of the worker.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm.v1.engine.core import EngineCore

from forgeasync.generator.host_memory import HostMemory
from forgeasync.generator.weight_route import WeightRoute
from forgeasync.generator.workarounds.load_trace import LoadTrace, WorkerTrace
from forgeasync.weights import BLOCK_BYTES, HostShare, StridedCopy, WeightLayout, needed_blocks

POLL_START_S, POLL_MAX_S = 0.0005, 0.02


MAX_NAMES = 20
"""In an error message."""


BetweenSteps = Callable[[Callable[[EngineCore], Any]], Awaitable[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineNeeds:
    """The part of every version that an engine needs."""

    blocks: list[np.ndarray]
    """Blocks (bool) of each trainer rank's staging buffer that the engine needs, by rank."""
    num_bytes: int
    """Bytes of the elements that at least one worker copies."""


class EngineWeights:
    """The weights of one engine."""

    def __init__(self, between_steps: BetweenSteps) -> None:
        self._between_steps = between_steps
        self._route = WeightRoute()
        self._traces: list[LoadTrace] = []

    async def _call(self, method: str, *arguments: object) -> list[Any]:
        return await self._between_steps(lambda core: core.collective_rpc(method, args=arguments))

    async def trace(self, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> WeightRoute:
        """Find out where every worker keeps the tensors of a model, and so how it can take new ones.

        Raises:
            ValueError: the engine does not have the same tensors; names the offending ones.
        """
        answers: list[WorkerTrace] = await self._call("trace_weights", shapes, dtype)
        reasons = dict.fromkeys(reason for answer in answers for reason in answer.reload_because)
        self._route = WeightRoute(reload_because=tuple(reasons))
        self._traces = [answer.trace for answer in answers]
        foreign = {name for answer in answers for name in answer.foreign}
        check_traces(self._traces, shapes, dtype, foreign=foreign, is_copy=self._route.is_copy)
        return self._route

    async def connect(self, layout: WeightLayout, host_memory: HostMemory) -> EngineNeeds:
        """Plan how every worker takes versions of this layout out of the receive buffer; after ``trace``."""
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
        """Return all tensors that the engine keeps in one parameter with any of ``names``, these included.

        After ``trace``; all tensors where vLLM loads every version whole.
        """
        regions = [region for trace in self._traces for region in trace.regions]
        if not self._route.is_copy:
            return {region.name for region in regions}
        wanted = set(names)
        touched = {region.parameter for region in regions if region.name in wanted}
        return {region.name for region in regions if region.parameter in touched}

    async def stage(self, share: HostShare) -> None:
        """Have every worker make its part of the receive buffer's version ready; returns when all have.

        ``share`` is that of this engine among those that take the version together.
        """
        await self._call("start_staging", share)
        delay_s = POLL_START_S
        while not all(await self._call("staging_done")):
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, POLL_MAX_S)

    @staticmethod
    def install(core: EngineCore) -> None:
        """Put the version that is ready in place; runs between two steps."""
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
    """Compare what the engine's workers take with what the trainer publishes.

    ``foreign`` are tensors that the engine's own folder does not have. Unless workers copy (``is_copy``),
    vLLM's loaders decide about the others.

    Raises:
        ValueError: they differ; names the tensors and parameters.
    """
    taken = {region.name for trace in traces for region in trace.regions}
    untraceable = {line for trace in traces for line in trace.untraceable}
    problems = {"the engine's own folder does not have": set(foreign)}
    if is_copy:
        problems |= {
            "the engine cannot take": untraceable,
            "the engine does not know": set(shapes) - taken - {line.split(" ")[0] for line in untraceable},
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
