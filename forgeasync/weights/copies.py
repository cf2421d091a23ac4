"""Copies from the receive buffer into the engine's parameters: planned once, run for every version.

Both sides cut the same tensors into boxes, each in its own way; every overlap is one strided copy. Copies at
equal distances (a layer's experts) are then joined into one with a further dimension.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from forgeasync.weights.layout import Box, WeightLayout
from forgeasync.weights.manifest import BLOCK_BYTES


class Destination(Protocol):
    """A box of a tensor and where it goes (see ``forgeasync.generator.workarounds.load_trace.Region``)."""

    @property
    def name(self) -> str: ...
    @property
    def box(self) -> Box: ...
    @property
    def parameter(self) -> str: ...
    @property
    def target_offset(self) -> int: ...
    @property
    def target_strides(self) -> tuple[int, ...]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StridedCopy:
    """Elements of a receive buffer to elements of a parameter; offsets and strides count elements."""

    rank: int
    source_offset: int
    source_strides: tuple[int, ...]
    parameter: str
    target_offset: int
    target_strides: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        return math.prod(self.size)

    def source(self, image: torch.Tensor) -> torch.Tensor:
        """The view to copy from; ``image`` is the rank's part of the receive buffer in the weights' dtype."""
        return image.as_strided(self.size, self.source_strides, image.storage_offset() + self.source_offset)

    def target(self, parameter: torch.Tensor) -> torch.Tensor:
        """The view to copy into."""
        start = parameter.storage_offset() + self.target_offset
        return parameter.as_strided(self.size, self.target_strides, start)


def plan_copies(layout: WeightLayout, destinations: Iterable[Destination]) -> list[StridedCopy]:
    """Every copy that fills the destinations from the staged pieces."""
    by_name: dict[str, list[Destination]] = defaultdict(list)
    for destination in destinations:
        by_name[destination.name].append(destination)
    copies: list[StridedCopy] = []
    for rank in layout.ranks:
        for piece in rank.pieces:
            strides = tuple(math.prod(piece.box.size[dim + 1 :]) for dim in range(len(piece.box.size)))
            for index, name in enumerate(piece.names):
                start = piece.offset // layout.dtype.itemsize + index * piece.box.num_elements
                for destination in by_name[name]:
                    copy = _copy(rank.rank, piece.box, start, strides, destination)
                    if copy is not None:
                        copies.append(copy)
    return join(copies)


def _copy(
    rank: int, held: Box, start: int, strides: tuple[int, ...], destination: Destination
) -> StridedCopy | None:
    shared = held.overlap(destination.box)
    if shared is None:
        return None
    inside = [a - b for a, b in zip(shared.start, held.start, strict=True)]
    target = [a - b for a, b in zip(shared.start, destination.box.start, strict=True)]
    return StridedCopy(
        rank=rank,
        source_offset=start + sum(i * s for i, s in zip(inside, strides, strict=True)),
        source_strides=strides,
        parameter=destination.parameter,
        target_offset=destination.target_offset
        + sum(i * s for i, s in zip(target, destination.target_strides, strict=True)),
        target_strides=destination.target_strides,
        size=shared.size,
    )


def join(copies: Sequence[StridedCopy]) -> list[StridedCopy]:
    """Join copies: equal ones at equal distances become one."""
    alike: dict[tuple[object, ...], list[StridedCopy]] = defaultdict(list)
    for copy in copies:
        key = (copy.rank, copy.parameter, copy.size, copy.source_strides, copy.target_strides)
        alike[key].append(copy)
    joined: list[StridedCopy] = []
    for group in alike.values():
        start = 0
        while start < len(group):
            stop = _run_end(group, start)
            joined.append(_stack(group[start:stop]))
            start = stop
    return joined


def _distance(a: StridedCopy, b: StridedCopy) -> tuple[int, int]:
    return b.source_offset - a.source_offset, b.target_offset - a.target_offset


def _run_end(group: Sequence[StridedCopy], start: int) -> int:
    """The end of the longest run from ``start`` on whose members lie at equal distances."""
    if start + 1 == len(group):
        return start + 1
    step = _distance(group[start], group[start + 1])
    if min(step) < 0:
        return start + 1  # as_strided has no negative strides
    stop = start + 2
    while stop < len(group) and _distance(group[stop - 1], group[stop]) == step:
        stop += 1
    return stop


def _stack(run: Sequence[StridedCopy]) -> StridedCopy:
    first = run[0]
    if len(run) == 1:
        return first
    source_step, target_step = _distance(run[0], run[1])
    return StridedCopy(
        rank=first.rank,
        source_offset=first.source_offset,
        source_strides=(source_step, *first.source_strides),
        parameter=first.parameter,
        target_offset=first.target_offset,
        target_strides=(target_step, *first.target_strides),
        size=(len(run), *first.size),
    )


def needed_blocks(layout: WeightLayout, copies: Iterable[StridedCopy]) -> list[np.ndarray]:
    """For every rank which blocks of its staging buffer hold something to copy (bool).

    A strided copy is taken to need everything from its first element to its last.
    """
    needed = [np.zeros(rank.num_blocks, bool) for rank in layout.ranks]
    itemsize = layout.dtype.itemsize
    for copy in copies:
        last = copy.source_offset + sum(
            (n - 1) * s for n, s in zip(copy.size, copy.source_strides, strict=True)
        )
        first_block = copy.source_offset * itemsize // BLOCK_BYTES
        needed[copy.rank][first_block : last * itemsize // BLOCK_BYTES + 1] = True
    return needed
