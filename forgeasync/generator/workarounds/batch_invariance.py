"""Log-probabilities that do not depend on what else an engine decodes, to the last bit. For vllm 0.32.

On a GPU this is vLLM's own ``VLLM_BATCH_INVARIANT``. The CPU build has no such mode: its attention splits the
keys of long sequences over what threads are free, and torch's linear layers choose their kernel by the number
of rows (oneDNN's do not, but they keep a copy of the weights that cannot be updated). Its kernel for experts
is invariant already. Can go when the CPU build knows the mode.
"""

import os

import torch
from torch.nn import functional
from vllm.model_executor.layers import utils
from vllm.platforms import current_platform

ROWS = 32
"""Linear layers see this many rows at a time, filled up with zeros."""


def compute_batch_invariantly() -> None:
    """Call before the engine is built; for the whole process."""
    if current_platform.is_cpu():
        os.environ["VLLM_CPU_ATTN_SPLIT_KV"] = "0"
        utils.cpu_unquantized_gemm = _linear_by_blocks
    else:
        os.environ["VLLM_BATCH_INVARIANT"] = "1"


def _linear_by_blocks(
    layer: torch.nn.Module, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Stands in for ``cpu_unquantized_gemm``, whose other arguments say what ``layer`` knows."""
    rows = x.reshape(-1, x.shape[-1])
    filled = functional.pad(rows, (0, 0, 0, -len(rows) % ROWS))
    blocks = [functional.linear(block, weight, bias) for block in filled.split(ROWS)]
    return torch.cat(blocks)[: len(rows)].view(*x.shape[:-1], -1)
