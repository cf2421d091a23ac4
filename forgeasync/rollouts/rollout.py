"""Rollouts, which a generator samples and a trainer learns from, and the groups they come in.

Shape suffixes: T tokens of one response, P tokens of its prompt.
"""

from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from forgeasync.rollouts.kept_tokens import KeptTokens
from forgeasync.rollouts.payload_format import PayloadRef, group_num_bytes
from forgeasync.rollouts.routing import RoutedExperts
from forgeasync.rollouts.score import Score, Step
from forgeasync.rollouts.task import Task


class FinishReason(StrEnum):
    """Why a response ended."""

    STOP = "stop"
    """The model ended its response."""
    LENGTH = "length"
    """The response was cut at ``sampling.max_response_tokens``, or an episode's context was full."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionSpan:
    """Tokens [start, end) of a response were sampled under policy ``version``, all of them."""

    version: int
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One sampled response, or one episode: its response is then everything after the first prompt.

    ``prompt_ids_P`` and ``response_ids_T`` are int32; ``logprobs_T`` (float32) are under the
    distribution that was really sampled from; ``version_spans`` cover the sampled tokens of [0, T), in order.
    ``routed_experts`` covers prompt and response (the last token was never fed to the model and has no
    record); None where the engine was not asked for it. ``kept_tokens`` is None where the whole vocabulary
    was kept throughout. ``is_sampled_T`` (bool) is False for tokens that an environment put between the
    model's turns; None: all were sampled. Given tokens have log-probability 0 and an empty kept set, and
    nothing may read either.
    """

    prompt_ids_P: np.ndarray
    response_ids_T: np.ndarray
    logprobs_T: np.ndarray
    version_spans: tuple[VersionSpan, ...]
    text: str
    finish_reason: FinishReason
    routed_experts: RoutedExperts | None = None
    kept_tokens: KeptTokens | None = None
    is_sampled_T: np.ndarray | None = None

    @property
    def num_response_tokens(self) -> int:
        """Number of response tokens, sampled or not."""
        return len(self.response_ids_T)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRollout:
    """A rollout's small facts, which travel in messages; its arrays lie where it was sampled.

    ``prompt`` is shared by the rollouts of a group whose prompt records are equal.
    """

    generator_rank: int
    """Rank of the generator that sampled the rollout, holds its arrays and frees them."""
    prompt: PayloadRef
    response: PayloadRef
    num_prompt_tokens: int
    num_response_tokens: int
    """Sampled, or given by an environment between the model's turns: what the rollout takes of a row."""
    version_spans: tuple[VersionSpan, ...]
    """Versions of the sampled tokens, in order."""
    text: str
    finish_reason: FinishReason

    @property
    def num_sampled_tokens(self) -> int:
        """Response tokens that the model sampled: those that train."""
        return sum(span.end - span.start for span in self.version_spans)

    @property
    def first_version(self) -> int:
        """Policy version of the oldest token."""
        return self.version_spans[0].version


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """All rollouts of one prompt; ``rewards`` is None until they are scored.

    ``group_id`` counts admissions: group i was the i-th that the buffer let start. ``draw_id`` is what random
    draws for it follow from: its prompt's place in the data's order, and how often that was tried.
    """

    group_id: int
    draw_id: int
    task: Task
    rollouts: tuple[StoredRollout, ...]
    rewards: tuple[float, ...] | None = None
    """Rewards that the rollouts train with: the values of their scores, changed by filters."""
    scores: tuple[Score, ...] | None = None
    """The reward's score for each rollout; None if only ``rewards`` are known."""
    steps: tuple[tuple[Step, ...], ...] | None = None
    """Rewards of each rollout's steps; None where the scorer gave none."""

    @property
    def num_payload_bytes(self) -> int:
        """Memory that the arrays of the group take on their host."""
        return group_num_bytes([ref for one in self.rollouts for ref in (one.prompt, one.response)])

    @property
    def first_version(self) -> int:
        """Policy version of the oldest token in the group."""
        return min(rollout.first_version for rollout in self.rollouts)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupProgress:
    """A generator's report on a group when it changes to ``version``."""

    group_id: int
    version: int
    num_running: int
    """Rollouts that will sample at least one more token, under ``version`` or a later one."""
    num_tokens: int
    """Tokens sampled so far by these rollouts and by those that have ended."""
