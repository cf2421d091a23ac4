"""Further components of a loss, beside the objective: what a teacher says of the tokens, and cross-entropy.

Each has its own weight and its own denominator:

    loss = (loss of the objective, as in ``forgeasync.algorithms.loss``)
           + sum over terms of weight * aggregate_of_the_term(term)

**Same distributions.** What a teacher says is compared with the student's own log-probabilities over the full
vocabulary at temperature 1, which is what teachers give; never with those of the distribution that was
sampled from. Where student and teacher are the same model all gaps are 0, whatever temperature and kept sets
sampling has.

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
"""Most ids that a teacher can be asked for at each token."""


class IdsOf(StrEnum):
    """Whose likely ids a divergence looks at."""

    TEACHER = "teacher"
    """The teacher's likeliest."""
    STUDENT = "student"
    """Those that the policy could have drawn: the token's kept set."""


class Term(Section):
    """A loss for every token that is added to that of the objective."""

    weight: Factor = 1.0
    """Factor of this term in the loss."""
    aggregation: AnyAggregation = TokenMean()
    """How the term's losses of tokens become a loss of the batch; its denominator is its own."""

    needs_teacher: ClassVar[bool] = True
    """Whether rows need a teacher's log-probabilities."""

    @property
    def num_ids(self) -> int:
        """Ids that the teacher is asked for at each token, besides the sampled one."""
        return 0

    @property
    def asks_student_ids(self) -> bool:
        """Whether these are the policy's and not the teacher's."""
        return False

    @abstractmethod
    def __call__(
        self, row: RowTokens, weights_T: torch.Tensor | None
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Compute losses [T] and sums over the masked tokens by metric name.

        ``weights_T`` are the weights that corrections have given the tokens [T], None without corrections.
        """


def _teacher(row: RowTokens) -> TeacherTokens:
    assert row.teacher is not None, "groups of a run with such a term are seen by a teacher"
    return row.teacher


def _own(row: RowTokens) -> torch.Tensor:
    assert row.full_logprobs_T is not None, "the trainer computes them for every loss with terms"
    return row.full_logprobs_T


class SampledReverseKl(Term):
    """KL(student || teacher) on the sampled tokens, as a cost of each of them.

    The loss of a token is sg(gap) * logprob, times the corrections' weights, with gap = log(student /
    teacher) and sg stopping the gradient: the policy gradient of minus the gap. Sources: Gu et al.,
    "MiniLLM", 2024, equation 4 (single steps); Agarwal et al., "On-Policy Distillation", 2024. Beside an
    objective it is the sum of Xu et al., "KDRL", 2025, section 3: their k2 loss has this gradient.
    """

    kind: Literal["sampled_reverse_kl"] = "sampled_reverse_kl"
    max_gap: float = Field(default=20.0, ge=0.1, le=1e4)
    """Gaps beyond this many nats count as this many, on both sides; counted in ``teacher/capped_share``."""

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
    """The divergence from the teacher over some likely tokens, with all others as one further event.

    Sources: ``forward``, Hinton et al., "Distilling the Knowledge in a Neural Network", 2015; ``reverse`` and
    ``jsd``, Agarwal et al., "On-Policy Distillation", 2024, equation 1 (beta 1/2).
    """

    kind: Literal["topk_kl"] = "topk_kl"
    divergence: Literal["forward", "reverse", "jsd"] = "forward"
    ids: IdsOf = IdsOf.TEACHER
    """Whose likely tokens are looked at. ``student``: those of each token's kept set, so that
    ``sampling.top_k`` has to be set and to be ``top_k``; not with an ``endpoint``."""
    top_k: int = Field(default=16, gt=0, le=MAX_TOPK)
    """Number of the most likely tokens that are looked at."""
    tail: bool = True
    """Count the probability of all other tokens as one further event."""

    @property
    def num_ids(self) -> int:
        return self.top_k

    @property
    def asks_student_ids(self) -> bool:
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

    Over the full vocabulary at temperature 1. Source: Dong et al., "RAFT", 2023, with the group's mean in
    place of its best.
    """

    needs_teacher: ClassVar[bool] = False

    kind: Literal["cross_entropy"] = "cross_entropy"

    def __call__(
        self, row: RowTokens, weights_T: torch.Tensor | None
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        losses_T = -_own(row).where(row.advantages_T > 0, 0.0)
        return losses_T, {"loss/cross_entropy": row.masked(losses_T.detach()).sum()}


class RefKl(Term):
    """A KL penalty towards a teacher, by an estimator of ``algorithm.kl``; 1 times its estimate.

    It takes the reference out of the trainer's procs: with the policy's own first weights as the teacher, and
    sampling at temperature 1 that cuts nothing, it is the penalty ``algorithm.kl`` with ``where: loss``.
    Otherwise it differs in looking at the full vocabulary at temperature 1.
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
