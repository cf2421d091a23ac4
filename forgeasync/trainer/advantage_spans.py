"""Advantages of parts of a response: from scored groups to characters of the text, and on to its tokens.

The controller knows texts and rewards but no token: it says up to which character of the text an advantage
holds. The trainer's rank that reads the tokens finds out where they lie in the text and spreads the
advantages.

Shape suffix: T tokens of one response.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer

from forgeasync.algorithms import Grpo, step_advantages
from forgeasync.config import AlgorithmSection
from forgeasync.rollouts import Group, Score, decoded


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageSpan:
    """The advantage of the tokens that begin before a character of the response's text and behind the span
    before.

    ``end`` None: all the rest of the response.
    """

    end: int | None
    value: float


def whole_response(value: float) -> tuple[AdvantageSpan, ...]:
    """Give all tokens the same advantage."""
    return (AdvantageSpan(end=None, value=value),)


def advantage_spans(
    groups: Sequence[Group], algorithm: AlgorithmSection
) -> list[list[tuple[AdvantageSpan, ...]]]:
    """The advantages of each group's rollouts; they are those of a whole batch where the advantage asks for
    it. Each agent of an environment is compared with itself in other episodes.

    A group with rewards of steps has an advantage for each step (``forgeasync.algorithms.step_rewards``),
    and 0 behind the last; its rewards are not looked at. Computed in float64: rewards far from 0 differ by
    less than float32 can tell.

    Raises:
        ValueError: the advantage knows no step rewards, or only some rollouts of a group have them.
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
    """Why ``advantage_spans`` would refuse this group with these scores; None where it would not."""
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
    check_steps(group)
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


def check_steps(group: Group) -> None:
    """Whether the steps of a group fit its rollouts.

    Raises:
        ValueError: only some rollouts with a text have steps, or their ends do not increase within the text.
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
                f"{where} has steps that end at the characters {ends}; must increase, from 1 to the "
                f"{len(rollout.text)} characters of its text"
            )


def spread(spans: Sequence[AdvantageSpan], starts_T: np.ndarray, *, num_characters: int) -> np.ndarray:
    """The advantage of every token, float32 [T].

    ``starts_T`` are the characters at which tokens begin, of a text of ``num_characters``. A token that lies
    across the end of a span belongs to the span that it begins in; tokens behind the text, such as the one
    that ends the response, belong to its last character.
    """
    assert spans[-1].end is None
    ends = [span.end for span in spans if span.end is not None]
    values = np.asarray([span.value for span in spans], np.float32)
    places_T = np.minimum(starts_T, max(0, num_characters - 1))
    return values[np.searchsorted(np.asarray(ends, np.int64), places_T, side="right")]


class TokenPlaces:
    """Decodes responses as the generator does, a token at a time; nothing is ever tokenized again."""

    def __init__(self, folder: Path | None) -> None:
        """``folder`` holds the tokenizer; it is read when the first response has to be decoded."""
        self._folder = folder
        self._tokenizer: Tokenizer | None = None

    def starts(self, prompt_ids_P: np.ndarray, response_ids_T: np.ndarray) -> np.ndarray:
        """The characters of the text at which the tokens begin, int64 [T].

        The tokens that a character's bytes are spread over all begin where that character does, and so does a
        token whose first bytes end one character while its last ones begin another. Tokens that add no text,
        special ones among them, begin where the next text does.
        """
        if self._tokenizer is None:
            self._tokenizer = self._load()
        starts_T = np.zeros(len(response_ids_T), np.int64)
        num_characters = 0
        for index, text in enumerate(decoded(self._tokenizer, prompt_ids_P, response_ids_T)):
            starts_T[index] = num_characters
            num_characters += len(text)
        return starts_T

    def _load(self) -> Tokenizer:
        # transformers takes a second to import, for step rewards only.
        from transformers import AutoTokenizer

        assert self._folder is not None, "a trainer of rollouts is told where the tokenizer is"
        return AutoTokenizer.from_pretrained(self._folder).backend_tokenizer
