"""Bits on CPUs: linear layers whose rows do not depend on each other, and a digest of a machine's kernels.

torch's linear layers choose their kernel by the number of rows, so a token's bits depend on what else is in
the batch. Blocks of one size always use the same kernel. Can go when torch has batch-invariant layers.
"""

import torch
import xxhash
from torch.nn import functional

ROWS = 32
"""Number of rows that a linear layer computes at a time, padded with zeros."""


def linear_by_blocks(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return ``torch.nn.functional.linear(x, weight, bias)``, computed in blocks of ``ROWS`` rows."""
    rows = x.reshape(-1, x.shape[-1])
    filled = functional.pad(rows, (0, 0, 0, -len(rows) % ROWS))
    blocks = [functional.linear(block, weight, bias) for block in filled.split(ROWS)]
    return torch.cat(blocks)[: len(rows)].view(*x.shape[:-1], -1)


@torch.no_grad()
def kernel_digest() -> str:
    """Return a digest of the bits that this machine's kernels compute in a short float32 forward pass.

    Machines with other digests round differently: torch chooses kernels by the processor.
    """
    generator = torch.Generator().manual_seed(0)
    x_TD, weight_VD = (torch.randn(rows, 256, generator=generator) for rows in (3 * ROWS, 512))
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for _ in range(3):
            hidden_TF = functional.silu(linear_by_blocks(x_TD, weight_VD))
            x_TD = x_TD + linear_by_blocks(hidden_TF, weight_VD.T)
            x_TD = x_TD * torch.rsqrt(x_TD.pow(2).mean(dim=-1, keepdim=True))
            scores_TT = functional.softmax(x_TD @ x_TD.T, dim=-1)
            x_TD = x_TD + scores_TT @ x_TD
        logprobs_TV = functional.log_softmax(linear_by_blocks(x_TD, weight_VD), dim=-1)
    finally:
        torch.set_num_threads(num_threads)
    return xxhash.xxh3_64_hexdigest(logprobs_TV.numpy().tobytes())
