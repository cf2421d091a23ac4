"""Log-probabilities of given tokens under the distribution the generator sampled from, and its entropies.

The generator divides logits by the temperature, cuts the vocabulary (top-k, top-p, min-p) and renormalizes
over the tokens it kept. Here the softmax of each token runs over the same kept set. Kept sets are CSR: the
set of token t is ``kept_ids[kept_offsets[t]:kept_offsets[t + 1]]``; an empty one means the whole vocabulary.

``LogprobHead`` is the model's output layer: it returns log-probabilities and never stores the logits of all
tokens. Its weight may be sharded over the vocabulary (``VocabularySlice``).

Shape suffixes: T tokens; V vocabulary; v this rank's slice of it; N kept ids of all tokens; D model dim; C
tokens with a cut vocabulary; U tokens without; K requested ids of each token.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.autograd.function import FunctionCtx
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint

from forgeasync.models import GATHER_COST, LOGITS_CHUNK_TOKENS
from forgeasync.trainer.head_weight import HeadWeight, sum_dtype

CPU_BLOCK_BYTES = 2**20
"""Bytes of scaled logits per block on CPUs: blocks that fit into caches take a third of the time."""

SMALLEST_LOG = -1e4
"""Lower bound of log-probabilities in entropies.

Its exponential is 0 in every dtype; with minus infinity, 0 * log 0 would be nan.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabularySlice:
    """Part of the vocabulary that this rank's logits cover; ``group`` is None if it is the whole."""

    size: int
    """Size of the whole vocabulary."""
    start: int
    end: int
    group: dist.ProcessGroup | None

    @classmethod
    def of(cls, tensor: torch.Tensor, *, dim: int) -> "VocabularySlice":
        """Return the slice that a tensor's local part covers along its vocabulary dimension."""
        size = tensor.shape[dim]
        if not isinstance(tensor, DTensor) or tensor.device_mesh.size() == 1:
            return cls(size=size, start=0, end=size, group=None)
        mesh, (placement, *others) = tensor.device_mesh, tensor.placements
        if placement.is_replicate():
            return cls(size=size, start=0, end=size, group=None)
        assert placement == Shard(dim) and not others, "logits are sharded over the vocabulary or not at all"
        width = -(-size // mesh.size())
        start = min(size, width * mesh.get_local_rank())
        return cls(size=size, start=start, end=min(size, start + width), group=mesh.get_group())

    def has(self, ids: torch.Tensor) -> torch.Tensor:
        """Return which ids are in this slice (bool)."""
        return (ids >= self.start) & (ids < self.end)

    def gather(self, values_Tv: torch.Tensor, ids_TK: torch.Tensor) -> torch.Tensor:
        """Return the values [T, K] of ids (int64) of the whole vocabulary; differentiable in the values."""
        if self.group is None:
            return values_Tv.gather(1, ids_TK)
        is_mine_TK = self.has(ids_TK)
        local_TK = (ids_TK - self.start).where(is_mine_TK, 0)
        return self.sum(values_Tv.gather(1, local_TK).where(is_mine_TK, 0.0))

    def sum(self, partial: torch.Tensor) -> torch.Tensor:
        """Return the sum over all slices, the same on every rank; each rank gets its gradient unchanged."""
        return partial if self.group is None else SumRanks.apply(partial, self.group)

    def max(self, partial: torch.Tensor) -> torch.Tensor:
        """Return the maximum over all slices, without gradient."""
        partial = partial.detach()
        if self.group is not None:
            dist.all_reduce(partial, dist.ReduceOp.MAX, self.group)
        return partial

    def share(self, whole: torch.Tensor) -> torch.Tensor:
        """Return a tensor that every rank has, for use with this rank's slice.

        In the backward pass, the gradients of all slices are summed.
        """
        return whole if self.group is None else _ShareWithSlices.apply(whole, self.group)


class SumRanks(torch.autograd.Function):
    """All-reduce forward, identity backward: every rank continues with the same sum and the same loss."""

    @staticmethod
    def forward(ctx: object, partial: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        total = partial.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


class _Context(FunctionCtx):
    group: dist.ProcessGroup


class _ShareWithSlices(torch.autograd.Function):
    """Identity forward, all-reduce backward: the counterpart of ``SumRanks``."""

    @staticmethod
    def forward(ctx: _Context, whole: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: _Context, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        total = gradient.contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """Tokens to predict and their kept sets (CSR: int64 ``kept_offsets`` [T + 1], int32 ``kept_ids``)."""

    token_ids_T: torch.Tensor
    """Ids of the tokens, of any integer type."""
    kept_offsets: torch.Tensor
    """In page-locked host memory, so that no GPU has to be waited for."""
    kept_ids: torch.Tensor
    extra_ids_TK: torch.Tensor | None = None
    """Ids (int64) whose log-probabilities over the full vocabulary are also returned; None: none."""

    def chunks(self, num_tokens: int) -> Iterator["Targets"]:
        """Yield the targets in parts of ``num_tokens``, with offsets beside their ids and no extra ids."""
        bounds = [*self.kept_offsets[::num_tokens].tolist(), len(self.kept_ids)]
        kept_offsets = self.kept_offsets.to(self.token_ids_T.device, non_blocking=True)
        for index, token_ids_T in enumerate(self.token_ids_T.split(num_tokens)):
            start, first, last = index * num_tokens, bounds[index], bounds[index + 1]
            yield Targets(
                token_ids_T=token_ids_T,
                kept_offsets=kept_offsets[start : start + len(token_ids_T) + 1] - first,
                kept_ids=self.kept_ids[first:last],
            )


class Predictions(NamedTuple):
    """Output of ``LogprobHead``. A tuple, because FSDP2 does not find tensors in dataclasses."""

    logprobs_T: torch.Tensor
    """Log-probabilities of the targets, at least float32, differentiable."""
    entropies_T: torch.Tensor | None
    """Entropies of the sampled distributions in nats, without gradients, in the dtype of ``logprobs_T``.

    None if not requested.
    """
    extra_logprobs_TK: torch.Tensor | None = None
    """Log-probabilities of the requested ids over the full vocabulary at temperature 1.

    At least float32, differentiable; None if not requested.
    """


def kept_logprobs(
    logits_TV: torch.Tensor,
    token_ids_T: torch.Tensor,
    kept_offsets: torch.Tensor,
    kept_ids: torch.Tensor,
    temperature: float = 1.0,
) -> torch.Tensor:
    """Return log softmax(logits / temperature) over each token's kept set, at the given tokens.

        >>> logits_TV = torch.tensor([[0.0, 0.0, 0.0, 0.0]])
        >>> offsets, ids = torch.tensor([0, 2]), torch.tensor([1, 3], dtype=torch.int32)
        >>> fa.kept_logprobs(logits_TV, torch.tensor([3]), offsets, ids)
        tensor([-0.6931])

    The result is differentiable in the logits. The gradient of row t is (onehot(token) - softmax over the
    kept set) / temperature, and exactly 0 outside of the set. With a single kept token, value and gradient
    are exactly 0. A token outside of its kept set has probability 0, so its log-probability is -inf.

    Args:
        logits_TV: Logits; may be a DTensor, sharded over the vocabulary or replicated.
        token_ids_T: Ids of the sampled tokens, of any integer type.
        kept_offsets: Kept sets in CSR format, int64 [T + 1]: that of token t is
            ``kept_ids[kept_offsets[t]:kept_offsets[t + 1]]``. An empty one means the whole vocabulary.
        kept_ids: Ids of all kept sets, one after the other, int32.
        temperature: Temperature of sampling, above 0.

    Returns:
        Log-probabilities in nats [T], float32, or float64 for float64 logits.
    """
    vocabulary = VocabularySlice.of(logits_TV, dim=1)
    local_Tv = logits_TV.to_local() if isinstance(logits_TV, DTensor) else logits_TV
    is_cut_away_Tv = cut_away(kept_offsets, kept_ids, vocabulary)
    scaled_Tv = _cut(_scaled(local_Tv, temperature), is_cut_away_Tv)
    return _uncut_logprobs(token_ids_T.long(), vocabulary, scaled_Tv)[0]


def chunked_predictions(
    hidden_TD: torch.Tensor,
    weight_VD: torch.Tensor,
    targets: Targets,
    temperature: float = 1.0,
    *,
    with_entropies: bool = False,
    chunk_tokens: int = LOGITS_CHUNK_TOKENS,
) -> Predictions:
    """Return ``kept_logprobs(hidden @ weight.T, ...)`` in float32 [T] without storing all logits at once.

    A chunk's logits are computed, used and freed, and recomputed in the backward pass. On CPUs, only the
    logits in kept sets are computed if the sets are small. A chunk never uses more memory than all logits of
    its tokens and ``GATHER_BLOCK_BYTES``. Gradients of both arguments are summed in at least float32 and
    rounded once.

    Args:
        hidden_TD: Hidden states. If ``weight_VD`` is sharded, all of its ranks pass the same ones.
        weight_VD: Weight of the output layer; may be a DTensor sharded over the vocabulary.
        targets: The tokens with their kept sets, see ``kept_logprobs``, and extra ids.
        temperature: Temperature of sampling, above 0.
        with_entropies: Whether to return the entropies of softmax(logits / temperature) over the same kept
            sets.
        chunk_tokens: Maximum number of tokens whose logits are in memory at the same time.
    """
    vocabulary = VocabularySlice.of(weight_VD, dim=0)
    weight = HeadWeight.of(weight_VD.to_local() if isinstance(weight_VD, DTensor) else weight_VD)
    # Autograd sums gradients in the dtype of the tensor they belong to.
    wide_TD = hidden_TD.to(sum_dtype(hidden_TD.dtype))
    if isinstance(weight_VD, DTensor):
        wide_TD = vocabulary.share(wide_TD)
    again = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
    chunks = wide_TD.to(hidden_TD.dtype).split(chunk_tokens)
    pieces = [
        again(_chunk_predictions, hidden, weight, part, temperature, vocabulary, with_entropies)
        for hidden, part in zip(chunks, targets.chunks(chunk_tokens), strict=True)
    ]
    logprobs_T = torch.cat([piece.logprobs_T for piece in pieces])
    entropies_T = torch.cat([piece.entropies_T for piece in pieces]) if with_entropies else None
    extra_logprobs_TK = None
    if targets.extra_ids_TK is not None:
        parts = zip(chunks, targets.extra_ids_TK.split(chunk_tokens), strict=True)
        extra_logprobs_TK = torch.cat([again(_full_logprobs, *part, weight, vocabulary) for part in parts])
    return Predictions(logprobs_T=logprobs_T, entropies_T=entropies_T, extra_logprobs_TK=extra_logprobs_TK)


def _chunk_predictions(
    hidden_TD: torch.Tensor,
    weight: HeadWeight,
    targets: Targets,
    temperature: float,
    vocabulary: VocabularySlice,
    with_entropies: bool,
) -> Predictions:
    """Compute log-probabilities before entropies: recomputation for the backward pass stops between them."""
    if hidden_TD.device.type == "cpu" and _is_gathering_faster(targets.kept_offsets, vocabulary):
        return _gathered_predictions(hidden_TD, weight, targets, temperature, vocabulary, with_entropies)
    # Make the mask before the logits: as pairs of indices, wide sets take more memory than logits do.
    is_cut_away_Tv = cut_away(targets.kept_offsets, targets.kept_ids, vocabulary)
    scaled_Tv = _cut(_scaled(weight.logits(hidden_TD), temperature), is_cut_away_Tv)
    logprobs_T, log_sums_T = _uncut_logprobs(targets.token_ids_T.long(), vocabulary, scaled_Tv)
    if not with_entropies:
        return Predictions(logprobs_T=logprobs_T, entropies_T=None)
    entropies_T = vocabulary.sum(_slice_entropies(scaled_Tv.detach(), log_sums_T.detach()))
    return Predictions(logprobs_T=logprobs_T, entropies_T=entropies_T)


def _is_gathering_faster(kept_offsets: torch.Tensor, vocabulary: VocabularySlice) -> bool:
    """Return whether computing the logits of kept ids alone takes less time, on a CPU.

    It also takes less memory then: a kept id takes some 60 bytes in total. On GPUs reading single rows takes
    hundreds of times as long as the matrix product does, and their number differs from chunk to chunk.
    """
    num_cut = int((kept_offsets.diff() > 0).sum())
    return int(kept_offsets[-1]) * GATHER_COST < num_cut * vocabulary.size


def cut_away(
    kept_offsets: torch.Tensor, kept_ids: torch.Tensor, vocabulary: VocabularySlice
) -> torch.Tensor | None:
    """Return which ids of the slice are not in the tokens' kept sets, bool [T, v]; None if nothing is cut."""
    if len(kept_ids) == 0:
        return None
    widths_T = kept_offsets.diff()
    tokens_T = torch.arange(len(widths_T), device=widths_T.device)
    token_N = torch.repeat_interleave(tokens_T, widths_T, output_size=len(kept_ids))
    width, local_N = vocabulary.end - vocabulary.start, kept_ids.long()
    if vocabulary.group is not None:
        # Ids of other slices go to a column of their own, because selecting by a mask waits for the GPU.
        local_N = (local_N - vocabulary.start).where(vocabulary.has(kept_ids), width)
    # Cut all ids of tokens that have a kept set, then restore the kept ones.
    num_columns = width + (vocabulary.group is not None)
    is_cut_away_Tw = (widths_T > 0)[:, None].expand(-1, num_columns).clone()
    is_cut_away_Tw[token_N, local_N] = False
    return is_cut_away_Tw[:, :width]


def _cut(scaled_Tv: torch.Tensor, is_cut_away_Tv: torch.Tensor | None) -> torch.Tensor:
    """Set the scaled logits of ids that are cut away to minus infinity, in place."""
    return scaled_Tv if is_cut_away_Tv is None else scaled_Tv.masked_fill_(is_cut_away_Tv, -torch.inf)


def _gathered_predictions(
    hidden_TD: torch.Tensor,
    weight: HeadWeight,
    targets: Targets,
    temperature: float,
    vocabulary: VocabularySlice,
    with_entropies: bool,
) -> Predictions:
    """Compute only the kept logits of cut tokens and all logits of the others; return them in order."""
    widths_T, token_ids_T = targets.kept_offsets.diff(), targets.token_ids_T
    token_C = widths_T.nonzero().squeeze(1)
    token_U = (widths_T == 0).nonzero().squeeze(1)
    cut_N = torch.repeat_interleave(torch.arange(len(token_C), device=widths_T.device), widths_T[token_C])
    token_N, kept_ids_N = token_C[cut_N], targets.kept_ids.long()
    if vocabulary.group is None:
        mine_N, local_ids_N = None, kept_ids_N
    else:
        mine_N = vocabulary.has(kept_ids_N).nonzero().squeeze(1)
        token_N, local_ids_N = token_N[mine_N], kept_ids_N[mine_N] - vocabulary.start
    dots_N, logits_Uv = weight.some_logits(hidden_TD, token_N, local_ids_N, token_U)
    # Rounded to the dtype of a matrix product, as in the generator.
    values_N = _scaled(dots_N.to(hidden_TD.dtype), temperature)
    if mine_N is not None:
        everywhere_N = torch.zeros(len(kept_ids_N), dtype=values_N.dtype, device=values_N.device)
        values_N = vocabulary.sum(everywhere_N.index_put((mine_N,), values_N))
    is_sampled_N = kept_ids_N == token_ids_T[token_C][cut_N]
    cut_C, log_sums_C = _cut_logprobs(values_N, cut_N, is_sampled_N, num_cut=len(token_C))
    scaled_Uv = _scaled(logits_Uv, temperature)
    uncut_U, log_sums_U = _uncut_logprobs(token_ids_T[token_U].long(), vocabulary, scaled_Uv)

    def in_order(of_cut_C: torch.Tensor, of_uncut_U: torch.Tensor) -> torch.Tensor:
        values_T = torch.zeros(len(widths_T), dtype=of_uncut_U.dtype, device=of_uncut_U.device)
        return values_T.index_put((token_C,), of_cut_C).index_put((token_U,), of_uncut_U)

    logprobs_T = in_order(cut_C, uncut_U)
    if not with_entropies:
        return Predictions(logprobs_T=logprobs_T, entropies_T=None)
    entropies_C = _kept_entropies(values_N.detach(), cut_N, log_sums_C.detach())
    entropies_U = vocabulary.sum(_slice_entropies(scaled_Uv.detach(), log_sums_U.detach()))
    return Predictions(logprobs_T=logprobs_T, entropies_T=in_order(entropies_C, entropies_U))


def _cut_logprobs(
    values_N: torch.Tensor, cut_N: torch.Tensor, is_sampled_N: torch.Tensor, *, num_cut: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-probabilities [C], and the log-sum-exp of each token's scaled logits [C].

    ``values_N`` has the scaled logits of all kept ids, ``cut_N`` their tokens' indices, and ``is_sampled_N``
    whether they were sampled.
    """
    if num_cut == 0:
        return values_N, values_N
    largest_C = torch.full((num_cut,), -torch.inf, dtype=values_N.dtype, device=values_N.device)
    largest_C = largest_C.scatter_reduce(0, cut_N, values_N.detach(), "amax")
    sums_C = torch.zeros_like(largest_C).index_add(0, cut_N, (values_N - largest_C[cut_N]).exp())
    # Read the sampled token's own entry, the same number as in the sum: a single kept token gives exactly 0.
    entry_N = torch.where(is_sampled_N, torch.arange(len(cut_N), device=cut_N.device), -1)
    entry_C = torch.full((num_cut,), -1, device=cut_N.device).scatter_reduce(0, cut_N, entry_N, "amax")
    log_sums_C = sums_C.log()
    logprobs_C = values_N[entry_C.clamp(min=0)] - largest_C - log_sums_C
    return torch.where(entry_C >= 0, logprobs_C, -torch.inf), largest_C + log_sums_C.detach()


def _uncut_logprobs(
    token_ids_U: torch.Tensor, vocabulary: VocabularySlice, scaled_Uv: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-probabilities [U], and the log-sum-exp of each token's scaled logits [U]."""
    sampled_U = vocabulary.gather(scaled_Uv, token_ids_U[:, None]).squeeze(-1)
    if vocabulary.group is None:
        log_sums_U = scaled_Uv.logsumexp(dim=-1)
        return sampled_U - log_sums_U, log_sums_U
    largest_U = vocabulary.max(scaled_Uv.amax(dim=-1))
    sums_U = vocabulary.sum((scaled_Uv - largest_U[:, None]).exp().sum(dim=-1))
    log_sums_U = sums_U.log()
    return sampled_U - largest_U - log_sums_U, largest_U + log_sums_U.detach()


def _scaled(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return scaled logits in new memory, in at least float32."""
    return logits.to(sum_dtype(logits.dtype)) / temperature


def _full_logprobs(
    hidden_TD: torch.Tensor, ids_TK: torch.Tensor, weight: HeadWeight, vocabulary: VocabularySlice
) -> torch.Tensor:
    """Return log softmax(hidden @ weight.T) of the given ids (int64) of each token: at least float32 [T, K].

    This is the model's own distribution, which is compared with a teacher's: over the full vocabulary, at
    temperature 1, independent of the distribution that was sampled from. Differentiable in hidden states and
    weight. Ranks that split the vocabulary pass the same hidden states.
    """
    logits_Tv = weight.logits(hidden_TD)
    logits_Tv = logits_Tv.to(sum_dtype(logits_Tv.dtype))
    known_TK = vocabulary.gather(logits_Tv, ids_TK)
    if vocabulary.group is None:
        return known_TK - logits_Tv.logsumexp(-1, keepdim=True)
    largest_T1 = vocabulary.max(logits_Tv.amax(-1, keepdim=True))
    sums_T1 = vocabulary.sum((logits_Tv - largest_T1).exp().sum(-1, keepdim=True))
    return known_TK - largest_T1 - sums_T1.log()


@torch.no_grad()
def _slice_entropies(scaled_Uv: torch.Tensor, log_sums_U: torch.Tensor) -> torch.Tensor:
    """Return a vocabulary slice's contribution [U] to the entropies; ``log_sums_U`` are those of all slices.

    H = -sum over kept ids of p * log p, with log p = scaled logit - log of the sum of their exponentials, in
    nats. Logits that are cut away (minus infinity) add nothing.
    """
    entropies_U = torch.empty_like(log_sums_U)
    num_rows = max(1, len(entropies_U))
    if scaled_Uv.device.type == "cpu":
        num_rows = max(1, CPU_BLOCK_BYTES // (scaled_Uv.element_size() * max(1, scaled_Uv.shape[1])))
    blocks = zip(*(part.split(num_rows) for part in (scaled_Uv, log_sums_U, entropies_U)), strict=True)
    for scaled, log_sums, entropies in blocks:
        logs = (scaled - log_sums[:, None]).clamp_(min=SMALLEST_LOG)
        torch.sum(logs.exp().mul_(logs), dim=-1, out=entropies)
    return entropies_U.neg_()


@torch.no_grad()
def _kept_entropies(values_N: torch.Tensor, cut_N: torch.Tensor, log_sums_C: torch.Tensor) -> torch.Tensor:
    """Return the entropies [C], from the scaled logits of all kept ids and their tokens' indices."""
    logs_N = values_N - log_sums_C[cut_N]
    return torch.zeros_like(log_sums_C).index_add_(0, cut_N, logs_N.exp().mul_(logs_N)).neg_()
