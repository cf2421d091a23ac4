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
    token_of_P: torch.Tensor,
    entry_of_L: torch.Tensor,
    shapes_G2: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [L, N, H], and the logarithm of every query's sum of exponentials [L, N].

    For the index tensors see ``forgeasync.trainer.attention.PackedSequences``.
    """
    q_PNH, k_PNH, v_PNH = (x.index_select(0, token_of_P) for x in (q_LNH, k_LNH, v_LNH))
    out_PNH = torch.empty_like(q_PNH)
    log_sums_PN = _empty_log_sums(q_PNH)
    for group, shape in _groups(shapes_G2):
        q, k, v = (_by_sequence(x[group], shape) for x in (q_PNH, k_PNH, v_PNH))
        out_SNMH, log_sums_SNM = _flash(q, k, v, is_causal=True, scale=scale)
        _by_sequence(out_PNH[group], shape).copy_(out_SNMH)
        _by_sequence(log_sums_PN[group], shape).copy_(log_sums_SNM)
    return out_PNH.index_select(0, entry_of_L), log_sums_PN.index_select(0, entry_of_L)


@torch.library.custom_op("forgeasync::packed_attention_backward", mutates_args=())
def attend_backward(
    grad_LNH: torch.Tensor,
    q_LNH: torch.Tensor,
    k_LNH: torch.Tensor,
    v_LNH: torch.Tensor,
    out_LNH: torch.Tensor,
    log_sums_LN: torch.Tensor,
    token_of_P: torch.Tensor,
    entry_of_L: torch.Tensor,
    shapes_G2: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of queries, keys and values."""
    tensors = [x.index_select(0, token_of_P) for x in (q_LNH, k_LNH, v_LNH, out_LNH, log_sums_LN)]
    # Nothing comes from padded queries: they stand for a token that has its own entry.
    grad_PNH = grad_LNH.new_zeros(len(token_of_P), *grad_LNH.shape[1:]).index_copy_(0, entry_of_L, grad_LNH)
    grads_PNH = [torch.empty_like(x) for x in tensors[:3]]
    for group, shape in _groups(shapes_G2):
        q, k, v, out, log_sums = (_by_sequence(x[group], shape) for x in tensors)
        grad = _by_sequence(grad_PNH[group], shape)
        of_group = _flash_backward(grad, q, k, v, out, log_sums, 0.0, True, scale=scale)
        for whole_PNH, part_SNMH in zip(grads_PNH, of_group, strict=True):
            _by_sequence(whole_PNH[group], shape).copy_(part_SNMH)
    dq_LNH, dk_LNH, dv_LNH = (x.index_select(0, entry_of_L) for x in grads_PNH)
    return dq_LNH, dk_LNH, dv_LNH


def _groups(shapes_G2: torch.Tensor) -> Iterator[tuple[slice, tuple[int, int]]]:
    """The entries of each group, and its S and M."""
    start = 0
    for num_sequences, longest in shapes_G2.tolist():
        yield slice(start, start + num_sequences * longest), (num_sequences, longest)
        start += num_sequences * longest


def _by_sequence(entries: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """A view [S, N, M, ...] of a group's entries [S * M, N, ...]."""
    return entries.view(*shape, *entries.shape[1:]).transpose(1, 2)


def _empty_log_sums(q_LNH: torch.Tensor) -> torch.Tensor:
    """Of a dtype no lower than float32, as the kernel has them."""
    return q_LNH.new_empty(q_LNH.shape[:2], dtype=torch.promote_types(q_LNH.dtype, torch.float32))


@attend.register_fake
def _(
    q_LNH: torch.Tensor,
    k_LNH: torch.Tensor,
    v_LNH: torch.Tensor,
    token_of_P: torch.Tensor,
    entry_of_L: torch.Tensor,
    shapes_G2: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    return q_LNH.new_empty(q_LNH.shape), _empty_log_sums(q_LNH)


@attend_backward.register_fake
def _(
    grad_LNH: torch.Tensor,
    q_LNH: torch.Tensor,
    k_LNH: torch.Tensor,
    v_LNH: torch.Tensor,
    out_LNH: torch.Tensor,
    log_sums_LN: torch.Tensor,
    token_of_P: torch.Tensor,
    entry_of_L: torch.Tensor,
    shapes_G2: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    dq_LNH, dk_LNH, dv_LNH = (x.new_empty(x.shape) for x in (q_LNH, k_LNH, v_LNH))
    return dq_LNH, dk_LNH, dv_LNH


class _Context(FunctionCtx):
    saved_tensors: tuple[torch.Tensor, ...]
    scale: float


def _save(
    ctx: _Context, inputs: tuple[torch.Tensor | float, ...], output: tuple[torch.Tensor, torch.Tensor]
) -> None:
    *tensors, ctx.scale = inputs
    ctx.save_for_backward(*tensors[:3], *output, *tensors[3:])


def _backward(
    ctx: _Context, grad_LNH: torch.Tensor, _: torch.Tensor | None
) -> tuple[torch.Tensor | None, ...]:
    return *attend_backward(grad_LNH, *ctx.saved_tensors, ctx.scale), None, None, None, None


attend.register_autograd(_backward, setup_context=_save)
