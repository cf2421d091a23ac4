"""Shards cut by the trainer, regions cut by the engine: every byte gets where the whole tensor says."""

import itertools
import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forgeasync.weights import (
    BLOCK_BYTES,
    SEGMENT_BYTES,
    Box,
    NamedWeight,
    Piece,
    RankLayout,
    StridedCopy,
    WeightLayout,
    WeightSet,
    assign_boxes,
    byte_ranges,
    join,
    lay_out,
    name_in,
    needed_blocks,
    plan_copies,
    whole_tensors,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """As a traced region: part of a tensor and its place in a parameter."""

    name: str
    box: Box
    parameter: str
    target_offset: int
    target_strides: tuple[int, ...]


def _cuts(length: int, points: list[int]) -> list[tuple[int, int]]:
    edges = sorted({0, length, *(point % (length + 1) for point in points)})
    return [(a, b - a) for a, b in itertools.pairwise(edges)]


POINTS = st.lists(st.integers(0, 100), max_size=2)


@settings(max_examples=200, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 5), st.integers(1, 6)),
    num_names=st.integers(1, 4),
    held=st.tuples(POINTS, POINTS),
    taken=st.tuples(POINTS, POINTS),
    is_swapped=st.booleans(),
)
def test_any_two_ways_of_cutting_meet(
    shape: tuple[int, int],
    num_names: int,
    held: tuple[list[int], list[int]],
    taken: tuple[list[int], list[int]],
    is_swapped: bool,
) -> None:
    """Tensors split in boxes over ranks, taken in other boxes into a fused, maybe transposed parameter."""
    names = tuple(f"w{i}" for i in range(num_names))
    whole = torch.arange(num_names * math.prod(shape), dtype=torch.float32).view(num_names, *shape)
    ranks, images = [], []
    for rank, (rows, columns) in enumerate(
        (rows, columns) for rows in _cuts(shape[0], held[0]) for columns in _cuts(shape[1], held[1])
    ):
        box = Box(start=(rows[0], columns[0]), size=(rows[1], columns[1]))
        part = whole[:, rows[0] : sum(rows), columns[0] : sum(columns)].contiguous()
        padding = 16 * (rank % 2)  # elements before the piece, as after another piece
        images.append(torch.cat([torch.full((padding,), -1.0), part.flatten()]))
        piece = Piece(names=names, shape=shape, box=box, offset=4 * padding)
        ranks.append(RankLayout(rank=rank, host_id="h", pieces=(piece,), num_bytes=4 * len(images[-1])))
    layout = WeightLayout(dtype=torch.float32, ranks=tuple(ranks))

    strides = (1, shape[0]) if is_swapped else (shape[1], 1)
    targets = [
        Target(
            name=name,
            box=Box(start=(rows[0], columns[0]), size=(rows[1], columns[1])),
            parameter="fused",
            target_offset=index * math.prod(shape) + rows[0] * strides[0] + columns[0] * strides[1],
            target_strides=strides,
        )
        for index, name in enumerate(names)
        for rows in _cuts(shape[0], taken[0])
        for columns in _cuts(shape[1], taken[1])
    ]
    fused = torch.full((num_names, math.prod(shape)), math.nan)
    copies = plan_copies(layout, targets)
    for copy in copies:
        copy.target(fused).copy_(copy.source(images[copy.rank]))
    expected = whole.transpose(1, 2) if is_swapped else whole
    assert torch.equal(fused, expected.reshape(num_names, -1))
    assert sum(copy.num_elements for copy in copies) == whole.numel(), "an element was copied twice"


def make_copy(source: int, target: int, size: tuple[int, ...]) -> StridedCopy:
    """Of dense elements of both sides."""
    strides = tuple(math.prod(size[dim + 1 :]) for dim in range(len(size)))
    return StridedCopy(
        rank=0,
        source_offset=source,
        source_strides=strides,
        parameter="w",
        target_offset=target,
        target_strides=strides,
        size=size,
    )


def test_a_layers_experts_become_one_copy() -> None:
    """128 experts of gate and up in a fused parameter: two strided copies instead of 256."""
    num_experts, rows, columns = 128, 4, 8
    size = rows * columns
    joined = join(
        [
            make_copy((half * num_experts + expert) * size, (2 * expert + half) * size, (rows, columns))
            for half in range(2)
            for expert in range(num_experts)
        ]
    )
    assert [copy.size for copy in joined] == [(num_experts, rows, columns)] * 2


def test_one_source_for_several_targets_is_one_copy() -> None:
    (copy,) = join([make_copy(2, offset, (4,)) for offset in (0, 4, 8)])
    source, target = torch.arange(8), torch.zeros(12, dtype=torch.int64)
    copy.target(target).copy_(copy.source(source))
    assert target.tolist() == [2, 3, 4, 5] * 3


def test_copies_in_falling_order_stay_apart() -> None:
    """Strides cannot be negative."""
    copies = [make_copy(offset, 8 - offset, (4,)) for offset in (0, 4, 8)]
    assert join(copies) == copies


def test_boxes_that_only_touch_share_nothing() -> None:
    box = Box(start=(0, 0), size=(2, 3))
    assert box.overlap(Box(start=(2, 0), size=(2, 3))) is None
    assert box.overlap(Box(start=(1, 2), size=(4, 4))) == Box(start=(1, 2), size=(1, 1))


def test_copies_use_offsets_of_views() -> None:
    """An image and a parameter may start anywhere in their storage."""
    copy, parameter = make_copy(1, 0, (2,)), torch.zeros(6)
    copy.target(parameter[3:]).copy_(copy.source(torch.arange(10.0)[5:]))
    assert parameter.tolist() == [0, 0, 0, 6, 7, 0]


def test_replicas_share_the_work_and_publish_each_box_once() -> None:
    halves = [Box(start=(i * 4, 0), size=(4, 2)) for i in range(2)]
    whole = Box(start=(0,), size=(8,))
    empty = Box(start=(8,), size=(0,))
    # Four ranks as 2 replicas x 2 shards; the second weight is whole everywhere, the third on rank 0 only.
    boxes_by_rank = [
        [halves[rank % 2], whole, Box(start=(0,), size=(5,)) if rank == 0 else empty] for rank in range(4)
    ]
    assigned = assign_boxes(boxes_by_rank)
    published = [(index, boxes_by_rank[rank][index]) for rank in range(4) for index in assigned[rank]]
    assert len(published) == len(set(published)) == 4
    assert {index for index, _ in published} == {0, 1, 2}
    assert assigned == [[0, 2], [0], [1], []], "the replicas' shares go to whom has the least to do"


def test_whoever_has_the_least_to_do_so_far_takes_the_next() -> None:
    boxes = [Box(start=(0,), size=(length,)) for length in (8, 5, 4, 3)]
    assert assign_boxes([boxes, boxes]) == [[0, 3], [1, 2]]


def test_elements_that_nobody_publishes_are_a_bug() -> None:
    piece = Piece(names=("w",), shape=(4, 2), box=Box(start=(0, 0), size=(3, 2)), offset=0)
    with pytest.raises(AssertionError, match="6 elements of w are published, it has 8"):
        WeightLayout(
            dtype=torch.float32, ranks=(RankLayout(rank=0, host_id="h", pieces=(piece,), num_bytes=24),)
        )


def test_only_the_blocks_that_hold_something_are_needed() -> None:
    per_block = BLOCK_BYTES // 4
    box = Box(start=(0,), size=(2 * per_block,))
    piece = Piece(names=("a", "b"), shape=box.size, box=box, offset=0)
    rank = RankLayout(rank=0, host_id="h", pieces=(piece,), num_bytes=4 * BLOCK_BYTES)
    layout = WeightLayout(dtype=torch.float32, ranks=(rank,))
    for name, start, expected in (
        ("b", per_block - 1, [False, False, True, True]),
        ("a", per_block - 1, [True, True, False, False]),
        ("a", per_block - 2, [True, False, False, False]),
    ):
        box = Box(start=(start,), size=(2,))
        target = Target(name=name, box=box, parameter="p", target_offset=0, target_strides=(1,))
        (needed,) = needed_blocks(layout, plan_copies(layout, [target]))
        assert needed.tolist() == expected and needed.dtype == bool


@given(
    wanted=st.lists(st.booleans(), min_size=1, max_size=70),
    granularity=st.sampled_from([BLOCK_BYTES, SEGMENT_BYTES]),
    missing=st.integers(0, BLOCK_BYTES - 1),
)
def test_ranges_cover_what_is_wanted_in_whole_units(
    wanted: list[bool], granularity: int, missing: int
) -> None:
    num_bytes = len(wanted) * BLOCK_BYTES - missing
    ranges = byte_ranges(np.asarray(wanted), granularity, num_bytes)
    covered = np.zeros(len(wanted), bool)
    for start, stop in ranges:
        assert start % granularity == 0 and (stop % granularity == 0 or stop == num_bytes)
        assert start < stop
        covered[start // BLOCK_BYTES : -(-stop // BLOCK_BYTES)] = True
    assert all(stop < start for (_, stop), (start, _) in itertools.pairwise(ranges))
    units = [
        any(wanted[first : first + granularity // BLOCK_BYTES])
        for first in range(0, len(wanted), granularity // BLOCK_BYTES)
    ]
    expected = np.repeat(units, granularity // BLOCK_BYTES)[: len(wanted)]
    assert covered.tolist() == expected.tolist()


def test_two_sets_of_weights_in_one_layout_are_read_apart() -> None:
    """Each under its own names and where it is; both with the digest of the whole."""
    values = {"a": torch.arange(6.0).view(2, 3), "b": torch.full((5,), 7.0)}
    averages = {name_in(WeightSet.AVERAGE, name): -tensor for name, tensor in values.items()}
    weights = [NamedWeight(names=(name,), tensor=one) for name, one in (values | averages).items()]
    rank = lay_out(weights, range(len(weights)), rank=0, host_id="h", itemsize=4)
    layout = WeightLayout(dtype=torch.float32, ranks=(rank,))
    image = torch.empty(rank.num_bytes // 4)
    for piece, weight in zip(rank.pieces, weights, strict=True):
        image[piece.offset // 4 : piece.offset // 4 + piece.num_elements] = weight.tensor.flatten()
    for which, sign in ((WeightSet.POLICY, 1.0), (WeightSet.AVERAGE, -1.0)):
        part = layout.of(which)
        assert part.digest == layout.digest and part.num_bytes == layout.num_bytes / 2
        found = dict(whole_tensors(part, [image]))
        assert found.keys() == values.keys()
        assert all(torch.equal(found[name], sign * tensor) for name, tensor in values.items())
        # Of a layout with one set, that set is all.
        assert part.of(WeightSet.POLICY).ranks == part.ranks and not part.of(WeightSet.AVERAGE).shapes
