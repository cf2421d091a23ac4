"""Attention over packed rows on a CPU, where TorchTitan's flex and varlen kernels do not run.

Shape suffixes: B batch, L packed row length, N heads, H head size, S packed sequences, M longest of them.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torchtitan.models.common.attention import FlexAttention
from torchtitan.protocols.module import Module


class PackedSequences(NamedTuple):
    """Where each sequence of a batch of packed rows lies, and which part of the rows this rank's queries are.

    ``token_of_SM`` indexes the flattened [B*L] tokens (padded entries repeat token 0: causal attention
    keeps them out of every real query's sight, because they come last); ``sequence_of_L`` and
    ``offset_of_L`` lead back from a flattened token to its entry.
    """

    token_of_SM: torch.Tensor
    sequence_of_L: torch.Tensor
    offset_of_L: torch.Tensor
    query_start: int
    """First position of this rank's queries in each row; with context parallelism a rank has a part only."""


def packed_sequences(positions_BL: torch.Tensor, *, query_start: int = 0) -> PackedSequences:
    """Find the sequences in whole rows whose positions restart at 0 with each of them (int64 [B, L])."""
    positions_L = positions_BL.flatten()
    starts_S = (positions_L == 0).nonzero().squeeze(1)
    sequence_of_L = (positions_L == 0).cumsum(0) - 1
    longest = int(positions_L.max()) + 1
    lengths_S = torch.diff(starts_S, append=torch.tensor([positions_L.numel()]))
    offsets_M = torch.arange(longest)
    token_of_SM = starts_S[:, None] + offsets_M
    token_of_SM = torch.where(offsets_M < lengths_S[:, None], token_of_SM, 0)
    return PackedSequences(token_of_SM, sequence_of_L, positions_L, query_start)


class PackedAttention(FlexAttention):
    """Causal attention within each packed sequence, never across their borders.

    Takes the place of TorchTitan's ``FlexAttention``, and is one by name, so that context parallelism
    gathers keys and values for it. The parameter names of ``forward`` are the ones the tensor-parallel plan
    looks up.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        pass

    def __init__(self, config: Config) -> None:
        # None of FlexAttention's own state: only its place is taken.
        Module.__init__(self)

    def forward(
        self,
        q_BLNH: torch.Tensor,
        k_BLNH: torch.Tensor,
        v_BLNH: torch.Tensor,
        *,
        attention_masks: PackedSequences,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        num_queries, length = q_BLNH.shape[1], k_BLNH.shape[1]
        start = attention_masks.query_start
        # Queries of a part of the row take their places in it; the others' output is cut off again.
        q_BLNH = F.pad(q_BLNH, (0, 0, 0, 0, start, length - start - num_queries))
        batch, length, num_heads, _ = q_BLNH.shape
        # Values may have heads of another size than queries and keys.
        q_SNMH, k_SNMH, v_SNMH = (
            x.reshape(batch * length, *x.shape[2:])[attention_masks.token_of_SM].transpose(1, 2)
            for x in (q_BLNH, k_BLNH, v_BLNH)
        )
        out_SNMH = F.scaled_dot_product_attention(
            q_SNMH, k_SNMH, v_SNMH, is_causal=True, scale=scale, enable_gqa=enable_gqa
        )
        out_LNH = out_SNMH.transpose(1, 2)[attention_masks.sequence_of_L, attention_masks.offset_of_L]
        return out_LNH.view(batch, length, num_heads, -1)[:, start : start + num_queries]
