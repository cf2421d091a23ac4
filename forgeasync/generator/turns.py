"""A turn that an engine samples, and what the turns of one episode share."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from forgeasync.config import SamplingSection
from forgeasync.rollouts import BegunTurn, EndedTurn, EpisodeId, FinishReason, LoggedTurn, Trajectory


@dataclass(slots=True, kw_only=True)
class EngineEpisode:
    """What the turns of a response or an episode share."""

    number: int
    """Names it in the engine; another attempt at the same episode has another number."""
    sample: int
    """Place of the response or episode in its group."""
    agent: int = 0
    attempt: int = 0
    num_requests: int = 0
    is_cancelled: bool = False


@dataclass(slots=True, kw_only=True)
class EngineTurn:
    """A turn that the engine samples, with the tokens before it."""

    episode: EngineEpisode
    trajectory: Trajectory
    number: int = 0
    """Its place among the turns of its episode."""
    after: int | None = None
    """The turn that it follows."""
    restored: LoggedTurn | None = None
    """What another engine has sampled of the turn, until this one goes on from it."""
    is_claimable: bool = False
    """Whether the turn was restored, and nobody has asked for it again."""
    log_key: int | None = None
    """Names the turn in the log of what is in flight; None where it is not logged."""
    finish_reason: FinishReason | None = None
    """Why the turn ended; None until it has."""
    has_end_token: bool = False
    """Whether the turn ended with a token of its own, not with a text of ``stop`` or at a bound."""
    stop: tuple[str, ...] = ()
    """The texts that end the turn."""
    stop_text: str | None = None
    """The one of them that has ended it."""

    def continued(self) -> "EngineTurn":
        """A new turn after this one."""
        return EngineTurn(episode=self.episode, trajectory=self.trajectory.continued(), after=self.number)

    def begun(self, group_id: int) -> BegunTurn:
        """The turn before anything of it is sampled, for the log of what is in flight."""
        episode = self.episode
        return BegunTurn(
            # Given by the log.
            key=0,
            episode=EpisodeId(
                group_id=group_id, index=episode.sample, attempt=episode.attempt, agent=episode.agent
            ),
            number=self.number,
            after=self.after,
            num_tokens_before=self.trajectory.num_tokens_before,
            given_ids=self.trajectory.given_ids,
        )

    def ended(self, key: int) -> EndedTurn:
        """How the turn has ended, for the same log."""
        assert self.finish_reason is not None
        return EndedTurn(
            key=key,
            num_tokens=self.trajectory.num_sampled,
            finish_reason=self.finish_reason,
            has_end_token=self.has_end_token,
            stop_text=self.stop_text,
        )


def check_continued(
    continued: Sequence[LoggedTurn], prompt_ids_P: np.ndarray, num_samples: int, sampling: SamplingSection
) -> None:
    """Check that what another engine has sampled of a group belongs to these responses.

    Raises:
        ValueError: it does not; names field, value and what would be right.
    """
    seen: set[int] = set()
    for turn in continued:
        index = turn.begun.episode.index
        if index >= num_samples or index in seen or turn.begun.number:
            raise ValueError(
                f"continued: turn {turn.begun.number} of response {index}; a group of {num_samples} "
                f"responses has one turn of each, numbered from 0 to {num_samples - 1}"
            )
        seen.add(index)
        if not np.array_equal(turn.begun.given_ids, prompt_ids_P):
            raise ValueError(
                f"continued: response {index} has another prompt, of {len(turn.begun.given_ids)} tokens; it "
                f"must be the group's, of {len(prompt_ids_P)}"
            )
        if turn.num_tokens > sampling.max_response_tokens:
            raise ValueError(
                f"continued: {turn.num_tokens} tokens of response {index}; must be at most "
                f"max_response_tokens = {sampling.max_response_tokens}"
            )
