"""Converts a batch of scored groups to the sequences that a trainer packs.

The controller knows rewards, versions and lengths, but no tokens: it computes advantages, as spans of
characters of a response's text, and assigns rollouts to rows and ranks. The trainer rank that trains on a
rollout reads its arrays, finds the characters at which tokens begin (``TokenPlaces``) and spreads the
advantages over the tokens.

Shape suffixes: T tokens of one response, P of its prompt.
"""

import dataclasses
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer

from forgeasync.algorithms import Grpo, step_advantages
from forgeasync.config import AlgorithmSection, RoutingReplay
from forgeasync.models import load_tokenizer
from forgeasync.rollouts import (
    NO_RECORD,
    BranchKey,
    Group,
    Prefixes,
    RolloutKey,
    Score,
    StoredBranch,
    StoredRollout,
    TokenTrace,
    decoded,
    plan_rows,
)
from forgeasync.trainer.packing import Source, TrainingSequence


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageSpan:
    """Advantage of the tokens that begin between the end of the previous span and ``end``.

    ``end`` is a character of the response's text; None: the rest of the response.
    """

    end: int | None
    value: float


def whole_response(value: float) -> tuple[AdvantageSpan, ...]:
    """Return a single span, so that all tokens have the same advantage."""
    return (AdvantageSpan(end=None, value=value),)


def advantage_spans(
    groups: Sequence[Group], algorithm: AlgorithmSection
) -> list[list[tuple[AdvantageSpan, ...]]]:
    """Return the advantage spans of each group's rollouts.

    Some advantages are computed over the whole batch. Each agent of an environment is compared only with
    itself in other episodes. A group with rewards of steps has an advantage for each step
    (``forgeasync.algorithms.advantages``) and 0 after the last one; rewards of its whole responses are
    ignored. Computed in float64, because rewards far from 0 can differ by less than float32 resolves.

    Raises:
        ValueError: The advantage does not support step rewards, or only some rollouts of a group have them.
    """
    agents = {rollout.agent for group in groups for rollout in group.rollouts}
    if len(agents) > 1:
        return _by_agent(groups, agents, algorithm)
    rewards = [torch.tensor(group.rewards, dtype=torch.float64) for group in groups]
    return [
        [whole_response(value) for value in advantages_G.float().tolist()]
        if group.steps is None
        else _of_steps(group, algorithm)
        for group, advantages_G in zip(groups, algorithm.advantage.of_batch(rewards), strict=True)
    ]


def _by_agent(
    groups: Sequence[Group], agents: Iterable[int], algorithm: AlgorithmSection
) -> list[list[tuple[AdvantageSpan, ...]]]:
    found: list[dict[int, tuple[AdvantageSpan, ...]]] = [{} for _ in groups]
    for agent in sorted(agents):
        places = [
            [index for index, rollout in enumerate(group.rollouts) if rollout.agent == agent]
            for group in groups
        ]
        own = [_only(group, indices) for group, indices in zip(groups, places, strict=True) if indices]
        spans = iter(advantage_spans(own, algorithm))
        for of_group, indices in zip(found, places, strict=True):
            if indices:
                of_group.update(zip(indices, next(spans), strict=True))
    return [[of_group[index] for index in range(len(of_group))] for of_group in found]


def _only(group: Group, indices: Sequence[int]) -> Group:
    """Return the group with some of its rollouts."""
    assert group.rewards is not None
    steps = None if group.steps is None else tuple(group.steps[index] for index in indices)
    return dataclasses.replace(
        group,
        rollouts=tuple(group.rollouts[index] for index in indices),
        rewards=tuple(group.rewards[index] for index in indices),
        steps=steps if steps is not None and any(steps) else None,
    )


def steps_problem(group: Group, scores: Sequence[Score], algorithm: AlgorithmSection) -> str | None:
    """Return why ``advantage_spans`` would refuse this group with these scores; None if it accepts them."""
    steps = tuple(score.steps for score in scores)
    if not any(steps):
        return None
    scored = dataclasses.replace(group, steps=steps, rewards=tuple(score.value for score in scores))
    try:
        advantage_spans([scored], algorithm)
    except ValueError as error:
        return str(error)
    return None


def _of_steps(group: Group, algorithm: AlgorithmSection) -> list[tuple[AdvantageSpan, ...]]:
    assert group.steps is not None
    if not isinstance(algorithm.advantage, Grpo):
        raise ValueError(
            f"group {group.group_id} has rewards of steps, which algorithm.advantage = "
            f"{algorithm.advantage.kind!r} has no formula for; use 'grpo', or reward whole responses"
        )
    _check_steps(group)
    values = step_advantages(
        [torch.tensor([step.value for step in steps], dtype=torch.float64) for steps in group.steps],
        algorithm.step_credit,
    )
    return [
        (
            *(
                AdvantageSpan(end=step.end, value=value)
                for step, value in zip(steps, values_J.float().tolist(), strict=True)
            ),
            AdvantageSpan(end=None, value=0.0),
        )
        for steps, values_J in zip(group.steps, values, strict=True)
    ]


def _check_steps(group: Group) -> None:
    """Check that the steps of a group fit its rollouts.

    Raises:
        ValueError: Only some rollouts with a text have steps, a rollout with steps has several branches, or
            the steps' ends do not increase within the text.
    """
    assert group.steps is not None
    for index, (rollout, steps) in enumerate(zip(group.rollouts, group.steps, strict=True)):
        where = f"rollout {index} of group {group.group_id}"
        if not steps and rollout.text:
            raise ValueError(
                f"{where} has no rewards of steps, but others of its group have; must be all of them or none"
            )
        if len(rollout.branches) > 1:
            raise ValueError(
                f"{where} has rewards of steps and {len(rollout.branches)} branches; steps need one branch, "
                "whose text they divide: reward whole episodes, or keep the agent from rewriting its history"
            )
        ends = [step.end for step in steps]
        if ends != sorted(set(ends)) or (ends and not 0 < ends[0] <= ends[-1] <= len(rollout.text)):
            raise ValueError(
                f"{where} has steps that end at characters {ends}; the ends must increase, and lie between 1 "
                f"and the length of its text, {len(rollout.text)}"
            )


def spread(spans: Sequence[AdvantageSpan], starts_T: np.ndarray, *, num_characters: int) -> np.ndarray:
    """Return the advantage of every token, float32 [T].

    ``starts_T`` has the characters at which tokens begin, in a text of ``num_characters``. A token across the
    end of a span belongs to the span in which it begins. Tokens after the text, such as the end token of the
    response, belong to its last character.
    """
    assert spans[-1].end is None
    ends = [span.end for span in spans if span.end is not None]
    values = np.asarray([span.value for span in spans], np.float32)
    places_T = np.minimum(starts_T, max(0, num_characters - 1))
    return values[np.searchsorted(np.asarray(ends, np.int64), places_T, side="right")]


class TokenPlaces:
    """Finds where tokens begin in the text, by decoding responses token by token, like the generator."""

    def __init__(self, folder: Path | None) -> None:
        """``folder`` has the tokenizer, which is loaded when the first response is decoded."""
        self._folder = folder
        self._tokenizer: Tokenizer | None = None

    def starts(self, prompt_ids_P: np.ndarray, response_ids_T: np.ndarray) -> np.ndarray:
        """Return the characters of the text at which the tokens begin, int64 [T].

        If the bytes of one character are spread over several tokens, all of them begin at that character. A
        token that ends one character and begins another one begins at the first. Tokens that add no text,
        such as special tokens, begin where the next text does.
        """
        if self._tokenizer is None:
            assert self._folder is not None, "a trainer of rollouts knows where the tokenizer is"
            self._tokenizer = load_tokenizer(self._folder).backend_tokenizer
        starts_T = np.zeros(len(response_ids_T), np.int64)
        num_characters = 0
        for index, text in enumerate(decoded(self._tokenizer, prompt_ids_P, response_ids_T)):
            starts_T[index] = num_characters
            num_characters += len(text)
        return starts_T


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingItem:
    """One branch of a rollout of a batch, by reference, with its advantages and its weight."""

    branch: StoredBranch
    advantages: tuple[AdvantageSpan, ...]
    weight: float
    """Weight of the branch in the batch's loss (rollout accounting)."""
    source: Source | None = None
    """Source of the tokens in reports; None if single tokens are not reported."""
    prefixes: Prefixes = ()
    """Its prompt, and what other branches of the rollout begin with too."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the item, prompt included."""
        return self.branch.num_tokens


def training_items(
    groups: Sequence[Group],
    weights: Sequence[float],
    algorithm: AlgorithmSection,
    *,
    recorded: Collection[RolloutKey] | None = None,
) -> list[TrainingItem]:
    """Return the training items of a batch: one for each branch of each rollout.

    Args:
        groups: Scored groups of the batch.
        weights: Weight of each group, from rollout accounting.
        algorithm: The config's ``algorithm`` section, which has the advantage.
        recorded: Rollouts whose tokens are all reported, in addition to the worst tokens of the batch; None:
            no token is reported.

    Raises:
        ValueError: Rewards of steps do not fit the advantage or their group.
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
    """Return the items of a rollout, with their sources if single tokens are reported."""
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
    """Return one item for each branch of a rollout; all have its advantages."""
    return [
        TrainingItem(
            branch=branch,
            advantages=advantages,
            weight=weight,
            prefixes=_prefixes(branch, rollout.branches),
        )
        for branch in rollout.branches
    ]


def _prefixes(branch: StoredBranch, branches: Sequence[StoredBranch]) -> Prefixes:
    # All branches with a turn begin with the prompt of the one that trains it. Branches with equal prompts,
    # recorded experts included, refer to the same payload.
    first = branches[branch.forks[0][0]] if branch.forks else branch
    prompts = [(one.prompt.payload_id, one.num_prompt_tokens) for one in (first, branch)]
    forks = [((branches[index].response.payload_id, num), num) for index, num in branch.forks]
    return sorted(dict.fromkeys([*forks, *prompts]), key=lambda prefix: prefix[1])


def split_by_groups(
    items: Sequence[TrainingItem], groups: Sequence[Group], num_minibatches: int
) -> list[list[TrainingItem]]:
    """Split the items of a batch's ``groups``, in order, into minibatches with equal numbers of groups."""
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
    items: Sequence[TrainingItem],
    *,
    tokens_per_row: int,
    num_ranks: int,
    pair_cost: float,
    share_prefixes: bool = False,
    routing_replay: RoutingReplay = RoutingReplay.ALL,
) -> list[list[list[TrainingItem]]]:
    """Return the items of each row, ``[rank][microbatch]``, with the same number of microbatches per rank.

    Args:
        items: Items of one optimizer step.
        tokens_per_row: Maximum number of tokens of a row.
        num_ranks: Number of data-parallel ranks.
        pair_cost: Work for a pair of a query and a key, relative to the other work on a token
            (``planning.pair_cost``).
        share_prefixes: Whether a row has the tokens of a common beginning once.
        routing_replay: Tokens whose recorded experts are replayed; it decides which prefixes can be shared.
    """
    # If only responses have records, those of a turn differ between the branch that trains it and others.
    num_shared = 1 if routing_replay is RoutingReplay.RESPONSE else None
    plan = plan_rows(
        [item.num_tokens for item in items],
        tokens_per_row=tokens_per_row,
        num_ranks=num_ranks,
        prefixes=[item.prefixes[:num_shared] for item in items] if share_prefixes else None,
        pair_cost=pair_cost,
    )
    return [[[items[index] for index in rows[rank]] for rows in plan] for rank in range(num_ranks)]


def training_sequence(
    item: TrainingItem,
    trace: TokenTrace,
    *,
    trained_version: int,
    routing_replay: RoutingReplay,
    keep_sampling_mask: bool,
    places: TokenPlaces,
) -> TrainingSequence:
    """Return the sequence of an item and its arrays.

    Args:
        trained_version: Version of the weights before this training step.
        places: Token decoder, used only if parts of the response have different advantages.
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
    """Return one advantage for all tokens, or float32 [T]."""
    if len(item.advantages) == 1:
        return item.advantages[0].value
    starts_T = places.starts(trace.prompt_ids_P, trace.response_ids_T)
    return spread(item.advantages, starts_T, num_characters=len(item.branch.text))


NO_AGE = -1
"""Age of tokens that were not sampled."""


def _ages(branch: StoredBranch, is_sampled_T: np.ndarray | None, trained_version: int) -> np.ndarray:
    ages_T = np.full(branch.num_response_tokens, NO_AGE, np.int32)
    for span in branch.version_spans:
        ages_T[span.start : span.end] = trained_version - span.version
    is_sampled_T = np.ones(len(ages_T), bool) if is_sampled_T is None else is_sampled_T
    assert (ages_T[is_sampled_T] >= 0).all() and (ages_T[~is_sampled_T] == NO_AGE).all(), (
        "exactly the sampled tokens have a version, no newer than the weights it trains"
    )
    return ages_T
