"""Renders conversations by the package ``renderers`` (0.1.12), which knows some 25 families of models.

Its renderers are programs in place of chat templates: they render a conversation, parse a turn, and extend
the tokens of a conversation by new messages without looking at its text again ("bridge").

A chat template may drop the reasoning of earlier turns when it renders a conversation anew. A path never
does: what was sampled stays in it, since the model's later turns attended to it. So the library is told to
keep reasoning (``thinking_retention="all"``), which concerns its bridge only.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from renderers import RendererConfig, config_from_name, create_renderer, merge_chat_template_kwargs
from renderers.base import Renderer

from forgeasync.environments.messages import ASSISTANT, TOOL, Message, ToolSpec, show
from forgeasync.environments.rendering.forms import message_forms, tool_forms
from forgeasync.environments.rendering.renderer import BridgeRefused, Conversation, ParsedTurn
from forgeasync.environments.rendering.reserved import reserved_texts
from forgeasync.environments.rendering.turns import TurnReader
from forgeasync.rollouts import SampledTurn, text_of_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class FamilyRenderer:
    """A ``MessageRenderer`` by one of the library's renderers."""

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        family: str,
        template_arguments: Mapping[str, int | float | bool | str] | None = None,
    ) -> None:
        """``family`` is the library's name of the renderer.

        Raises:
            ValueError: the tokenizer is not one of this family, or the family has no such argument.
        """
        self.family = family
        self._tokenizer = tokenizer
        self._reserved = reserved_texts(tokenizer)
        try:
            config = _config(family, template_arguments or {})
            self._library: Renderer = create_renderer(tokenizer, config)
        except Exception as error:
            # The library asserts that special tokens are there, and raises pydantic's and its own errors.
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise ValueError(f"the tokenizer has no renderer {family!r}: {reason}") from error
        self._reader = TurnReader(tokenizer, self._library)
        self._shows_tools: bool | None = None

    @property
    def reserved(self) -> Sequence[str]:
        return self._reserved

    def added_ids(
        self, conversation: Conversation, messages: tuple[Message, ...], tools: Sequence[ToolSpec] = ()
    ) -> np.ndarray:
        """See ``MessageRenderer``."""
        self._check_tools(tools)
        if not conversation.turns:
            return np.asarray(self._render(messages, tools, for_answer=True), np.int32)
        num_before = len(conversation.messages)
        new = messages[num_before:]
        for index, message in enumerate(new, start=num_before):
            if message["role"] == ASSISTANT:
                raise BridgeRefused(
                    f"messages[{index}] is an assistant's message that this model did not say after these "
                    "tokens; render the conversation anew"
                )
        turn = conversation.turns[num_before - 1]
        if not self._reader.can_read(turn):
            # The bridges of GLM, DeepSeek V4 and Gemma 4 parse the turn (renderers 0.1.12).
            raise BridgeRefused(
                f"the turn before messages[{num_before}] has more markup than is read; render the "
                "conversation anew"
            )
        path = list(conversation.token_ids)
        num_prompt = len(path) - turn.num_tokens
        assert path[num_prompt:] == turn.ids_T.tolist(), "a path ends with its last turn"
        try:
            bridged = self._library.bridge_to_next_turn(
                path[:num_prompt],
                path[num_prompt:],
                message_forms(new),
                tools=tool_forms(tools) or None,
            )
        except Exception as error:
            # What the model wrote can raise here, for instance nested JSON, and so can the new messages.
            # Those are refused again when they are rendered anew.
            raise BridgeRefused(str(self._refusal(error))) from error
        if bridged is None:
            raise BridgeRefused(
                f"the renderer {self.family!r} cannot append messages[{num_before}:] to the turn before them "
                f"({self._why_refused(turn)}); render the conversation anew"
            )
        if bridged.token_ids[: len(path)] != path:
            raise BridgeRefused(
                f"the renderer {self.family!r} would take back tokens of the turn before "
                f"messages[{num_before}], which goes on after a token that ends turns; render the "
                "conversation anew"
            )
        return np.asarray(bridged.token_ids[len(path) :], np.int32)

    def answer_ids(
        self, messages: tuple[Message, ...], answer: Message, tools: Sequence[ToolSpec] = ()
    ) -> np.ndarray:
        """See ``MessageRenderer``."""
        self._check_tools(tools)
        prompt = self._render(messages, tools, for_answer=True)
        whole = self._render((*messages, answer), tools, for_answer=False)
        ids = _after_prompt(self._tokenizer, prompt, whole)
        if ids is None:
            raise ValueError(
                f"messages[{len(messages)}]: the renderer {self.family!r} does not render this answer after "
                f"the prompt of a turn: {show(self._tokenizer.decode(whole[-40:]))}"
            )
        ends = set(self._library.get_stop_token_ids())
        last = next((index for index, token in enumerate(ids) if token in ends), None)
        ids = [*ids, self._end_of(messages, answer, tools)] if last is None else ids[: last + 1]
        return np.asarray(ids, np.int32)

    def text_of(self, ids: Sequence[int]) -> str:
        """See ``MessageRenderer``."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def parse(
        self, before_ids: Sequence[int], turn: SampledTurn, tools: Sequence[ToolSpec] = ()
    ) -> ParsedTurn:
        """See ``MessageRenderer``."""
        return self._reader.read(before_ids, turn, tools)

    def _end_of(self, messages: tuple[Message, ...], answer: Message, tools: Sequence[ToolSpec]) -> int:
        """The token that ends an answer in a format whose turns end with the role of the next message."""
        follows: Message = {"role": "user", "content": "x"}
        if calls := answer.get("tool_calls"):
            follows = {"role": TOOL, "content": "x", "tool_call_id": calls[0].get("id", "call_0")}
        ends = self._library.get_stop_token_ids()
        rendered = self._library.render(
            message_forms((*messages, answer, follows)), tools=tool_forms(tools) or None
        )
        said = zip(rendered.token_ids, rendered.message_indices, rendered.sampled_mask, strict=True)
        sampled = [token for token, index, is_sampled in said if is_sampled and index == len(messages)]
        return sampled[-1] if sampled and sampled[-1] in ends else ends[0]

    def rendered_ids(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[int]:
        """Return the tokens of messages that the model answers, whether they tell of ``tools`` or not.

        Raises:
            ValueError: the family has no form for these messages.
        """
        return self._render(messages, tools, for_answer=True)

    def _render(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec], *, for_answer: bool
    ) -> list[int]:
        try:
            return self._library.render_ids(
                message_forms(messages), tools=tool_forms(tools) or None, add_generation_prompt=for_answer
            )
        except Exception as error:
            raise self._refusal(error) from error

    def _refusal(self, error: Exception) -> ValueError:
        # The library raises whatever its code meets in a message that the family has no form for.
        return ValueError(
            f"the renderer {self.family!r} refuses these messages: {type(error).__name__}: {error}"
        )

    def _check_tools(self, tools: Sequence[ToolSpec]) -> None:
        """Refuse tools where the family's format has no place for them: the library leaves them out."""
        if not tools:
            return
        if self._shows_tools is None:
            probe = ({"role": "user", "content": "x"},)
            self._shows_tools = self._render(probe, tools, for_answer=True) != self._render(
                probe, (), for_answer=True
            )
        if not self._shows_tools:
            raise ValueError(
                f"tools: {tools[0].name!r} was given, but the format of {self.family!r} does not tell the "
                "model of tools; describe them in a message"
            )

    def _why_refused(self, turn: SampledTurn) -> str:
        ends = self._library.get_stop_token_ids()
        if any(token in ends for token in turn.ids_T.tolist()):
            return "it ended while the model was reasoning"
        return "its tokens do not show how it ends"


def _config(family: str, arguments: Mapping[str, Any]) -> RendererConfig:
    default = config_from_name(family)
    assert default is not None, "a family, not the library's own choice"
    return merge_chat_template_kwargs(type(default)(thinking_retention="all"), arguments)


def _after_prompt(
    tokenizer: "PreTrainedTokenizerBase", prompt: list[int], whole: list[int]
) -> list[int] | None:
    """The tokens of an answer, given those of its prompt, and of both; None if they do not fit."""
    if whole[: len(prompt)] == prompt:
        return whole[len(prompt) :]
    # Where the prompt ends within a token of the whole, the answer's text is what a model would sample.
    before = text_of_ids(tokenizer, prompt)
    text = text_of_ids(tokenizer, whole)
    if not text.startswith(before):
        return None
    return tokenizer(text[len(before) :], add_special_tokens=False)["input_ids"]
