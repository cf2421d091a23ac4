"""Renders conversations for models without a chat template.

Only the text of a message counts, not its role: the first one is taken as it is, each later one after a
newline if the tokenizer has one.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from forgeasync.environments.messages import Message, ToolSpec
from forgeasync.environments.rendering.renderer import Conversation, ParsedTurn
from forgeasync.rollouts import SampledTurn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class PlainRenderer:
    """A ``MessageRenderer`` that writes texts one after the other."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        self._tokenizer = tokenizer
        self._newline = "\n" if _has_newline(tokenizer) else ""

    @property
    def reserved(self) -> Sequence[str]:
        """None: what an environment writes is all the format that there is."""
        return ()

    def added_ids(
        self, conversation: Conversation, messages: tuple[Message, ...], tools: Sequence[ToolSpec] = ()
    ) -> np.ndarray:
        _refuse(tools)
        ids: list[int] = []
        for index in range(len(conversation.messages), len(messages)):
            text = (self._newline if index else "") + messages[index]["content"]
            ids += self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return np.asarray(ids, np.int32)

    def answer_ids(
        self, messages: tuple[Message, ...], answer: Message, tools: Sequence[ToolSpec] = ()
    ) -> np.ndarray:
        _refuse(tools)
        ids = self._tokenizer(answer["content"], add_special_tokens=False)["input_ids"]
        end = self._tokenizer.eos_token_id
        return np.asarray(ids if end is None else [*ids, end], np.int32)

    def text_of(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def parse(
        self, before_ids: Sequence[int], turn: SampledTurn, tools: Sequence[ToolSpec] = ()
    ) -> ParsedTurn:
        return ParsedTurn(text=turn.text)


def _refuse(tools: Sequence[ToolSpec]) -> None:
    if tools:
        raise ValueError(
            f"tools: {tools[0].name!r} was given, but without a chat template there is no form in which "
            "the model could be told of it; set data.chat_template: true, or describe it in a message"
        )


def _has_newline(tokenizer: "PreTrainedTokenizerBase") -> bool:
    ids = tokenizer("\n", add_special_tokens=False)["input_ids"]
    return bool(ids) and tokenizer.unk_token_id not in ids and "\n" in tokenizer.decode(ids)
