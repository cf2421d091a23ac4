"""Causal attention of groups of sequences of like length, as operators that compiled layers call as they are.

A compiled layer would be compiled anew for every number of groups. PyTorch's flash kernel for CPUs is called
by its own name (torch 2.13), because only then its backward pass can be.

Shape suffixes: L tokens of all rows, N heads (of keys and values a divisor of the queries'), H head size, S
sequences of a group, M longest of them, P entries of all groups, G groups.
"""

from collections.abc import Iterator

import torch
from torch.autograd.function import FunctionCtx

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
    """Output [L, N, H], and the logarithm of every query's sum of exponentials [L, N].

    For the index tensors see ``forgeasync.trainer.workarounds.attention.PackedSequences``.
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
    """Gradients of queries, keys and values.

    In at least float32: in bfloat16 the kernel rounds the gradients of keys and values again with every block
    of queries and every head that shares them, and takes longer.
    """
    inputs = (q_LNH, k_LNH, v_LNH, out_LNH)
    dq, dk, dv = (_with_spare_row(x) for x in inputs[:3])
    for places_SM in _groups(place_of_P, shapes_G2):
        q, k, v, out = (_take(x, places_SM).to(log_sums_LN.dtype) for x in inputs)
        log_sums = _take(log_sums_LN, places_SM)
        # Nothing comes from padded queries: they stand for a token that has a place of its own. That token's
        # log sum says nothing of the keys that they see here, and exp(score - log sum) could overflow;
        # exp(score - inf) is 0.
        is_padding_S1M = (places_SM == len(q_LNH))[:, None]
        log_sums.masked_fill_(is_padding_S1M, torch.inf)
        grad = _take(grad_LNH, places_SM).to(log_sums_LN.dtype).masked_fill_(is_padding_S1M[..., None], 0)
        of_group = _flash_backward(grad, q, k, v, out, log_sums, 0.0, True, scale=scale)
        for whole, part_SNMH in zip((dq, dk, dv), of_group, strict=True):
            _put(whole, places_SM, part_SNMH)
    return dq[:-1], dk[:-1], dv[:-1]


def _groups(place_of_P: torch.Tensor, shapes_G2: torch.Tensor) -> Iterator[torch.Tensor]:
    """The places [S, M] of each group."""
    start = 0
    for num_sequences, longest in shapes_G2.tolist():
        yield place_of_P[start : start + num_sequences * longest].view(num_sequences, longest)
        start += num_sequences * longest


def _take(x_LN: torch.Tensor, places_SM: torch.Tensor) -> torch.Tensor:
    """[S, N, M, ...] of [L, N, ...]; padding gets what the last token has."""
    tokens = places_SM.flatten().clamp(max=len(x_LN) - 1)
    return x_LN.index_select(0, tokens).view(*places_SM.shape, *x_LN.shape[1:]).transpose(1, 2)


def _put(whole: torch.Tensor, places_SM: torch.Tensor, part_SNM: torch.Tensor) -> None:
    """The way back, to [L + 1, N, ...]: padding goes to the spare row."""
    whole.index_copy_(0, places_SM.flatten(), part_SNM.transpose(1, 2).flatten(0, 1).to(whole.dtype))


def _with_spare_row(like_LN: torch.Tensor) -> torch.Tensor:
    return like_LN.new_empty(len(like_LN) + 1, *like_LN.shape[1:])


def _empty_log_sums(q_LNH: torch.Tensor) -> torch.Tensor:
    """Allocate log sums in a dtype no lower than float32, as the kernel has them."""
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
