"""Attention over packed rows where that of TorchTitan 0.3.0 and torch 2.13 does not work.

**CPUs.** TorchTitan's flex and varlen attention have no backward pass. ``PackedAttention`` cuts rows into
segments: runs of tokens without branches, which are whole sequences if no prefixes are shared. It groups
segments of similar length and pads them to the longest of the group, for the causal attention within each. A
segment with branches is also seen by all tokens below it, which are next to each other: full attention to its
keys is merged into their output. All this is a custom operator that compiled layers call unchanged; otherwise
they would be recompiled for every number of groups. The operator calls PyTorch's flash kernel for CPUs by its
private name, because only then can its backward pass be called too. That pass runs in at least float32: in
bfloat16 the kernel rounds the gradients of keys and values again with every block of queries and every head
that shares them, and takes longer. Can go when flex or varlen attention has a backward pass on CPUs.

**Values with another head size on GPUs.** torch's FlashAttention 2 has one head size for queries, keys and
values; latent attention has smaller values. ``WholeRowAttention`` pads values with zeros, and drops the zeros
that these add to the output. Can go when torch's FlashAttention 2 supports two sizes; 3 and 4 do.

**Context parallelism on GPUs.** TorchTitan refuses varlen attention with it, and flex attention, which it
accepts, compiles a kernel for its masks. ``ContextAttention`` runs varlen attention on the part of every row
that a rank has. A rank has the queries of one part of every row, and keys and values of whole rows. The
queries of a sequence attend to its keys from its first token to the end of the part, so that keys and queries
of every sequence end at the same token: the causal mask of varlen attention is aligned there (bottom-right),
and no query sees a later key. Keys before the first overlapping sequence and after the part are left out. Can
go when TorchTitan's varlen attention supports context parallelism.

Shape suffixes: B batch (rows), L packed row length (of queries: of this rank's part), N heads (of keys and
values a divisor of the queries'), H head size, V size of a head of values, S segments of a group or sequences
of the part, M longest of a group, P entries of all groups, G groups, I segments with branches, Q queries of
all rows, K keys that they may see.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
import torchtitan.tools.utils as titan_utils
from torch.autograd.function import FunctionCtx
from torch.nn.attention import activate_flash_attention_impl, current_flash_attention_impl
from torch.nn.attention.varlen import varlen_attn
from torchtitan.models.common.attention import FlexAttention, VarlenAttention, VarlenMetadata
from torchtitan.protocols.module import Module

from forgeasync.trainer.host_copies import to_device

GROUP_RATIO = 1.25
"""Upper bound of the padded length of sequences of at least ``SHORT`` tokens, relative to their length."""

SHORT = 16
"""Length in tokens below which all sequences form one group: more groups would cost more than padding."""


class PackedSequences(NamedTuple):
    """Places of the segments of a packed row, by group, and the start of this rank's queries."""

    place_of_P: torch.Tensor
    """Index (int64) of each entry among the row's tokens: group after group, each [S, M].

    Padding is L; it comes last, so that causal attention hides it from every real query.
    """
    shapes_G2: torch.Tensor
    """S and M of every group, int64."""
    branches_I3: torch.Tensor
    """First token and end of every segment with branches, and the end of the tokens below it, int64."""
    query_start: int
    """First position of this rank's queries in each row; with context parallelism a rank has only a part."""


def packed_sequences(visible_until_L: torch.Tensor, *, query_start: int = 0) -> PackedSequences:
    """Find the segments of a whole row (int64 [L]; see ``forgeasync.trainer.packing``)."""
    length = visible_until_L.numel()
    # Tokens of a segment are seen until the same position, and those of the next segment until another one.
    is_start_L = torch.ones(length, dtype=torch.bool)
    is_start_L[1:] = visible_until_L[1:] != visible_until_L[:-1]
    starts = is_start_L.nonzero().squeeze(1)
    lengths = torch.diff(starts, append=torch.tensor([length]))
    ends, below = starts + lengths, visible_until_L[starts]
    branches_I3 = torch.stack([starts, ends, below], dim=1)[below > ends]
    group_of = (lengths.clamp(min=SHORT).log() / torch.tensor(GROUP_RATIO).log()).floor()
    places, shapes = [], []
    for group in group_of.unique():
        is_own = group_of == group
        offsets_M = torch.arange(int(lengths[is_own].max()))
        is_token_SM = offsets_M < lengths[is_own][:, None]
        place_of_SM = torch.where(is_token_SM, starts[is_own][:, None] + offsets_M, length)
        places.append(place_of_SM.flatten())
        shapes.append(place_of_SM.shape)
    return PackedSequences(torch.cat(places), torch.tensor(shapes), branches_I3, query_start)


_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu

_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@torch.library.custom_op("forgeasync::packed_attention", mutates_args=())
def attend(
    q_LNH: torch.Tensor,
    k_LNH: torch.Tensor,
    v_LNH: torch.Tensor,
    place_of_P: torch.Tensor,
    shapes_G2: torch.Tensor,
    branches_I3: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output [L, N, H], and the logarithm of every query's sum of exponentials [L, N].

    ``place_of_P``, ``shapes_G2`` and ``branches_I3`` are those of ``PackedSequences``.
    """
    inputs = (q_LNH, k_LNH, v_LNH)
    out, log_sums = _with_spare_row(q_LNH), _with_spare_row(_empty_log_sums(q_LNH))
    for places_SM in _groups(place_of_P, shapes_G2):
        q, k, v = (_take(x, places_SM) for x in inputs)
        out_SNMH, log_sums_SNM = _flash(q, k, v, is_causal=True, scale=scale)
        _put(out, places_SM, out_SNMH)
        _put(log_sums, places_SM, log_sums_SNM)
    out_LNH, log_sums_LN = out[:-1], log_sums[:-1]
    if len(branches_I3):
        merged_LNH = out_LNH.to(log_sums_LN.dtype)
        for start, end, below in branches_I3.tolist():
            keys, queries = slice(start, end), slice(end, below)
            given = (_heads_first(q_LNH[queries]), _heads_first(k_LNH[keys]), _heads_first(v_LNH[keys]))
            part, part_log_sums = _flash(*given, is_causal=False, scale=scale)
            _merge(merged_LNH[queries], log_sums_LN[queries], part, part_log_sums)
        out_LNH = merged_LNH.to(out_LNH.dtype)
    return out_LNH, log_sums_LN


def _heads_first(x_QNH: torch.Tensor) -> torch.Tensor:
    return x_QNH.transpose(0, 1)[None]


def _merge(
    out_QNH: torch.Tensor, log_sums_QN: torch.Tensor, part_1NQH: torch.Tensor, part_log_sums_1NQ: torch.Tensor
) -> None:
    """Add attention to further keys, in place: a mean weighted by the sums of exponentials."""
    part_log_sums_QN = part_log_sums_1NQ[0].transpose(0, 1)
    total_QN = torch.logaddexp(log_sums_QN, part_log_sums_QN)
    out_QNH *= (log_sums_QN - total_QN).exp()[..., None]
    out_QNH += part_1NQH[0].transpose(0, 1) * (part_log_sums_QN - total_QN).exp()[..., None]
    log_sums_QN.copy_(total_QN)


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
    branches_I3: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of queries, keys and values, computed in at least float32.

    With the whole output and log sum of a query, the kernel's gradients for any part of its keys are right.
    """
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
    dq, dk, dv = dq[:-1], dk[:-1], dv[:-1]
    if len(branches_I3):
        sums = [x.to(log_sums_LN.dtype) for x in (dq, dk, dv)]
        for start, end, below in branches_I3.tolist():
            keys, queries = slice(start, end), slice(end, below)
            places = (queries, keys, keys, queries)
            grad, q, k, v, out = (
                _heads_first(x[at]).to(log_sums_LN.dtype)
                for x, at in zip((grad_LNH, *inputs), (queries, *places), strict=True)
            )
            log_sums = _heads_first(log_sums_LN[queries])
            of_part = _flash_backward(grad, q, k, v, out, log_sums, 0.0, False, scale=scale)
            for whole, at, part_1NQH in zip(sums, places[:3], of_part, strict=True):
                whole[at] += part_1NQH[0].transpose(0, 1)
        dq, dk, dv = (x.to(like.dtype) for x, like in zip(sums, (dq, dk, dv), strict=True))
    return dq, dk, dv


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
    return *attend_backward(grad_LNH, *ctx.saved_tensors, ctx.scale), None, None, None, None


attend.register_autograd(_backward, setup_context=_save)


class PackedAttention(FlexAttention):
    """Causal attention within each packed sequence or tree of sequences, never across their borders.

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
            attention_masks.branches_I3,
            head_size**-0.5 if scale is None else scale,
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


class WholeRowAttention(VarlenAttention):
    """TorchTitan's attention over packed rows, for heads of any two sizes."""

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
    ) -> torch.Tensor:
        """Return the output [B, L, N, V]. The tensor-parallel plan looks up the names of the parameters."""

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
    key_starts_B: tuple[int, ...]
    key_stop: int


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

    def offsets(lengths_S: np.ndarray) -> torch.Tensor:
        return to_device(np.concatenate([[0], np.cumsum(lengths_S)]).astype(np.int32))

    return PartMetadata(
        cu_seq_q=offsets(num_queries_S),
        cu_seq_k=offsets(num_keys_S),
        max_q=int(num_queries_S.max()),
        max_k=int(num_keys_S.max()),
        key_starts_B=tuple(key_starts),
        key_stop=stop,
    )


class ContextAttention(FlexAttention):
    """Causal attention of a part's queries to the keys of its sequences, through ``varlen_attn``.

    It is a subclass of ``FlexAttention`` only so that TorchTitan gathers keys and values for it with
    ``flex_cp_allgather`` of torch 2.13. The backward pass of that is a reduce-scatter of sums by functional
    collectives, which NCCL and gloo both support. The tensor-parallel plan looks up the parameter names of
    ``forward``. Nothing is cast: the kernel refuses dtypes other than bfloat16 and float16.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        pass

    def __init__(self, config: Config) -> None:
        # Skip FlexAttention's own state, and choose the kernel as TorchTitan's VarlenAttention does.
        Module.__init__(self)
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
    ) -> torch.Tensor:
        """Return the output [B, L, N, V] of the part's queries; keys and values [B, whole L, N, H or V]."""
        k_KNH, v_KNH = (
            _seen(x, attention_masks.key_starts_B, attention_masks.key_stop) for x in (k_BLNH, v_BLNH)
        )
        # As in TorchTitan: FlashAttention 2 must not choose the number of splits itself (pytorch 179760).
        is_second = current_flash_attention_impl() in (None, "FA2") and torch.version.hip is None

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
                window_size=(-1, 0),
                enable_gqa=enable_gqa,
                num_splits=1 if is_second else None,
            )

        out_QNH = with_equal_heads(attend, q_BLNH, v_KNH)
        return out_QNH.view(*q_BLNH.shape[:3], v_BLNH.shape[3])


def _seen(x_BLNH: torch.Tensor, starts_B: tuple[int, ...], stop: int) -> torch.Tensor:
    """Return keys or values [K, N, H] that a query of the part may see; a single row is not copied."""
    rows = [x_LNH[start:stop] for x_LNH, start in zip(x_BLNH.unbind(0), starts_B, strict=True)]
    return rows[0] if len(rows) == 1 else torch.cat(rows)
