"""Copies into an engine's parameters are chosen only where its values lie as the copies assume."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from forgeasync.generator import (
    LoadTrace,
    Region,
    check_traces,
    derived_tensors,
    other_orders,
)
from forgeasync.models import CheckpointTensors
from forgeasync.weights import Box

NUM_EXPERTS, INNER, HIDDEN = 20, 4, 6
"""More experts than are compared."""


def regions() -> list[Region]:
    """Where vLLM's loader puts gate and up of every expert: one parameter, [experts, 2 x inner, hidden]."""
    box = Box(start=(0, 0), size=(INNER, HIDDEN))
    return [
        Region(
            name=f"experts.{expert}.{name}",
            box=box,
            parameter="w13",
            target_offset=(2 * expert + half) * INNER * HIDDEN,
            target_strides=(HIDDEN, 1),
        )
        for expert in range(NUM_EXPERTS)
        for half, name in enumerate(("gate", "up"))
    ]


@pytest.fixture
def checkpoint(tmp_path: Path) -> CheckpointTensors:
    tensors = {region.name: 100 * torch.randn(INNER, HIDDEN) for region in regions()}
    save_file(tensors, tmp_path / "model.safetensors")
    return CheckpointTensors(tmp_path)


def loaded(checkpoint: CheckpointTensors, dtype: torch.dtype) -> torch.Tensor:
    halves = [[checkpoint[f"experts.{e}.{name}"] for name in ("gate", "up")] for e in range(NUM_EXPERTS)]
    return torch.stack([torch.cat(pair) for pair in halves]).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parameters_in_the_checkpoints_order_are_copied_to(
    checkpoint: CheckpointTensors, dtype: torch.dtype
) -> None:
    assert other_orders({"w13": loaded(checkpoint, dtype)}, regions(), checkpoint) == []


@pytest.mark.parametrize("order", ["halves_swapped", "experts_turned", "blocks", "last_expert_moved"])
def test_an_order_of_the_kernels_own_is_seen(checkpoint: CheckpointTensors, order: str) -> None:
    w13 = loaded(checkpoint, torch.bfloat16)
    kept = {
        # FlashInfer's CUTLASS kernel.
        "halves_swapped": torch.cat([w13[:, INNER:], w13[:, :INNER]], dim=1),
        "experts_turned": w13.transpose(1, 2).contiguous().view_as(w13),
        "blocks": w13.view(NUM_EXPERTS, 2 * INNER, 2, HIDDEN // 2).transpose(1, 2).contiguous().view_as(w13),
        "last_expert_moved": torch.cat([w13[:-2], w13[-1:], w13[-2:-1]]),
    }[order]
    (reason,) = other_orders({"w13": kept}, regions(), checkpoint)
    assert reason.startswith("w13 is kept in an order of its kernel (row ")


def test_modules_of_unknown_methods_are_not_copied_to() -> None:
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

    class Other(QuantizeMethodBase):
        def create_weights(self, *arguments: object, **keywords: object) -> None: ...
        def apply(self, *arguments: object, **keywords: object) -> torch.Tensor: ...

    model = torch.nn.ModuleDict({"known": torch.nn.Linear(1, 1), "other": torch.nn.Linear(1, 1)})
    model["known"].quant_method = UnquantizedLinearMethod()
    model["other"].quant_method = Other()
    assert derived_tensors(model) == ["other has Other"]


TRACE = LoadTrace(
    regions=(), unfilled=("w13 (3 of 4 elements)",), other_dtypes=(), untraceable=("up (4, 6): x",)
)


def test_what_the_engines_own_folder_lacks_is_refused_on_every_route() -> None:
    shapes = {"up": (4, 6), "strange": (1,)}
    with pytest.raises(ValueError, match=r"own folder does not have: strange$"):
        check_traces([TRACE], shapes, torch.float32, foreign={"strange"}, is_copy=False)
    check_traces([TRACE], shapes, torch.float32, is_copy=False)
    with pytest.raises(ValueError, match=r"cannot take: up \(4, 6\)"):
        check_traces([TRACE], shapes, torch.float32, is_copy=True)
