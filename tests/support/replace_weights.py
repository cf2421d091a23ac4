"""Puts whole tensors into a running engine at once, for tests of what an update does to sequences."""

import torch
from vllm.v1.engine.core import EngineCore

from forgeasync.weights import NamedWeight, WeightLayout, lay_out, plan_copies


def replace_all_weights(core: EngineCore, weights: list[tuple[str, torch.Tensor]]) -> None:
    """Replace every weight of a one-worker CPU engine; float32 tensors under their Hugging Face names."""
    named = [NamedWeight(names=(name,), tensor=tensor) for name, tensor in weights]
    rank = lay_out(named, range(len(named)), rank=0, host_id="h", itemsize=4)
    image = torch.empty(rank.num_bytes // 4)
    for piece, (_, tensor) in zip(rank.pieces, weights, strict=True):
        image[piece.offset // 4 : piece.offset // 4 + tensor.numel()] = tensor.flatten()
    layout = WeightLayout(dtype=torch.float32, ranks=(rank,))
    worker = core.model_executor.driver_worker.worker
    answer = worker.trace_weights(layout.shapes, layout.dtype)
    worker._weights.plan(plan_copies(layout, answer.trace.regions))
    worker._weights.stage([image])
    worker._weights.swap()
