"""Divergences between a student's and a teacher's distributions, token by token, in nats.

Both are given as log-probabilities of the same ids under comparable distributions, for instance both over the
full vocabulary at temperature 1. All functions are differentiable in the student; the teacher gets no
gradient.

Shape suffixes: T tokens, K ids of each token.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

KlKind = Literal["forward", "reverse", "jsd"]
"""``forward``: KL(teacher || student). ``reverse``: KL(student || teacher). ``jsd``: Jensen-Shannon."""


def sampled_reverse_kl(student_T: torch.Tensor, teacher_T: torch.Tensor) -> torch.Tensor:
    """Return log(student / teacher) of each sampled token, an estimate of KL(student || teacher) in nats [T].

    It is unbiased if the tokens were drawn from the student, and negative for about half of them. Its own
    gradient is that of the student's log-probability, whose expectation is 0. A loss therefore uses the
    detached value as the cost of each token (``SampledReverseKl``). Source: k1 in Schulman, "Approximating KL
    Divergence", 2020.

    Args:
        student_T: Log-probabilities of the student.
        teacher_T: Log-probabilities of the teacher.

    Raises:
        ValueError: The arguments do not have the same shape [T].
    """
    _require_same_shape(student_T, teacher_T, num_dimensions=1)
    return student_T - teacher_T.detach()


def topk_kl(
    student_logprobs_TK: torch.Tensor,
    teacher_logprobs_TK: torch.Tensor,
    *,
    kind: KlKind = "forward",
    tail: bool = True,
) -> torch.Tensor:
    """Return the divergence between student and teacher over K ids of each token, in nats [T].

        >>> student_TK = torch.tensor([[0.5, 0.5]]).log()
        >>> teacher_TK = torch.tensor([[0.9, 0.1]]).log()
        >>> fa.losses.topk_kl(student_TK, teacher_TK, kind="forward")
        tensor([0.3681])

    With ``tail``, all other ids count as one further event with the remaining probability. The result is then
    a lower bound of the divergence over the whole vocabulary, and equals it if K is the size of the
    vocabulary. Source: the data processing inequality (Cover and Thomas, "Elements of Information Theory",
    2006, theorem 2.8.1). Without ``tail``, the result is the sum of the K terms, which can be negative.

    A tail probability below the dtype's resolution is replaced by that resolution, without a gradient. An id
    with log-probability -inf contributes 0 if it is -inf in the distribution that weights the sum, and
    infinity if only in the other one.

    Args:
        student_logprobs_TK: Log-probabilities of the student, which gets a gradient.
        teacher_logprobs_TK: Log-probabilities of the teacher for the same ids, in the same dtype.
        kind: ``forward`` is KL(teacher || student), ``reverse`` is KL(student || teacher). ``jsd`` is the
            Jensen-Shannon divergence, the mean of both KLs towards the mean distribution.
        tail: Whether to add the event of all other ids.

    Raises:
        ValueError: The arguments do not have the same shape [T, K], or ``kind`` is none of the three.
    """
    _require_same_shape(student_logprobs_TK, teacher_logprobs_TK, num_dimensions=2)
    student_TK, teacher_TK = student_logprobs_TK, teacher_logprobs_TK.detach()
    if tail:
        student_TK, teacher_TK = _with_tail(student_TK), _with_tail(teacher_TK)
    if kind == "forward":
        return _terms(teacher_TK, student_TK).sum(-1)
    if kind == "reverse":
        return _terms(student_TK, teacher_TK).sum(-1)
    if kind == "jsd":
        # Where both are -inf, the mean is unused, but its gradient would be nan.
        is_there_TK = (student_TK.detach() > -math.inf) | (teacher_TK > -math.inf)
        mean_TK = student_TK.where(is_there_TK, 0.0).logaddexp(teacher_TK) - math.log(2.0)
        return (_terms(student_TK, mean_TK) + _terms(teacher_TK, mean_TK)).sum(-1) / 2.0
    raise ValueError(f"topk_kl: kind = {kind!r}; must be 'forward', 'reverse' or 'jsd'")


def _terms(logp_TK: torch.Tensor, logq_TK: torch.Tensor) -> torch.Tensor:
    """Return p log(p / q); 0 where p is 0, also in the gradient."""
    is_there_TK = logp_TK.detach() > -math.inf
    p_TK = logp_TK.where(is_there_TK, 0.0)
    q_TK = logq_TK.where(is_there_TK, 0.0)
    return (p_TK.exp() * (p_TK - q_TK)).where(is_there_TK, 0.0)


def _with_tail(logprobs_TK: torch.Tensor) -> torch.Tensor:
    """Append the log-probability of all other ids. Returns [T, K + 1]."""
    import torch

    # A remaining probability below this is indistinguishable from rounding.
    least = torch.finfo(logprobs_TK.dtype).eps
    left_T1 = -logprobs_TK.logsumexp(-1, keepdim=True).expm1()
    return torch.cat([logprobs_TK, left_T1.clamp(min=least).log()], dim=-1)


def _require_same_shape(student: torch.Tensor, teacher: torch.Tensor, *, num_dimensions: int) -> None:
    if student.shape != teacher.shape or student.ndim != num_dimensions:
        shape = "[T]" if num_dimensions == 1 else "[T, K]"
        raise ValueError(
            f"student {list(student.shape)} and teacher {list(teacher.shape)} must both be {shape}"
        )
