"""Log-probabilities of given tokens under the distribution the generator drew from, and its entropies.

The generator divides logits by the temperature, cuts the vocabulary (top-k, top-p, min-p) and renormalizes
over what it kept. Here the softmax runs over the same kept sets, token by token. Kept sets are CSR: the set
of token t is ``kept_ids[kept_offsets[t]:kept_offsets[t + 1]]``; an empty one means the whole vocabulary.

Shape suffixes: T tokens, V vocabulary, v this rank's slice of it, N kept ids of all tokens, D model dim,
C tokens with a cut vocabulary, U tokens without.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from forgeasync.models import GATHER_COST, LOGITS_CHUNK_TOKENS
from forgeasync.trainer.entropies import kept_entropies, slice_entropies
from forgeasync.trainer.full_logprobs import full_logprobs
from forgeasync.trainer.head_weight import HeadWeight, sum_dtype
from forgeasync.trainer.vocabulary_slice import VocabularySlice


class Predictions(NamedTuple):
    """What the output layer says of tokens; a tuple, since FSDP2 finds no tensors in dataclasses."""

    logprobs_T: torch.Tensor
    """At least float32, differentiable."""
    entropies_T: torch.Tensor | None
    """Entropies of the distributions that the tokens were drawn from, in nats: the same dtype, without
    gradients; None where nobody asked."""
    asked_TK: torch.Tensor | None = None
    """Log-probabilities of the ids that were asked for, over the full vocabulary at temperature 1, at least
    float32, differentiable; None where nobody asked."""


def kept_logprobs(
    logits_TV: torch.Tensor,
    token_ids_T: torch.Tensor,
    kept_offsets: torch.Tensor,
    kept_ids: torch.Tensor,
    temperature: float = 1.0,
) -> torch.Tensor:
    """log softmax(logits / temperature) over each token's kept set, at the given tokens: [T].

    In float32 (float64 for float64 logits). ``kept_offsets``: int64 [T + 1]; ``kept_ids``: int32. Logits may
    be a DTensor, sharded over the vocabulary or replicated. Differentiable in the logits: the gradient of
    row t is (onehot(token) - softmax over the kept set) / temperature, and exactly zero outside of the set;
    with a single kept token, value and gradient are exactly zero. A token outside of its own set has
    probability zero: its logprob is -inf.
    """
    vocabulary = VocabularySlice.of(logits_TV, dim=1)
    local_Tv = logits_TV.to_local() if isinstance(logits_TV, DTensor) else logits_TV
    is_cut_away_Tv = _cut_away(kept_offsets, kept_ids, vocabulary)
    scaled_Tv = _cut(_scaled(local_Tv, temperature), is_cut_away_Tv)
    return _uncut_logprobs(token_ids_T.long(), vocabulary, scaled_Tv)[0]


def chunked_predictions(
    hidden_TD: torch.Tensor,
    weight_VD: torch.Tensor,
    token_ids_T: torch.Tensor,
    kept_offsets: torch.Tensor,
    kept_ids: torch.Tensor,
    temperature: float = 1.0,
    *,
    with_entropies: bool = False,
    asked_ids_TK: torch.Tensor | None = None,
    chunk_tokens: int = LOGITS_CHUNK_TOKENS,
) -> Predictions:
    """``kept_logprobs(hidden @ weight.T, ...)`` without ever holding the logits of all tokens: float32 [T].

    ``with_entropies`` adds the entropies of softmax(logits / temperature) over the same kept sets,
    ``asked_ids_TK`` (int64) log softmax(logits) over the full vocabulary at these ids.

    A chunk's logits are computed, used and dropped, and computed again in the backward pass. Where the kept
    sets are small, only the logits in them are computed at all; however large they are, a chunk takes no more
    memory than the whole logits of its tokens would, and ``GATHER_BLOCK_BYTES``. Gradients of both arguments
    are added up in at least float32 and rounded once. ``weight_VD`` may be a DTensor sharded over the
    vocabulary; ``hidden_TD`` is then the same on all of its ranks.
    """
    vocabulary = VocabularySlice.of(weight_VD, dim=0)
    weight = HeadWeight.of(weight_VD.to_local() if isinstance(weight_VD, DTensor) else weight_VD)
    # Autograd adds up gradients in the dtype of what they are of.
    wide_TD = hidden_TD.to(sum_dtype(hidden_TD.dtype))
    if isinstance(weight_VD, DTensor):
        wide_TD = vocabulary.share(wide_TD)
    again = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
    offsets = kept_offsets.tolist() if len(token_ids_T) > chunk_tokens else []
    pieces, start = [], 0
    for hidden in wide_TD.to(hidden_TD.dtype).split(chunk_tokens):
        end = start + len(hidden)
        first, last = (offsets[start], offsets[end]) if offsets else (0, len(kept_ids))
        pieces.append(
            again(
                _chunk_predictions,
                hidden,
                weight,
                token_ids_T[start:end],
                kept_offsets[start : end + 1] - first,
                kept_ids[first:last],
                temperature,
                vocabulary,
                with_entropies,
            )
        )
        start = end
    logprobs_T = torch.cat([piece.logprobs_T for piece in pieces])
    entropies_T = torch.cat([piece.entropies_T for piece in pieces]) if with_entropies else None
    asked_TK = None
    if asked_ids_TK is not None:
        parts = zip(
            wide_TD.to(hidden_TD.dtype).split(chunk_tokens), asked_ids_TK.split(chunk_tokens), strict=True
        )
        asked_TK = torch.cat([again(full_logprobs, *part, weight, vocabulary) for part in parts])
    return Predictions(logprobs_T=logprobs_T, entropies_T=entropies_T, asked_TK=asked_TK)


def _chunk_predictions(
    hidden_TD: torch.Tensor,
    weight: HeadWeight,
    token_ids_T: torch.Tensor,
    kept_offsets: torch.Tensor,
    kept_ids: torch.Tensor,
    temperature: float,
    vocabulary: VocabularySlice,
    with_entropies: bool,
) -> Predictions:
    """Log-probabilities first: their recomputation for the backward pass stops before the entropies."""
    num_whole = int((kept_offsets[1:] == kept_offsets[:-1]).sum())
    # Less time, and less memory too: the list of kept ids takes some 60 bytes an id, in all its forms.
    if (len(kept_ids) * GATHER_COST) < (len(token_ids_T) - num_whole) * vocabulary.size:
        return _gathered_predictions(
            hidden_TD,
            weight,
            token_ids_T,
            kept_offsets,
            kept_ids,
            temperature,
            vocabulary,
            with_entropies,
        )
    # The ids become a mask before there are logits: as pairs of indices wide sets take more than those do.
    is_cut_away_Tv = _cut_away(kept_offsets, kept_ids, vocabulary)
    scaled_Tv = _cut(_scaled(weight.logits(hidden_TD), temperature), is_cut_away_Tv)
    logprobs_T, log_sums_T = _uncut_logprobs(token_ids_T.long(), vocabulary, scaled_Tv)
    if not with_entropies:
        return Predictions(logprobs_T=logprobs_T, entropies_T=None)
    entropies_T = vocabulary.sum(slice_entropies(scaled_Tv.detach(), log_sums_T.detach()))
    return Predictions(logprobs_T=logprobs_T, entropies_T=entropies_T)


def _cut_away(
    kept_offsets: torch.Tensor, kept_ids: torch.Tensor, vocabulary: VocabularySlice
) -> torch.Tensor | None:
    """Which ids of the slice are not in the tokens' kept sets, bool [T, v]; None where nothing is cut."""
    if len(kept_ids) == 0:
        return None
    widths_T = kept_offsets.diff()
    token_N = torch.repeat_interleave(torch.arange(len(widths_T), device=widths_T.device), widths_T)
    ids_N = kept_ids.long()
    if vocabulary.group is not None:
        is_mine_N = (ids_N >= vocabulary.start) & (ids_N < vocabulary.end)
        token_N, ids_N = token_N[is_mine_N], ids_N[is_mine_N] - vocabulary.start
    width = vocabulary.end - vocabulary.start
    # All of a cut token's ids, none of another's; then less the kept ones.
    is_cut_away_Tv = (widths_T > 0)[:, None].expand(-1, width).clone()
    is_cut_away_Tv[token_N, ids_N] = False
    return is_cut_away_Tv


def _cut(scaled_Tv: torch.Tensor, is_cut_away_Tv: torch.Tensor | None) -> torch.Tensor:
    """The scaled logits of the whole slice, overwritten: minus infinity where they are cut away."""
    return scaled_Tv if is_cut_away_Tv is None else scaled_Tv.masked_fill_(is_cut_away_Tv, -torch.inf)


def _gathered_predictions(
    hidden_TD: torch.Tensor,
    weight: HeadWeight,
    token_ids_T: torch.Tensor,
    kept_offsets: torch.Tensor,
    kept_ids: torch.Tensor,
    temperature: float,
    vocabulary: VocabularySlice,
    with_entropies: bool,
) -> Predictions:
    """Cut and uncut tokens, each in their own way, back in one order."""
    widths_T = kept_offsets.diff()
    token_C = widths_T.nonzero().squeeze(1)
    token_U = (widths_T == 0).nonzero().squeeze(1)
    cut_N = torch.repeat_interleave(torch.arange(len(token_C), device=widths_T.device), widths_T[token_C])
    token_N, kept_ids_N = token_C[cut_N], kept_ids.long()
    if vocabulary.group is None:
        mine_N, local_ids_N = None, kept_ids_N
    else:
        mine_N = ((kept_ids_N >= vocabulary.start) & (kept_ids_N < vocabulary.end)).nonzero().squeeze(1)
        token_N, local_ids_N = token_N[mine_N], kept_ids_N[mine_N] - vocabulary.start
    dots_N, logits_Uv = weight.some_logits(hidden_TD, token_N, local_ids_N, token_U)
    # Rounded to the dtype a matrix product would give, as in the generator.
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
    entropies_C = kept_entropies(values_N.detach(), cut_N, log_sums_C.detach())
    entropies_U = vocabulary.sum(slice_entropies(scaled_Uv.detach(), log_sums_U.detach()))
    return Predictions(logprobs_T=logprobs_T, entropies_T=in_order(entropies_C, entropies_U))


def _cut_logprobs(
    values_N: torch.Tensor, cut_N: torch.Tensor, is_sampled_N: torch.Tensor, *, num_cut: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """[C] from the scaled logits of all kept ids, each with its token's index and whether it was drawn.

    Besides, the log of the sum of the exponentials of each token's scaled logits [C].
    """
    if num_cut == 0:
        return values_N, values_N
    largest_C = torch.full((num_cut,), -torch.inf, dtype=values_N.dtype, device=values_N.device)
    largest_C = largest_C.scatter_reduce(0, cut_N, values_N.detach(), "amax")
    sums_C = torch.zeros_like(largest_C).index_add(0, cut_N, (values_N - largest_C[cut_N]).exp())
    # The sampled token's own entry: the very number that is in the sum, so that a single kept token gives 0.
    entry_N = torch.where(is_sampled_N, torch.arange(len(cut_N), device=cut_N.device), -1)
    entry_C = torch.full((num_cut,), -1, device=cut_N.device).scatter_reduce(0, cut_N, entry_N, "amax")
    log_sums_C = sums_C.log()
    logprobs_C = values_N[entry_C.clamp(min=0)] - largest_C - log_sums_C
    return torch.where(entry_C >= 0, logprobs_C, -torch.inf), largest_C + log_sums_C.detach()


def _uncut_logprobs(
    token_ids_U: torch.Tensor, vocabulary: VocabularySlice, scaled_Uv: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """[U], and the log of the sum of the exponentials of each token's scaled logits [U]."""
    if vocabulary.group is None:
        sampled_U = scaled_Uv.gather(-1, token_ids_U[:, None]).squeeze(-1)
        log_sums_U = scaled_Uv.logsumexp(dim=-1)
        return sampled_U - log_sums_U, log_sums_U
    largest_U = vocabulary.max(scaled_Uv.amax(dim=-1))
    sums_U = vocabulary.sum((scaled_Uv - largest_U[:, None]).exp().sum(dim=-1))
    row_U = torch.arange(len(token_ids_U), device=token_ids_U.device)
    sampled_U = _read_slice(row_U, token_ids_U, vocabulary, lambda row, ids: scaled_Uv[row, ids])
    log_sums_U = sums_U.log()
    return sampled_U - largest_U - log_sums_U, largest_U + log_sums_U.detach()


def _read_slice(
    token_N: torch.Tensor,
    id_N: torch.Tensor,
    vocabulary: VocabularySlice,
    read: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Scaled logits at any ids, whichever slice they lie in."""
    if vocabulary.group is None:
        return read(token_N, id_N)
    mine = ((id_N >= vocabulary.start) & (id_N < vocabulary.end)).nonzero().squeeze(1)
    values = read(token_N[mine], id_N[mine] - vocabulary.start)
    values_N = torch.zeros(len(id_N), dtype=values.dtype, device=values.device)
    return vocabulary.sum(values_N.index_put((mine,), values))


def _scaled(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """New memory, of at least float32."""
    return logits.to(sum_dtype(logits.dtype)) / temperature
