"""Checkpoint copies and optimizer state of a GPU, on pretended devices."""

from types import SimpleNamespace

import pytest
import torch

from forgeasync.config import OptimizerSection
from forgeasync.trainer import HostCopies, build_optimizer, host_copies, training_state
from tests.support import pretended_device
from tests.support.pretended_device import DEVICE, LazyGpu, OnDevice


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> LazyGpu:
    """It does nothing before somebody waits for it."""
    gpu = LazyGpu()

    def empty_like(tensor: torch.Tensor, *, device: str, pin_memory: bool) -> torch.Tensor:
        assert device == "cpu" and pin_memory, "page-locked memory of the host"
        return torch.empty(tensor.shape, dtype=tensor.dtype)

    monkeypatch.setattr(LazyGpu, "in_use", gpu)
    monkeypatch.setattr(host_copies, "DEVICE_TYPE", "cuda")
    monkeypatch.setattr(host_copies.torch, "get_device_module", lambda device: gpu)
    monkeypatch.setattr(host_copies.torch, "empty_like", empty_like)
    pretended_device.blocking_copies.clear()
    return gpu


def test_copies_run_beside_the_computation_into_memory_that_is_used_again(gpu: LazyGpu) -> None:
    copies, tensors = HostCopies(), {"a": OnDevice(torch.randn(3, 4)), "b": OnDevice(torch.arange(5))}
    seen = []
    for num_steps in (1, 2):
        expected = {name: tensor.data_on_cpu + 1 for name, tensor in tensors.items()}
        for tensor in tensors.values():
            tensor.add_(1)
        seen.append(copies.copy(tensors, copies.now()))
        assert all(torch.equal(seen[-1][name], tensor) for name, tensor in expected.items())
        assert len(gpu.compute.operations) == 2 * num_steps, "of the steps alone"
    assert len(gpu.sides) == 1 and all(seen[0][name] is seen[1][name] for name in tensors)
    assert pretended_device.blocking_copies == []


def test_without_a_gpu_every_copy_is_a_new_one() -> None:
    copies = HostCopies()
    tensor = torch.zeros(4)
    first = copies.copy({"a": tensor}, copies.now())
    tensor += 1
    second = copies.copy({"a": tensor}, copies.now())
    assert torch.equal(first["a"], torch.zeros(4)) and torch.equal(second["a"], torch.ones(4))


def test_steps_of_fused_adamw_lie_on_the_parameters_device() -> None:
    """Where a checkpoint is loaded into: torch puts them there itself only while there is no state."""
    parameter = torch.nn.Parameter(OnDevice(torch.randn(3, 4)))
    optimizer = build_optimizer([("w", parameter)], OptimizerSection(learning_rate=1e-3))
    model = SimpleNamespace(
        named_parameters=lambda: [("w", parameter)], named_buffers=lambda: [], state_dict=dict
    )
    step = training_state(model, optimizer)["optimizer.w.step"]  # type: ignore[arg-type]
    assert step.device == DEVICE and step.dtype is torch.float32 and step.shape == ()
