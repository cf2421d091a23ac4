"""The loss of a batch: objective per token, weighted by corrections, plus KL penalty, aggregated, plus terms.

    loss = aggregate(objective(A') * product(corrections) + [coefficient * kl, if it is in the loss])
           + sum over terms of weight * aggregate_of_the_term(term)

A' is the advantage, minus the penalty to go if the KL penalty is in the reward. The batch comes in rows. The
losses of all rows of all data-parallel ranks, computed with the counts of the whole batch, add up to the
batch's loss. Terms are further components, from teachers or cross-entropy, each with its own weight and
denominator.

**Same distributions.** Teachers give log-probabilities over the full vocabulary at temperature 1. Terms
compare them with the student's log-probabilities over the full vocabulary at temperature 1, never with those
of the distribution that was sampled from. So if student and teacher are the same model, all gaps are 0,
whatever the temperature and kept sets of sampling.

Shape suffixes: T trained tokens (targets) of a row, K ids of each token.
"""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from forgeasync.algorithms.aggregation import AnyAggregation, TokenMean
from forgeasync.algorithms.corrections import AnyCorrection, product
from forgeasync.algorithms.kl import K3, AnyKlEstimator, KlPenalty, KlPlace, penalty_to_go
from forgeasync.algorithms.objectives import AnyObjective, PpoClip
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
    """Divergence from teacher to policy (forward), from policy to teacher (reverse), or Jensen-Shannon."""
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
    """Estimator of the divergence of each token."""

    def __call__(
        self, row: RowTokens, weights_T: torch.Tensor | None
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        own_T = _own(row)
        seen = replace(row, logprobs_T=own_T, ref_logprobs_T=_teacher(row).logprobs_T)
        losses_T = self.estimator(seen)
        return losses_T, {f"teacher/{self.estimator.kind}": row.masked(losses_T.detach()).sum()}


AnyTerm = Annotated[SampledReverseKl | TopkKl | RefKl | CrossEntropy, Field(discriminator="kind")]


TAUGHT_SHARE = "teacher/taught_share"
"""Name of the metric for the share of trained tokens that the teacher scored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowLoss:
    """Result of ``Loss`` for one row."""

    loss: torch.Tensor
    """The row's share of the batch's loss, a scalar."""
    sums: dict[str, torch.Tensor]
    """Sums over the row's trained tokens, by metric name."""
    weights_T: torch.Tensor | None
    """Product of the corrections' weights; None without corrections."""
    advantages_T: torch.Tensor
    """Advantages that the objective used."""


class Loss(Section):
    """Components of a loss, and the loss as a function of rows of packed tokens.

        loss = fa.Loss(objective=fa.PpoClip(clip_high=0.28), corrections=(fa.TruncatedIs(cap=2.0),))

    It is sent as it is to the trainer's processes.
    """

    objective: AnyObjective = PpoClip()
    """Loss of a token."""
    corrections: tuple[AnyCorrection, ...] = ()
    """Off-policy corrections: factors of a token's loss, for data sampled by an older policy or by another
    engine."""
    aggregation: AnyAggregation = TokenMean()
    """Reduction of the losses of tokens to the loss of a batch."""
    kl: KlPenalty | None = None
    """KL penalty, for which the trainer also holds the run's initial model. null: none."""
    terms: tuple[AnyTerm, ...] = ()
    """Further components, each with its own weight and denominator: divergences from a teacher
    (``teachers``), cross-entropy."""

    @property
    def needs_reference(self) -> bool:
        """Whether rows need ``ref_logprobs_T``."""
        return self.kl is not None

    @property
    def needs_proximal(self) -> bool:
        """Whether rows need ``proximal_logprobs_T`` if a batch has several optimizer steps."""
        return self.objective.needs_proximal

    @property
    def needs_teacher(self) -> bool:
        """Whether rows need ``teacher``."""
        return any(term.needs_teacher for term in self.terms)

    @property
    def num_teacher_ids(self) -> int:
        """Number of ids that a teacher scores at each token, besides the sampled one."""
        return max((term.num_ids for term in self.terms), default=0)

    @property
    def needs_student_ids(self) -> bool:
        """Whether the teacher scores ids that the policy could have drawn, rather than its own likeliest."""
        return any(term.needs_student_ids for term in self.terms)

    def count(
        self, mask_T: torch.Tensor, sequence_ids_T: torch.Tensor, sample_weights_T: torch.Tensor
    ) -> torch.Tensor:
        """Return a row's contribution to the count of its batch."""
        return self.aggregation.count(mask_T, sequence_ids_T, sample_weights_T)

    def term_counts(
        self,
        mask_T: torch.Tensor,
        has_target_T: torch.Tensor,
        sequence_ids_T: torch.Tensor,
        sample_weights_T: torch.Tensor,
    ) -> list[torch.Tensor]:
        """Return a row's contribution to the count of each term.

        Tokens that the teacher did not score (``has_target_T`` is False) do not count in terms that need it.
        """
        taught_T = mask_T & has_target_T
        return [
            term.aggregation.count(
                taught_T if term.needs_teacher else mask_T, sequence_ids_T, sample_weights_T
            )
            for term in self.terms
        ]

    def __call__(self, row: RowTokens, *, total: torch.Tensor | float) -> RowLoss:
        """Return a row's share of the loss without its terms, for a batch whose ``count`` is ``total``.

        Raises:
            ValueError: User code returned an invalid result.
        """
        sums: dict[str, torch.Tensor] = {}
        seen, added_T = row, None
        if self.kl is not None:
            kl_T = self.kl.estimator(row)
            sums[f"kl/{self.kl.estimator.kind}"] = kl_T.detach().sum()
            penalty_T = self.kl.coefficient * kl_T
            if self.kl.where is KlPlace.REWARD:
                to_go_T = penalty_to_go(penalty_T, row.mask_T, row.sequence_ids_T)
                seen = dataclasses.replace(row, advantages_T=row.advantages_T - to_go_T)
            else:
                added_T = penalty_T
        losses_T, objective_sums = self.objective(seen)
        sums |= objective_sums
        weights_T = None
        if self.corrections:
            # Uses the row's original advantages, because the penalty to go differs between tokens.
            weights_T, correction_sums = product(self.corrections, row)
            sums |= correction_sums
            losses_T = losses_T * weights_T
        if added_T is not None:
            losses_T = losses_T + added_T
        loss = self.aggregation(
            values_T=losses_T,
            mask_T=row.mask_T,
            sequence_ids_T=row.sequence_ids_T,
            weights_T=row.sample_weights_T,
            total=total,
        )
        return RowLoss(loss=loss, sums=sums, weights_T=weights_T, advantages_T=seen.advantages_T)

    def with_terms(
        self,
        row: RowTokens,
        *,
        total: torch.Tensor | float,
        term_totals: Sequence[torch.Tensor | float],
    ) -> RowLoss:
        """Return a row's share of the whole loss.

        ``total`` is the batch's ``count``; ``term_totals`` are its ``term_counts``, in the order of the
        terms.

        Raises:
            ValueError: User code returned an invalid result.
        """
        of_objective = self(row, total=total)
        loss, sums = of_objective.loss, dict(of_objective.sums)
        taught = row if row.teacher is None else row.taught()
        for term, term_total in zip(self.terms, term_totals, strict=True):
            seen = taught if term.needs_teacher else row
            values_T, term_sums = term(seen, of_objective.weights_T)
            sums |= term_sums
            loss = loss + term.weight * term.aggregation(
                values_T=values_T,
                mask_T=seen.mask_T,
                sequence_ids_T=row.sequence_ids_T,
                weights_T=row.sample_weights_T,
                total=term_total,
            )
        if row.teacher is not None:
            sums |= _gap_sums(taught)
        return dataclasses.replace(of_objective, loss=loss, sums=sums)


def _gap_sums(row: RowTokens) -> dict[str, torch.Tensor]:
    assert row.teacher is not None and row.full_logprobs_T is not None
    gap_T = row.masked(row.full_logprobs_T.detach() - row.teacher.logprobs_T)
    return {
        "teacher/gap_mean": gap_T.sum(),
        "teacher/gap_abs_mean": gap_T.abs().sum(),
        "teacher/version": row.masked(row.teacher.versions_T).sum(),
        TAUGHT_SHARE: row.mask_T.sum(),
    }


def means_of_taught(metrics: Mapping[str, float]) -> dict[str, float]:
    """Convert the metrics of teachers to means over the tokens that the teacher scored.

    ``metrics`` are the sums of rows divided by the number of trained tokens. If the teacher scored none of
    the tokens, the metrics of teachers are left out, except the share of tokens that it scored.
    """
    if TAUGHT_SHARE not in metrics:
        return dict(metrics)
    share = metrics[TAUGHT_SHARE]
    means = {name for name in metrics if name.startswith("teacher/") and name != TAUGHT_SHARE}
    of_taught = {name: metrics[name] / share for name in means} if share else {}
    return {name: value for name, value in metrics.items() if name not in means} | of_taught
