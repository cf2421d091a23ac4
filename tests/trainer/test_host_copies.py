"""Checkpoint copies and optimizer state of a GPU, on pretended devices."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from forgeasync.config import OptimizerSection
from forgeasync.trainer import HostCopies, build_optimizer, host_copies, training_state
from tests.support import pretended_device
from tests.support.pretended_device import DEVICE, OnDevice


class Stream:
    """Writes down what it is asked for."""

    def __init__(self, log: list[str], name: str) -> None:
        self._log = log
        self._name = name

    def record_event(self) -> str:
        self._log.append(f"{self._name} records")
        return f"event of {self._name}"

    def wait_event(self, event: str) -> None:
        self._log.append(f"{self._name} waits for {event}")

    def synchronize(self) -> None:
        self._log.append(f"host waits for {self._name}")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What happened on a pretended GPU, in order."""
    seen: list[str] = []

    def empty_like(tensor: torch.Tensor, *, device: str, pin_memory: bool) -> torch.Tensor:
        assert device == "cpu" and pin_memory, "page-locked memory of the host"
        seen.append("allocate")
        return torch.empty(tensor.shape, dtype=tensor.dtype)

    gpu = SimpleNamespace(
        current_stream=lambda: Stream(seen, "compute"),
        Stream=lambda: Stream(seen, "side"),
        stream=lambda stream: nullcontext(),
    )
    monkeypatch.setattr(host_copies, "DEVICE_TYPE", "cuda")
    monkeypatch.setattr(host_copies.torch, "get_device_module", lambda device: gpu)
    monkeypatch.setattr(host_copies.torch, "empty_like", empty_like)
    pretended_device.blocking_copies.clear()
    return seen


def test_copies_run_beside_the_computation(log: list[str]) -> None:
    values = {"a": torch.randn(3, 4) * 1e3, "b": torch.arange(5)}
    copies = HostCopies()
    found = copies.copy({name: OnDevice(value) for name, value in values.items()}, copies.now())
    assert all(torch.equal(found[name], value) for name, value in values.items())
    assert log == [
        "compute records",
        "side waits for event of compute",
        "allocate",
        "allocate",
        "host waits for side",
    ]
    assert pretended_device.blocking_copies == []


def test_page_locked_memory_is_used_again(log: list[str]) -> None:
    copies = HostCopies()
    first = copies.copy({"a": OnDevice(torch.zeros(4))}, copies.now())
    second = copies.copy({"a": OnDevice(torch.ones(4))}, copies.now())
    assert log.count("allocate") == 1 and second["a"] is first["a"]
    assert torch.equal(second["a"], torch.ones(4))


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
