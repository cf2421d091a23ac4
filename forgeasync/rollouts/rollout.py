"""Rollouts, which a generator samples and a trainer learns from, and the groups they come in.

Shape suffixes: T tokens of one response, P tokens of its prompt.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from forgeasync.rollouts.kept_tokens import KeptTokens
from forgeasync.rollouts.payload_format import EVERY_HOST, PayloadRef, group_num_bytes
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
class VersionRange:
    """The policy versions that sampled something: the oldest and the newest of them."""

    first: int
    last: int


def spanned(ranges: Iterable[VersionRange | None]) -> VersionRange | None:
    """Return the range from the oldest to the newest version; None if there is none at all."""
    known = [one for one in ranges if one is not None]
    if not known:
        return None
    return VersionRange(first=min(one.first for one in known), last=max(one.last for one in known))


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
class StoredBranch:
    """One sequence of the trainer: a response, or one branch of an episode's tree of turns.

    ``prompt`` is shared by the branches of a group whose prompt records are equal.
    """

    prompt: PayloadRef
    response: PayloadRef
    num_prompt_tokens: int
    """Tokens before the first one that trains with this branch."""
    num_response_tokens: int
    """Sampled, or given by an environment between the model's turns."""
    version_spans: tuple[VersionSpan, ...]
    """Versions of the sampled tokens, in order."""
    text: str

    @property
    def num_tokens(self) -> int:
        """What the branch takes of a row."""
        return self.num_prompt_tokens + self.num_response_tokens

    @property
    def num_sampled_tokens(self) -> int:
        """Tokens that train."""
        return sum(span.end - span.start for span in self.version_spans)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRollout:
    """A rollout's small facts, which travel in messages; its arrays lie where it was sampled.

    A rollout is a response, or all that one agent has sampled in an episode; that has several branches where
    a history was rewritten or the agent was asked the same thing more than once.
    """

    generator_rank: int
    """Rank of the generator that sampled the rollout, holds its arrays and frees them."""
    branches: tuple[StoredBranch, ...]
    finish_reason: FinishReason
    episode: int = 0
    """Place of the response or episode in its group."""
    agent: int = 0
    """Which of the environment's agents sampled it, by its place in the config."""

    @property
    def text(self) -> str:
        """The text of the response, or those of all branches, one after the other."""
        return "\n\n".join(branch.text for branch in self.branches)

    @property
    def num_tokens(self) -> int:
        """What the rollout takes of rows."""
        return sum(branch.num_tokens for branch in self.branches)

    @property
    def num_response_tokens(self) -> int:
        """Sampled, or given by an environment between the model's turns."""
        return sum(branch.num_response_tokens for branch in self.branches)

    @property
    def num_sampled_tokens(self) -> int:
        """Response tokens that the model sampled: those that train."""
        return sum(branch.num_sampled_tokens for branch in self.branches)

    @property
    def version_spans(self) -> tuple[VersionSpan, ...]:
        """Versions of the sampled tokens of all branches, each counted from its branch's prompt."""
        return tuple(span for branch in self.branches for span in branch.version_spans)

    @property
    def first_version(self) -> int:
        """Policy version of the oldest token."""
        return min(span.version for span in self.version_spans)

    @property
    def last_version(self) -> int:
        """Policy version of the newest token."""
        return max(span.version for span in self.version_spans)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """All rollouts of one task; ``rewards`` is None until they are scored.

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
    durations_ms: tuple[int, ...] | None = None
    """How long each rollout's episode took; None where rollouts are responses."""

    @property
    def num_payload_bytes(self) -> int:
        """Memory that the arrays of the group take on their host."""
        return group_num_bytes(
            [
                ref
                for rollout in self.rollouts
                for branch in rollout.branches
                for ref in (branch.prompt, branch.response)
            ]
        )

    @property
    def is_restored(self) -> bool:
        """Whether its arrays are on a disk since before the run was resumed."""
        return self.rollouts[0].branches[0].response.host_id == EVERY_HOST

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
