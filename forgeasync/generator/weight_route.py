"""Decides how new weights get into a running engine: copied into its parameters, or loaded again by vLLM.

A kernel may keep its weights in an order of its own, or compute further tensors from them. Copies into the
parameters are right only if neither is so, which is checked on the loaded model, by value, before the first
update. For vLLM 0.32, unquantized models.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

from forgeasync.generator.workarounds.load_trace import LoadTrace, Region
from forgeasync.models import CheckpointTensors
from forgeasync.weights import Box

KNOWN_METHODS = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod, UnquantizedFusedMoEMethod)
"""Methods that compute from the parameters themselves, whatever order they keep them in."""

MAX_COMPARED = 8
"""Regions of a parameter, and rows of a region, that are compared with the checkpoint's files."""

MAX_REASONS = 3
"""In the log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightRoute:
    """How an engine takes versions."""

    reload_because: tuple[str, ...] = ()
    """Reasons why vLLM's ``reload_weights`` has to load every version; empty: parameters are copied to."""

    @property
    def is_copy(self) -> bool:
        return not self.reload_because

    def __str__(self) -> str:
        if self.is_copy:
            return "weights are copied into the engine's parameters"
        reasons = "; ".join(self.reload_because[:MAX_REASONS])
        rest = len(self.reload_because) - MAX_REASONS
        more = f" and {rest} more" if rest > 0 else ""
        return f"weights are loaded by vLLM's reload_weights, while decoding stands still: {reasons}{more}"


def reload_reasons(
    model: torch.nn.Module, trace: LoadTrace, checkpoint: CheckpointTensors
) -> tuple[str, ...]:
    """Return what makes copies into a model's parameters wrong; the model is as ``checkpoint`` has it.

    Tensors that the checkpoint does not have are left out: no route can take them.
    """
    parameters = {name: parameter.data for name, parameter in model.named_parameters()}
    failed = [line for line in trace.untraceable if line.split(" ")[0] in checkpoint]
    return (
        *derived_tensors(model),
        *(f"its loader does not copy {line}" for line in failed),
        *(f"{line} has another dtype than what is published" for line in trace.other_dtypes),
        *other_orders(parameters, trace.regions, checkpoint),
    )


def derived_tensors(model: torch.nn.Module) -> list[str]:
    """Modules that compute tensors of their own from their weights once these are loaded."""
    found = []
    for name, module in model.named_modules():
        if isinstance(module, MLAAttention):
            found.append(f"{name} computes its projections of the latent from kv_b_proj")
            continue
        method = getattr(module, "quant_method", None)
        if isinstance(method, QuantizeMethodBase) and not isinstance(method, KNOWN_METHODS):
            found.append(f"{name} has {type(method).__name__}")
    return found


def other_orders(
    parameters: Mapping[str, torch.Tensor], regions: Sequence[Region], checkpoint: CheckpointTensors
) -> list[str]:
    """Parameters whose values do not lie where their loader puts them, found by comparing samples of each."""
    of_parameter: dict[str, list[Region]] = {}
    for region in regions:
        of_parameter.setdefault(region.parameter, []).append(region)
    found = []
    for name, parts in of_parameter.items():
        parameter = parameters[name]
        for index in _spread(len(parts)):
            if (difference := _differs(parameter, parts[index], checkpoint)) is not None:
                found.append(f"{name} is kept in an order of its kernel ({difference})")
                break
    return found


def _spread(num_items: int) -> list[int]:
    """Indices of at most ``MAX_COMPARED`` items, the first and the last among them."""
    if num_items <= MAX_COMPARED:
        return list(range(num_items))
    return [index * (num_items - 1) // (MAX_COMPARED - 1) for index in range(MAX_COMPARED)]


def _differs(parameter: torch.Tensor, region: Region, checkpoint: CheckpointTensors) -> str | None:
    box = region.box
    start = parameter.storage_offset() + region.target_offset
    kept = parameter.as_strided(box.size, region.target_strides, start)
    for row in _spread(box.size[0]):
        part = Box(start=(box.start[0] + row, *box.start[1:]), size=(1, *box.size[1:]))
        expected = checkpoint.part(region.name, part.start, part.size).to(parameter.dtype)
        if not torch.equal(kept[row : row + 1].cpu(), expected):
            return f"row {part.start[0]} of {region.name} is not there"
    return None
