"""The next version of a GPU worker's weights: shadows on the host and on the device, shared by generators."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from forgeasync.config import ShadowMemory
from forgeasync.generator import GpuWeights, HostMemory, Region
from forgeasync.weights import Box, HostShare, Piece, RankLayout, WeightLayout, plan_copies
from tests.support import pretended_device
from tests.support.pretended_device import DEVICE, OnDevice

ROWS, COLUMNS, NUM_PADDED = 6, 10, 2


class Model(torch.nn.Module):
    """Fuses two matrices, swaps the dimensions of a third, and pads its vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.fused = torch.nn.Parameter(torch.randn(2 * ROWS, COLUMNS))
        self.turned = torch.nn.Parameter(torch.randn(COLUMNS, ROWS))
        self.vocabulary = torch.nn.Parameter(torch.randn(ROWS + NUM_PADDED, COLUMNS))
        self.untouched = torch.nn.Parameter(torch.randn(3))


WHOLE = Box(start=(0, 0), size=(ROWS, COLUMNS))
REGIONS = [
    Region(name="a", box=WHOLE, parameter="fused", target_offset=0, target_strides=(COLUMNS, 1)),
    Region(name="b", box=WHOLE, parameter="fused", target_offset=ROWS * COLUMNS, target_strides=(COLUMNS, 1)),
    Region(name="c", box=WHOLE, parameter="turned", target_offset=0, target_strides=(1, ROWS)),
    Region(name="d", box=WHOLE, parameter="vocabulary", target_offset=0, target_strides=(COLUMNS, 1)),
]


def layout() -> WeightLayout:
    """Each trainer rank publishes half of the rows of every tensor."""
    ranks = []
    for rank in range(2):
        pieces, end = [], 0
        for name in "abcd":
            box = Box(start=(rank * ROWS // 2, 0), size=(ROWS // 2, COLUMNS))
            pieces.append(Piece(names=(name,), shape=(ROWS, COLUMNS), box=box, offset=end))
            end += -(-box.num_elements * 4 // 64) * 64
        ranks.append(RankLayout(rank=rank, host_id="h", pieces=tuple(pieces), num_bytes=end))
    return WeightLayout(dtype=torch.float32, ranks=tuple(ranks))


def images(tensors: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    made = []
    for rank in layout().ranks:
        image = torch.zeros(rank.num_bytes // 4)
        for piece in rank.pieces:
            part = tensors[piece.names[0]][piece.box.start[0] :][: piece.box.size[0]]
            image[piece.offset // 4 :][: part.numel()] = part.reshape(-1)
        made.append(image)
    return made


def version(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: 1e4 * torch.randn(ROWS, COLUMNS, generator=generator) for name in "abcd"}


def expected(model: Model, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """By hand."""
    padding = model.vocabulary.detach()[ROWS:].clone()
    return {
        "fused": torch.cat([tensors["a"], tensors["b"]]),
        "turned": tensors["c"].T,
        "vocabulary": torch.cat([tensors["d"], padding]),
        "untouched": model.untouched.detach().clone(),
    }


def planned(model: torch.nn.Module, folder: Path, share: HostShare) -> GpuWeights:
    weights = GpuWeights(model, worker_rank=0)
    memory = HostMemory(receive_buffer=folder / "receive-buffer", shadow=ShadowMemory.HOST, share=share)
    weights.plan(plan_copies(layout(), REGIONS), memory)
    return weights


def test_each_generator_stages_only_its_share(tmp_path: Path) -> None:
    model = Model()
    first = planned(model, tmp_path, HostShare(index=0, count=2))
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    other = Model()
    other.load_state_dict(model.state_dict())
    planned(other, tmp_path, HostShare(index=1, count=2))
    wanted = expected(model, version(1))
    first.stage(images(version(1)))
    first.swap()
    changed = {name for name, value in model.named_parameters() if not torch.equal(value, before[name])}
    assert changed == {"fused"}, "the largest parameter is the first one's share, the others the second one's"
    assert torch.equal(model.fused, wanted["fused"])
    assert len(list(tmp_path.iterdir())) == 1, "one file for both"


def test_the_swap_waits_for_the_device_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "synchronize", waits.append)
    pretended_device.blocking_copies.clear()
    model = Model()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    on_device = {name: OnDevice(parameter.data) for name, parameter in model.named_parameters()}

    class OnGpu(torch.nn.Module):
        def named_parameters(self, *arguments: object) -> list[tuple[str, SimpleNamespace]]:  # type: ignore[override]
            return [(name, SimpleNamespace(data=tensor)) for name, tensor in on_device.items()]

    weights = planned(OnGpu(), tmp_path, HostShare())
    pretended_device.blocking_copies.clear()
    wanted = expected(model, version(1))
    weights.stage(images(version(1)))
    assert waits == [] and pretended_device.blocking_copies == []
    assert all(torch.equal(tensor.data_on_cpu, before[name]) for name, tensor in on_device.items())
    weights.swap()
    assert waits == [DEVICE], "once, for all parameters"
    for name, tensor in on_device.items():
        assert torch.equal(tensor.data_on_cpu, wanted[name]), name
