"""Staging from a GPU, on pretended devices: the same bytes and checksums as from the host, and one wait."""

from pathlib import Path

import numpy as np
import pytest
import torch

from forgeasync.weights.layout import BLOCK_BYTES, NamedWeight, RankLayout, lay_out
from forgeasync.weights.staging import StagingBuffers
from tests.support import pretended_device
from tests.support.pretended_device import DEVICE, OnDevice


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """Devices that the host has waited for."""
    seen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "synchronize", seen.append)
    pretended_device.blocking_copies.clear()
    return seen


def make_shards(scale: float) -> list[torch.Tensor]:
    """Smaller and larger than a block; one is not contiguous, one is empty."""
    generator = torch.Generator().manual_seed(0)
    sizes = [(3, 5), (BLOCK_BYTES // 4 + 7,), (700, 300), (0, 4)]
    shards = [torch.randn(size, generator=generator) * scale for size in sizes]
    return [*shards, shards[2].T]


def layout_of(shards: list[torch.Tensor], dtype: torch.dtype) -> RankLayout:
    weights = [NamedWeight(names=(f"w{i}",), tensor=shard) for i, shard in enumerate(shards)]
    return lay_out(weights, range(len(weights)), rank=0, host_id="h", itemsize=dtype.itemsize)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [1.0, 1e4])
def test_a_device_stages_what_the_host_stages(
    tmp_path: Path, waits: list[torch.device], dtype: torch.dtype, scale: float
) -> None:
    shards = make_shards(scale)
    layout = layout_of(shards, dtype)
    for name in ("host", "device"):
        (tmp_path / name).mkdir()
    host = StagingBuffers(tmp_path / "host", layout, dtype)
    device = StagingBuffers(tmp_path / "device", layout, dtype)
    expected = host.write(1, 7, shards)
    assert waits == []
    found = device.write(1, 7, [OnDevice(shard) for shard in shards])
    assert torch.equal(device.bytes(1), host.bytes(1)) and host.bytes(1).any()
    assert np.array_equal(found.checksums, expected.checksums)
    assert waits == [DEVICE], "once, for all shards"
    assert pretended_device.blocking_copies == []


def test_shards_of_both_are_staged_together(tmp_path: Path, waits: list[torch.device]) -> None:
    """With offloading only some of them are on the host."""
    shards = make_shards(1.0)
    layout = layout_of(shards, torch.bfloat16)
    (tmp_path / "host").mkdir()
    host = StagingBuffers(tmp_path / "host", layout, torch.bfloat16)
    both = StagingBuffers(tmp_path, layout, torch.bfloat16)
    expected = host.write(0, 1, shards)
    found = both.write(0, 1, [shard if i % 2 else OnDevice(shard) for i, shard in enumerate(shards)])
    assert torch.equal(both.bytes(0), host.bytes(0))
    assert np.array_equal(found.checksums, expected.checksums)
