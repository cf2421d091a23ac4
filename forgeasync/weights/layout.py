"""The layout of a version's weights in the staging buffers of the trainer's ranks.

A layout is made once, when trainer and generators meet, and holds for every version. Each rank publishes the
shards it holds, cut into pieces; of shards that several ranks hold (replicas) one rank publishes each.
"""

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from forgeasync.config import Dtype
from forgeasync.weights.manifest import BLOCK_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedWeight:
    """A tensor (or this rank's shard of one, as a DTensor) and what generators call it.

    Several ``names`` mean that the tensor stacks that many tensors along its first dimension (experts).
    """

    names: tuple[str, ...]
    tensor: torch.Tensor


def merged(base: torch.Tensor, lora_a: torch.Tensor, lora_b: torch.Tensor, scaling: float) -> torch.Tensor:
    """``base + scaling * lora_b @ lora_a``, computed in float32, in the dtype of ``base``.

    Shapes: base [..., out, in], lora_a [..., rank, in], lora_b [..., out, rank]; leading dimensions (experts)
    are the same in all three. W = W0 + (alpha / rank) B A: Hu et al., "LoRA", 2021, section 4.1.
    """
    delta = lora_b.float() @ lora_a.float()
    return torch.add(base.float(), delta, alpha=scaling).to(base.dtype)


ALIGNMENT = 64
"""Alignment of pieces in their buffer, in bytes: a cache line, enough for any dtype."""


SEGMENT_BYTES = 128 * BLOCK_BYTES
"""Bytes that a transport between hosts moves at once: 32 MiB, 1,900 handles for a model of 61 GB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """A block of a tensor: where it starts and how long it is, in elements of every dimension."""

    start: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def num_elements(self) -> int:
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
        return len(self.names) * self.box.num_elements


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLayout:
    """The staging buffer of one trainer rank."""

    rank: int
    host_id: str
    pieces: tuple[Piece, ...]
    num_bytes: int

    @property
    def num_blocks(self) -> int:
        return -(-self.num_bytes // BLOCK_BYTES)


class WeightSet(StrEnum):
    """Which of the weights of a version a reader takes."""

    POLICY = "policy"
    AVERAGE = "average"
    """The trainer's average of the policy's, for teachers that follow it."""


AVERAGE_PREFIX = "forgeasync.average."


def name_in(weights: WeightSet, name: str) -> str:
    """What a tensor of a set is called in the layout of all that is published."""
    return name if weights is WeightSet.POLICY else f"{AVERAGE_PREFIX}{name}"


@dataclass(frozen=True)
class WeightLayout:
    """The staging buffers of all ranks; every tensor is published whole, each element once."""

    dtype: torch.dtype
    ranks: tuple[RankLayout, ...]
    part_of: str | None = None
    """Digest of the layout that this is a part of; None: it is all that is published."""

    def of(self, weights: WeightSet) -> "WeightLayout":
        """The part that has one set of weights, each under its own name and where it was."""
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
        """The whole shape of every tensor by name."""
        return {name: piece.shape for rank in self.ranks for piece in rank.pieces for name in piece.names}

    @cached_property
    def digest(self) -> str:
        """Tells layouts apart: a manifest names the whole layout that it was written in."""
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


def shard_box(tensor: torch.Tensor) -> Box:
    """Which part of the whole tensor this rank holds."""
    if not isinstance(tensor, DTensor):
        return Box(start=(0,) * tensor.dim(), size=tuple(tensor.shape))
    size, start = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    assert tuple(tensor.to_local().shape) == tuple(size), (tensor.placements, size)
    return Box(start=tuple(start), size=tuple(size))


def assign_boxes(boxes_by_rank: Sequence[Sequence[Box]]) -> list[list[int]]:
    """Which weights each rank publishes, by index, given the box of every weight on every rank.

    Where several ranks hold the same box, the one with the least to publish so far publishes it.
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
    weights: Sequence[NamedWeight], indices: Sequence[int], *, rank: int, host_id: str, itemsize: int
) -> RankLayout:
    """The staging buffer of a rank that publishes its shards of ``weights[index]`` for ``indices``."""
    pieces, end = [], 0
    for index in indices:
        weight = weights[index]
        piece = replace(_piece(weight), offset=-(-end // ALIGNMENT) * ALIGNMENT)
        end = piece.offset + piece.num_elements * itemsize
        pieces.append(piece)
    return RankLayout(rank=rank, host_id=host_id, pieces=tuple(pieces), num_bytes=end)


def _piece(weight: NamedWeight) -> Piece:
    box, shape = shard_box(weight.tensor), tuple(weight.tensor.shape)
    if len(weight.names) == 1:
        return Piece(names=weight.names, shape=shape, box=box, offset=0)
    assert len(weight.names) == shape[0], f"{len(weight.names)} names for {shape}"
    first, count = box.start[0], box.size[0]
    inner = Box(start=box.start[1:], size=box.size[1:])
    return Piece(names=weight.names[first : first + count], shape=shape[1:], box=inner, offset=0)


def whole_tensors(layout: WeightLayout, images: Sequence[torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of a receive buffer by name; those in one piece are views, the others are put together."""
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


TORCH_DTYPES = {Dtype.FLOAT32: torch.float32, Dtype.BFLOAT16: torch.bfloat16}
