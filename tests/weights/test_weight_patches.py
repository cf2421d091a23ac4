"""``weights.delta: exact``: elements whose bits changed move, and what arrives is the version, to the bit."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forgeasync.weights import (
    ALONE,
    BLOCK_BYTES,
    Arrived,
    ByteRange,
    FetchReport,
    HostShare,
    Manifest,
    NamedWeight,
    RankSource,
    ReceiveBuffer,
    SharedMemoryTransport,
    StagingBuffers,
    StagingSource,
    WeightFetcher,
    WeightLayout,
    lay_out,
    received_images,
    whole_tensors,
)
from tests.support.weight_service import FailingTransport, connected, make_fetcher, make_manifest

NUM_ELEMENTS = 4_000_000


@dataclass
class Site:
    """A trainer rank that publishes one tensor with patches, and the generators of a host that fetch it."""

    folder: Path
    dtype: torch.dtype = torch.bfloat16
    num_elements: int = NUM_ELEMENTS
    num_versions: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.weight = torch.randn(self.num_elements, generator=generator)
        weights = [NamedWeight(names=("w",), tensor=self.weight)]
        itemsize = self.dtype.itemsize
        rank = lay_out(weights, [0], rank=0, host_id="h", itemsize=itemsize, has_patches=True)
        self.layout = WeightLayout(dtype=self.dtype, ranks=(rank,))
        self.buffers = StagingBuffers(self.folder, rank, self.dtype)
        self.receive_buffer = ReceiveBuffer(self.folder / "receive-buffer", self.layout)

    def fetcher(
        self,
        share: HostShare = ALONE,
        transport: type[SharedMemoryTransport] = SharedMemoryTransport,
    ) -> WeightFetcher:
        source = StagingSource(host_id="h", paths=self.buffers.paths)
        return make_fetcher(
            self.layout, [source], self.receive_buffer, delta=True, share=share, transport=transport
        )

    def publish(self, slot: int | None = None) -> Manifest:
        self.num_versions += 1
        slot = self.num_versions % 2 if slot is None else slot
        return make_manifest(
            self.layout, self.num_versions, slot, self.buffers.begin(slot, [self.weight]).finish()
        )

    def assert_received(self) -> None:
        ((_, found),) = whole_tensors(self.layout, received_images(self.receive_buffer.path, self.layout))
        bits = torch.int16 if self.dtype.itemsize == 2 else torch.int32
        assert torch.equal(found.view(bits), self.weight.to(self.dtype).view(bits))

    @property
    def num_bytes(self) -> int:
        """Bytes of all blocks of a version."""
        return self.layout.ranks[0].num_blocks * BLOCK_BYTES


def fetch(fetcher: WeightFetcher, manifest: Manifest) -> FetchReport:
    return asyncio.run(fetcher.fetch(manifest))


def change(weight: torch.Tensor, share: float, seed: int) -> None:
    """Double and shift some elements, so that their bits differ in every dtype."""
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.rand(weight.shape, generator=generator) < share
    weight[chosen] = 2 * weight[chosen] + 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_version_of_few_changes_takes_few_bytes(tmp_path: Path, dtype: torch.dtype) -> None:
    site = Site(tmp_path, dtype)
    fetcher = site.fetcher()
    assert fetch(fetcher, site.publish()).num_bytes_moved == site.num_bytes
    for version in range(2, 6):
        change(site.weight, 0.01, version)
        report = fetch(fetcher, site.publish())
        assert report.is_complete and report.num_bad_blocks == 0
        # Two bytes and an element for one in a hundred, and a few more where the distance is above 255.
        expected = 0.01 * NUM_ELEMENTS * (2 + dtype.itemsize)
        assert expected / 2 < report.num_bytes_moved < 1.1 * expected + BLOCK_BYTES
        site.assert_received()


def test_a_trainers_adam_step_takes_few_bytes(tmp_path: Path) -> None:
    """bfloat16 from float32 masters at a learning rate of 1e-6."""
    site = Site(tmp_path, num_elements=10_000_000)
    site.weight.mul_(0.02)
    parameter = torch.nn.Parameter(site.weight)
    optimizer = torch.optim.AdamW([parameter], lr=1e-6, weight_decay=0.0)
    fetcher = site.fetcher()
    fetch(fetcher, site.publish())
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        parameter.grad = torch.randn(site.num_elements, generator=generator)
        optimizer.step()
        manifest = site.publish()
        assert fetch(fetcher, manifest).num_bytes_moved < 0.06 * site.num_bytes
        assert manifest.patches[0][0].sizes.sum() < 0.05 * site.num_bytes
        site.assert_received()


def test_nan_payloads_and_signs_of_zero_arrive(tmp_path: Path) -> None:
    site = Site(tmp_path)
    site.weight[:] = 0.0
    fetcher = site.fetcher()
    fetch(fetcher, site.publish())
    bits = site.weight.view(torch.int32)
    bits[5] = -(2**31)
    bits[70_000] = 0x7FC00000
    bits[200_000] = 0x7FD50000
    bits[NUM_ELEMENTS - 1] = -0x2A0000
    report = fetch(fetcher, site.publish())
    assert report.is_complete and report.num_bytes_moved == BLOCK_BYTES
    site.assert_received()


def test_a_generator_that_missed_versions_takes_the_patches_of_all(tmp_path: Path) -> None:
    site = Site(tmp_path)
    fetcher = site.fetcher()
    fetch(fetcher, site.publish())
    for version in range(2, 8):
        change(site.weight, 0.005, version)
        manifest = site.publish()
    report = fetch(fetcher, manifest)
    assert report.is_complete and report.num_bytes_moved < 0.1 * site.num_bytes
    site.assert_received()


def test_a_slow_generators_version_stays_the_base_of_patches(tmp_path: Path) -> None:
    """While it fetches from one buffer, all new versions go to the other one."""
    site = Site(tmp_path, num_elements=1_000_000)
    slow = site.fetcher()
    held = site.publish(slot=0)
    for version in range(2, 12):
        change(site.weight, 0.001, version)
        newest = site.publish(slot=1)
    before = site.weight.clone()
    assert fetch(slow, held).is_complete
    report = fetch(slow, newest)
    assert report.is_complete and report.num_bytes_moved < 0.2 * site.num_bytes
    site.assert_received()
    assert torch.equal(before, site.weight)


@pytest.mark.parametrize("share", [0.2, 1.0])
def test_many_changes_arrive_whole(tmp_path: Path, share: float) -> None:
    """More than the room for patches: as many blocks as fit have a part."""
    site = Site(tmp_path)
    fetcher = site.fetcher()
    fetch(fetcher, site.publish())
    change(site.weight, share, 1)
    report = fetch(fetcher, site.publish())
    assert report.is_complete and report.num_bytes_moved <= site.num_bytes
    site.assert_received()
    change(site.weight, 0.001, 2)
    assert fetch(fetcher, site.publish()).num_bytes_moved == BLOCK_BYTES
    site.assert_received()


def test_a_restarted_generator_and_a_restarted_trainer_move_everything(tmp_path: Path) -> None:
    site = Site(tmp_path)
    fetch(site.fetcher(), site.publish())
    change(site.weight, 0.001, 1)
    restarted = site.fetcher()
    assert fetch(restarted, site.publish()).num_bytes_moved == site.num_bytes
    again = tmp_path / "again"
    again.mkdir()
    site.buffers = StagingBuffers(again, site.layout.ranks[0], site.dtype)
    source = StagingSource(host_id="h", paths=site.buffers.paths)
    restarted.connect({0: connected(SharedMemoryTransport, site.layout.ranks[0], source)})
    change(site.weight, 0.001, 2)
    assert site.publish().patches == ((),)
    change(site.weight, 0.001, 3)
    report = fetch(restarted, site.publish())
    assert report.is_complete and report.num_bytes_moved > 0.9 * site.num_bytes
    site.assert_received()


class DamagingTransport(SharedMemoryTransport):
    """Flips bits of what it reads, the first times."""

    num_left = 0

    async def read(
        self, slot: int, ranges: Sequence[ByteRange], received: torch.Tensor, arrived: Arrived
    ) -> None:
        await super().read(slot, ranges, received, arrived)
        if DamagingTransport.num_left:
            DamagingTransport.num_left -= 1
            for start, stop in ranges:
                received[start:stop:1000] ^= 0x55


@pytest.mark.parametrize("num_damaged", [1, 3])
def test_a_damaged_patch_is_found(tmp_path: Path, num_damaged: int) -> None:
    site = Site(tmp_path)
    fetcher = site.fetcher(transport=DamagingTransport)
    fetch(fetcher, site.publish())
    change(site.weight, 0.01, 1)
    DamagingTransport.num_left = num_damaged
    report = fetch(fetcher, site.publish())
    DamagingTransport.num_left = 0
    assert report.num_bad_blocks > 0
    # The whole blocks are damaged after their check, which only the next version can find.
    assert report.is_complete
    change(site.weight, 0.01, 2)
    report = fetch(fetcher, site.publish())
    assert report.is_complete
    site.assert_received()


def test_blocks_that_a_failed_fetch_overwrote_are_not_patched(tmp_path: Path) -> None:
    site = Site(tmp_path)
    fetcher = site.fetcher(transport=FailingTransport)
    fetch(fetcher, site.publish())
    change(site.weight[: NUM_ELEMENTS // 2], 0.5, 1)
    FailingTransport.is_failing = True
    assert not fetch(fetcher, site.publish()).is_complete
    FailingTransport.is_failing = False
    change(site.weight, 0.001, 2)
    report = fetch(fetcher, site.publish())
    assert report.is_complete and report.num_bad_blocks == 0
    site.assert_received()


class SegmentTransport(SharedMemoryTransport):
    """Reads segments, which have the same bytes on both sides."""

    granularity = 4 * BLOCK_BYTES

    def connect(self, source: RankSource) -> None:
        super().connect(source)
        self.num_bytes = source.num_bytes

    async def read(
        self, slot: int, ranges: Sequence[ByteRange], received: torch.Tensor, arrived: Arrived
    ) -> None:
        assert len(received) == self.num_bytes
        for start, stop in ranges:
            assert start % self.granularity == 0
            assert stop % self.granularity == 0 or stop == len(received)
        await super().read(slot, ranges, received, arrived)


def test_segments_are_read_up_to_the_end_of_the_buffer(tmp_path: Path) -> None:
    """Weights end in the middle of a segment, and so do their patches."""
    site = Site(tmp_path, num_elements=600_000)
    fetcher = site.fetcher(transport=SegmentTransport)
    for version, share in enumerate((0.0, 0.001, 0.4, 0.001)):
        change(site.weight, share, version)
        report = fetch(fetcher, site.publish())
        assert report.is_complete and report.num_bad_blocks == 0
        site.assert_received()


def test_generators_of_a_host_apply_the_parts_of_their_shares(tmp_path: Path) -> None:
    site = Site(tmp_path, num_elements=34_000_000)
    fetchers = [site.fetcher(HostShare(index=index, count=2)) for index in range(2)]
    for version in range(1, 4):
        change(site.weight[version::100], 0.1, version)
        manifest = site.publish()
        reports = [fetch(fetcher, manifest) for fetcher in fetchers]
        assert all(report.is_complete for report in reports)
        moved = sum(report.num_bytes_moved for report in reports)
        assert moved == site.num_bytes if version == 1 else moved < 0.05 * site.num_bytes
        site.assert_received()


@settings(deadline=None, max_examples=25)
@given(data=st.data())
def test_what_arrives_is_always_what_was_published(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Whatever changes, whichever buffers versions go to, and whichever of them are fetched."""
    dtype = data.draw(st.sampled_from([torch.bfloat16, torch.float32]))
    site = Site(tmp_path_factory.mktemp("site"), dtype, num_elements=300_001)
    fetcher = site.fetcher()
    for version in range(data.draw(st.integers(1, 8))):
        places = data.draw(st.lists(st.integers(0, site.num_elements - 1), max_size=4))
        site.weight[places] = data.draw(st.floats(width=16))
        change(site.weight, data.draw(st.sampled_from([0.0, 0.0, 0.01, 0.3])), version)
        manifest = site.publish(slot=data.draw(st.integers(0, 1)))
        if data.draw(st.booleans()):
            assert fetch(fetcher, manifest).is_complete
            site.assert_received()


@pytest.mark.exhaustive
def test_200_updates_with_versions_missed(tmp_path: Path) -> None:
    site = Site(tmp_path, num_elements=1_000_000)
    fetcher = site.fetcher()
    rng = np.random.default_rng(0)
    moved = []
    for version in range(200):
        change(site.weight, 0.002, version)
        manifest = site.publish()
        if rng.random() < 0.6:
            report = fetch(fetcher, manifest)
            assert report.is_complete
            moved.append(report.num_bytes_moved)
    fetch(fetcher, manifest)
    site.assert_received()
    assert np.median(moved) <= 0.15 * site.num_bytes
