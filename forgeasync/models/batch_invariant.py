"""Linear layers whose rows do not depend on each other, on CPUs.

torch's linear layers choose their kernel by the number of rows, so a token's bits depend on what else is in
the batch. Blocks of one size always use the same kernel. Can go when torch has batch-invariant layers.
"""

import torch
from torch.nn import functional

ROWS = 32
"""Number of rows that a linear layer computes at a time, padded with zeros."""


def linear_by_blocks(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return ``torch.nn.functional.linear(x, weight, bias)``, computed in blocks of ``ROWS`` rows."""
    rows = x.reshape(-1, x.shape[-1])
    filled = functional.pad(rows, (0, 0, 0, -len(rows) % ROWS))
    blocks = [functional.linear(block, weight, bias) for block in filled.split(ROWS)]
    return torch.cat(blocks)[: len(rows)].view(*x.shape[:-1], -1)
