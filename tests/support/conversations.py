"""Conversations of a scripted model with a renderer, and the tokens that they must have."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerFast

from forgeasync.environments import (
    Conversation,
    Message,
    MessageRenderer,
    ToolSpec,
    Turn,
    checked_message,
    sampled,
)
from forgeasync.rollouts import FinishReason, SampledTurn


class Talk:
    """One path, kept as an agent keeps it; ``received`` is what an engine would have got and made."""

    def __init__(
        self, renderer: MessageRenderer, tokenizer: PreTrainedTokenizerFast, tools: Sequence[ToolSpec] = ()
    ) -> None:
        self.renderer = renderer
        self.tokenizer = tokenizer
        self.tools = tuple(tools)
        self.conversation = Conversation(turns={})
        self.received: list[int] = []

    def say(self, ids: Sequence[int], *, cut: bool = False) -> Turn:
        """Have the model sample these tokens."""
        turn = sampled(
            self.tokenizer,
            np.asarray(ids, np.int32),
            number=len(self.conversation.turns),
            finish_reason=FinishReason.LENGTH if cut else FinishReason.STOP,
        )
        parsed = self.renderer.parse(tuple(self.received), turn, self.tools)
        index = len(self.messages)
        self.received += turn.ids_T.tolist()
        self.conversation = Conversation(
            messages=(*self.messages, checked_message("a turn", parsed.message)),
            turns={**self.conversation.turns, index: turn},
            token_ids=tuple(self.received),
        )
        self.messages = self.conversation.messages
        return parsed

    messages: tuple[Message, ...] = ()

    def hear(self, *new: Message) -> list[int]:
        """Append messages; returns their tokens."""
        messages = (*self.messages, *new)
        ids = self.renderer.added_ids(self.conversation, messages, self.tools)
        assert ids.dtype == np.int32
        self.received += ids.tolist()
        self.messages = messages
        return ids.tolist()

    def say_text(self, text: str, *, cut: bool = False) -> Turn:
        """Have the model sample a text, and what ends a turn unless it is cut."""
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return self.say(ids if cut else [*ids, self.tokenizer.eos_token_id], cut=cut)

    @property
    def text(self) -> str:
        return self.tokenizer.decode(self.received, skip_special_tokens=False)


def turn_of(tokenizer: PreTrainedTokenizerFast, text: str, **facts: Any) -> SampledTurn:
    """A turn of this text."""
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return sampled(tokenizer, np.asarray(ids, np.int32), **{"number": 0, **facts})
