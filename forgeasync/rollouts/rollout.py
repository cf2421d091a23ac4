"""Rollouts, which a generator samples and a trainer learns from, their groups, and the outcomes of episodes.

A ``Rollout`` has its arrays. A ``StoredRollout`` has facts only and travels in messages, while its arrays
stay in the shared memory of the host where it was sampled (``PayloadRef``).

Shape suffixes: T tokens of one response, P tokens of its prompt.
"""

import mmap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np

from forgeasync.config import Ending
from forgeasync.rollouts.score import Score, Step, Task
from forgeasync.rollouts.token_records import KeptTokens, RoutedExperts


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


EVERY_HOST = ""
"""``host_id`` of a file on a disk that all hosts of the run see."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PayloadRef:
    """The place of one payload, and how to verify that its bytes are the right ones.

    ``file`` is a path on the host ``host_id``, or on ``EVERY_HOST``; the payload is its bytes [offset,
    offset + num_bytes).
    ``checksum`` is the xxh3_64 of the payload's body; ``payload_id`` is unique in the run.
    """

    payload_id: str
    host_id: str
    file: str
    offset: int
    num_bytes: int
    checksum: int


def whole_pages(num_bytes: int) -> int:
    """Return the bytes that a file of ``num_bytes`` takes of its host's memory."""
    return -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


def group_num_bytes(refs: Sequence[PayloadRef]) -> int:
    """What the file of a group takes of its host's memory, in bytes: the size to settle a reservation with.

    ``refs`` are all references of one ``PayloadWriter.write_group``.
    """
    assert len({ref.file for ref in refs}) == 1, "payloads of several groups"
    return whole_pages(max(ref.offset + ref.num_bytes for ref in refs))


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


class ToolStatus(StrEnum):
    """What came of a call of a tool."""

    OK = "ok"
    UNREADABLE = "unreadable"
    """It was half a call, or none at all, so that no tool was called."""
    CUT = "cut"
    """It succeeded and said more than the model was told."""
    UNKNOWN_TOOL = "unknown_tool"
    """There is no tool of that name."""
    BAD_ARGUMENTS = "bad_arguments"
    FAILED = "failed"
    """The tool raised, or said that it failed."""
    TIMEOUT = "timeout"
    """It took longer than ``episodes.tool_s``."""
    SERVER_LOST = "server_lost"
    """Its server ended, or did not answer any more."""

    @property
    def is_success(self) -> bool:
        """Whether the tool has done what it was called for."""
        return self in (ToolStatus.OK, ToolStatus.CUT)


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentOutcome:
    """What one agent has done in an episode."""

    score: Score | None
    """None where the environment gave it none."""
    num_turns: int
    num_rewritten: int
    """Times that a history was rewritten and began another branch."""
    num_faulty_calls: int
    """Tool calls that could not be read."""
    tool_calls: Mapping[ToolStatus, int] = field(default_factory=dict)
    """Calls of tools, by what came of them."""
    tool_calls_s: tuple[float, ...] = ()
    """Seconds that each call took for which a tool was called."""
    num_from_text: int = 0
    """The model's earlier messages that came back changed, so that their tokens had to be made from text."""
    num_reserved: int = 0
    """Texts of tokens with a meaning for conversations that stood in messages from outside."""
    session_counts: Mapping[str, int] = field(default_factory=dict)
    """What has happened in the agent's session, by name; empty if it had none."""
    versions: VersionRange | None = None
    """The policy versions that sampled its turns; None if it took none, or if they are unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeOutcome:
    """The outcome of one attempt at an episode."""

    ending: Ending
    agents: tuple[AgentOutcome, ...]
    """By the agents' order in the config."""
    episode_s: float
    sampling_s: float
    """Time in which at least one turn was being sampled."""
    problem: str | None = None
    """What went wrong, with environment, task and rollout; None where nothing did."""
    record: Mapping[str, Any] | None = None
    """Messages and turns for people to read, as JSON values; None where nobody asked for them."""
    num_cut_bytes: int = 0
    """Bytes of messages that the record has no room for."""
    attempt: int = 0
    episode: int = 0
    """Place of the episode in its group."""
    num_artifacts: int = 0
    """Files that it kept."""
    num_refused_artifacts: int = 0
    """Files that were too many or too large to keep."""

    @property
    def versions(self) -> VersionRange | None:
        """The policy versions that sampled the turns of all agents."""
        return spanned(agent.versions for agent in self.agents)

    @property
    def num_turns(self) -> int:
        """Turns of all agents."""
        return sum(agent.num_turns for agent in self.agents)


def record_of(outcomes: Sequence[EpisodeOutcome]) -> dict[str, Any] | None:
    """Return the record of an episode's last attempt, with the endings of all attempts.

    None where its last attempt has no record.
    """
    if outcomes[-1].record is None:
        return None
    attempts = [{"ending": one.ending.value, "problem": one.problem} for one in outcomes]
    return {**outcomes[-1].record, "attempts": attempts}


def lost_outcome(problem: str, *, num_agents: int, attempt: int, episode: int) -> EpisodeOutcome:
    """Return the outcome of an episode whose worker is gone."""
    agent = AgentOutcome(score=None, num_turns=0, num_rewritten=0, num_faulty_calls=0)
    return EpisodeOutcome(
        ending=Ending.INFRASTRUCTURE,
        agents=(agent,) * num_agents,
        episode_s=0.0,
        sampling_s=0.0,
        problem=problem,
        attempt=attempt,
        episode=episode,
    )
