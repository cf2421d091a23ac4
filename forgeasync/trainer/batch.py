"""Turns a batch of scored groups into the sequences that a trainer packs.

The controller knows rewards, versions and lengths: it computes advantages and assigns rollouts to rows and
ranks. The trainer rank that trains on a rollout reads its arrays.
"""

import dataclasses
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from forgeasync.config import AlgorithmSection, RoutingReplay
from forgeasync.rollouts import (
    NO_RECORD,
    BranchKey,
    Group,
    RolloutKey,
    StoredBranch,
    StoredRollout,
    TokenTrace,
    plan_rows,
)
from forgeasync.trainer.advantage_spans import AdvantageSpan, TokenPlaces, advantage_spans, spread
from forgeasync.trainer.packing import Source, TrainingSequence


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingItem:
    """One branch of a rollout of a batch, by reference, with what the batch made of it."""

    generator_rank: int
    """Rank of the generator that holds the arrays."""
    branch: StoredBranch
    advantages: tuple[AdvantageSpan, ...]
    weight: float
    """Weight of the branch in the batch's loss (rollout accounting)."""
    source: Source | None = None
    """None where nobody asks about single tokens."""

    @property
    def num_tokens(self) -> int:
        return self.branch.num_tokens


def training_items(
    groups: Sequence[Group],
    weights: Sequence[float],
    algorithm: AlgorithmSection,
    *,
    recorded: Collection[RolloutKey] | None = None,
) -> list[TrainingItem]:
    """One item per branch; ``weights`` has each group's weight from rollout accounting.

    ``recorded``: rollouts whose tokens' values are wanted, besides the worst tokens of all; None: no token's.

    Raises:
        ValueError: rewards of steps do not fit the advantage or their group.
    """
    return [
        item
        for group, weight, spans_G in zip(groups, weights, advantage_spans(groups, algorithm), strict=True)
        for rollout, spans in zip(group.rollouts, spans_G, strict=True)
        for item in _sourced(items_of(rollout, spans, weight=weight), group.group_id, rollout, recorded)
    ]


def _sourced(
    items: list[TrainingItem],
    group_id: int,
    rollout: StoredRollout,
    recorded: Collection[RolloutKey] | None,
) -> list[TrainingItem]:
    """Return the items of a rollout with their sources, where somebody asks."""
    if recorded is None:
        return items
    rollout_key = RolloutKey(group_id=group_id, episode=rollout.episode, agent=rollout.agent)
    return [
        dataclasses.replace(
            item,
            source=Source(
                key=BranchKey(rollout=rollout_key, branch=branch), is_recorded=rollout_key in recorded
            ),
        )
        for branch, item in enumerate(items)
    ]


def items_of(
    rollout: StoredRollout, advantages: tuple[AdvantageSpan, ...], *, weight: float
) -> list[TrainingItem]:
    """One item for each branch of a rollout; all have its advantages."""
    return [
        TrainingItem(
            generator_rank=rollout.generator_rank, branch=branch, advantages=advantages, weight=weight
        )
        for branch in rollout.branches
    ]


def split_by_groups(
    items: Sequence[TrainingItem], groups: Sequence[Group], num_minibatches: int
) -> list[list[TrainingItem]]:
    """The items of a batch's ``groups``, in their order, as minibatches of equally many whole groups."""
    assert len(groups) % num_minibatches == 0, "checked with the config"
    num_groups = len(groups) // num_minibatches
    minibatches, start = [], 0
    for first in range(0, len(groups), num_groups):
        of_minibatch = groups[first : first + num_groups]
        end = start + sum(len(rollout.branches) for group in of_minibatch for rollout in group.rollouts)
        minibatches.append(list(items[start:end]))
        start = end
    assert start == len(items)
    return minibatches


def assign_rows(
    items: Sequence[TrainingItem], *, tokens_per_row: int, num_ranks: int
) -> list[list[list[TrainingItem]]]:
    """Items of each row, ``[rank][microbatch]``; as many microbatches for every rank."""
    plan = plan_rows([item.num_tokens for item in items], tokens_per_row=tokens_per_row, num_ranks=num_ranks)
    return [
        [[items[index] for index in microbatch[rank]] for microbatch in plan] for rank in range(num_ranks)
    ]


def training_sequence(
    item: TrainingItem,
    trace: TokenTrace,
    *,
    trained_version: int,
    routing_replay: RoutingReplay,
    keep_sampling_mask: bool,
    places: TokenPlaces,
) -> TrainingSequence:
    """An item with its arrays; ``trained_version`` is the version of the weights about to be trained.

    ``places`` is asked only where parts of the response have advantages of their own.
    """
    expert_ids_SMK = None
    if routing_replay is not RoutingReplay.OFF:
        assert trace.routed_experts is not None, "generators record what the config says is replayed"
        expert_ids_SMK = trace.routed_experts.to_dense()
        if routing_replay is RoutingReplay.RESPONSE:
            expert_ids_SMK[: len(trace.prompt_ids_P)] = NO_RECORD
    return TrainingSequence(
        prompt_ids_P=trace.prompt_ids_P,
        response_ids_T=trace.response_ids_T,
        behavior_logprobs_T=trace.logprobs_T,
        ages_T=_ages(item.branch, trace.is_sampled_T, trained_version),
        advantage=_advantages(item, trace, places),
        weight=item.weight,
        expert_ids_SMK=expert_ids_SMK,
        kept_tokens=trace.kept_tokens if keep_sampling_mask else None,
        is_sampled_T=trace.is_sampled_T,
        teacher=trace.teacher,
        source=item.source,
    )


def _advantages(item: TrainingItem, trace: TokenTrace, places: TokenPlaces) -> float | np.ndarray:
    """One number for all tokens, or float32 [T]."""
    if len(item.advantages) == 1:
        return item.advantages[0].value
    starts_T = places.starts(trace.prompt_ids_P, trace.response_ids_T)
    return spread(item.advantages, starts_T, num_characters=len(item.branch.text))


NO_AGE = -1
"""Age of tokens that no version has sampled."""


def _ages(branch: StoredBranch, is_sampled_T: np.ndarray | None, trained_version: int) -> np.ndarray:
    ages_T = np.full(branch.num_response_tokens, NO_AGE, np.int32)
    for span in branch.version_spans:
        ages_T[span.start : span.end] = trained_version - span.version
    is_sampled_T = np.ones(len(ages_T), bool) if is_sampled_T is None else is_sampled_T
    assert (ages_T[is_sampled_T] >= 0).all() and (ages_T[~is_sampled_T] == NO_AGE).all(), (
        "exactly the sampled tokens have a version, no newer than the weights it trains"
    )
    return ages_T
