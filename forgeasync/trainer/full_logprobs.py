"""Log-probabilities of any ids under the model's own distribution: the full vocabulary, at temperature 1.

They are what a teacher's are compared with, whatever temperature and kept sets the tokens were drawn with.

Shape suffixes: T tokens, K ids of each token, D model dim, V vocabulary, v this rank's slice of it.
"""

import torch
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from forgeasync.models.sizes import LOGITS_CHUNK_TOKENS
from forgeasync.trainer.logprobs import VocabularySlice


def chunked_full_logprobs(
    hidden_TD: torch.Tensor,
    weight_VD: torch.Tensor,
    ids_TK: torch.Tensor,
    *,
    chunk_tokens: int = LOGITS_CHUNK_TOKENS,
) -> torch.Tensor:
    """log softmax(hidden @ weight.T) of the given ids of each token: at least float32 [T, K].

    Differentiable in both arguments. A chunk's logits are computed, used and dropped, and computed again in
    the backward pass. ``weight_VD`` may be a DTensor sharded over the vocabulary; ``hidden_TD`` is then the
    same on all of its ranks.
    """
    vocabulary = VocabularySlice.of(weight_VD, dim=0)
    if isinstance(weight_VD, DTensor):
        weight_VD = weight_VD.to_local()
        hidden_TD = vocabulary.share(hidden_TD)
    return torch.cat(
        [
            checkpoint(
                _chunk_full_logprobs,
                hidden_TD[start : start + chunk_tokens],
                weight_VD,
                ids_TK[start : start + chunk_tokens],
                vocabulary,
                use_reentrant=False,
                preserve_rng_state=False,
            )
            for start in range(0, max(1, len(ids_TK)), chunk_tokens)
        ]
    )


def _chunk_full_logprobs(
    hidden_TD: torch.Tensor, weight_vD: torch.Tensor, ids_TK: torch.Tensor, vocabulary: VocabularySlice
) -> torch.Tensor:
    logits_Tv = hidden_TD @ weight_vD.T
    logits_Tv = logits_Tv.to(torch.promote_types(logits_Tv.dtype, torch.float32))
    ids_TK = ids_TK.long()
    if vocabulary.group is None:
        return logits_Tv.gather(1, ids_TK) - logits_Tv.logsumexp(-1, keepdim=True)
    largest_T1 = vocabulary.max(logits_Tv.amax(-1, keepdim=True))
    sums_T1 = vocabulary.sum((logits_Tv - largest_T1).exp().sum(-1, keepdim=True))
    is_mine_TK = (ids_TK >= vocabulary.start) & (ids_TK < vocabulary.end)
    local_TK = (ids_TK - vocabulary.start).where(is_mine_TK, 0)
    known_TK = vocabulary.sum(logits_Tv.gather(1, local_TK).where(is_mine_TK, 0.0))
    return known_TK - largest_T1 - sums_T1.log()
