"""Log-probabilities of any ids under the model's own distribution: the full vocabulary, at temperature 1.

They are what a teacher's are compared with, whatever temperature and kept sets the tokens were drawn with.

Shape suffixes: T tokens, K ids of each token, D model dim, v this rank's slice of the vocabulary.
"""

import torch

from forgeasync.trainer.head_weight import HeadWeight, sum_dtype
from forgeasync.trainer.vocabulary_slice import VocabularySlice


def full_logprobs(
    hidden_TD: torch.Tensor, ids_TK: torch.Tensor, weight: HeadWeight, vocabulary: VocabularySlice
) -> torch.Tensor:
    """log softmax(hidden @ weight.T) of the given ids (int64) of each token: at least float32 [T, K].

    Differentiable in hidden states and weight. Where the vocabulary is split over ranks, the hidden states
    are the same on all of them.
    """
    logits_Tv = weight.logits(hidden_TD)
    logits_Tv = logits_Tv.to(sum_dtype(logits_Tv.dtype))
    if vocabulary.group is None:
        return logits_Tv.gather(1, ids_TK) - logits_Tv.logsumexp(-1, keepdim=True)
    largest_T1 = vocabulary.max(logits_Tv.amax(-1, keepdim=True))
    sums_T1 = vocabulary.sum((logits_Tv - largest_T1).exp().sum(-1, keepdim=True))
    is_mine_TK = (ids_TK >= vocabulary.start) & (ids_TK < vocabulary.end)
    local_TK = (ids_TK - vocabulary.start).where(is_mine_TK, 0)
    known_TK = vocabulary.sum(logits_Tv.gather(1, local_TK).where(is_mine_TK, 0.0))
    return known_TK - largest_T1 - sums_T1.log()
