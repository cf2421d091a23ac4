"""The loss of a batch: objective per token, weighted by corrections, plus KL penalty, aggregated, plus terms.

    loss = aggregate(objective(A') * product(corrections) + [coefficient * kl, if it is in the loss])
           + sum over terms of weight * aggregate_of_the_term(term)

A' is the advantage, minus the penalty to go if the KL penalty is in the reward. The batch comes in rows. The
losses of all rows of all data-parallel ranks, computed with the counts of the whole batch, add up to the
batch's loss.

Shape suffix: T trained tokens (targets) of a row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from forgeasync.algorithms.aggregation import AnyAggregation, TokenMean
from forgeasync.algorithms.corrections import AnyCorrection, product
from forgeasync.algorithms.kl import KlPenalty, KlPlace, penalty_to_go
from forgeasync.algorithms.objectives import AnyObjective, PpoClip
from forgeasync.algorithms.row_tokens import RowTokens
from forgeasync.algorithms.terms import AnyTerm
from forgeasync.schema import Section

if TYPE_CHECKING:
    import torch


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
    """Components of a loss, and the loss as a function of rows. Sent as is to the trainer's processes."""

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
