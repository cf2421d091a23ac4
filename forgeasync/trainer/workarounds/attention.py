"""Attention over packed rows where that of TorchTitan 0.3.0 and torch 2.13 does not work.

**CPUs.** TorchTitan's flex and varlen attention have no backward pass. ``PackedAttention`` cuts rows into
segments: runs of tokens without branches, which are whole sequences if no prefixes are shared. It groups
segments of similar length and pads them to the longest of the group, for the causal attention within each. A
segment with branches is also seen by all tokens below it, which are next to each other: full attention to its
keys is merged into their output, for segments of equal length at once. All this is a custom operator that
compiled layers call unchanged; otherwise they would be recompiled for every number of groups. The operator
calls PyTorch's flash kernel for CPUs by its private name, because only then can its backward pass be called
too. That pass runs in at least float32: in bfloat16 the kernel rounds the gradients of keys and values again
with every block of queries and every head that shares them, and takes longer. Can go when flex or varlen
attention has a backward pass on CPUs.

**Values with another head size on GPUs.** torch's FlashAttention 2 has one head size for queries, keys and
values; latent attention has smaller values. ``WholeRowAttention`` pads values with zeros, and drops the zeros
that these add to the output. Can go when torch's FlashAttention 2 supports two sizes; 3 and 4 do.

**Context parallelism and shared prefixes on GPUs.** TorchTitan refuses varlen attention with the former and
has none for trees; flex attention, which has, compiles a kernel for its masks. ``GatheredKeysAttention`` runs
varlen attention with fewer queries than keys. Both end at the same token, where the causal mask of varlen
attention is aligned (bottom-right), so no query sees a later key. With context parallelism a rank has the
queries of one part of every row, and keys and values of whole rows. The keys of a sequence are those from its
first token to the end of the part; keys before the first overlapping sequence and after the part are left
out. In a row of trees the queries are those of a segment, and the keys of the whole path to it are gathered.
Can go when TorchTitan's varlen attention supports both.

**Sinks.** TorchTitan multiplies gpt-oss's output with a function of the kernel's log sums, but torch's varlen
attention returns no gradient of these: those of queries, keys and sinks are wrong. ``SinkAttention`` gives
kernels' backward passes the output and log sums with sinks, of which they compute the right ones. Can go when
varlen attention has gradients of log sums. With tensor parallelism TorchTitan also divides the gradient of
the output projection's bias by the number of ranks.

Shape suffixes: B batch (rows); L packed row length (of queries: of this rank's part); N heads (of keys and
values a divisor of the queries'); H head size; V size of a head of values; S segments of a group or sequences
of the part; M longest of a group; P entries of all groups; G groups; Q queries of all rows; K keys that they
may see.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
import torchtitan.tools.utils as titan_utils
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.distributed.tensor import DTensor
from torch.nn.attention import activate_flash_attention_impl, current_flash_attention_impl
from torch.nn.attention.varlen import varlen_attn
from torchtitan.models.common.attention import FlexAttention, VarlenAttention, VarlenMetadata
from torchtitan.models.common.linear import ScaledBiasRowwiseLinear
from torchtitan.models.gpt_oss.model import Attention as GptOssAttention
from torchtitan.models.gpt_oss.moe import ScaleBiasForward
from torchtitan.protocols.module import Module

from forgeasync.trainer.host_copies import to_device
from forgeasync.weights import local_shard

FULL_WINDOW = (-1, 0)
"""Number of tokens before and after a token that it sees (-1: all), in causal attention without a window."""

GROUP_RATIO = 1.25
"""Upper bound of the padded length of sequences of at least ``SHORT`` tokens, relative to their length."""

SHORT = 16
"""Length in tokens below which all sequences form one group: more groups would cost more than padding."""


class PackedSequences(NamedTuple):
    """Places of the segments of a packed row, by group, and the start of this rank's queries."""

    places_P: torch.Tensor
    """Index (int64) of each entry among the row's tokens, group after group.

    A group has queries [S, M], and keys [S, K] unless each segment attends to itself. Padding is L. It is at
    the end of queries, where causal attention hides it from real ones; keys [S, K] have none.
    """
    shapes_G3: torch.Tensor
    """S, M and K of every group, int64; K is 0 if each segment attends to itself. Those groups come first."""
    query_start: int
    """First position of this rank's queries in each row; with context parallelism a rank has only a part."""


def packed_sequences(visible_until_L: torch.Tensor, *, query_start: int = 0) -> PackedSequences:
    """Find the segments of a whole row (int64 [L]; see ``forgeasync.trainer.packing``)."""
    length = visible_until_L.numel()
    starts, ends, below = map(torch.from_numpy, _segments(visible_until_L.numpy()))
    places, shapes = [], []
    for own in _alike(_size_class(ends - starts)):
        queries = _ranges(starts[own], ends[own], length)
        places.append(queries.flatten())
        shapes.append([*queries.shape, 0])
    # Segments with branches, whose keys are also seen by the tokens below them. Those of one depth have
    # different queries.
    is_branch = below > ends
    starts, ends, below = (x[is_branch] for x in (starts, ends, below))
    is_above = (starts[:, None] > starts) & (starts[:, None] < below)
    for own in _alike(torch.stack([is_above.sum(1), ends - starts, _size_class(below - ends)], dim=1)):
        queries, keys = _ranges(ends[own], below[own], length), _ranges(starts[own], ends[own], length)
        places += [queries.flatten(), keys.flatten()]
        shapes.append([*queries.shape, keys.shape[1]])
    return PackedSequences(torch.cat(places), torch.tensor(shapes), query_start)


def _segments(visible_until_L: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the first position and the end of each segment, and the end of the tokens below it: int64."""
    # Tokens of a segment are seen until the same position, and those of the next segment until another one.
    starts = np.flatnonzero(np.diff(visible_until_L, prepend=-1))
    return starts, np.append(starts[1:], len(visible_until_L)), visible_until_L[starts]


def _size_class(lengths: torch.Tensor) -> torch.Tensor:
    """Return a number that is equal for lengths that are padded to the longest of them."""
    return (lengths.clamp(min=SHORT).log() / torch.tensor(GROUP_RATIO).log()).floor().long()


def _alike(keys: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield which entries (bool) have the same key; ``keys`` may have several numbers for each."""
    if len(keys):
        unique, group_of = keys.unique(dim=0, return_inverse=True)
        for group in range(len(unique)):
            yield group_of == group


def _ranges(starts: torch.Tensor, ends: torch.Tensor, padding: int) -> torch.Tensor:
    """Return the positions from each start to its end, [S, M], filled up with ``padding``."""
    places_SM = starts[:, None] + torch.arange(int((ends - starts).max()))
    return places_SM.where(places_SM < ends[:, None], padding)


_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu

_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@torch.library.custom_op("forgeasync::packed_attention", mutates_args=())
def attend(
    q_LNH: torch.Tensor,
    k_LNH: torch.Tensor,
    v_LNH: torch.Tensor,
    places_P: torch.Tensor,
    shapes_G3: torch.Tensor,
    scale: float,
    num_before: int = -1,
    sinks_N: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output [L, N, H], and the logarithm of every query's sum of exponentials [L, N].

    ``places_P`` and ``shapes_G3`` are those of ``PackedSequences``.

    Args:
        num_before: Number of tokens before itself that a token sees; -1: all. In trees, they see all.
        sinks_N: A score of each head that is added to every query's sum, and adds nothing to its output.
    """
    log_sums = _with_spare_row(_empty_log_sums(q_LNH))
    out = _with_spare_row(q_LNH, dtype=_dtype_of_sums(q_LNH.dtype, log_sums.dtype, shapes_G3))
    for queries_SM, keys_SK in _groups(places_P, shapes_G3):
        is_own = keys_SK is queries_SM
        q, k, v = _take(q_LNH, queries_SM), _take(k_LNH, keys_SK), _take(v_LNH, keys_SK)
        assert is_own or num_before < 0, "trees have no windows"
        mask = _window_mask(q, num_before)
        part, part_log_sums = _flash(q, k, v, is_causal=is_own and mask is None, attn_mask=mask, scale=scale)
        if not is_own:
            # A mean over both sets of keys, weighted by their sums of exponentials.
            before, before_log_sums = _take(out, queries_SM), _take(log_sums, queries_SM)
            total = torch.logaddexp(before_log_sums, part_log_sums)
            part = (
                before * (before_log_sums - total).exp()[..., None]
                + part.to(out.dtype) * (part_log_sums - total).exp()[..., None]
            )
            part_log_sums = total
        _put(out, queries_SM, part)
        _put(log_sums, queries_SM, part_log_sums)
    out_LNH, log_sums_LN = out[:-1], log_sums[:-1]
    if sinks_N is not None:
        out_LNH, log_sums_LN = with_sinks(out_LNH, log_sums_LN, sinks_N)
    return out_LNH.to(q_LNH.dtype), log_sums_LN


def with_sinks(
    out_LNH: torch.Tensor, log_sums_LN: torch.Tensor, sinks_N: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output and the log sums with another score of each head in the sums.

    Given these, kernels compute the right gradients of queries, keys and values.
    """
    total_LN = torch.logaddexp(log_sums_LN, sinks_N.to(log_sums_LN.dtype))
    return out_LNH * (log_sums_LN - total_LN).exp()[..., None], total_LN


def gradient_of_sinks(
    grad_LNH: torch.Tensor, out_LNH: torch.Tensor, log_sums_LN: torch.Tensor, sinks_N: torch.Tensor
) -> torch.Tensor:
    """Return the gradient [N] of the scores of ``with_sinks``, given what it returns."""
    dtype = log_sums_LN.dtype
    through_LN = (grad_LNH.to(dtype) * out_LNH.to(dtype)).sum(-1)
    return -(through_LN * (sinks_N.to(dtype) - log_sums_LN).exp()).sum(0).to(sinks_N.dtype)


def _window_mask(q_SNMH: torch.Tensor, num_before: int) -> torch.Tensor | None:
    """Return what to add to scores [M, M] of queries that see ``num_before`` tokens before them."""
    length = q_SNMH.shape[2]
    if num_before < 0 or num_before >= length - 1:
        return None
    is_seen_MM = q_SNMH.new_ones(length, length, dtype=torch.bool).tril().triu(-num_before)
    return q_SNMH.new_zeros(length, length).masked_fill_(~is_seen_MM, -torch.inf)


@torch.library.custom_op("forgeasync::packed_attention_backward", mutates_args=())
def attend_backward(
    grad_LNH: torch.Tensor,
    q_LNH: torch.Tensor,
    k_LNH: torch.Tensor,
    v_LNH: torch.Tensor,
    out_LNH: torch.Tensor,
    log_sums_LN: torch.Tensor,
    places_P: torch.Tensor,
    shapes_G3: torch.Tensor,
    scale: float,
    num_before: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of queries, keys and values, computed in at least float32.

    Given the output and log sum over all keys of a query, the kernel's gradients for any of them are right.
    """
    dtype = log_sums_LN.dtype
    inputs = (q_LNH, k_LNH, v_LNH)
    sums = [_with_spare_row(x, dtype=_dtype_of_sums(x.dtype, dtype, shapes_G3)) for x in inputs]
    for queries_SM, keys_SK in _groups(places_P, shapes_G3):
        is_own = keys_SK is queries_SM
        places = (queries_SM, keys_SK, keys_SK)
        q, k, v = (_take(x, at).to(dtype) for x, at in zip(inputs, places, strict=True))
        out, log_sums = _take(out_LNH, queries_SM).to(dtype), _take(log_sums_LN, queries_SM)
        # Padded queries must not contribute: they repeat a token that has its own place. Its log sum does not
        # belong to the keys that they see here, and exp(score - log sum) could overflow; exp(score - inf) is
        # 0.
        is_padding_S1M = (queries_SM == len(q_LNH))[:, None]
        log_sums.masked_fill_(is_padding_S1M, torch.inf)
        grad = _take(grad_LNH, queries_SM).to(dtype).masked_fill_(is_padding_S1M[..., None], 0)
        mask = _window_mask(q, num_before)
        is_causal = is_own and mask is None
        parts = _flash_backward(grad, q, k, v, out, log_sums, 0.0, is_causal, attn_mask=mask, scale=scale)
        for whole, at, part in zip(sums, places, parts, strict=True):
            _put(whole, at, part if is_own else _take(whole, at) + part)
    dq, dk, dv = (whole[:-1].to(x.dtype) for whole, x in zip(sums, inputs, strict=True))
    return dq, dk, dv


def _dtype_of_sums(dtype: torch.dtype, wide: torch.dtype, shapes_G3: torch.Tensor) -> torch.dtype:
    """Return the dtype of results: ``wide`` if a token has several parts, which are added."""
    return wide if bool(shapes_G3[-1, 2]) else dtype


def _groups(places_P: torch.Tensor, shapes_G3: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the places of queries [S, M] and keys [S, K] of each group; the same tensor if they are equal."""
    start = 0
    for num_segments, num_queries, num_keys in shapes_G3.tolist():
        middle = start + num_segments * num_queries
        queries_SM = places_P[start:middle].view(num_segments, num_queries)
        start = middle + num_segments * num_keys
        yield queries_SM, places_P[middle:start].view(num_segments, num_keys) if num_keys else queries_SM


def _take(x_LN: torch.Tensor, places_SM: torch.Tensor) -> torch.Tensor:
    """Return [S, N, M, ...] of [L, N, ...]; padding gets the values of the last token."""
    tokens = places_SM.flatten().clamp(max=len(x_LN) - 1)
    return x_LN.index_select(0, tokens).view(*places_SM.shape, *x_LN.shape[1:]).transpose(1, 2)


def _put(whole: torch.Tensor, places_SM: torch.Tensor, part_SNM: torch.Tensor) -> None:
    """Write [S, N, M, ...] to [L + 1, N, ...]; padding goes to the spare row."""
    whole.index_copy_(0, places_SM.flatten(), part_SNM.transpose(1, 2).flatten(0, 1).to(whole.dtype))


def _with_spare_row(like_LN: torch.Tensor, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    return like_LN.new_empty(len(like_LN) + 1, *like_LN.shape[1:], dtype=dtype or like_LN.dtype)


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


class _VarlenContext(FunctionCtx):
    saved_tensors: tuple[torch.Tensor, ...]
    lengths: tuple[int, int, bool]
    options: tuple[float | None, list[int]]


class _Context(FunctionCtx):
    saved_tensors: tuple[torch.Tensor, ...]
    scale: float
    num_before: int


def _save(
    ctx: _Context,
    inputs: tuple[*tuple[torch.Tensor, ...], float, int, torch.Tensor | None],
    output: tuple[torch.Tensor, torch.Tensor],
) -> None:
    *tensors, ctx.scale, ctx.num_before, sinks_N = inputs
    ctx.save_for_backward(*tensors[:3], *output, *tensors[3:], *(() if sinks_N is None else (sinks_N,)))


def _backward(
    ctx: _Context, grad_LNH: torch.Tensor, _: torch.Tensor | None
) -> tuple[torch.Tensor | None, ...]:
    # Recomputed activations can be taken only once.
    saved = ctx.saved_tensors
    saved, sinks_N = saved[:7], saved[7] if len(saved) > 7 else None
    of_inputs = attend_backward(grad_LNH, *saved, ctx.scale, ctx.num_before)
    of_sinks = None if sinks_N is None else gradient_of_sinks(grad_LNH, saved[3], saved[4], sinks_N)
    return *of_inputs, None, None, None, None, of_sinks


attend.register_autograd(_backward, setup_context=_save)


class PackedAttention(FlexAttention):
    """Causal attention within each packed sequence or tree of sequences, never across their borders.

    Replaces TorchTitan's ``FlexAttention``. It is a subclass, so that context parallelism gathers keys and
    values for it. The tensor-parallel plan looks up the parameter names of ``forward``.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        window_size: tuple[int, int] = FULL_WINDOW

    def __init__(self, config: Config) -> None:
        # Skip FlexAttention's own state.
        Module.__init__(self)
        self.window_size = config.window_size

    def forward(
        self,
        q_BLNH: torch.Tensor,
        k_BLNH: torch.Tensor,
        v_BLNH: torch.Tensor,
        *,
        attention_masks: PackedSequences,
        scale: float | None = None,
        enable_gqa: bool = False,
        sinks_N: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the output in the head size of values, which may differ from that of queries and keys.

        There may be fewer heads of keys and values, regardless of ``enable_gqa``. ``sinks_N`` as in
        ``attend``.
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
            attention_masks.places_P,
            attention_masks.shapes_G3,
            head_size**-0.5 if scale is None else scale,
            self.window_size[0],
            sinks_N,
        )
        out_BLNH = out_LNH.view(-1, length, *out_LNH.shape[1:])
        return out_BLNH[:, start : start + num_queries, :, :value_size]


def _widened(x: torch.Tensor, head_size: int) -> torch.Tensor:
    # F.pad by 0 would copy.
    missing = head_size - x.shape[-1]
    return F.pad(x, (0, missing)) if missing else x


def with_equal_heads(
    attend: Callable[[torch.Tensor], torch.Tensor], q: torch.Tensor, v: torch.Tensor
) -> torch.Tensor:
    """Return ``attend(v)`` [..., V], with values padded to the size of queries if the kernel needs it."""
    if q.shape[-1] == v.shape[-1] or current_flash_attention_impl() not in (None, "FA2"):
        return attend(v)
    return attend(_widened(v, q.shape[-1]))[..., : v.shape[-1]]


class _SinkVarlen(torch.autograd.Function):
    """``varlen_attn`` with sinks [N]; the other arguments are its own."""

    @staticmethod
    def forward(
        ctx: _VarlenContext,
        q_QNH: torch.Tensor,
        k_KNH: torch.Tensor,
        v_KNH: torch.Tensor,
        sinks_N: torch.Tensor,
        cu_seq_q: torch.Tensor,
        cu_seq_k: torch.Tensor,
        max_q: int,
        max_k: int,
        scale: float | None,
        num_before: int,
    ) -> torch.Tensor:
        ctx.lengths, ctx.options = (max_q, max_k, num_before == -1), (scale, [num_before, 0])
        out_QNH, log_sums_NQ, rng_state = torch.ops.torch_attn._varlen_attn(
            *(q_QNH, k_KNH, v_KNH, cu_seq_q, cu_seq_k, *ctx.lengths, *ctx.options),
            *(True, None, None, num_splits()),
        )
        wide_QNH, total_QN = with_sinks(out_QNH.to(log_sums_NQ.dtype), log_sums_NQ.t(), sinks_N)
        out_QNH = wide_QNH.to(q_QNH.dtype)
        total_NQ = total_QN.t().contiguous()
        ctx.save_for_backward(q_QNH, k_KNH, v_KNH, out_QNH, total_NQ, cu_seq_q, cu_seq_k, rng_state, sinks_N)
        return out_QNH

    @staticmethod
    @once_differentiable
    def backward(ctx: _VarlenContext, grad_QNH: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        *saved, rng_state, sinks_N = ctx.saved_tensors
        of_inputs = torch.ops.torch_attn._varlen_attn_backward(
            grad_QNH.contiguous(), *saved, *ctx.lengths, rng_state, *ctx.options
        )
        of_sinks = gradient_of_sinks(grad_QNH, saved[3], saved[4].t(), sinks_N)
        return *of_inputs, of_sinks, None, None, None, None, None, None


def varlen_with_sinks(
    q_BLNH: torch.Tensor,
    k_KNH: torch.Tensor,
    v_KNH: torch.Tensor,
    sinks_N: torch.Tensor,
    masks: "VarlenMetadata | PartMetadata",
    scale: float | None,
    num_before: int,
) -> torch.Tensor:
    """Return the output [B, L, N, H] of varlen attention, with sinks and a window as in ``attend``."""
    lengths = (masks.cu_seq_q, masks.cu_seq_k, masks.max_q, masks.max_k)
    q_QNH = q_BLNH.flatten(0, 1)
    out_QNH: torch.Tensor = _SinkVarlen.apply(q_QNH, k_KNH, v_KNH, sinks_N, *lengths, scale, num_before)
    return out_QNH.view_as(q_BLNH)


def num_splits() -> int | None:
    """Return the argument of ``varlen_attn``: FlashAttention 2 must not choose it itself (pytorch 179760)."""
    is_second = current_flash_attention_impl() in (None, "FA2") and torch.version.hip is None
    return 1 if is_second else None


class UndividedBiasLinear(ScaledBiasRowwiseLinear):
    """TorchTitan's row-wise linear layer, whose bias's gradient is not divided by the number of ranks."""

    @dataclass(kw_only=True, slots=True)
    class Config(ScaledBiasRowwiseLinear.Config):
        pass

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        weight, bias = local_shard(self.weight), local_shard(self.bias)
        return F.linear(input, weight, ScaleBiasForward.apply(bias, self.tp_degree, bias.dtype))


class SinkAttention(GptOssAttention):
    """TorchTitan's attention with sinks that are part of the kernels' sums, forward and backward."""

    @dataclass(kw_only=True, slots=True)
    class Config(GptOssAttention.Config):
        pass

    def forward(
        self,
        x: torch.Tensor,
        attention_masks: "PackedSequences | VarlenMetadata | PartMetadata",
        positions: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the output [B, L, D] for ``x`` [B, L, D], a name that the tensor-parallel plan looks up."""
        sinks_N = self.sinks
        if isinstance(sinks_N, DTensor):
            sinks_N = sinks_N.to_local(grad_placements=sinks_N.placements)
        q_BLNH, k_BLNH, v_BLNH = self.qkv_linear(x)
        q_BLNH, k_BLNH = self.rope(q_BLNH, k_BLNH, positions)
        out_BLNH = self.inner_attention(
            q_BLNH,
            k_BLNH,
            v_BLNH,
            attention_masks=attention_masks,
            scale=self.softmax_scale,
            enable_gqa=self.enable_gqa,
            sinks_N=sinks_N,
        )
        return self.wo(out_BLNH.flatten(2).contiguous())


class WholeRowAttention(VarlenAttention):
    """TorchTitan's attention over packed rows, for heads of any two sizes, and with sinks."""

    @dataclass(kw_only=True, slots=True)
    class Config(VarlenAttention.Config):
        pass

    def forward(
        self,
        q_BLNH: torch.Tensor,
        k_BLNH: torch.Tensor,
        v_BLNH: torch.Tensor,
        *,
        attention_masks: VarlenMetadata,
        scale: float | None = None,
        enable_gqa: bool = False,
        sinks_N: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the output [B, L, N, V]. The tensor-parallel plan looks up the names of the parameters."""
        if sinks_N is not None:
            k_KNH, v_KNH = k_BLNH.flatten(0, 1), v_BLNH.flatten(0, 1)
            num_before = self.window_size[0]
            return varlen_with_sinks(q_BLNH, k_KNH, v_KNH, sinks_N, attention_masks, scale, num_before)

        def attend(v: torch.Tensor) -> torch.Tensor:
            return super(WholeRowAttention, self).forward(
                q_BLNH, k_BLNH, v, attention_masks=attention_masks, scale=scale, enable_gqa=enable_gqa
            )

        return with_equal_heads(attend, q_BLNH, v_BLNH)


class PartMetadata(NamedTuple):
    """Sequences of a part, in the order of rows; offsets count from the first kept token.

    A tuple, because compiled layers and DTensor's plans accept one.
    """

    cu_seq_q: torch.Tensor
    """Offsets of each sequence's queries among the part's queries of all rows, end to end, int32 [S + 1]."""
    cu_seq_k: torch.Tensor
    """Offsets of each sequence's keys among the kept keys, int32 [S + 1].

    The kept keys of a row are those from ``key_starts_B`` to ``key_stop``.
    """
    max_q: int
    max_k: int
    key_starts_B: tuple[int, ...] = ()
    key_stop: int = 0
    key_places_K: torch.Tensor | None = None
    """Positions of the kept keys in a single row of trees, where several sequences see a key; int64."""


def part_metadata(positions_BL: np.ndarray, *, start: int, stop: int) -> PartMetadata:
    """Find the sequences of whole rows that overlap the positions from ``start`` to ``stop``.

    ``positions_BL`` are integers [B, L] that restart at 0 with every sequence (padding is a sequence too).
    """
    length = positions_BL.shape[1]
    assert 0 <= start < stop <= length, f"a part {start}:{stop} of rows of {length} tokens"
    num_queries, num_keys, key_starts = [], [], []
    for positions_L in positions_BL:
        assert positions_L[0] == 0, "a row begins with a sequence"
        firsts = np.flatnonzero(positions_L == 0)
        ends = np.append(firsts[1:], length)
        is_here = (firsts < stop) & (ends > start)
        firsts, ends = firsts[is_here], np.minimum(ends[is_here], stop)
        num_queries.append(ends - np.maximum(firsts, start))
        num_keys.append(ends - firsts)
        key_starts.append(int(firsts[0]))
    num_queries_S, num_keys_S = np.concatenate(num_queries), np.concatenate(num_keys)

    return PartMetadata(
        cu_seq_q=_offsets(num_queries_S),
        cu_seq_k=_offsets(num_keys_S),
        max_q=int(num_queries_S.max()),
        max_k=int(num_keys_S.max()),
        key_starts_B=tuple(key_starts),
        key_stop=stop,
    )


def tree_metadata(visible_until_L: np.ndarray) -> PartMetadata:
    """Find the segments of a row of trees, whose keys are those of the whole path to them.

    See ``forgeasync.trainer.packing``.
    """
    starts, ends, below = _segments(visible_until_L)
    places, num_keys, above = [], [], list[tuple[int, int, int]]()
    for segment in zip(starts.tolist(), ends.tolist(), below.tolist(), strict=True):
        start, end, until = segment
        above = [one for one in above if one[2] > start]
        path = [*above, segment]
        places += [np.arange(first, last) for first, last, _ in path]
        num_keys.append(sum(last - first for first, last, _ in path))
        if until > end:
            above = path
    return PartMetadata(
        cu_seq_q=_offsets(ends - starts),
        cu_seq_k=_offsets(np.asarray(num_keys)),
        max_q=int((ends - starts).max()),
        max_k=max(num_keys),
        key_places_K=to_device(np.concatenate(places)),
    )


def _offsets(lengths_S: np.ndarray) -> torch.Tensor:
    return to_device(np.concatenate([[0], np.cumsum(lengths_S)]).astype(np.int32))


class GatheredKeysAttention(FlexAttention):
    """Causal attention of segments or sequences to chosen keys that end with them, through ``varlen_attn``.

    It is a subclass of ``FlexAttention`` only so that TorchTitan gathers keys and values for it with
    ``flex_cp_allgather`` of torch 2.13. The backward pass of that is a reduce-scatter of sums by functional
    collectives, which NCCL and gloo both support. The tensor-parallel plan looks up the parameter names of
    ``forward``. Nothing is cast: the kernel refuses dtypes other than bfloat16 and float16.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        window_size: tuple[int, int] = FULL_WINDOW

    def __init__(self, config: Config) -> None:
        # Skip FlexAttention's own state, and choose the kernel as TorchTitan's VarlenAttention does.
        Module.__init__(self)
        self.window_size = config.window_size
        wanted = titan_utils.get_cuda_flash_attention_impl()
        if wanted is not None and current_flash_attention_impl() != wanted:
            activate_flash_attention_impl(wanted)

    def forward(
        self,
        q_BLNH: torch.Tensor,
        k_BLNH: torch.Tensor,
        v_BLNH: torch.Tensor,
        *,
        attention_masks: PartMetadata,
        scale: float | None = None,
        enable_gqa: bool = False,
        sinks_N: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the output [B, L, N, V] of the part's queries; keys and values [B, whole L, N, H or V]."""
        k_KNH, v_KNH = (_seen(x, attention_masks) for x in (k_BLNH, v_BLNH))
        if sinks_N is not None:
            num_before = self.window_size[0]
            return varlen_with_sinks(q_BLNH, k_KNH, v_KNH, sinks_N, attention_masks, scale, num_before)

        def attend(v: torch.Tensor) -> torch.Tensor:
            # The result is a tuple only if auxiliary outputs are requested.
            return varlen_attn(  # type: ignore[return-value]
                q_BLNH.flatten(0, 1),
                k_KNH,
                v,
                attention_masks.cu_seq_q,
                attention_masks.cu_seq_k,
                attention_masks.max_q,
                attention_masks.max_k,
                scale=scale,
                window_size=self.window_size,
                enable_gqa=enable_gqa,
                num_splits=num_splits(),
            )

        out_QNH = with_equal_heads(attend, q_BLNH, v_KNH)
        return out_QNH.view(*q_BLNH.shape[:3], v_BLNH.shape[3])


def _seen(x_BLNH: torch.Tensor, masks: PartMetadata) -> torch.Tensor:
    """Return the kept keys or values [K, N, H]; those of a single row without branches are not copied."""
    if masks.key_places_K is not None:
        # In at least float32, so that gradients of a key that several segments see are summed there.
        wide_LNH = x_BLNH.squeeze(0).to(torch.promote_types(x_BLNH.dtype, torch.float32))
        return wide_LNH.index_select(0, masks.key_places_K).to(x_BLNH.dtype)
    pairs = zip(x_BLNH.unbind(0), masks.key_starts_B, strict=True)
    rows = [x_LNH[start : masks.key_stop] for x_LNH, start in pairs]
    return rows[0] if len(rows) == 1 else torch.cat(rows)
