"""Messages between an environment and the generator that holds its episodes."""

from dataclasses import dataclass

from forgeasync.rollouts.rollout import FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeId:
    """One episode of a group.

    ``group_id`` is the group's own, or a negative number for episodes that no buffer knows of (evaluation).
    """

    group_id: int
    index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledTurn:
    """Facts of one turn of the model; its arrays stay where they were sampled."""

    text: str
    num_tokens: int
    """Number of tokens sampled in this turn."""
    finish_reason: FinishReason
    last_id: int
    """The last sampled token: with finish reason ``stop`` the one that ended the turn."""
    version: int
    """Policy version of the last token."""
