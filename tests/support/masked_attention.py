"""Attention over packed rows in float64 with everything masked that a token must not see: the reference.

Shape suffixes: B rows, L row length, N heads, H head size.
"""

import torch
import torch.nn.functional as F

NUM_HEADS = 4

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def packed_positions(rows: list[list[int]]) -> torch.Tensor:
    """Of rows [B, L] of sequences of these lengths."""
    return torch.stack([torch.cat([torch.arange(length) for length in row]) for row in rows])


def random_inputs(
    positions_BL: torch.Tensor,
    *,
    num_kv_heads: int,
    head_size: int,
    value_size: int,
    scale: float = 1.0,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Tensors:
    """Queries, keys and values ``scale`` times as large as N(0, 1)."""
    generator = torch.Generator().manual_seed(seed)

    def random(num_heads: int, size: int) -> torch.Tensor:
        shape = (*positions_BL.shape, num_heads, size)
        return (scale * torch.randn(shape, generator=generator)).to(dtype).requires_grad_()

    return random(NUM_HEADS, head_size), random(num_kv_heads, head_size), random(num_kv_heads, value_size)


def masked_attention(inputs: Tensors, positions_BL: torch.Tensor) -> torch.Tensor:
    """Float64 [B, L, N, H]: a row at a time, everything but a token's own past masked."""
    outs = []
    for row, positions_L in enumerate(positions_BL):
        sequence_L = (positions_L == 0).cumsum(0)
        is_seen_LL = (sequence_L[:, None] == sequence_L).tril()
        q_NLH, k_NLH, v_NLH = (x[row].double().transpose(0, 1) for x in inputs)
        out_NLH = F.scaled_dot_product_attention(q_NLH, k_NLH, v_NLH, attn_mask=is_seen_LL, enable_gqa=True)
        outs.append(out_NLH.transpose(0, 1))
    return torch.stack(outs)
