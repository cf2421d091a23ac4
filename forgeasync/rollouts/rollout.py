"""Rollouts, which a generator samples and the trainer trains on, their groups, and outcomes of episodes.

A ``Rollout`` has its arrays. A ``StoredRollout`` has only small facts and travels in messages, while its
arrays stay in the shared memory of the host where it was sampled (``PayloadRef``).

Shape suffixes: T tokens of one response, P tokens of its prompt.
"""

import mmap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

import numpy as np

from forgeasync.config import Ending
from forgeasync.rollouts.score import Score, Step, Task, steps_of
from forgeasync.rollouts.token_records import KeptTokens, RoutedExperts


class FinishReason(StrEnum):
    """Reason why a response ended."""

    STOP = "stop"
    """The model ended its response."""
    LENGTH = "length"
    """The response was cut at ``sampling.max_response_tokens``, or an episode's context was full."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionSpan:
    """Token range [start, end) of a response that was sampled entirely under policy ``version``."""

    version: int
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSpan:
    """Token range [start, end) of a response that one request to an engine sampled.

    A response has several requests if a swap or the loss of its generator ended one, or if it has several
    turns.
    """

    request: int
    """Index of the request among those of its response or episode, by which its noise is seeded."""
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionRange:
    """Oldest and newest of the policy versions that sampled something."""

    first: int
    last: int


def spanned(ranges: Iterable[VersionRange | None]) -> VersionRange | None:
    """Return the range from the oldest to the newest version of all ranges; None if all are None."""
    known = [one for one in ranges if one is not None]
    if not known:
        return None
    return VersionRange(first=min(one.first for one in known), last=max(one.last for one in known))


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One sampled response, or one branch of an episode, with the record of every token.

    The response of a branch is everything after its prompt. It includes tokens that an environment gave
    between the model's turns. These given tokens have log-probability 0 and an empty kept set, which must
    not be used.
    """

    prompt_ids_P: np.ndarray
    """Token ids of the prompt, int32."""
    response_ids_T: np.ndarray
    """Token ids of the response, int32."""
    logprobs_T: np.ndarray
    """Log-probabilities under the distribution that was actually sampled from, float32."""
    version_spans: tuple[VersionSpan, ...]
    """Policy versions of the sampled tokens in [0, T), in order."""
    text: str
    finish_reason: FinishReason
    routed_experts: RoutedExperts | None = None
    """Routing of prompt and response, without the last token, which was never an input of the model.

    None if the engine did not record it.
    """
    kept_tokens: KeptTokens | None = None
    """Kept sets of the response tokens; None if the engine did not record them."""
    is_sampled_T: np.ndarray | None = None
    """Whether each response token was sampled by the model, bool; None if all were."""
    request_spans: tuple[RequestSpan, ...] = ()
    """Requests that sampled the tokens, in order."""
    forks: tuple[tuple[int, int], ...] = ()
    """Turns of the branch after which others part from it, in order: the index of the branch with which the
    turn trains, and the number of tokens up to its end."""

    @property
    def num_response_tokens(self) -> int:
        """Number of response tokens, sampled or not."""
        return len(self.response_ids_T)


EVERY_HOST = ""
"""``host_id`` of a file on a disk that all hosts of the run share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PayloadRef:
    """Location of one payload, with a checksum to verify its bytes.

    The payload is bytes [offset, offset + num_bytes) of ``file``.
    """

    payload_id: str
    """Identifier of the payload, unique in the run."""
    host_id: str
    """Host of the file, or ``EVERY_HOST``."""
    file: str
    """Path of the file on that host."""
    offset: int
    num_bytes: int
    checksum: int
    """xxh3_64 of the payload's body."""


def whole_pages(num_bytes: int) -> int:
    """Return the bytes of memory that a file of ``num_bytes`` takes: rounded up to whole pages."""
    return -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


def group_num_bytes(refs: Sequence[PayloadRef]) -> int:
    """Return the bytes of memory that a group's file takes, with which its reservation is settled.

    ``refs`` are all references of one ``PayloadWriter.write_group``.
    """
    assert len({ref.file for ref in refs}) == 1, "payloads of several groups"
    return whole_pages(max(ref.offset + ref.num_bytes for ref in refs))


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredBranch:
    """Facts of one training sequence: a response, or one branch of an episode's tree of turns.

    Branches of a group that have equal prompt records share the payload ``prompt``.
    """

    prompt: PayloadRef
    response: PayloadRef
    num_prompt_tokens: int
    """Number of tokens before the first one that trains with this branch."""
    num_response_tokens: int
    """Number of tokens after the prompt, sampled by the model or given by an environment."""
    version_spans: tuple[VersionSpan, ...]
    """Policy versions of the sampled tokens, in order."""
    text: str
    request_spans: tuple[RequestSpan, ...] = ()
    """Requests that sampled the tokens, in order."""
    forks: tuple[tuple[int, int], ...] = ()
    """See ``Rollout.forks``."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens of prompt and response, which the branch takes of a packed row."""
        return self.num_prompt_tokens + self.num_response_tokens

    @property
    def num_sampled_tokens(self) -> int:
        """Number of tokens that the model sampled, which train."""
        return sum(span.end - span.start for span in self.version_spans)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRollout:
    """Facts of a rollout, which travel in messages while its arrays stay where they were sampled.

    A rollout is a response, or everything that one agent sampled in an episode. An episode's rollout has
    several branches if a history was rewritten, or if the agent answered the same messages more than once.
    """

    generator_rank: int
    """Rank of the generator that sampled the rollout, holds its arrays and frees them."""
    branches: tuple[StoredBranch, ...]
    finish_reason: FinishReason
    episode: int = 0
    """Index of the response or episode in its group."""
    agent: int = 0
    """Index of the agent that sampled the rollout, in the order of the environment's config."""

    @property
    def text(self) -> str:
        """Text of the response, or the texts of all branches, separated by blank lines."""
        return "\n\n".join(branch.text for branch in self.branches)

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all branches with their prompts, which the rollout takes of packed rows."""
        return sum(branch.num_tokens for branch in self.branches)

    @property
    def num_response_tokens(self) -> int:
        """Number of tokens after the prompts, sampled by the model or given by an environment."""
        return sum(branch.num_response_tokens for branch in self.branches)

    @property
    def num_sampled_tokens(self) -> int:
        """Number of tokens that the model sampled, which train."""
        return sum(branch.num_sampled_tokens for branch in self.branches)

    @property
    def version_spans(self) -> tuple[VersionSpan, ...]:
        """Policy versions of all branches' sampled tokens, with positions within each branch's response."""
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
    """All rollouts of one task."""

    group_id: int
    """Index of the group in the order in which the buffer admitted groups."""
    draw_id: int
    """Number that seeds the group's random draws: its prompt's position in the data, and the attempt."""
    task: Task
    rollouts: tuple[StoredRollout, ...]
    rewards: tuple[float, ...] | None = None
    """Reward with which each rollout trains, the value of its score after filters; None until scored."""
    scores: tuple[Score, ...] | None = None
    """Score of each rollout; None if only ``rewards`` are known."""
    steps: tuple[tuple[Step, ...], ...] | None = None
    """Rewards of each rollout's steps; None if the scorer gave none."""
    durations_ms: tuple[int, ...] | None = None
    """Duration of each rollout's episode in milliseconds; None if the rollouts are responses."""

    def trained(
        self, rewards: Sequence[float], kept: Sequence[int], scores: Sequence[Score] | None
    ) -> "Group":
        """Return the group with only the rollouts at the indices ``kept``, with their rewards and scores."""
        return replace(
            self,
            rollouts=tuple(self.rollouts[index] for index in kept),
            rewards=tuple(rewards),
            scores=None if scores is None else tuple(scores),
            steps=None if scores is None else steps_of(scores),
        )

    @property
    def num_payload_bytes(self) -> int:
        """Bytes of memory that the group's arrays take on their host."""
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
        """Whether a resumed run restored the group from disk. Its arrays are still there."""
        return self.rollouts[0].branches[0].response.host_id == EVERY_HOST

    @property
    def first_version(self) -> int:
        """Policy version of the oldest token in the group."""
        return min(rollout.first_version for rollout in self.rollouts)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupProgress:
    """A generator's report on a group in flight, made when the generator switches to ``version``."""

    group_id: int
    version: int
    num_running: int
    """Number of rollouts that will sample at least one more token, under ``version`` or a later one."""
    num_tokens: int
    """Number of tokens sampled so far by these rollouts and by those that have ended."""


class ToolStatus(StrEnum):
    """Outcome of a tool call."""

    OK = "ok"
    UNREADABLE = "unreadable"
    """The call could not be parsed, so no tool was called."""
    CUT = "cut"
    """The tool succeeded, and the model saw only part of its result."""
    UNKNOWN_TOOL = "unknown_tool"
    """No tool has the name of the call."""
    BAD_ARGUMENTS = "bad_arguments"
    FAILED = "failed"
    """The tool raised an exception, or reported a failure."""
    TIMEOUT = "timeout"
    """The tool took longer than ``episodes.tool_s``."""
    SERVER_LOST = "server_lost"
    """The tool's server ended or stopped responding."""

    @property
    def is_success(self) -> bool:
        """Whether the tool succeeded."""
        return self in (ToolStatus.OK, ToolStatus.CUT)


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentOutcome:
    """Outcome of one agent in an episode."""

    score: Score | None
    """Score from the environment; None if it gave none."""
    num_turns: int
    versions: VersionRange | None = None
    """Policy versions that sampled the agent's turns; None if it took none, or if they are unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeOutcome:
    """Outcome of one attempt at an episode."""

    ending: Ending
    agents: tuple[AgentOutcome, ...]
    """Outcome of each agent, in the order of the config."""
    episode_s: float
    sampling_s: float
    """Seconds in which at least one turn was being sampled."""
    problem: str | None = None
    """Description of the failure, with environment, task and rollout; None if there was none."""
    record: Mapping[str, Any] | None = None
    """Messages and turns for people to read, as JSON values; None if no record was requested."""
    attempt: int = 0
    episode: int = 0
    """Index of the episode in its group."""
    counts: Counter[str] = field(default_factory=Counter)
    """Counts of events in the episode and in its agents' sessions, by their names in metrics.jsonl."""
    tool_calls_s: tuple[float, ...] = ()
    """Duration in seconds of each call that reached a tool."""

    @property
    def versions(self) -> VersionRange | None:
        """Policy versions that sampled the turns of all agents; None if they are unknown."""
        return spanned(agent.versions for agent in self.agents)

    @property
    def num_turns(self) -> int:
        """Number of turns of all agents."""
        return sum(agent.num_turns for agent in self.agents)


def record_of(outcomes: Sequence[EpisodeOutcome]) -> dict[str, Any] | None:
    """Return the record of an episode's last attempt, with the endings and problems of all attempts.

    Returns None if the last attempt has no record.
    """
    if outcomes[-1].record is None:
        return None
    attempts = [{"ending": one.ending.value, "problem": one.problem} for one in outcomes]
    return {**outcomes[-1].record, "attempts": attempts}


def failed_outcome(problem: str, *, num_agents: int, attempt: int, episode: int) -> EpisodeOutcome:
    """Return the outcome of an episode whose worker died."""
    agent = AgentOutcome(score=None, num_turns=0)
    return EpisodeOutcome(
        ending=Ending.INFRASTRUCTURE,
        agents=(agent,) * num_agents,
        episode_s=0.0,
        sampling_s=0.0,
        problem=problem,
        attempt=attempt,
        episode=episode,
    )
