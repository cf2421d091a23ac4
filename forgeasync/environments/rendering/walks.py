"""Takes a renderer through a conversation turn by turn, as an agent does, with turns of given texts."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from forgeasync.environments.messages import ASSISTANT, Message, ToolSpec
from forgeasync.environments.rendering.probes import Dialogue
from forgeasync.environments.rendering.renderer import Conversation, MessageRenderer, ParsedTurn
from forgeasync.rollouts import FinishReason, SampledTurn, text_of_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Retokenized = Callable[[np.ndarray], np.ndarray]
"""Other tokens for the same text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What was given before one turn of the model, and the turn."""

    index: int
    """Of the turn's message."""
    given_ids: np.ndarray
    turn: SampledTurn


@dataclass(frozen=True, slots=True, kw_only=True)
class Walk:
    """A path of tokens through a conversation, up to where the model answers its last message."""

    steps: tuple[Step, ...]
    last_given_ids: np.ndarray
    conversation: Conversation
    """Up to the last turn."""

    @property
    def ids(self) -> list[int]:
        return [*self.conversation.token_ids, *self.last_given_ids.tolist()]


def walk(
    renderer: MessageRenderer,
    tokenizer: "PreTrainedTokenizerBase",
    dialogue: Dialogue,
    retokenized: Retokenized = lambda ids: ids,
) -> Walk:
    """Have the model say every assistant's message of ``dialogue`` as the renderer's own format has it.

    Raises:
        ValueError: the renderer refuses a message.
    """
    steps: list[Step] = []
    conversation = Conversation(turns={})
    messages = dialogue.messages
    for index, message in enumerate(messages):
        if message["role"] != ASSISTANT:
            continue
        given = renderer.added_ids(conversation, messages[:index], dialogue.tools)
        ids = retokenized(renderer.answer_ids(messages[:index], message, dialogue.tools))
        turn = sampled(tokenizer, ids, number=len(steps))
        steps.append(Step(index=index, given_ids=given, turn=turn))
        conversation = Conversation(
            messages=messages[: index + 1],
            turns={**conversation.turns, index: turn},
            token_ids=[*conversation.token_ids, *given.tolist(), *ids.tolist()],
        )
    last = renderer.added_ids(conversation, messages, dialogue.tools)
    return Walk(steps=tuple(steps), last_given_ids=last, conversation=conversation)


def sampled(
    tokenizer: "PreTrainedTokenizerBase",
    ids: np.ndarray,
    *,
    number: int,
    finish_reason: FinishReason = FinishReason.STOP,
) -> SampledTurn:
    """A turn as a generator reports it."""
    text = text_of_ids(tokenizer, ids.tolist(), skip_special_tokens=True)
    return SampledTurn(
        turn=number, ids_T=ids, text=text, finish_reason=finish_reason, first_version=0, version=0
    )


def message_of(parsed: ParsedTurn) -> Message:
    """A turn as the message that continues the conversation."""
    message: dict[str, Any] = {"role": ASSISTANT, "content": parsed.text}
    if parsed.reasoning is not None:
        message["reasoning_content"] = parsed.reasoning
    if parsed.tool_calls:
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": dict(call.arguments)},
            }
            for call in parsed.tool_calls
        ]
    return message


def other_tokens(tokenizer: "PreTrainedTokenizerBase", rng: random.Random) -> Retokenized:
    """Tokenizations that a model can sample and a tokenizer would never choose."""
    whole = frozenset(tokenizer.get_added_vocab().values()) | frozenset(tokenizer.all_special_ids)

    def retokenized(ids: np.ndarray) -> np.ndarray:
        made: list[int] = []
        run: list[int] = []
        for token in [*ids.tolist(), None]:
            if token is None or token in whole:
                made += _split(tokenizer, run, rng)
                made += [] if token is None else [token]
                run = []
            else:
                run.append(token)
        return np.asarray(made, np.int32)

    return retokenized


def _split(tokenizer: "PreTrainedTokenizerBase", ids: list[int], rng: random.Random) -> list[int]:
    """Tokenize a run of text in pieces; as it was if that changes the text."""
    text = tokenizer.decode(ids, skip_special_tokens=False)
    pieces: list[int] = []
    start = 0
    while start < len(text):
        end = start + rng.randint(1, 6)
        pieces += tokenizer(text[start:end], add_special_tokens=False)["input_ids"]
        start = end
    same = tokenizer.decode(pieces, skip_special_tokens=False) == text
    return pieces if same else ids


def rendered_at_once(
    renderer: MessageRenderer, messages: Sequence[Message], tools: Sequence[ToolSpec]
) -> list[int]:
    """All messages as one first prompt, from their text."""
    return renderer.added_ids(Conversation(turns={}), tuple(messages), tools).tolist()
