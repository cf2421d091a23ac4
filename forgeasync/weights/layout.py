"""Layout of a version's bytes: pieces in staging buffers, checksummed blocks, copies to parameters.

A layout is made once, when trainer and generators connect, and applies to every version. Each rank publishes
its shards, cut into pieces; a shard that several ranks hold is published by one of them. The ``Manifest`` of
a version has the checksum of every block of ``BLOCK_BYTES``.

Trainer and engine shard the same tensors differently. Every overlap of a published piece with a block of an
engine's parameter is one strided copy, planned once and executed for every version (``plan_copies``). Copies
at equal distances, such as those of a layer's experts, are joined into one copy with an additional dimension.
"""

import hashlib
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from typing import Protocol

import numpy as np
import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from forgeasync.config import PATCH_SHARE, Dtype
from forgeasync.weights.ledger import BLOCK_BYTES

TORCH_DTYPES = {Dtype.FLOAT32: torch.float32, Dtype.BFLOAT16: torch.bfloat16}
"""Torch dtype of each dtype of a config."""


ALIGNMENT = 64
"""Alignment of pieces in their buffer, in bytes: a cache line, sufficient for any dtype."""

SEGMENT_BYTES = 128 * BLOCK_BYTES
"""Bytes that a transport between hosts moves at once: 32 MiB, or 1,900 handles for a model of 61 GB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedWeight:
    """Tensor (or this rank's shard of one, as a DTensor) with its names in generators.

    Several ``names`` mean that the tensor is a stack of that many tensors along its first dimension
    (experts).
    """

    names: tuple[str, ...]
    tensor: torch.Tensor


def merge_adapter(
    base: torch.Tensor, lora_a: torch.Tensor, lora_b: torch.Tensor, scaling: float
) -> torch.Tensor:
    """Return ``base + scaling * lora_b @ lora_a``, computed in float32, in the dtype of ``base``.

    Shapes: base [..., out, in], lora_a [..., rank, in], lora_b [..., out, rank]; leading dimensions (experts)
    are the same in all three. W = W0 + (alpha / rank) B A: Hu et al., "LoRA", 2021, section 4.1.
    """
    delta = lora_b.float() @ lora_a.float()
    return torch.add(base.float(), delta, alpha=scaling).to(base.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """Block of a tensor: start and size in elements, by dimension."""

    start: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        """Number of elements."""
        return math.prod(self.size)

    def overlap(self, other: "Box") -> "Box | None":
        """Return the intersection of two blocks of the same tensor; None if it is empty."""
        start = tuple(map(max, self.start, other.start))
        stop = (
            min(a + m, b + n)
            for a, m, b, n in zip(self.start, self.size, other.start, other.size, strict=True)
        )
        size = tuple(end - begin for begin, end in zip(start, stop, strict=True))
        return Box(start=start, size=size) if all(n > 0 for n in size) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One box of each of the equally shaped tensors ``names``, consecutive from byte ``offset`` on."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    """Shape of each whole tensor."""
    box: Box
    offset: int

    @property
    def num_elements(self) -> int:
        """Number of elements of all tensors of the piece."""
        return len(self.names) * self.box.num_elements


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLayout:
    """Layout of the staging buffer of one trainer rank."""

    rank: int
    host_id: str
    pieces: tuple[Piece, ...]
    num_bytes: int
    """Bytes of the weights, with what lies between pieces."""
    patch_bytes: int = 0
    """Bytes that patches may take behind the weights."""

    @property
    def num_blocks(self) -> int:
        """Number of blocks of the weights."""
        return -(-self.num_bytes // BLOCK_BYTES)

    @property
    def patch_start(self) -> int:
        """First byte of the patches."""
        return self.num_blocks * BLOCK_BYTES

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the buffer: weights and patches."""
        return self.patch_start + self.patch_bytes if self.patch_bytes else self.num_bytes


class WeightSet(StrEnum):
    """Set of a version's weights that a reader uses."""

    POLICY = "policy"
    AVERAGE = "average"
    """Moving average of the policy's weights, for teachers that follow it."""


AVERAGE_PREFIX = "forgeasync.average."


def name_in(weights: WeightSet, name: str) -> str:
    """Return the name of a tensor of a set in the layout of all published weights."""
    return name if weights is WeightSet.POLICY else f"{AVERAGE_PREFIX}{name}"


@dataclass(frozen=True)
class WeightLayout:
    """Layout of the staging buffers of all ranks; each element of every tensor is published exactly once."""

    dtype: torch.dtype
    ranks: tuple[RankLayout, ...]
    part_of: str | None = None
    """Digest of the layout that this one is a part of; None if it is the layout of all published weights."""

    def of(self, weights: WeightSet) -> "WeightLayout":
        """Return the part with one set of weights, under their own names, at unchanged offsets."""
        is_average = weights is WeightSet.AVERAGE
        ranks = tuple(
            replace(
                rank,
                pieces=tuple(
                    replace(piece, names=tuple(one.removeprefix(AVERAGE_PREFIX) for one in piece.names))
                    for piece in rank.pieces
                    if piece.names[0].startswith(AVERAGE_PREFIX) is is_average
                ),
            )
            for rank in self.ranks
        )
        return WeightLayout(dtype=self.dtype, ranks=ranks, part_of=self.digest)

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Whole shape of every tensor by name."""
        return {name: piece.shape for rank in self.ranks for piece in rank.pieces for name in piece.names}

    @cached_property
    def digest(self) -> str:
        """Identifier of the layout. A manifest has the digest of the whole layout that it was written in."""
        return (
            self.part_of
            or hashlib.blake2b(repr((self.dtype, self.ranks)).encode(), digest_size=16).hexdigest()
        )

    @property
    def num_bytes(self) -> int:
        """Bytes of all weights, without padding."""
        elements = sum(piece.num_elements for rank in self.ranks for piece in rank.pieces)
        return elements * self.dtype.itemsize

    def __post_init__(self) -> None:
        elements: dict[str, int] = {}
        for rank in self.ranks:
            for piece in rank.pieces:
                for name in piece.names:
                    elements[name] = elements.get(name, 0) + piece.box.num_elements
        for name, shape in self.shapes.items():
            assert elements[name] == math.prod(shape), (
                f"{elements[name]} elements of {name} are published, it has {math.prod(shape)}"
            )


def local_shard(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a DTensor, or any other tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def shard_box(tensor: torch.Tensor) -> Box:
    """Return the part of the whole tensor that this rank holds."""
    if not isinstance(tensor, DTensor):
        return Box(start=(0,) * tensor.dim(), size=tuple(tensor.shape))
    size, start = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    assert tuple(tensor.to_local().shape) == tuple(size), (tensor.placements, size)
    return Box(start=tuple(start), size=tuple(size))


def assign_boxes(boxes_by_rank: Sequence[Sequence[Box]]) -> list[list[int]]:
    """Return the indices of the weights that each rank publishes.

    ``boxes_by_rank`` has the ``Box`` of every weight on every rank. If several ranks hold the same one, the
    rank with the least to publish so far publishes it.
    """
    assigned: list[list[int]] = [[] for _ in boxes_by_rank]
    load = [0] * len(boxes_by_rank)
    for index in range(len(boxes_by_rank[0])):
        holders: dict[Box, list[int]] = {}
        for rank, boxes in enumerate(boxes_by_rank):
            if boxes[index].num_elements:
                holders.setdefault(boxes[index], []).append(rank)
        for box, ranks in holders.items():
            owner = min(ranks, key=load.__getitem__)
            load[owner] += box.num_elements
            assigned[owner].append(index)
    return assigned


def lay_out(
    weights: Sequence[NamedWeight],
    indices: Sequence[int],
    *,
    rank: int,
    host_id: str,
    itemsize: int,
    has_patches: bool = False,
) -> RankLayout:
    """Return the staging layout of a rank that publishes its shards of ``weights[index]`` for ``indices``."""
    pieces, end = [], 0
    for index in indices:
        weight = weights[index]
        piece = replace(_piece(weight), offset=-(-end // ALIGNMENT) * ALIGNMENT)
        end = piece.offset + piece.num_elements * itemsize
        pieces.append(piece)
    patch_bytes = int(PATCH_SHARE * end) if has_patches else 0
    return RankLayout(
        rank=rank, host_id=host_id, pieces=tuple(pieces), num_bytes=end, patch_bytes=patch_bytes
    )


def _piece(weight: NamedWeight) -> Piece:
    box, shape = shard_box(weight.tensor), tuple(weight.tensor.shape)
    if len(weight.names) == 1:
        return Piece(names=weight.names, shape=shape, box=box, offset=0)
    assert len(weight.names) == shape[0], f"{len(weight.names)} names for {shape}"
    first, count = box.start[0], box.size[0]
    inner = Box(start=box.start[1:], size=box.size[1:])
    return Piece(names=weight.names[first : first + count], shape=shape[1:], box=inner, offset=0)


def whole_tensors(layout: WeightLayout, images: Sequence[torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor of the ranks' buffers with its name: a view if in one piece, else a new tensor."""
    parts: dict[str, list[tuple[tuple[slice, ...], torch.Tensor]]] = {}
    for rank, image in zip(layout.ranks, images, strict=True):
        for piece in rank.pieces:
            first = piece.offset // layout.dtype.itemsize
            count = piece.box.num_elements
            place = tuple(slice(a, a + n) for a, n in zip(piece.box.start, piece.box.size, strict=True))
            for index, name in enumerate(piece.names):
                start = first + index * count
                parts.setdefault(name, []).append((place, image[start : start + count].view(piece.box.size)))
    for name, shape in layout.shapes.items():
        if len(parts[name]) == 1:
            yield name, parts[name][0][1]
            continue
        whole = torch.empty(shape, dtype=layout.dtype)
        for place, part in parts[name]:
            whole[place] = part
        yield name, whole


class Destination(Protocol):
    """Box of a tensor and its target (see ``forgeasync.generator.workarounds.load_trace.Region``)."""

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
    """Copy from a receive buffer to a parameter; offsets and strides count elements."""

    rank: int
    source_offset: int
    source_strides: tuple[int, ...]
    parameter: str
    target_offset: int
    target_strides: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        """Number of elements that are copied."""
        return math.prod(self.size)

    def source(self, image: torch.Tensor) -> torch.Tensor:
        """Return the view to copy from; ``image`` is the rank's image in the weights' dtype."""
        return image.as_strided(self.size, self.source_strides, image.storage_offset() + self.source_offset)

    def target(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the view to copy into."""
        start = parameter.storage_offset() + self.target_offset
        return parameter.as_strided(self.size, self.target_strides, start)


def plan_copies(layout: WeightLayout, destinations: Iterable[Destination]) -> list[StridedCopy]:
    """Return all copies that fill the destinations from the staged pieces."""
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
    """Join equal copies at equal distances into one."""
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
    """Return the end of the longest run of copies at equal distances that begins at ``start``."""
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
    """Return, for every rank, the blocks of its staging buffer that contain elements to copy (bool).

    A strided copy counts as needing everything from its first element to its last.
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
