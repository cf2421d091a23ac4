"""Attention over packed rows on a CPU, where TorchTitan's flex and varlen kernels do not run.

Shape suffixes: B batch, L packed row length (of the flattened rows too), N heads, H head size, S sequences of
a group, M longest of them, P entries of all groups, G groups.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torchtitan.models.common.attention import FlexAttention
from torchtitan.protocols.module import Module

from forgeasync.trainer.workarounds.attention_kernel import attend

GROUP_RATIO = 1.25
"""Sequences of a group are padded to less than this many times their length..."""

SHORT = 16
"""...but for the group of those that are shorter than this: more groups would cost more than padding does."""


class PackedSequences(NamedTuple):
    """Where each sequence of packed rows lies, and which part of the rows this rank's queries are.

    Sequences of like length form a group and are padded to the longest of it.
    """

    place_of_P: torch.Tensor
    """Int64, which of the B*L flattened tokens each entry is: group after group, each [S, M]. Padding is B*L;
    causal attention keeps them out of every real query's sight, because they come last."""
    shapes_G2: torch.Tensor
    """Int64, S and M of every group."""
    query_start: int
    """First position of this rank's queries in each row; with context parallelism a rank has a part only."""


def packed_sequences(positions_BL: torch.Tensor, *, query_start: int = 0) -> PackedSequences:
    """Find the sequences in whole rows whose positions restart at 0 with each of them (int64 [B, L])."""
    positions_L = positions_BL.flatten()
    starts = (positions_L == 0).nonzero().squeeze(1)
    lengths = torch.diff(starts, append=torch.tensor([positions_L.numel()]))
    group_of = (lengths.clamp(min=SHORT).log() / torch.tensor(GROUP_RATIO).log()).floor()
    places, shapes = [], []
    for group in group_of.unique():
        is_own = group_of == group
        offsets_M = torch.arange(int(lengths[is_own].max()))
        is_token_SM = offsets_M < lengths[is_own][:, None]
        place_of_SM = torch.where(is_token_SM, starts[is_own][:, None] + offsets_M, positions_L.numel())
        places.append(place_of_SM.flatten())
        shapes.append(place_of_SM.shape)
    return PackedSequences(torch.cat(places), torch.tensor(shapes), query_start)


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
        """Queries and keys are of one head size, values may be of another, which is the output's.

        There may be fewer heads of keys and values whether or not ``enable_gqa`` says so.
        """
        num_queries, length, head_size = q_BLNH.shape[1], k_BLNH.shape[1], q_BLNH.shape[3]
        start, value_size = attention_masks.query_start, v_BLNH.shape[3]
        if num_queries < length:
            # Queries of a part of the row take their places in it; the others' output is cut off again.
            q_BLNH = F.pad(q_BLNH, (0, 0, 0, 0, start, length - start - num_queries))
        # The kernel wants heads of one size. Zeros change no score, and the output that they make is cut off.
        q_LNH, k_LNH, v_LNH = (
            _widened(x, max(head_size, value_size)).flatten(0, 1) for x in (q_BLNH, k_BLNH, v_BLNH)
        )
        out_LNH, _ = attend(
            q_LNH,
            k_LNH,
            v_LNH,
            attention_masks.place_of_P,
            attention_masks.shapes_G2,
            head_size**-0.5 if scale is None else scale,
        )
        out_BLNH = out_LNH.view(-1, length, *out_LNH.shape[1:])
        return out_BLNH[:, start : start + num_queries, :, :value_size]


def _widened(x_BLNH: torch.Tensor, head_size: int) -> torch.Tensor:
    # Padding by nothing would copy.
    missing = head_size - x_BLNH.shape[3]
    return F.pad(x_BLNH, (0, missing)) if missing else x_BLNH
