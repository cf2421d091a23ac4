"""Staging from a GPU, on pretended devices: the host's bytes and checksums, whatever the order of streams."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from forgeasync.weights import (
    BLOCK_BYTES,
    NamedWeight,
    Publication,
    RankLayout,
    StagingBuffers,
    lay_out,
)
from tests.support import pretended_device
from tests.support.pretended_device import DEVICE, LazyGpu, OnDevice


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> LazyGpu:
    """What ``cuda:0`` does, which is nothing before somebody waits for it."""
    gpu = LazyGpu()
    monkeypatch.setattr(LazyGpu, "in_use", gpu)
    monkeypatch.setattr(torch, "get_device_module", lambda device: {DEVICE: gpu}[device])
    pretended_device.blocking_copies.clear()
    return gpu


def make_shards(scale: float) -> list[torch.Tensor]:
    """Smaller and larger than a block; one is not contiguous, one is empty."""
    generator = torch.Generator().manual_seed(0)
    sizes = [(3, 5), (BLOCK_BYTES // 4 + 7,), (700, 300), (0, 4)]
    shards = [torch.randn(size, generator=generator) * scale for size in sizes]
    return [*shards, shards[2].T]


def layout_of(shards: list[torch.Tensor], dtype: torch.dtype) -> RankLayout:
    weights = [NamedWeight(names=(f"w{i}",), tensor=shard) for i, shard in enumerate(shards)]
    return lay_out(weights, range(len(weights)), rank=0, host_id="h", itemsize=dtype.itemsize)


def make_buffers(folder: Path, layout: RankLayout, dtype: torch.dtype) -> StagingBuffers:
    folder.mkdir()
    return StagingBuffers(folder, layout, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [1.0, 1e4])
@pytest.mark.parametrize("every", [1, 2])
def test_a_device_stages_what_the_host_stages(
    tmp_path: Path, gpu: LazyGpu, dtype: torch.dtype, scale: float, every: int
) -> None:
    """Also where, with offloading, only every second shard is on the device."""
    shards = make_shards(scale)
    layout = layout_of(shards, dtype)
    host = make_buffers(tmp_path / "host", layout, dtype)
    device = make_buffers(tmp_path / "device", layout, dtype)
    expected = host.begin(1, shards).finish()
    assert gpu.events == []
    write = device.begin(1, [shard if i % every else OnDevice(shard) for i, shard in enumerate(shards)])
    assert write.reads_host is (every == 2)
    found = write.finish()
    assert torch.equal(device.bytes(1), host.bytes(1)) and host.bytes(1).any()
    assert np.array_equal(found.checksums, expected.checksums)
    (event,) = gpu.events
    assert event.num_waits == 1 and event.is_blocking, "once, for all shards, and without polling"
    assert pretended_device.blocking_copies == []


@pytest.mark.parametrize("first", ["compute", "side"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_before_are_staged_and_the_step_after_is_not(
    tmp_path: Path, gpu: LazyGpu, dtype: torch.dtype, first: str
) -> None:
    """Whichever stream runs as early as it may, and although the host waits for neither."""
    shards = make_shards(1.0)[:3]
    expected = [((shard + 1) / 3).to(dtype) for shard in shards]
    layout = layout_of(shards, dtype)
    buffers = make_buffers(tmp_path / "staging", layout, dtype)
    on_device = [OnDevice(shard) for shard in shards]
    for version in (1, 2):
        for shard in on_device:
            shard.add_(1).div_(3)
        write = buffers.begin(version % 2, on_device)
        write.hold_stream()
        for shard in on_device:
            shard.mul_(3).sub_(1)
        assert [event.num_waits for event in gpu.events] == [1] * (version - 1) + [0], "the host went on"
        (side,) = gpu.sides
        (gpu.compute if first == "compute" else side).run()
        write.finish()
        held = buffers.bytes(version % 2)
        for piece, tensor in zip(layout.pieces, expected, strict=True):
            stop = piece.offset + piece.num_elements * dtype.itemsize
            found = held[piece.offset : stop].clone().view(dtype).view(tensor.shape)
            assert torch.equal(found, tensor)
        gpu.compute.run()
        expected = [((shard.data_on_cpu + 1) / 3).to(dtype) for shard in on_device]


def test_a_cast_is_made_on_the_side_stream(tmp_path: Path, gpu: LazyGpu) -> None:
    """There its memory is safe: the allocator gives it to this stream only."""
    (shard, *_) = make_shards(1.0)
    buffers = make_buffers(tmp_path / "staging", layout_of([shard], torch.bfloat16), torch.bfloat16)
    buffers.begin(0, [OnDevice(shard)])
    (side,) = gpu.sides
    assert gpu.compute.operations == []
    assert len(side.operations) == 3, "the wait for what was computed, the cast, the copy"


@pytest.mark.parametrize("on_device", [True, False])
def test_a_device_s_copies_hold_its_stream_and_the_host_s_the_thread_that_trains(
    tmp_path: Path, gpu: LazyGpu, on_device: bool
) -> None:
    (shard, *_) = make_shards(1.0)
    buffers = make_buffers(tmp_path / "staging", layout_of([shard], torch.float32), torch.float32)
    let_go = threading.Event()
    with ThreadPoolExecutor(1) as copying:
        copying.submit(let_go.wait)
        publication = Publication(
            buffers.begin(0, [OnDevice(shard) if on_device else shard]),
            SimpleNamespace(copying=copying),  # type: ignore[arg-type]
            version=1,
            slot=0,
        )
        trains = threading.Thread(target=publication.until_copied)
        trains.start()
        trains.join(None if on_device else 0.2)
        goes_on = not trains.is_alive()
        let_go.set()
        trains.join()
    assert goes_on is on_device
    assert len(gpu.compute.operations) == on_device, "what comes next waits for the copies"
