"""One rank's side of publishing: where its tensors lie in the staging buffers, and that all are there."""

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import xxhash
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from forgeasync.weights import (
    ALIGNMENT,
    BLOCK_BYTES,
    Box,
    NamedWeight,
    RankStaging,
    SharedMemoryTransport,
    StagedShard,
    WeightPublisher,
    lay_out,
)

EXPERTS = tuple(f"experts.{index}" for index in range(3))


@pytest.fixture
def third_of_four() -> Iterator[None]:
    """Of a group whose other ranks are not there: enough to know which shard is whose."""
    dist.init_process_group("fake", rank=2, world_size=4, store=FakeStore())
    yield
    dist.destroy_process_group()


class Recording(SharedMemoryTransport):
    """Keeps what it was told."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, torch.Tensor]] = []

    async def open(self, staging: RankStaging) -> str:
        self.staging = staging
        return "what open says"

    async def staged(self, slot: int) -> None:
        self.seen.append((slot, self.staging.buffers[slot].clone()))


def make_weights(seed: int) -> list[NamedWeight]:
    """A norm, stacked experts and two matrices of more than one block, one of them transposed in memory."""
    generator = torch.Generator().manual_seed(seed)
    return [
        NamedWeight(names=("norm",), tensor=torch.randn(7, generator=generator)),
        NamedWeight(names=EXPERTS, tensor=torch.randn(3, 5, 4, generator=generator)),
        NamedWeight(names=("big",), tensor=torch.randn(64, 1200, generator=generator).t()),
        NamedWeight(names=("wide",), tensor=torch.randn(300, 1000, generator=generator)),
    ]


def publish(
    publisher: WeightPublisher, slot: int, version: int, weights: Sequence[NamedWeight]
) -> StagedShard:
    async def whole() -> StagedShard:
        return await publisher.begin(slot, version, weights).finished()

    return asyncio.run(whole())


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_both_slots_hold_what_was_staged_there(tmp_path: Path, dtype: torch.dtype) -> None:
    versions = {slot: make_weights(slot) for slot in (0, 1)}
    publisher = WeightPublisher(versions[0], dtype, host_id="here")
    transport = Recording()
    source = asyncio.run(publisher.open(tmp_path, transport, generator_hosts=frozenset({"there"})))
    buffers = publisher.buffers
    assert (source.host_id, source.paths, source.address) == ("here", buffers.paths, "what open says")
    assert transport.staging.generator_hosts == {"there"}
    layout = publisher.layout
    assert layout.rank == 0 and layout.host_id == "here"
    assert [piece.names for piece in layout.pieces] == [("norm",), EXPERTS, ("big",), ("wide",)]
    assert [piece.shape for piece in layout.pieces] == [(7,), (5, 4), (1200, 64), (300, 1000)]
    assert all(piece.offset % ALIGNMENT == 0 for piece in layout.pieces)
    assert layout.num_bytes == layout.pieces[3].offset + 300 * 1000 * dtype.itemsize
    shards = {slot: publish(publisher, slot, 10 + slot, weights) for slot, weights in versions.items()}
    assert [slot for slot, _ in transport.seen] == [0, 1]
    for slot, seen in transport.seen:
        assert torch.equal(seen, buffers.bytes(slot)), "it was told before the last byte"
    for slot, weights in versions.items():
        assert (shards[slot].rank, shards[slot].version) == (0, 10 + slot)
        held = buffers.bytes(slot)
        assert len(held) == layout.num_bytes
        for piece, weight in zip(layout.pieces, weights, strict=True):
            stop = piece.offset + piece.num_elements * dtype.itemsize
            found = held[piece.offset : stop].clone().view(dtype).view(weight.tensor.shape)
            assert torch.equal(found, weight.tensor.to(dtype)), piece.names
        image = held.numpy().tobytes()
        blocks = [image[start : start + BLOCK_BYTES] for start in range(0, len(image), BLOCK_BYTES)]
        expected = np.array([xxhash.xxh3_64_intdigest(block) for block in blocks], np.uint64)
        np.testing.assert_array_equal(shards[slot].checksums, expected)
    assert (shards[0].checksums != shards[1].checksums).any()


def test_a_rank_publishes_what_it_was_dealt() -> None:
    layout = lay_out(make_weights(0), [2, 0], rank=3, host_id="there", itemsize=4)
    assert (layout.rank, layout.host_id) == (3, "there")
    big, norm = layout.pieces
    assert (big.names, big.offset, big.box) == (("big",), 0, Box(start=(0, 0), size=(1200, 64)))
    assert (norm.names, norm.offset, norm.box) == (("norm",), 4 * 1200 * 64, Box(start=(0,), size=(7,)))
    assert layout.num_bytes == 4 * (1200 * 64 + 7)
    assert layout.num_blocks == 2


@pytest.mark.usefixtures("third_of_four")
def test_a_rank_publishes_its_rows_and_its_experts() -> None:
    """Rank 2 of 2 x 2: of rows sharded over four the third part, of 6 experts x 8 x 10 the second half's 3,
    and of those the first 5 columns."""
    rows = DTensor.from_local(
        torch.zeros(2, 3),
        init_device_mesh("cpu", (4,)),
        [Shard(0)],
        run_check=False,
        shape=(8, 3),
        stride=(3, 1),
    )
    experts = DTensor.from_local(
        torch.zeros(3, 8, 5),
        init_device_mesh("cpu", (2, 2)),
        [Shard(0), Shard(2)],
        run_check=False,
        shape=(6, 8, 10),
        stride=(80, 10, 1),
    )
    names = tuple(f"experts.{index}" for index in range(6))
    weights = [NamedWeight(names=("rows",), tensor=rows), NamedWeight(names=names, tensor=experts)]
    layout = lay_out(weights, [0, 1], rank=2, host_id="here", itemsize=4)
    first, second = layout.pieces
    assert (first.names, first.shape) == (("rows",), (8, 3))
    assert (first.box, first.offset) == (Box(start=(4, 0), size=(2, 3)), 0)
    assert (second.names, second.shape) == (names[3:], (8, 10))
    assert (second.box, second.offset) == (Box(start=(0, 0), size=(8, 5)), ALIGNMENT)
    assert layout.num_bytes == ALIGNMENT + 4 * 3 * 8 * 5
