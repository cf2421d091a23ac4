"""Attention over packed rows on CPUs, where TorchTitan 0.3.0's flex and varlen attention have no backward.

Sequences of similar length form a group and are padded to the longest of the group. Causal attention of
groups is a custom operator that compiled layers call unchanged; otherwise they would be recompiled for every
number of groups. The operator calls PyTorch's flash kernel for CPUs by its private name (torch 2.13), because
only then can its backward pass be called too. That pass runs in at least float32: in bfloat16 the kernel
rounds the gradients of keys and values again with every block of queries and every head that shares them, and
takes longer. Can go when flex or varlen attention has a backward pass on CPUs.

Shape suffixes: B batch, L packed row length (of the flattened rows too), N heads (of keys and values a
divisor of the queries'), H head size, S sequences of a group, M longest of them, P entries of all groups, G
groups.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.autograd.function import FunctionCtx
from torchtitan.models.common.attention import FlexAttention
from torchtitan.protocols.module import Module

GROUP_RATIO = 1.25
"""Upper bound of the padded length of sequences of at least ``SHORT`` tokens, relative to their length."""

SHORT = 16
"""Length in tokens below which all sequences form one group: more groups would cost more than padding."""


class PackedSequences(NamedTuple):
    """Places of the sequences in packed rows, by group, and the start of this rank's queries."""

    place_of_P: torch.Tensor
    """Index (int64) of each entry among the B*L flattened tokens: group after group, each [S, M].

    Padding is B*L; it comes last, so that causal attention hides it from every real query.
    """
    shapes_G2: torch.Tensor
    """S and M of every group, int64."""
    query_start: int
    """First position of this rank's queries in each row; with context parallelism a rank has only a part."""


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


_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu

_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@torch.library.custom_op("forgeasync::packed_attention", mutates_args=())
def attend(
    q_LNH: torch.Tensor,
    k_LNH: torch.Tensor,
    v_LNH: torch.Tensor,
    place_of_P: torch.Tensor,
    shapes_G2: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output [L, N, H], and the logarithm of every query's sum of exponentials [L, N].

    ``place_of_P`` and ``shapes_G2`` are those of ``PackedSequences``.
    """
    inputs = (q_LNH, k_LNH, v_LNH)
    out, log_sums = _with_spare_row(q_LNH), _with_spare_row(_empty_log_sums(q_LNH))
    for places_SM in _groups(place_of_P, shapes_G2):
        q, k, v = (_take(x, places_SM) for x in inputs)
        out_SNMH, log_sums_SNM = _flash(q, k, v, is_causal=True, scale=scale)
        _put(out, places_SM, out_SNMH)
        _put(log_sums, places_SM, log_sums_SNM)
    return out[:-1], log_sums[:-1]


@torch.library.custom_op("forgeasync::packed_attention_backward", mutates_args=())
def attend_backward(
    grad_LNH: torch.Tensor,
    q_LNH: torch.Tensor,
    k_LNH: torch.Tensor,
    v_LNH: torch.Tensor,
    out_LNH: torch.Tensor,
    log_sums_LN: torch.Tensor,
    place_of_P: torch.Tensor,
    shapes_G2: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of queries, keys and values, computed in at least float32."""
    inputs = (q_LNH, k_LNH, v_LNH, out_LNH)
    dq, dk, dv = (_with_spare_row(x) for x in inputs[:3])
    for places_SM in _groups(place_of_P, shapes_G2):
        q, k, v, out = (_take(x, places_SM).to(log_sums_LN.dtype) for x in inputs)
        log_sums = _take(log_sums_LN, places_SM)
        # Padded queries must not contribute: they repeat a token that has its own place. Its log sum does not
        # belong to the keys that they see here, and exp(score - log sum) could overflow; exp(score - inf) is
        # 0.
        is_padding_S1M = (places_SM == len(q_LNH))[:, None]
        log_sums.masked_fill_(is_padding_S1M, torch.inf)
        grad = _take(grad_LNH, places_SM).to(log_sums_LN.dtype).masked_fill_(is_padding_S1M[..., None], 0)
        of_group = _flash_backward(grad, q, k, v, out, log_sums, 0.0, True, scale=scale)
        for whole, part_SNMH in zip((dq, dk, dv), of_group, strict=True):
            _put(whole, places_SM, part_SNMH)
    return dq[:-1], dk[:-1], dv[:-1]


def _groups(place_of_P: torch.Tensor, shapes_G2: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the places [S, M] of each group."""
    start = 0
    for num_sequences, longest in shapes_G2.tolist():
        yield place_of_P[start : start + num_sequences * longest].view(num_sequences, longest)
        start += num_sequences * longest


def _take(x_LN: torch.Tensor, places_SM: torch.Tensor) -> torch.Tensor:
    """Return [S, N, M, ...] of [L, N, ...]; padding gets the values of the last token."""
    tokens = places_SM.flatten().clamp(max=len(x_LN) - 1)
    return x_LN.index_select(0, tokens).view(*places_SM.shape, *x_LN.shape[1:]).transpose(1, 2)


def _put(whole: torch.Tensor, places_SM: torch.Tensor, part_SNM: torch.Tensor) -> None:
    """Write [S, N, M, ...] to [L + 1, N, ...]; padding goes to the spare row."""
    whole.index_copy_(0, places_SM.flatten(), part_SNM.transpose(1, 2).flatten(0, 1).to(whole.dtype))


def _with_spare_row(like_LN: torch.Tensor) -> torch.Tensor:
    return like_LN.new_empty(len(like_LN) + 1, *like_LN.shape[1:])


def _empty_log_sums(q_LNH: torch.Tensor) -> torch.Tensor:
    """Allocate log sums in a dtype no lower than float32, like the kernel."""
    return q_LNH.new_empty(q_LNH.shape[:2], dtype=torch.promote_types(q_LNH.dtype, torch.float32))


@attend.register_fake
def _(q_LNH: torch.Tensor, *_: torch.Tensor | float) -> tuple[torch.Tensor, torch.Tensor]:
    return q_LNH.new_empty(q_LNH.shape), _empty_log_sums(q_LNH)


@attend_backward.register_fake
def _(
    grad_LNH: torch.Tensor,
    q_LNH: torch.Tensor,
    k_LNH: torch.Tensor,
    v_LNH: torch.Tensor,
    *_: torch.Tensor | float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return q_LNH.new_empty(q_LNH.shape), k_LNH.new_empty(k_LNH.shape), v_LNH.new_empty(v_LNH.shape)


class _Context(FunctionCtx):
    saved_tensors: tuple[torch.Tensor, ...]
    scale: float


def _save(
    ctx: _Context, inputs: tuple[*tuple[torch.Tensor, ...], float], output: tuple[torch.Tensor, torch.Tensor]
) -> None:
    *tensors, ctx.scale = inputs
    ctx.save_for_backward(*tensors[:3], *output, *tensors[3:])


def _backward(
    ctx: _Context, grad_LNH: torch.Tensor, _: torch.Tensor | None
) -> tuple[torch.Tensor | None, ...]:
    return *attend_backward(grad_LNH, *ctx.saved_tensors, ctx.scale), None, None, None


attend.register_autograd(_backward, setup_context=_save)


class PackedAttention(FlexAttention):
    """Causal attention within each packed sequence, never across their borders.

    Replaces TorchTitan's ``FlexAttention``. It is a subclass, so that context parallelism gathers keys and
    values for it. The tensor-parallel plan looks up the parameter names of ``forward``.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        pass

    def __init__(self, config: Config) -> None:
        # Skip FlexAttention's own state.
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
        """Return the output in the head size of values, which may differ from that of queries and keys.

        There may be fewer heads of keys and values, regardless of ``enable_gqa``.
        """
        num_queries, length, head_size = q_BLNH.shape[1], k_BLNH.shape[1], q_BLNH.shape[3]
        start, value_size = attention_masks.query_start, v_BLNH.shape[3]
        if num_queries < length:
            # Put the queries of a part at their places in the row; the rest of the output is dropped below.
            q_BLNH = F.pad(q_BLNH, (0, 0, 0, 0, start, length - start - num_queries))
        # The kernel needs heads of one size. Zeros change no score, and their output is dropped.
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
    # F.pad by 0 would copy.
    missing = head_size - x_BLNH.shape[3]
    return F.pad(x_BLNH, (0, missing)) if missing else x_BLNH
