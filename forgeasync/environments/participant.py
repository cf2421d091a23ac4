"""What an episode needs of its agents besides their turns, whoever samples them."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from forgeasync.environments.branches import RecordedBranch
from forgeasync.environments.environment import NamedAgent
from forgeasync.rollouts import AgentOutcome, Score, ToolStatus, VersionRange


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentRole:
    """An agent of the environment, as the config describes it."""

    name: str
    is_trainable: bool


class Participant(NamedAgent, Protocol):
    """An agent of an episode, with what is said of it when the episode has ended."""

    num_rewritten: int
    """Times that a history was rewritten and began another branch."""
    num_faulty_calls: int
    """Tool calls of the model that could not be read."""
    num_from_text: int
    """Assistant's messages of rewritten histories whose tokens had to be made from text."""
    num_reserved: int
    """Texts of tokens with a meaning for conversations that stood in messages from outside."""
    tool_calls: Counter[ToolStatus]
    """Calls of tools, by what came of them."""
    tool_calls_s: list[float]
    """Seconds that each of these calls took, but for those that no tool was called for."""
    has_given_url: bool
    """Whether turns may have been taken that are not counted."""
    has_hit_length: bool
    """Whether there was no room for another turn."""
    has_hit_max_turns: bool
    is_cancelled: bool
    """The group was given up during a turn."""
    failure: Exception | None
    """Why a turn could not be sampled, even if the environment went on without it: ``EpisodeInterrupted``
    ends the episode, anything else the run."""

    @property
    def num_turns(self) -> int:
        """Number of turns that the model has taken."""
        ...

    @property
    def session_counts(self) -> Mapping[str, int]:
        """What has happened in the agent's session; empty if it had none."""
        ...

    @property
    def versions(self) -> VersionRange | None:
        """The policy versions that sampled them; None if there are none, or the model is not ours."""
        ...

    def branches(self) -> list[RecordedBranch]:
        """Return all its conversations, for people."""
        ...

    def close(self) -> None:
        """Refuse further turns."""
        ...

    async def leave(self) -> None:
        """Give back what belongs to the event loop of the episode, on that loop."""
        ...


def outcome_of(agent: Participant, score: Score | None) -> AgentOutcome:
    """Return what an agent has done in an episode that has ended."""
    return AgentOutcome(
        score=score,
        num_turns=agent.num_turns,
        num_rewritten=agent.num_rewritten,
        num_faulty_calls=agent.num_faulty_calls,
        tool_calls=dict(agent.tool_calls),
        tool_calls_s=tuple(agent.tool_calls_s),
        num_from_text=agent.num_from_text,
        num_reserved=agent.num_reserved,
        session_counts=agent.session_counts,
        versions=agent.versions,
    )
