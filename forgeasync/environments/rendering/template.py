"""Renders conversations by a tokenizer's own chat template, for models that no other renderer knows.

The whole conversation is rendered with a mark in place of each turn of the model, and the text after the last
mark is tokenized. Everything before it is in the trajectory already, so the template must render it as it did
then: a template that removes or rewrites something is refused. White space at the edges of a turn may differ,
since many templates strip it: the trajectory keeps what was sampled.

A turn ends with a token that the model samples, unless the turn is cut. Templates write it after every
turn, so it is left out where the model has sampled it already.

Turns are read by parsers of the package ``renderers``. Which one is told by the marks that the template
itself writes around tool calls and reasoning.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jinja2
import numpy as np
from renderers import DefaultRendererConfig
from renderers.default import DefaultRenderer

from forgeasync.environments.messages import ASSISTANT, Message, ToolSpec, show
from forgeasync.environments.rendering.forms import message_forms, tool_forms
from forgeasync.environments.rendering.renderer import Conversation, ParsedTurn
from forgeasync.environments.rendering.reserved import reserved_texts
from forgeasync.environments.rendering.turns import TurnReader
from forgeasync.rollouts import FinishReason, SampledTurn, text_of_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_TOOL_FORMS = (("<function=", "qwen3.5"), ("<arg_key>", "glm"), ("<tool_call>", "qwen3"))
"""Marks of tool calls, the most specific first, and the parsers of renderers 0.1.12 that read them."""


class TemplateRenderer:
    """A ``MessageRenderer`` by the tokenizer's chat template."""

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        template_arguments: Mapping[str, int | float | bool | str] | None = None,
    ) -> None:
        """Raises ValueError if the tokenizer has no template."""
        if tokenizer.chat_template is None:
            raise ValueError(
                f"data.chat_template = true: the tokenizer of {tokenizer.name_or_path!r} has no template; "
                "must be false, or the model folder must have a chat template"
            )
        self._tokenizer = tokenizer
        self._reserved = reserved_texts(tokenizer)
        self._arguments = dict(template_arguments or {})
        template = tokenizer.get_chat_template()
        self._tool_parser = _tool_parser(tokenizer, template)
        self._takes_tools = "tools" in template and self._tool_parser is not None
        config = DefaultRendererConfig(
            tool_parser=self._tool_parser, reasoning_parser="think" if "</think>" in template else None
        )
        self._reader = TurnReader(tokenizer, DefaultRenderer(tokenizer, config))

    @property
    def reserved(self) -> Sequence[str]:
        return self._reserved

    def added_ids(
        self, conversation: Conversation, messages: tuple[Message, ...], tools: Sequence[ToolSpec] = ()
    ) -> np.ndarray:
        if not conversation.turns:
            return np.asarray(self._encode(self._render(messages, tools)), np.int32)
        ids = self._encode(self._text_after_last_turn(conversation, messages, tools))
        last_turn = conversation.turns[len(conversation.messages) - 1]
        return np.asarray(self._without_sampled_end(ids, last_turn), np.int32)

    def answer_ids(
        self, messages: tuple[Message, ...], answer: Message, tools: Sequence[ToolSpec] = ()
    ) -> np.ndarray:
        prompt = self._render(messages, tools)
        whole = self._render((*messages, answer), tools, for_answer=False)
        if not whole.startswith(prompt):
            now, then = _from_difference(whole, prompt), _from_difference(prompt, whole)
            raise ValueError(
                f"messages[{len(messages)}]: the chat template does not render this answer after the prompt "
                f"of a turn: it renders {show(now)} where the prompt has {show(then)}"
            )
        ids = self._encode(whole[len(prompt) :])
        end = self._tokenizer.eos_token_id
        if end in ids:
            ids = ids[: ids.index(end) + 1]
        elif end is not None:
            ids.append(end)
        return np.asarray(ids, np.int32)

    def text_of(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def parse(
        self, before_ids: Sequence[int], turn: SampledTurn, tools: Sequence[ToolSpec] = ()
    ) -> ParsedTurn:
        return self._reader.read(before_ids, turn, tools)

    def _text_after_last_turn(
        self, conversation: Conversation, messages: tuple[Message, ...], tools: Sequence[ToolSpec]
    ) -> str:
        marks = {index: f"\ue000{index}\ue001" for index in conversation.turns}

        def with_turns(texts: Mapping[int, str]) -> list[Message]:
            """The messages with a turn's whole text in place of what was read from it."""
            return [
                {"role": ASSISTANT, "content": texts[index]} if index in texts else message
                for index, message in enumerate(messages)
            ]

        marked = with_turns(marks)
        last = len(conversation.messages) - 1
        before, after = self._render(marked[:last], tools), self._render(marked, tools)
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
                f"{show(now)} where it had {show(then)}"
            )
        written = after
        for index, mark in marks.items():
            written = written.replace(mark, conversation.turns[index].text)
        real = self._render(
            with_turns({index: turn.text for index, turn in conversation.turns.items()}), tools
        )
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
            if text_of_ids(self._tokenizer, [token]).strip():
                break
        return ids

    def rendered_ids(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[int]:
        """Return the template's own tokens of messages that the model answers; ``tools`` may be in a form
        that is not read here.

        Raises:
            ValueError: the template refuses the messages.
        """
        return self._encode(self._applied(messages, tools, for_answer=True))

    def _render(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec], *, for_answer: bool = True
    ) -> str:
        if tools and not self._takes_tools:
            raise ValueError(
                f"tools: {tools[0].name!r} was given, but the chat template does not tell the model of "
                "tools, or writes calls in a form that is not read here; use a model with such a "
                "template, name its renderer by data.renderer, or describe the tools in a message"
            )
        return self._applied(messages, tools, for_answer=for_answer)

    def _applied(self, messages: Sequence[Message], tools: Sequence[ToolSpec], *, for_answer: bool) -> str:
        arguments: dict[str, Any] = dict(self._arguments)
        if tools:
            arguments["tools"] = tool_forms(tools)
        try:
            rendered = self._tokenizer.apply_chat_template(
                message_forms(messages), tokenize=False, add_generation_prompt=for_answer, **arguments
            )
        except Exception as error:
            # Templates are programs: a message of a form that they do not expect can raise anything.
            kind = "" if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: "
            raise ValueError(f"the chat template refuses these messages: {kind}{error}") from error
        assert isinstance(rendered, str)
        return rendered

    def _encode(self, text: str) -> list[int]:
        # A template writes its special tokens itself.
        return self._tokenizer(text, add_special_tokens=False)["input_ids"]


def _tool_parser(tokenizer: "PreTrainedTokenizerBase", template: str) -> str | None:
    """The parser for the tool calls that the template writes; None if there is none, or its marks are no
    single tokens, which the library's parsers look for.
    """
    vocabulary = tokenizer.get_vocab()
    if "<tool_call>" not in vocabulary or "</tool_call>" not in vocabulary:
        return None
    return next((parser for mark, parser in _TOOL_FORMS if mark in template), None)


def _from_difference(text: str, other: str) -> str:
    """Return ``text`` from shortly before the first character in which it differs from ``other``."""
    index = next(
        (i for i, (a, b) in enumerate(zip(text, other, strict=False)) if a != b), min(len(text), len(other))
    )
    return text[max(0, index - 10) :]
