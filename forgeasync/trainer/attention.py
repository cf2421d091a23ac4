"""Attention over packed rows on a CPU, where TorchTitan's flex and varlen kernels do not run.

Shape suffixes: B batch, L packed row length, N heads, H head size, S sequences of a group, M longest of them,
P entries of all groups, padding included.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torchtitan.models.common.attention import FlexAttention
from torchtitan.protocols.module import Module

NUM_GROUPS = 4
"""Sequences are padded to the longest of their group: within a factor of two, but for the shortest group."""


class PackedSequences(NamedTuple):
    """Where each sequence of packed rows lies, and which part of the rows this rank's queries are."""

    tokens_by_group: tuple[torch.Tensor, ...]
    """Of each group of sequences of like length int64 [S, M], indices of the flattened [B*L] tokens. Padded
    entries repeat token 0: causal attention keeps them out of every real query's sight, because they come
    last."""
    entry_of_L: torch.Tensor
    """From a flattened token back to its place among the P entries, group after group."""
    query_start: int
    """First position of this rank's queries in each row; with context parallelism a rank has a part only."""


def packed_sequences(positions_BL: torch.Tensor, *, query_start: int = 0) -> PackedSequences:
    """Find the sequences in whole rows whose positions restart at 0 with each of them (int64 [B, L])."""
    positions_L = positions_BL.flatten()
    starts = (positions_L == 0).nonzero().squeeze(1)
    lengths = torch.diff(starts, append=torch.tensor([positions_L.numel()]))
    longest = int(lengths.max())
    # Halving: group 0 holds what is longer than half of the longest, the last one all that is left.
    group_of = (longest / lengths).log2().floor().clamp(max=NUM_GROUPS - 1)
    entry_of_L = torch.empty_like(positions_L)
    tokens_by_group = []
    num_entries = 0
    for group in group_of.unique():
        own = group_of == group
        offsets_M = torch.arange(int(lengths[own].max()))
        is_token_SM = offsets_M < lengths[own][:, None]
        token_of_SM = torch.where(is_token_SM, starts[own][:, None] + offsets_M, 0)
        entries_SM = num_entries + torch.arange(token_of_SM.numel()).view_as(token_of_SM)
        entry_of_L[token_of_SM[is_token_SM]] = entries_SM[is_token_SM]
        tokens_by_group.append(token_of_SM)
        num_entries += token_of_SM.numel()
    return PackedSequences(tuple(tokens_by_group), entry_of_L, query_start)


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
        flat = [x.reshape(batch * length, *x.shape[2:]) for x in (q_BLNH, k_BLNH, v_BLNH)]
        outs = []
        for token_of_SM in attention_masks.tokens_by_group:
            q_SNMH, k_SNMH, v_SNMH = (_of_sequences(x_LNH, token_of_SM) for x_LNH in flat)
            out_SNMH = F.scaled_dot_product_attention(
                q_SNMH, k_SNMH, v_SNMH, is_causal=True, scale=scale, enable_gqa=enable_gqa
            )
            outs.append(out_SNMH.transpose(1, 2).flatten(0, 1))
        out_LNH = torch.cat(outs).index_select(0, attention_masks.entry_of_L)
        return out_LNH.view(batch, length, num_heads, -1)[:, start : start + num_queries]


def _of_sequences(x_LNH: torch.Tensor, token_of_SM: torch.Tensor) -> torch.Tensor:
    # index_select's gradient is several times as fast as that of indexing.
    x_PNH = x_LNH.index_select(0, token_of_SM.flatten())
    return x_PNH.view(*token_of_SM.shape, *x_LNH.shape[1:]).transpose(1, 2)
