"""The agent of one episode: checks and renders messages, and has a generator sample the model's turns."""

from collections.abc import Awaitable, Callable, Sequence

import numpy as np

from forgeasync.environments.conversation import Conversation, MessageRenderer
from forgeasync.environments.environment import ContextFull, Message, Turn
from forgeasync.rollouts.trajectory import SampledTurn

SampleTurn = Callable[[np.ndarray, int], Awaitable[SampledTurn | None]]
"""Appends token ids to the episode's trajectory and samples at most this many tokens. Returns None if the
episode's group was given up."""


class EpisodeOver(RuntimeError):
    """The episode has ended or was given up: no further turn is sampled."""


class EpisodeAgent:
    """An ``Agent`` whose trajectory is kept by a generator."""

    def __init__(
        self,
        sample: SampleTurn,
        renderer: MessageRenderer,
        *,
        max_turn_tokens: int,
        max_context_length: int,
    ) -> None:
        self._sample = sample
        self._renderer = renderer
        self._max_turn_tokens = max_turn_tokens
        self._max_context_length = max_context_length
        self._conversation = Conversation(turns={})
        self._num_tokens = 0
        self._is_responding = False
        self._is_closed = False
        self.is_cancelled = False
        """The group was given up during a turn."""
        self.failure: Exception | None = None
        """Why the generator could not sample a turn, even if the environment went on without it."""

    @property
    def num_turns(self) -> int:
        """Number of turns that the model has taken."""
        return len(self._conversation.turns)

    def close(self) -> None:
        """Refuse further turns."""
        self._is_closed = True

    async def respond(self, messages: str | Sequence[Message]) -> Turn:
        """See ``Agent``.

        Raises:
            EpisodeOver: the episode has ended.
        """
        if self._is_closed:
            raise EpisodeOver("respond was called after the episode had ended; call it within rollout only")
        if self._is_responding:
            raise ValueError(
                "respond was called while a turn is being sampled; await each turn before the next call"
            )
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        continued = self._conversation.continued(messages)
        given_ids = self._renderer.added_ids(self._conversation, continued)
        num_before = self._num_tokens + len(given_ids)
        if not num_before:
            raise ValueError(f"messages[{len(continued) - 1}] has no tokens; a prompt must have at least one")
        if num_before >= self._max_context_length:
            raise ContextFull(
                f"the conversation has {num_before} tokens before turn {self.num_turns + 1} of the model; "
                f"model.max_context_length = {self._max_context_length} leaves no room for it"
            )
        max_tokens = min(self._max_turn_tokens, self._max_context_length - num_before)
        self._is_responding = True
        try:
            turn = await self._sample(given_ids, max_tokens)
        except Exception as error:
            self.failure = error
            self.close()
            raise
        finally:
            self._is_responding = False
        if turn is None:
            self.is_cancelled = True
            self.close()
            raise EpisodeOver("the group of the episode was given up")
        self._conversation = self._conversation.answered(continued, turn)
        self._num_tokens = num_before + turn.num_tokens
        return Turn(text=turn.text, num_tokens=turn.num_tokens, finish_reason=turn.finish_reason)
