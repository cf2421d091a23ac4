"""The seam between messages and tokens."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from forgeasync.environments.messages import (
    ASSISTANT,
    BrokenToolCall,
    Message,
    ToolCall,
    ToolSpec,
    checked_message,
)
from forgeasync.rollouts import SampledTurn


class BridgeRefused(ValueError):
    """Messages cannot be appended to a path; render the conversation anew instead (``rendered_anew``)."""


class NoCallOpening(ValueError):
    """A turn cannot be made to begin with a call of a tool."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """Messages whose tokens are in a trajectory; the last one is the model's, unless there are none yet.

    One path from the root of a trajectory's tree: what other branches have is not in it.
    """

    messages: tuple[Message, ...] = ()
    turns: Mapping[int, SampledTurn]
    """The model's turns, by their indices among the messages. An assistant's message that is not among them
    was written by someone else, and its tokens were given."""
    token_ids: Sequence[int] = ()
    """All tokens of the path, the last turn's included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedTurn:
    """What the model's tokens of one turn say."""

    text: str
    """What the model says to whom it talks: without reasoning, tool calls and special tokens."""
    reasoning: str | None = None
    """None where the model's format has none, or the model wrote none."""
    tool_calls: tuple[ToolCall, ...] = ()
    broken_tool_calls: tuple[BrokenToolCall, ...] = ()


class MessageRenderer(Protocol):
    """Renders messages as the tokens to append, and parses the tokens of a turn; for one tokenizer."""

    @property
    def reserved(self) -> Sequence[str]:
        """Texts that would become tokens with a meaning for conversations; see ``reserved.py``."""
        ...

    def added_ids(
        self, conversation: Conversation, messages: tuple[Message, ...], tools: Sequence[ToolSpec] = ()
    ) -> np.ndarray:
        """Return the token ids, int32, to append to the path of ``conversation`` so that it ends where the
        model answers ``messages``, which continue the conversation's messages.

        The tokens of the path stay as they are. ``tools`` are the same for all turns of a path.

        Raises:
            BridgeRefused: the messages can be rendered, but not after this path.
            ValueError: the messages cannot be rendered, for instance because the chat template fails or
                changes what came before.
        """
        ...

    def answer_ids(
        self, messages: tuple[Message, ...], answer: Message, tools: Sequence[ToolSpec] = ()
    ) -> np.ndarray:
        """Return the token ids, int32, that a model would sample to say ``answer`` after ``messages``.

        They end with what ends a turn, where the format has that. For an answer that has no sampled tokens.

        Raises:
            ValueError: the answer cannot be rendered.
        """
        ...

    def text_of(self, ids: Sequence[int]) -> str:
        """Return the text of tokens without special ones, as ``SampledTurn.text`` has it."""
        ...

    def parse(
        self, before_ids: Sequence[int], turn: SampledTurn, tools: Sequence[ToolSpec] = ()
    ) -> ParsedTurn:
        """Parse a turn that was sampled after ``before_ids``; never raises for what a model wrote."""
        ...


def call_opening(renderer: MessageRenderer, tools: Sequence[ToolSpec]) -> np.ndarray:
    """Return the tokens, int32, with which a turn begins that calls one of ``tools`` at once.

    They are what such calls have in common as the renderer writes them: up to the name of the tool, or up to
    its arguments where there is one tool.

    Raises:
        NoCallOpening: the format has no tool calls, or what they begin with does not make a call of it.
    """

    def answer(name: str | None, **arguments: int) -> list[int]:
        message: dict[str, object] = {"role": ASSISTANT, "content": "x"}
        if name is not None:
            call = ToolCall(id="call_0", name=name, arguments=arguments)
            message |= {"content": "", "tool_calls": [call.message_form]}
        told = ToolSpec(name=name or "x", description="", parameters={"type": "object", "properties": {}})
        return renderer.answer_ids(question, checked_message("a call", message), (told,)).tolist()

    question = ({"role": "user", "content": "x"},)
    # Of several tools no name is given, so that calls with any two names show what comes before it.
    names = [tools[0].name] if len(tools) == 1 else ["a", "b"]
    try:
        calls = [answer(name, **more) for name in names for more in ({}, {"x": 1})]
        others = [answer(None)] + [answer("x" + name) for name in names if len(tools) == 1]
    except ValueError as error:
        raise NoCallOpening(
            f"the model's format has no tool calls that a turn can begin with: {error}"
        ) from error
    alike = itertools.takewhile(lambda ids: len(set(ids)) == 1, zip(*calls, strict=False))
    opening = [ids[0] for ids in alike]
    if any(other[: len(opening)] == opening for other in others):
        raise NoCallOpening(
            "a turn cannot be made to call a tool: the model's format writes its name too late"
        )
    return np.asarray(opening, np.int32)
