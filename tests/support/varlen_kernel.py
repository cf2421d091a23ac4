"""Kernels for CPUs of torch's varlen attention (torch.nn.attention.varlen, torch 2.13); import to register.

Only the two kernels stand in for FlashAttention's: signature, checks and autograd are torch's own. Computes
in at least float32. Like FlashAttention it aligns the causal mask bottom-right, takes fewer heads of keys
only where the heads of queries are a multiple, and does not write (here: NaN) what belongs to no sequence or
lies behind ``max_q`` and ``max_k``.

Shape suffixes: Q queries and K keys of all sequences, N heads, H head size; q, k those of one sequence, G
heads of keys, R heads of queries to each.
"""

from collections.abc import Iterator

import torch
from torch.nn.attention.varlen import _varlen_attn, _varlen_attn_backward


def _segments(
    cu_seq_q: torch.Tensor, cu_seq_k: torch.Tensor, max_q: int, max_k: int
) -> Iterator[tuple[slice, slice, int]]:
    """Queries and keys of each sequence that a kernel looks at; how many more keys than queries it has."""
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    assert len(cu_seq_q) == len(cu_seq_k) > 1
    offsets = (zip(cu.tolist(), cu.tolist()[1:], strict=False) for cu in (cu_seq_q, cu_seq_k))
    for (q_start, q_end), (k_start, k_end) in zip(*offsets, strict=True):
        more = (k_end - k_start) - (q_end - q_start)
        yield (
            slice(q_start, min(q_end, q_start + max_q)),
            slice(k_start, min(k_end, k_start + max_k)),
            more,
        )


def _scores(
    q_qNH: torch.Tensor, k_kGH: torch.Tensor, more: int, scale: float, num_before: int
) -> torch.Tensor:
    """[G, R, q, k], minus infinity where a query does not look."""
    q_GRqH = q_qNH.unflatten(1, (k_kGH.shape[1], -1)).permute(1, 2, 0, 3)
    scores = scale * torch.einsum("grqh,kgh->grqk", q_GRqH, k_kGH)
    is_seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril(diagonal=more)
    if num_before >= 0:
        is_seen = is_seen.triu(diagonal=more - num_before)
    return scores.masked_fill(~is_seen, -torch.inf)


@_varlen_attn.register_kernel("cpu")
def _forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    is_causal: bool = False,
    scale: float | None = None,
    window_size: list[int] | None = None,
    enable_gqa: bool = False,
    seqused_k: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    num_splits: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    assert window_size is not None and window_size[1] == 0 and is_causal == (window_size[0] == -1)
    assert seqused_k is None and block_table is None
    assert num_splits == 1, "FlashAttention 2 is to make no splits"
    assert key.shape == value.shape and query.shape[-1] == key.shape[-1], "FlashAttention 2 has one head size"
    dtype = torch.promote_types(query.dtype, torch.float32)
    q, k, v = (x.to(dtype) for x in (query, key, value))
    out = torch.full_like(q, torch.nan)
    log_sums_NQ = q.new_full((q.shape[1], len(q)), torch.nan)
    for of_q, of_k, more in _segments(cu_seq_q, cu_seq_k, max_q, max_k):
        scores = _scores(q[of_q], k[of_k], more, scale or q.shape[-1] ** -0.5, window_size[0])
        out[of_q] = torch.einsum("grqk,kgh->qgrh", scores.softmax(-1), v[of_k]).flatten(1, 2)
        log_sums_NQ[:, of_q] = scores.logsumexp(-1).flatten(0, 1)
    return out.to(query.dtype), log_sums_NQ, torch.zeros(2, dtype=torch.uint64)


@_varlen_attn_backward.register_kernel("cpu")
def _backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    is_causal: bool,
    rng_state: torch.Tensor,
    scale: float | None = None,
    window_size: list[int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients by Dao et al., "FlashAttention", 2022, appendix B.2."""
    q, k, v, out, grad = (x.to(lse.dtype) for x in (query, key, value, out, grad_out))
    scale = scale or q.shape[-1] ** -0.5
    assert window_size is not None
    dq, dk, dv = (torch.full_like(x, torch.nan) for x in (q, k, v))
    for of_q, of_k, more in _segments(cu_seq_q, cu_seq_k, max_q, max_k):
        groups = (k.shape[1], -1)
        scores = _scores(q[of_q], k[of_k], more, scale, window_size[0])
        shares = (scores - lse[:, of_q].unflatten(0, groups)[..., None]).exp()
        grad_qGRH = grad[of_q].unflatten(1, groups)
        dv[of_k] = torch.einsum("grqk,qgrh->kgh", shares, grad_qGRH)
        through_GRq = (grad[of_q] * out[of_q]).sum(-1).unflatten(1, groups).permute(1, 2, 0)
        of_shares = torch.einsum("qgrh,kgh->grqk", grad_qGRH, v[of_k])
        of_scores = scale * shares * (of_shares - through_GRq[..., None])
        dq[of_q] = torch.einsum("grqk,kgh->qgrh", of_scores, k[of_k]).flatten(1, 2)
        dk[of_k] = torch.einsum("grqk,qgrh->kgh", of_scores, q[of_q].unflatten(1, groups))
    return dq.to(query.dtype), dk.to(key.dtype), dv.to(value.dtype)
