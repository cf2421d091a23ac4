"""Terms: further components of a loss besides the objective, from teachers or cross-entropy.

Each term has its own weight and denominator:

    loss = (loss of the objective, as in ``forgeasync.algorithms.loss``)
           + sum over terms of weight * aggregate_of_the_term(term)

**Same distributions.** Teachers give log-probabilities over the full vocabulary at temperature 1. Terms
compare them with the student's log-probabilities over the full vocabulary at temperature 1, never with those
of the distribution that was sampled from. So if student and teacher are the same model, all gaps are 0,
whatever the temperature and kept sets of sampling.

Shape suffixes: T trained tokens of a row, K ids of each token.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from forgeasync.algorithms.aggregation import AnyAggregation, TokenMean
from forgeasync.algorithms.kl import K3, AnyKlEstimator
from forgeasync.algorithms.row_tokens import RowTokens, TeacherTokens
from forgeasync.losses import sampled_reverse_kl, topk_kl
from forgeasync.schema import Factor, Section

if TYPE_CHECKING:
    import torch

MAX_TOPK = 1024
"""Maximum number of ids that a teacher can score at each token."""


class IdsOf(StrEnum):
    """Model whose likely ids a divergence compares."""

    TEACHER = "teacher"
    """The teacher's likeliest ids."""
    STUDENT = "student"
    """The ids that the policy could have drawn, which are the token's kept set."""


class Term(Section):
    """Base class of losses of tokens that are added to the loss of the objective."""

    weight: Factor = 1.0
    """Factor of this term in the loss."""
    aggregation: AnyAggregation = TokenMean()
    """Reduction of the term's losses of tokens to a loss of the batch, with its own denominator."""

    needs_teacher: ClassVar[bool] = True
    """Whether rows need a teacher's log-probabilities."""

    @property
    def num_ids(self) -> int:
        """Number of ids that the teacher scores at each token, besides the sampled one."""
        return 0

    @property
    def needs_student_ids(self) -> bool:
        """Whether the teacher scores ids that the policy could have drawn, rather than its own likeliest."""
        return False

    @abstractmethod
    def __call__(
        self, row: RowTokens, weights_T: torch.Tensor | None
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return losses [T], and sums over the trained tokens by metric name.

        ``weights_T`` are the corrections' weights of the tokens [T], or None without corrections.
        """


def _teacher(row: RowTokens) -> TeacherTokens:
    assert row.teacher is not None, "groups of a run with such a term are seen by a teacher"
    return row.teacher


def _own(row: RowTokens) -> torch.Tensor:
    assert row.full_logprobs_T is not None, "the trainer computes them for every loss with terms"
    return row.full_logprobs_T


class SampledReverseKl(Term):
    """KL(student || teacher), estimated on the sampled tokens, as a cost of each token.

    The loss of a token is sg(gap) * logprob, times the corrections' weights, where gap = log(student /
    teacher) and sg stops the gradient. This is the policy gradient with minus the gap as the reward. Sources:
    Gu et al., "MiniLLM", 2024, equation 4 (single steps); Agarwal et al., "On-Policy Distillation", 2024.
    Together with an objective, it is the sum of Xu et al., "KDRL", 2025, section 3, whose k2 loss has this
    gradient.
    """

    kind: Literal["sampled_reverse_kl"] = "sampled_reverse_kl"
    max_gap: float = Field(default=20.0, ge=0.1, le=1e4)
    """Bound on the absolute gap in nats. ``teacher/capped_share`` counts larger gaps."""

    def __call__(
        self, row: RowTokens, weights_T: torch.Tensor | None
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        teacher = _teacher(row)
        gap_T = row.masked(sampled_reverse_kl(_own(row), teacher.logprobs_T).detach())
        cost_T = gap_T.clamp(-self.max_gap, self.max_gap)
        losses_T = cost_T * row.logprobs_T
        if weights_T is not None:
            losses_T = losses_T * weights_T
        return losses_T, {"teacher/capped_share": (gap_T != cost_T).sum()}


class TopkKl(Term):
    """Divergence from the teacher over K likely tokens, with all other tokens as one further event.

    Sources: ``forward``, Hinton et al., "Distilling the Knowledge in a Neural Network", 2015; ``reverse`` and
    ``jsd``, Agarwal et al., "On-Policy Distillation", 2024, equation 1 (beta 1/2).
    """

    kind: Literal["topk_kl"] = "topk_kl"
    divergence: Literal["forward", "reverse", "jsd"] = "forward"
    ids: IdsOf = IdsOf.TEACHER
    """Model whose likely tokens are compared. ``student`` uses each token's kept set: it needs
    ``sampling.top_k`` equal to ``top_k``, and does not work with an ``endpoint``."""
    top_k: int = Field(default=16, gt=0, le=MAX_TOPK)
    """Number of likely tokens that are compared."""
    tail: bool = True
    """Count the probability of all other tokens as one further event."""

    @property
    def num_ids(self) -> int:
        return self.top_k

    @property
    def needs_student_ids(self) -> bool:
        return self.ids is IdsOf.STUDENT

    def __call__(
        self, row: RowTokens, weights_T: torch.Tensor | None
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        teacher = _teacher(row)
        student_TK = teacher.student_topk_TK[:, : self.top_k]
        losses_T = topk_kl(student_TK, teacher.topk_TK[:, : self.top_k], kind=self.divergence, tail=self.tail)
        return losses_T, {
            f"teacher/{self.divergence}_kl": row.masked(losses_T.detach()).sum(),
            "teacher/student_mass": row.masked(student_TK.detach().exp().sum(-1)).sum(),
        }


class CrossEntropy(Term):
    """-log p of the sampled tokens of responses that were better than their group (advantage above 0).

    Log-probabilities are over the full vocabulary at temperature 1. Source: Dong et al., "RAFT", 2023, but
    with responses above the group's mean instead of the group's best.
    """

    needs_teacher: ClassVar[bool] = False

    kind: Literal["cross_entropy"] = "cross_entropy"

    def __call__(
        self, row: RowTokens, weights_T: torch.Tensor | None
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        losses_T = -_own(row).where(row.advantages_T > 0, 0.0)
        return losses_T, {"loss/cross_entropy": row.masked(losses_T.detach()).sum()}


class RefKl(Term):
    """KL penalty towards a teacher, with an estimator of ``algorithm.kl``.

    With it, the trainer's processes need not hold a reference model. If the teacher has the policy's initial
    weights and sampling uses temperature 1 and the whole vocabulary, it equals the penalty ``algorithm.kl``
    with ``where: loss``. With other sampling it differs, because it compares distributions over the full
    vocabulary at temperature 1.
    """

    kind: Literal["ref_kl"] = "ref_kl"
    estimator: AnyKlEstimator = K3()

    def __call__(
        self, row: RowTokens, weights_T: torch.Tensor | None
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        own_T = _own(row)
        seen = replace(row, logprobs_T=own_T, ref_logprobs_T=_teacher(row).logprobs_T)
        losses_T = self.estimator(seen)
        return losses_T, {f"teacher/{self.estimator.kind}": row.masked(losses_T.detach()).sum()}


AnyTerm = Annotated[SampledReverseKl | TopkKl | RefKl | CrossEntropy, Field(discriminator="kind")]
