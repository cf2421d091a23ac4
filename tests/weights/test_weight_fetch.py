"""Versions from staging buffers into a receive buffer: whole, checked, and no more bytes than asked for."""

import asyncio
import functools
import math
import multiprocessing
import os
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forgeasync.files import SHARED_MEMORY
from forgeasync.weights import (
    BLOCK_BYTES,
    SEGMENT_BYTES,
    Arrived,
    Box,
    ByteRange,
    FetchReport,
    HostShare,
    Manifest,
    Piece,
    RankLayout,
    ReceiveBuffer,
    SharedMemoryTransport,
    StagingBuffers,
    StagingSource,
    WeightFetcher,
    WeightLayout,
    merge_host_reports,
    received_images,
    whole_tensors,
)
from tests.support.weight_service import (
    FailingTransport,
    constant,
    make_fetcher,
    make_manifest,
    publish_and_die,
)

ROWS = 300
SHAPES = {"big": (2 * ROWS, 1024), "experts": (64, 96), "norm": (7,)}
NUM_EXPERTS = 3


def make_weights(seed: int) -> dict[str, torch.Tensor]:
    """Whole tensors in float32; ``experts`` stacks as many."""
    generator = torch.Generator().manual_seed(seed)
    shapes = SHAPES | {"experts": (NUM_EXPERTS, *SHAPES["experts"])}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


class Publisher:
    """Two ranks: each has half of the big tensor's rows; one the experts, the other the norm."""

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32) -> None:
        self.folder = folder
        big = ROWS * 1024 * dtype.itemsize
        names = tuple(f"expert{i}" for i in range(NUM_EXPERTS))
        box = Box(start=(0, 0), size=SHAPES["experts"])
        experts = Piece(names=names, shape=SHAPES["experts"], box=box, offset=big)
        norm = Piece(names=("norm",), shape=(7,), box=Box(start=(0,), size=(7,)), offset=big + 64)
        ranks = []
        for rank, other in enumerate((experts, norm)):
            box = Box(start=(rank * ROWS, 0), size=(ROWS, 1024))
            half = Piece(names=("big",), shape=SHAPES["big"], box=box, offset=0)
            num_bytes = other.offset + other.num_elements * dtype.itemsize
            ranks.append(RankLayout(rank=rank, host_id="h", pieces=(half, other), num_bytes=num_bytes))
        self.layout = WeightLayout(dtype=dtype, ranks=tuple(ranks))
        self.num_bytes = sum(rank.num_bytes for rank in ranks)
        """With what lies between pieces."""
        self.buffers = [StagingBuffers(folder, rank, dtype) for rank in ranks]

    def publish(self, version: int, slot: int, weights: dict[str, torch.Tensor]) -> Manifest:
        """The big tensor's halves lie transposed in memory on rank 1, as a shard of columns would."""
        transposed = weights["big"][ROWS:].t().contiguous().t()
        staged = [
            self.buffers[0].begin(slot, [weights["big"][:ROWS], weights["experts"]]).finish(),
            self.buffers[1].begin(slot, [transposed, weights["norm"]]).finish(),
        ]
        return make_manifest(self.layout, version, slot, *staged)

    @functools.cached_property
    def receive_buffer(self) -> ReceiveBuffer:
        return ReceiveBuffer(self.folder / "receive-buffer", self.layout)

    def fetcher(self, **options: Any) -> WeightFetcher:
        """Of ``receive_buffer``; ``options`` are those of ``make_fetcher``."""
        sources = [StagingSource(host_id="h", paths=buffer.paths) for buffer in self.buffers]
        return make_fetcher(self.layout, sources, self.receive_buffer, **options)

    def assert_received(self, weights: dict[str, torch.Tensor]) -> None:
        found = dict(whole_tensors(self.layout, received_images(self.receive_buffer.path, self.layout)))
        expected = {f"expert{i}": weights["experts"][i] for i in range(NUM_EXPERTS)}
        expected |= {"big": weights["big"], "norm": weights["norm"]}
        assert set(found) == set(expected)
        for name, tensor in expected.items():
            assert torch.equal(found[name], tensor.to(self.layout.dtype)), name


def fetch(fetcher: WeightFetcher, manifest: Manifest) -> FetchReport:
    return asyncio.run(fetcher.fetch(manifest))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_versions_arrive_bit_for_bit_in_the_generators_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    publisher = Publisher(tmp_path, dtype)
    fetcher = publisher.fetcher()
    for version in range(1, 5):
        # The last is as the one before it: without a delta everything moves again.
        weights = make_weights(min(version, 3))
        report = fetch(fetcher, publisher.publish(version, version % 2, weights))
        assert report.is_complete and report.num_bad_blocks == 0
        assert report.num_bytes_moved == publisher.num_bytes
        assert report.num_bytes_needed == publisher.layout.num_bytes
        publisher.assert_received(weights)


def test_files_are_private_and_what_is_never_fetched_takes_no_memory(tmp_path: Path) -> None:
    """Staging buffers are allocated at once, a receive buffer page by page."""
    umask = os.umask(0)
    try:
        publisher = Publisher(tmp_path)
        received = publisher.receive_buffer.path
    finally:
        os.umask(umask)
    staging = [path for buffer in publisher.buffers for path in buffer.paths]
    assert {path.stat().st_mode & 0o777 for path in (received, *staging)} == {0o600}
    assert received.stat().st_blocks == 0
    assert all(path.stat().st_blocks > 0 for path in staging)


def test_a_buffer_overwritten_while_it_is_read_is_noticed(tmp_path: Path) -> None:
    """A reader whose lease ran out: what it copied is not the version that it was promised."""
    publisher = Publisher(tmp_path)
    fetcher = publisher.fetcher()
    promised = publisher.publish(1, 0, make_weights(1))
    publisher.publish(2, 0, make_weights(2))
    report = fetch(fetcher, promised)
    assert not report.is_complete and report.num_bad_blocks > 0
    weights = make_weights(3)
    assert fetch(fetcher, publisher.publish(3, 1, weights)).is_complete
    publisher.assert_received(weights)


class FlippingTransport(SharedMemoryTransport):
    """Flips a bit of one block, once."""

    is_done = False

    async def read(
        self, slot: int, ranges: Sequence[ByteRange], received: torch.Tensor, arrived: Arrived
    ) -> None:
        def flip_first(part: ByteRange) -> None:
            if not FlippingTransport.is_done and part[0] == BLOCK_BYTES:
                FlippingTransport.is_done = True
                received[part[0] + 5] ^= 4
            arrived(part)

        await super().read(slot, ranges, received, flip_first)


def test_a_bad_block_is_counted_and_fetched_again(tmp_path: Path) -> None:
    publisher = Publisher(tmp_path)
    FlippingTransport.is_done = False
    weights = make_weights(1)
    report = fetch(publisher.fetcher(transport=FlippingTransport), publisher.publish(1, 0, weights))
    assert report.is_complete and report.num_bad_blocks == 1
    assert report.num_bytes_moved == publisher.num_bytes + BLOCK_BYTES
    publisher.assert_received(weights)


def test_what_the_engine_does_not_take_is_not_moved(tmp_path: Path) -> None:
    publisher = Publisher(tmp_path)
    report = fetch(publisher.fetcher(unneeded=1), publisher.publish(1, 0, make_weights(1)))
    assert report.is_complete and report.num_bytes_moved == publisher.num_bytes - 2 * BLOCK_BYTES


def test_blocks_that_a_failed_fetch_overwrote_are_not_held(tmp_path: Path) -> None:
    publisher = Publisher(tmp_path)
    FailingTransport.is_failing = False
    fetcher = publisher.fetcher(delta=True, transport=FailingTransport)
    weights = make_weights(1)
    assert fetch(fetcher, publisher.publish(1, 0, weights)).is_complete
    FailingTransport.is_failing = True
    changed = weights | {"big": weights["big"] + 1}
    failed = fetch(fetcher, publisher.publish(2, 1, changed))
    assert not failed.is_complete and failed.failure.startswith("ConnectionResetError")
    FailingTransport.is_failing = False
    # The same bytes as version 1, which is not what lies in the receive buffer by now.
    assert fetch(fetcher, publisher.publish(3, 0, weights)).is_complete
    publisher.assert_received(weights)


def test_a_delta_moves_the_blocks_that_changed(tmp_path: Path) -> None:
    publisher = Publisher(tmp_path)
    fetcher = publisher.fetcher(delta=True)
    weights = make_weights(1)
    first = fetch(fetcher, publisher.publish(1, 0, weights))
    assert first.num_bytes_moved == publisher.num_bytes
    assert fetch(fetcher, publisher.publish(2, 1, weights)).num_bytes_moved == 0
    # Version 3 changes one element and is missed; version 4 changes another one in another block.
    weights["big"][5, 5] += 1
    publisher.publish(3, 0, weights)
    weights["big"][ROWS // 2, 3] += 1
    report = fetch(fetcher, publisher.publish(4, 1, weights))
    assert report.is_complete and report.num_bytes_moved == 2 * BLOCK_BYTES
    publisher.assert_received(weights)


@settings(max_examples=20, deadline=None)
@given(
    changes=st.lists(
        st.lists(st.integers(0, math.prod(SHAPES["big"]) - 1), max_size=3), min_size=1, max_size=6
    ),
    missed=st.sets(st.integers(0, 5)),
)
def test_deltas_add_up_to_the_whole(
    tmp_path_factory: pytest.TempPathFactory, changes: list[list[int]], missed: set[int]
) -> None:
    publisher = Publisher(tmp_path_factory.mktemp("delta"))
    fetcher = publisher.fetcher(delta=True)
    weights = make_weights(0)
    for version, elements in enumerate(changes):
        weights["big"].view(-1)[elements] += 1
        manifest = publisher.publish(version, version % 2, weights)
        if version not in missed:
            assert fetch(fetcher, manifest).is_complete
            publisher.assert_received(weights)


def test_a_manifest_of_another_layout_is_refused(tmp_path: Path) -> None:
    publisher = Publisher(tmp_path)
    manifest = publisher.publish(1, 0, make_weights(1))
    with pytest.raises(ValueError, match="version 1 was published in layout other"):
        fetch(publisher.fetcher(), replace(manifest, layout_digest="other"))


def test_more_than_the_shared_memory_has_is_refused() -> None:
    # In shared memory itself, which refuses at once; a disk would be filled first.
    layout = RankLayout(rank=0, host_id="h", pieces=(), num_bytes=2**42)
    with pytest.raises(ValueError, match="bytes of shared memory, more than is left"):
        with tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as folder:
            StagingBuffers(Path(folder), layout, torch.float32)


@settings(max_examples=200, deadline=None)
@given(
    num_bytes=st.integers(1, 40 * SEGMENT_BYTES),
    rank=st.integers(0, 7),
    count=st.integers(1, 8),
    granularity=st.sampled_from([BLOCK_BYTES, 3 * BLOCK_BYTES, SEGMENT_BYTES, 2 * SEGMENT_BYTES]),
)
def test_the_generators_of_a_host_fetch_every_block_once(
    num_bytes: int, rank: int, count: int, granularity: int
) -> None:
    layout = RankLayout(rank=rank, host_id="h", pieces=(), num_bytes=num_bytes)
    masks = [HostShare(index=i, count=count).of_blocks(layout, granularity) for i in range(count)]
    assert (np.sum(masks, axis=0) == 1).all()
    units = np.arange(layout.num_blocks) // (granularity // BLOCK_BYTES)
    for mask in masks:
        for unit in set(units[mask]):
            assert mask[units == unit].all(), "a transport reads whole units"


@settings(max_examples=200, deadline=None)
@given(
    sizes=st.dictionaries(st.text("ab", min_size=1, max_size=6), st.integers(0, 10**9), max_size=20),
    count=st.integers(1, 8),
)
def test_the_generators_of_a_host_share_parameters_evenly(sizes: dict[str, int], count: int) -> None:
    shares = [HostShare(index=i, count=count).of_sizes(sizes) for i in range(count)]
    assert sorted(name for share in shares for name in share) == sorted(sizes)
    loads = [sum(sizes[name] for name in share) for share in shares]
    # The fullest was the least full before it took its last one.
    assert max(loads) <= sum(sizes.values()) / count + max(sizes.values(), default=0)


def test_two_generators_fetch_a_version_into_one_buffer(tmp_path: Path) -> None:
    publisher = Publisher(tmp_path)
    weights = make_weights(1)
    manifest = publisher.publish(1, 0, weights)
    shares = [HostShare(index=index, count=2) for index in range(2)]
    reports = [fetch(publisher.fetcher(share=share), manifest) for share in shares]
    for report in reports:
        assert report.is_complete
        assert report.num_bytes_moved < publisher.num_bytes, "a share is not all"
    publisher.assert_received(weights)
    joined = merge_host_reports(reports)
    assert joined.is_complete and joined.num_bytes_moved == publisher.num_bytes
    assert joined.num_bytes_needed == reports[0].num_bytes_needed


def test_a_publisher_that_dies_half_way_leaves_the_version_before(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=publish_and_die, args=(tmp_path, there))
    process.start()
    layout, source, manifest = here.recv()
    process.join()
    assert process.exitcode == -9
    receive_buffer = ReceiveBuffer(tmp_path / "receive-buffer", layout)
    report = asyncio.run(make_fetcher(layout, [source], receive_buffer).fetch(manifest))
    assert report.is_complete
    assert (receive_buffer.image(0).view(torch.float32) == constant(1)).all()
