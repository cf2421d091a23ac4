"""Turns messages into the tokens that are appended to an episode. The model's text is never tokenized again.

With a chat template the whole conversation is rendered with a mark in place of each turn of the model, and
the text after the last mark is tokenized. Everything before it is in the trajectory already, so the template
must render it as it did then: a template that removes or rewrites something is refused. White space at the
edges of a turn may differ, since many templates strip it: the trajectory keeps what was sampled.

A turn ends with a token that the model samples, unless the turn is cut. Templates write it after every turn,
so it is left out where the model has sampled it already.

Without a template only the text of a message counts, not its role: the first one is taken as it is, each
later one after a newline if the tokenizer has one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import jinja2
import numpy as np

from forgeasync.environments.environment import Message
from forgeasync.rollouts.rollout import FinishReason
from forgeasync.rollouts.trajectory import SampledTurn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ASSISTANT = "assistant"

MAX_SHOWN = 80
"""Most characters of a message that an error quotes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """Messages whose tokens are in a trajectory; the last one is the model's, unless there are none yet."""

    messages: tuple[Message, ...] = ()
    turns: Mapping[int, SampledTurn]
    """The model's turns, by their indices among the messages."""

    def continued(self, messages: Sequence[Message]) -> tuple[Message, ...]:
        """Check that ``messages`` continue this conversation, and return copies of them.

        Raises:
            ValueError: a message is malformed or differs from the conversation, or there is nothing to
                answer; names the message.
        """
        if isinstance(messages, Mapping) or not isinstance(messages, Sequence):
            raise ValueError(f"messages must be a list of messages or a string, not {_show(messages)}")
        copies = tuple(_checked(index, message) for index, message in enumerate(messages))
        for index, (said, found) in enumerate(zip(self.messages, copies, strict=False)):
            if said != found:
                raise ValueError(
                    f"messages[{index}] is {_show(found)}, but the conversation so far has {_show(said)} "
                    "there; earlier messages must stay as they are: add messages at the end"
                )
        if len(copies) <= len(self.messages):
            raise ValueError(
                f"there are {len(copies)} messages and none is new: the conversation so far has "
                f"{len(self.messages)}; pass all of it, and at least one message after it"
            )
        if copies[-1]["role"] == ASSISTANT:
            raise ValueError(
                f"messages[{len(copies) - 1}], the last one, has role {ASSISTANT!r}; must be what the model "
                "answers to"
            )
        return copies

    def answered(self, messages: tuple[Message, ...], turn: SampledTurn) -> "Conversation":
        """Return the conversation after the model has answered ``messages``, a continuation of this one."""
        return Conversation(
            messages=(*messages, {"role": ASSISTANT, "content": turn.text}),
            turns={**self.turns, len(messages): turn},
        )


class MessageRenderer:
    """Renders messages for one tokenizer.

    Raises ValueError if ``chat_template`` is true and the tokenizer has no template.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", *, chat_template: bool) -> None:
        if chat_template and tokenizer.chat_template is None:
            raise ValueError(
                f"data.chat_template = true: the tokenizer of {tokenizer.name_or_path!r} has no template; "
                "must be false, or the model folder must have a chat template"
            )
        self._tokenizer = tokenizer
        self._chat_template = chat_template
        self._newline = "\n" if _has_newline(tokenizer) else ""

    def added_ids(self, conversation: Conversation, messages: tuple[Message, ...]) -> np.ndarray:
        """Return the token ids, int32, to append to the trajectory of ``conversation`` so that it ends where
        the model answers ``messages``, a continuation of it.

        Raises:
            ValueError: the chat template fails, or does not only append.
        """
        if not self._chat_template:
            new = messages[len(conversation.messages) :]
            newlines = [self._newline if index or conversation.messages else "" for index in range(len(new))]
            pieces = [
                self._encode(newline + message["content"])
                for newline, message in zip(newlines, new, strict=True)
            ]
            return np.asarray([token for piece in pieces for token in piece], np.int32)
        if not conversation.turns:
            return np.asarray(self._encode(self._render(messages)), np.int32)
        ids = self._encode(self._text_after_last_turn(conversation, messages))
        last_turn = conversation.turns[len(conversation.messages) - 1]
        return np.asarray(self._without_sampled_end(ids, last_turn), np.int32)

    def _text_after_last_turn(self, conversation: Conversation, messages: tuple[Message, ...]) -> str:
        marks = {index: f"\ue000{index}\ue001" for index in conversation.turns}
        marked = [
            {**message, "content": marks[index]} if index in marks else message
            for index, message in enumerate(messages)
        ]
        last = len(conversation.messages) - 1
        before, after = self._render(marked[:last]), self._render(marked)
        for index, mark in marks.items():
            if after.count(mark) != 1:
                raise ValueError(
                    f"the chat template renders messages[{index}], a turn of the model, "
                    f"{after.count(mark)} times once other messages follow it; must be once: it must only "
                    "append to what it has rendered before"
                )
        head, _, tail = after.partition(marks[last])
        if head.rstrip() != before.rstrip():
            now, then = _from_difference(head, before), _from_difference(before, head)
            raise ValueError(
                f"the chat template does not only append: before messages[{last}] it now renders "
                f"{_show(now)} where it had {_show(then)}"
            )
        written = after
        for index, mark in marks.items():
            written = written.replace(mark, messages[index]["content"])
        real = self._render(messages)
        if "".join(real.split()) != "".join(written.split()):
            raise ValueError(
                "the chat template does not only append: it leaves out or changes what the model wrote in an "
                "earlier turn (its reasoning, for instance), which is in the trajectory and was attended to; "
                "use a template that keeps it"
            )
        return tail

    def _without_sampled_end(self, ids: list[int], last_turn: SampledTurn) -> list[int]:
        """Return the token ids after a turn, without the end of that turn if the model has sampled it."""
        if last_turn.finish_reason is not FinishReason.STOP:
            return ids
        for position, token in enumerate(ids):
            if token == last_turn.last_id:
                return ids[position + 1 :]
            if self._tokenizer.decode([token]).strip():
                break
        return ids

    def _render(self, messages: Sequence[Message]) -> str:
        try:
            rendered = self._tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=True
            )
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template refuses these messages: {error}") from error
        assert isinstance(rendered, str)
        return rendered

    def _encode(self, text: str) -> list[int]:
        # A template writes its special tokens itself.
        return self._tokenizer(text, add_special_tokens=False)["input_ids"]


def _checked(index: int, message: object) -> Message:
    if not isinstance(message, Mapping):
        raise ValueError(
            f"messages[{index}] is {_show(message)}; must read {{'role': 'user', 'content': '...'}}"
        )
    for key in ("role", "content"):
        if not isinstance(message.get(key), str):
            raise ValueError(f"messages[{index}]: its {key!r} is {_show(message.get(key))}; must be a string")
    return dict(message)


def _show(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= MAX_SHOWN else shown[:MAX_SHOWN] + "..."


def _from_difference(text: str, other: str) -> str:
    """Return ``text`` from shortly before the first character in which it differs from ``other``."""
    index = next(
        (i for i, (a, b) in enumerate(zip(text, other, strict=False)) if a != b), min(len(text), len(other))
    )
    return text[max(0, index - 10) :]


def _has_newline(tokenizer: "PreTrainedTokenizerBase") -> bool:
    ids = tokenizer("\n", add_special_tokens=False)["input_ids"]
    return bool(ids) and tokenizer.unk_token_id not in ids and "\n" in tokenizer.decode(ids)
