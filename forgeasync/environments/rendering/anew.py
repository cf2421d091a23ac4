"""Renders a conversation whose earlier messages were changed, and keeps what the model has said in it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from forgeasync.environments.messages import ASSISTANT, Message, ToolSpec
from forgeasync.environments.rendering.renderer import BridgeRefused, Conversation, MessageRenderer
from forgeasync.rollouts import FinishReason, SampledTurn


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderedAnew:
    """All tokens of a conversation, up to where the model answers."""

    ids_S: np.ndarray
    """int32."""
    starts: Mapping[int, int]
    """Where the tokens of the model's own turns begin, by the indices of their messages."""
    num_from_text: int
    """Number of assistant's messages whose tokens had to be made from text."""


class _FromText(Exception):
    """Messages up to ``last`` must be rendered together, from their text; with ``only``, that one alone."""

    def __init__(self, *, last: int, only: bool) -> None:
        self.last = last
        self.only = only


def rendered_anew(
    renderer: MessageRenderer,
    messages: tuple[Message, ...],
    known_turns: Mapping[int, SampledTurn],
    tools: Sequence[ToolSpec] = (),
) -> RenderedAnew:
    """Render a whole conversation that continues none.

    ``known_turns`` are the model's own turns that stand in it unchanged, by their indices among the messages:
    their sampled tokens are put in as they are. Everything else is tokenized from text, and so is a turn
    after which nothing can be appended (``BridgeRefused``).

    Raises:
        ValueError: the messages cannot be rendered.
    """
    known = dict(known_turns)
    while True:
        try:
            return _spliced(renderer, messages, known, tools)
        except _FromText as error:
            # Each time there is one known turn less, or none before what is rendered together.
            known = {
                index: turn
                for index, turn in known.items()
                if index != error.last and (error.only or index > error.last)
            }


def _spliced(
    renderer: MessageRenderer,
    messages: tuple[Message, ...],
    known: Mapping[int, SampledTurn],
    tools: Sequence[ToolSpec],
) -> RenderedAnew:
    answers = [index for index, message in enumerate(messages) if message["role"] == ASSISTANT]
    first = min(known, default=len(messages))
    # What others said before the model's first turn is part of its prompt.
    ours_or_later = [index for index in answers if index >= first]
    path: list[int] = []
    starts: dict[int, int] = {}
    conversation = Conversation(turns={})
    for index in [*ours_or_later, len(messages)]:
        last = len(conversation.messages) - 1
        try:
            added = renderer.added_ids(conversation, messages[:index], tools)
        except BridgeRefused as error:
            assert last >= 0, "a first prompt is appended to nothing"
            raise _FromText(last=last, only=last in known) from error
        path += added.tolist()
        if index == len(messages):
            break
        turn = known.get(index)
        if turn is None:
            try:
                ids = renderer.answer_ids(messages[:index], messages[index], tools)
            except ValueError as error:
                raise _FromText(last=index, only=False) from error
            # The turn is of no tree, and nothing reads its number or version.
            turn = SampledTurn(
                turn=-1,
                ids_T=ids,
                text=messages[index]["content"],
                finish_reason=FinishReason.STOP,
                first_version=-1,
                version=-1,
            )
        else:
            starts[index] = len(path)
        path += turn.ids_T.tolist()
        conversation = Conversation(
            messages=messages[: index + 1],
            turns={**conversation.turns, index: turn},
            token_ids=tuple(path),
        )
    return RenderedAnew(
        ids_S=np.asarray(path, np.int32),
        starts=starts,
        num_from_text=len(answers) - len(known),
    )
