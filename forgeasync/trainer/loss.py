"""The loss of a batch: an objective per token, weighted by corrections, plus a penalty, aggregated.

    loss = aggregate(objective(A') * product(corrections) + [coefficient * kl, where it is in the loss])

A' is the advantage, less the penalty to go where the penalty is in the reward. The batch comes in rows: the
losses of all rows of all data-parallel ranks, each given the batch's count, add up to the batch's loss.

Shape suffix: T targets of a row.
"""

from dataclasses import dataclass

import torch

from forgeasync.algorithms import aggregation, corrections, kl, objectives
from forgeasync.algorithms.trial_call import check_objective_result
from forgeasync.config import loss_schema
from forgeasync.config.loss_schema import KlEstimator, KlPlace, KlSection, LossSection
from forgeasync.config.python_factory import load_factory


@dataclass(frozen=True, slots=True, kw_only=True)
class Supervised:
    """Negative log-likelihood of the given tokens, mean over tokens: for warming a model up."""


LossChoice = LossSection | Supervised
"""Which loss a trainer is asked for, as data that travels to its procs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowTokens:
    """The targets of a row; all [T]. ``logprobs_T`` has gradients.

    ``mask_T`` is False for targets that are not to be trained on. ``sample_weights_T`` says how often the
    target's sequence counts (rollout accounting). ``ref_logprobs_T`` is None where no reference is asked for.
    """

    logprobs_T: torch.Tensor
    behavior_logprobs_T: torch.Tensor
    advantages_T: torch.Tensor
    mask_T: torch.Tensor
    sequence_ids_T: torch.Tensor
    ages_T: torch.Tensor
    sample_weights_T: torch.Tensor
    ref_logprobs_T: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RowLoss:
    """A row's share of the batch's loss; sums over its masked tokens; corrections' weights [T], if any."""

    loss: torch.Tensor
    sums: dict[str, torch.Tensor]
    weights_T: torch.Tensor | None


class PolicyLoss:
    """A loss for rows of a batch."""

    def __init__(
        self,
        *,
        objective: objectives.Objective,
        correction: corrections.Correction | None,
        aggregate: aggregation.Aggregation,
        penalty: KlSection | None,
    ) -> None:
        self._objective = objective
        self._correction = correction
        self._aggregate = aggregate
        self._penalty = penalty

    @property
    def needs_reference(self) -> bool:
        """Whether rows have to come with ``ref_logprobs_T``."""
        return self._penalty is not None

    def count(
        self, mask_T: torch.Tensor, sequence_ids_T: torch.Tensor, sample_weights_T: torch.Tensor
    ) -> torch.Tensor:
        """What a row adds to the count of its batch."""
        return self._aggregate.count(mask_T, sequence_ids_T, sample_weights_T)

    def __call__(self, tokens: RowTokens, *, total: torch.Tensor | float) -> RowLoss:
        """A row's share of the loss of a batch whose ``count`` is ``total``.

        Raises:
            ValueError: the objective's losses are not one number a token, or its sums are no scalars.
        """
        known = {
            "logprobs_T": tokens.logprobs_T,
            "behavior_logprobs_T": tokens.behavior_logprobs_T,
            "mask_T": tokens.mask_T,
            "sequence_ids_T": tokens.sequence_ids_T,
        }
        sums: dict[str, torch.Tensor] = {}
        advantages_T, added_T = tokens.advantages_T, None
        if self._penalty is not None:
            kl_T = _kl(self._penalty.estimator, tokens)
            sums[f"kl/{self._penalty.estimator.value}"] = kl_T.detach().sum()
            penalty_T = self._penalty.coefficient * kl_T
            if self._penalty.where is KlPlace.REWARD:
                to_go_T = kl.penalty_to_go(penalty_T, tokens.mask_T, tokens.sequence_ids_T)
                advantages_T = advantages_T - to_go_T
            else:
                added_T = penalty_T
        losses_T, objective_sums = self._objective(**known, advantages_T=advantages_T)
        # A user's own can return another shape for other tokens than those it was tried on.
        check_objective_result(losses_T, objective_sums, tokens.logprobs_T)
        sums |= objective_sums
        weights_T = None
        if self._correction is not None:
            # By the sequence's own advantage: a penalty to go differs from token to token.
            weights_T, correction_sums = self._correction(
                **known, advantages_T=tokens.advantages_T, ages_T=tokens.ages_T
            )
            sums |= correction_sums
            losses_T = losses_T * weights_T
        if added_T is not None:
            losses_T = losses_T + added_T
        loss = self._aggregate(
            values_T=losses_T,
            mask_T=tokens.mask_T,
            sequence_ids_T=tokens.sequence_ids_T,
            weights_T=tokens.sample_weights_T,
            total=total,
        )
        return RowLoss(loss=loss, sums=sums, weights_T=weights_T)


def _kl(estimator: KlEstimator, tokens: RowTokens) -> torch.Tensor:
    """The estimate of every token [T]; 0, without a gradient, where masked out."""
    assert tokens.ref_logprobs_T is not None, "the trainer has a reference wherever there is a penalty"
    current_T = torch.where(tokens.mask_T, tokens.logprobs_T, 0.0)
    ref_T = torch.where(tokens.mask_T, tokens.ref_logprobs_T, 0.0)
    match estimator:
        case KlEstimator.K1:
            return kl.k1(current_T, ref_T)
        case KlEstimator.K2:
            return kl.k2(current_T, ref_T)
        case KlEstimator.K3:
            return kl.k3(current_T, ref_T)
        case KlEstimator.UNBIASED_K3:
            behavior_T = torch.where(tokens.mask_T, tokens.behavior_logprobs_T, 0.0)
            return kl.unbiased_k3(current_T, behavior_T, ref_T)


def build_loss(choice: LossChoice) -> PolicyLoss:
    """The loss of a choice.

    Raises:
        ValueError: a user's own objective cannot be imported.
    """
    if isinstance(choice, Supervised):
        return PolicyLoss(
            objective=objectives.supervised(),
            correction=None,
            aggregate=aggregation.token_mean,
            penalty=None,
        )
    factors = [_correction(section) for section in choice.corrections]
    return PolicyLoss(
        objective=_objective(choice.objective),
        correction=corrections.product(*factors) if factors else None,
        aggregate=_aggregation(choice.aggregation),
        penalty=choice.kl,
    )


def _objective(section: loss_schema.ObjectiveSection) -> objectives.Objective:
    match section:
        case loss_schema.PpoClip(clip_low=low, clip_high=high, dual_clip=dual_clip):
            return objectives.ppo_clip(low, high, dual_clip)
        case loss_schema.Cispo(clip_low=low, clip_high=high):
            return objectives.cispo(low, high)
        case loss_schema.Gspo(clip_low=low, clip_high=high):
            return objectives.gspo(low, high)
        case loss_schema.Reinforce():
            return objectives.reinforce()
        case loss_schema.DecoupledPpo(clip=clip, behavior_cap=cap):
            return _around_current(objectives.decoupled_ppo(clip, cap))
        case loss_schema.Topr():
            return objectives.topr()
        case loss_schema.Kimi15(tau=tau):
            return objectives.kimi15(tau)
        case loss_schema.PythonObjective(factory=factory, options=options):
            return load_factory(factory)(**options)


def _around_current(decoupled: objectives.DecoupledObjective) -> objectives.Objective:
    """With one optimizer step a batch the proximal policy, that of the step's start, is the current one."""

    def objective(
        *,
        logprobs_T: torch.Tensor,
        behavior_logprobs_T: torch.Tensor,
        advantages_T: torch.Tensor,
        mask_T: torch.Tensor,
        sequence_ids_T: torch.Tensor,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return decoupled(
            logprobs_T=logprobs_T,
            behavior_logprobs_T=behavior_logprobs_T,
            proximal_logprobs_T=logprobs_T.detach(),
            advantages_T=advantages_T,
            mask_T=mask_T,
            sequence_ids_T=sequence_ids_T,
        )

    return objective


def _correction(section: loss_schema.CorrectionSection) -> corrections.Correction:
    match section:
        case loss_schema.TruncatedIs(cap=cap, level=level):
            return corrections.truncated_is(cap, level)
        case loss_schema.MaskedIs(low=low, high=high, level=level):
            return corrections.masked_is(low, high, level)
        case loss_schema.IcePop(low=low, high=high):
            return corrections.icepop(low, high)
        case loss_schema.OffPolicySequenceMask(threshold=threshold):
            return corrections.off_policy_sequence_mask(threshold)
        case loss_schema.AgeWeight(half_life=half_life):
            return corrections.age_weight(half_life)


def _aggregation(section: loss_schema.AggregationSection) -> aggregation.Aggregation:
    match section:
        case loss_schema.TokenMean():
            return aggregation.token_mean
        case loss_schema.SequenceMeanOfTokenMean():
            return aggregation.sequence_mean_of_token_mean
        case loss_schema.SequenceMeanOfTokenSum():
            return aggregation.sequence_mean_of_token_sum
        case loss_schema.ConstantLength(length=length):
            return aggregation.constant_length(length)
