"""Puts whole tensors into a running engine: what an update runs on the engine's thread."""

import torch
from vllm.platforms import current_platform
from vllm.v1.engine.core import EngineCore


def replace_all_weights(core: EngineCore, weights: list[tuple[str, torch.Tensor]]) -> None:
    """Replace every weight; whole tensors under their Hugging Face names."""
    if current_platform.is_cpu():
        core.collective_rpc("replace_weights", args=(weights,))
    else:
        core.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
