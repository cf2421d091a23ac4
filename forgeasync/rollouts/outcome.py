"""What came of an episode: how it ended, what it scored, and what was said in it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from forgeasync.config import Ending
from forgeasync.rollouts.rollout import VersionRange, spanned
from forgeasync.rollouts.score import Score


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
    """The policy versions that sampled its turns; None if it took none, or if nobody knows them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeOutcome:
    """The outcome of one attempt at an episode."""

    ending: Ending
    agents: tuple[AgentOutcome, ...]
    """By the agents' order in the config."""
    episode_s: float
    sampling_s: float
    """Time in which at least one turn was under way."""
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
