"""Renderers for models with a chat template, which use the template itself or the package ``renderers``."""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jinja2
import numpy as np
from renderers import (
    DefaultRendererConfig,
    RendererConfig,
    config_from_name,
    create_renderer,
    merge_chat_template_kwargs,
)
from renderers.base import ParsedResponse, ParsedToolCall, Renderer, ToolCallParseStatus
from renderers.default import DefaultRenderer

from forgeasync.environments.environment import Turn
from forgeasync.environments.messages import (
    ASSISTANT,
    TOOL,
    BrokenToolCall,
    Message,
    ToolCall,
    ToolSpec,
    check_size,
)
from forgeasync.environments.rendering import (
    BridgeRefused,
    Conversation,
    from_difference,
    message_forms,
    reserved_texts,
    tool_forms,
)
from forgeasync.rollouts import FinishReason, SampledTurn, text_of_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_CALLS = 64
"""Maximum number of tool calls of one turn. All further ones become one broken call."""
MAX_NAME = 128
"""Maximum characters of a tool's name, and of the id that a model gives a call."""
MAX_DEPTH = 32
"""Maximum nesting of objects and lists in arguments."""
MAX_VALUES = 10_000
"""Maximum number of values in the arguments of one call, including nested ones."""
MAX_BROKEN_TEXT = 2_000
"""Maximum characters that are kept of a broken tool call."""
MAX_STEPS = 5_000_000
"""Maximum steps of the parsers' regular expressions for one turn, by ``_num_steps``: about half a second."""

# Texts from which patterns of renderers 0.1.12 (parsing.py, kimi_k25.py) search for an end. Without an end,
# each search reaches the end of the text.
_OPENERS = re.compile(r"<parameter|<function=|<invoke|<arg_key>|<arg_value>|<｜DSML｜|<\|tool_calls?_")
_BLANKS = re.compile(r"\s{64,}")

_PROBLEMS = {
    ToolCallParseStatus.INVALID_JSON: "it is not a JSON object with 'name' and 'arguments'",
    ToolCallParseStatus.UNCLOSED_BLOCK: "it has no end",
    ToolCallParseStatus.MISSING_NAME: "it names no tool",
    ToolCallParseStatus.MALFORMED_STRUCTURE: "it does not have the form of a tool call",
}
_READABLE = frozenset(
    # INVALID_JSON: the value of a parameter does not have its declared type. UNKNOWN_TOOL: no such tool is
    # declared. The code that runs the tools reports both to the model.
    {ToolCallParseStatus.OK, ToolCallParseStatus.INVALID_JSON, ToolCallParseStatus.UNKNOWN_TOOL}
)


class ChatRenderer(ABC):
    """A ``MessageRenderer`` for models with a chat template. Subclasses append messages after a turn.

    The tokens before the first turn, and those of answers that were not sampled, come from rendering the
    whole conversation at once.

    Turns are parsed by the package ``renderers`` (0.1.12), whose parsers have no limits: several patterns
    take time quadratic in the length of a turn, nested JSON exhausts the stack, and long numbers raise.
    Therefore a turn that would take too long is not parsed, an exception of the parser becomes a broken tool
    call, and arguments are checked before they are used.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", library: Renderer) -> None:
        self._tokenizer = tokenizer
        self._library = library
        self.reserved: Sequence[str] = reserved_texts(tokenizer)
        markers = sorted((token for token in tokenizer.all_special_tokens if token), key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, markers))) if markers else None

    @abstractmethod
    def rendered_ids(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec], *, for_answer: bool = True
    ) -> list[int]:
        """Return the tokens of all messages; with ``for_answer``, also those that open the model's answer.

        ``tools`` are not checked.

        Raises:
            ValueError: The format cannot express these messages.
        """

    @abstractmethod
    def _check_tools(self, tools: Sequence[ToolSpec]) -> None:
        """Raise ValueError if the format cannot describe the tools, or their calls cannot be parsed."""

    @abstractmethod
    def _ids_after_turn(
        self, conversation: Conversation, messages: tuple[Message, ...], tools: Sequence[ToolSpec]
    ) -> list[int]:
        """Return ``MessageRenderer.added_ids`` for a conversation that has a turn."""

    @abstractmethod
    def _end_of(
        self, messages: tuple[Message, ...], answer: Message, tools: Sequence[ToolSpec]
    ) -> int | None:
        """Return the token that ends an answer whose rendered form has no end; None if there is none."""

    def added_ids(
        self, conversation: Conversation, messages: tuple[Message, ...], tools: Sequence[ToolSpec] = ()
    ) -> np.ndarray:
        """See ``MessageRenderer``."""
        self._check_tools(tools)
        if conversation.turns:
            return np.asarray(self._ids_after_turn(conversation, messages, tools), np.int32)
        return np.asarray(self.rendered_ids(messages, tools), np.int32)

    def answer_ids(
        self, messages: tuple[Message, ...], answer: Message, tools: Sequence[ToolSpec] = ()
    ) -> np.ndarray:
        """See ``MessageRenderer``."""
        self._check_tools(tools)
        prompt = self.rendered_ids(messages, tools)
        whole = self.rendered_ids((*messages, answer), tools, for_answer=False)
        ids = whole[len(prompt) :]
        if whole[: len(prompt)] != prompt:
            # The prompt ends within a token of the whole, so the answer's text is tokenized by itself.
            before, text = (text_of_ids(self._tokenizer, some) for some in (prompt, whole))
            if not text.startswith(before):
                now, then = from_difference(text, before)
                raise ValueError(
                    f"messages[{len(messages)}]: the format does not render this answer after the prompt of "
                    f"a turn: it renders {now} where the prompt has {then}"
                )
            ids = self._encode(text[len(before) :])
        ends = self._library.get_stop_token_ids()
        last = next((index for index, token in enumerate(ids) if token in ends), None)
        if last is not None:
            ids = ids[: last + 1]
        elif (end := self._end_of(messages, answer, tools)) is not None:
            ids = [*ids, end]
        return np.asarray(ids, np.int32)

    def _encode(self, text: str) -> list[int]:
        # The text has the special tokens of the format already.
        return self._tokenizer(text, add_special_tokens=False)["input_ids"]

    def text_of(self, ids: Sequence[int]) -> str:
        """See ``MessageRenderer``."""
        return text_of_ids(self._tokenizer, ids, skip_special_tokens=True)

    def parse(self, before_ids: Sequence[int], turn: SampledTurn, tools: Sequence[ToolSpec] = ()) -> Turn:
        """See ``MessageRenderer``."""
        raw = self._raw(turn)
        if not self._can_read(turn):
            problem = "the turn has more markup than is read; write fewer and shorter tool calls"
            return self._unread(turn, raw, problem)
        try:
            parsed = self._library.parse_response(
                turn.ids_T.tolist(),
                tools=[tool.message_form for tool in tools] or None,
                prompt_ids=list(before_ids),
            )
        except Exception as error:
            # The library's parsers let some errors through: nested JSON (RecursionError), integers of more
            # than 4,300 digits (ValueError), lists where they expect text (AttributeError, TypeError).
            problem = f"it cannot be read ({type(error).__name__})"
            return self._unread(turn, raw, problem)
        calls, broken = self._calls(parsed, turn, tools)
        return Turn.of_sampled(
            turn,
            self._without_markers(_without_stop_text(parsed.content, self._stop_text(turn))),
            reasoning=(
                None if parsed.reasoning_content is None else self._without_markers(parsed.reasoning_content)
            ),
            tool_calls=calls,
            broken_tool_calls=broken,
        )

    def _can_read(self, turn: SampledTurn) -> bool:
        """Whether the parsers take at most ``MAX_STEPS`` for a turn."""
        return _num_steps(self._raw(turn)) <= MAX_STEPS

    def _raw(self, turn: SampledTurn) -> str:
        return text_of_ids(self._tokenizer, turn.ids_T.tolist())

    def _unread(self, turn: SampledTurn, raw: str, problem: str) -> Turn:
        broken = BrokenToolCall(text=raw[:MAX_BROKEN_TEXT], problem=problem)
        return Turn.of_sampled(turn, self._without_markers(turn.text), broken_tool_calls=(broken,))

    def _calls(
        self, parsed: ParsedResponse, turn: SampledTurn, tools: Sequence[ToolSpec]
    ) -> tuple[tuple[ToolCall, ...], tuple[BrokenToolCall, ...]]:
        types = {tool.name: _parameter_types(tool) for tool in tools}
        calls: list[ToolCall] = []
        broken: list[BrokenToolCall] = []
        ids: set[str] = set()
        for index, call in enumerate(parsed.tool_calls[:MAX_CALLS]):
            problem = _problem_with(call, turn)
            if problem is not None:
                broken.append(BrokenToolCall(text=call.raw[:MAX_BROKEN_TEXT], problem=problem))
                continue
            assert isinstance(call.name, str)
            own = call.id if isinstance(call.id, str) and 0 < len(call.id) <= MAX_NAME else None
            identity = own if own is not None and own not in ids else f"call_{turn.turn}_{index}"
            ids.add(identity)
            arguments = call.arguments if isinstance(call.arguments, Mapping) else {}
            calls.append(
                ToolCall(id=identity, name=call.name, arguments=_typed(arguments, types.get(call.name, {})))
            )
        if (num_more := len(parsed.tool_calls) - MAX_CALLS) > 0:
            text = parsed.tool_calls[MAX_CALLS].raw[:MAX_BROKEN_TEXT]
            problem = f"it and {num_more - 1} after it are too many; at most {MAX_CALLS} are read in a turn"
            broken.append(BrokenToolCall(text=text, problem=problem))
        return tuple(calls), tuple(broken)

    def _stop_text(self, turn: SampledTurn) -> str:
        """Return the stop text that ended the turn; empty if none did."""
        whole = text_of_ids(self._tokenizer, turn.ids_T.tolist(), skip_special_tokens=True)
        return whole[len(turn.text) :] if whole.startswith(turn.text) else ""

    def _without_markers(self, text: str) -> str:
        return text if self._special is None else self._special.sub("", text)


def _problem_with(call: ParsedToolCall, turn: SampledTurn) -> str | None:
    """Return why a call cannot be made; None if it can."""
    is_cut = call.status is ToolCallParseStatus.UNCLOSED_BLOCK and turn.finish_reason is FinishReason.LENGTH
    if is_cut:
        return "the turn was cut before the call had ended"
    if call.status not in _READABLE or (call.status is ToolCallParseStatus.INVALID_JSON and not call.name):
        return _PROBLEMS[call.status]
    if not isinstance(call.name, str) or not call.name.strip():
        return _PROBLEMS[ToolCallParseStatus.MISSING_NAME]
    if len(call.name) > MAX_NAME:
        return f"the tool's name has {len(call.name)} characters; no tool's name has more than {MAX_NAME}"
    if call.arguments is not None and not isinstance(call.arguments, Mapping):
        return f"its arguments are of type {type(call.arguments).__name__}; must be an object"
    try:
        check_size(call.arguments, max_depth=MAX_DEPTH + 1, max_values=MAX_VALUES)
        # Fails for NaN, infinity and halves of surrogate pairs.
        json.dumps([call.name, call.arguments], ensure_ascii=False, allow_nan=False).encode()
    except ValueError as error:
        return f"its arguments are refused: {error}"
    return None


def _parameter_types(tool: ToolSpec) -> Mapping[str, Any]:
    properties = tool.parameters.get("properties", {})
    if not isinstance(properties, Mapping):
        return {}
    return {name: one.get("type") for name, one in properties.items() if isinstance(one, Mapping)}


_PYTHON_WORDS = {"True": ("boolean", True), "False": ("boolean", False), "None": ("null", None)}


def _typed(arguments: Mapping[str, Any], types: Mapping[str, Any]) -> dict[str, Any]:
    """Convert ``True``, ``False`` and ``None`` to JSON values if the tool declares that type.

    The chat templates of Qwen3-Coder and Qwen3.5 write values this way, so their models do, too.
    """
    typed = dict(arguments)
    for name, value in arguments.items():
        if isinstance(value, str) and value in _PYTHON_WORDS:
            kind, meant = _PYTHON_WORDS[value]
            declared = types.get(name)
            if declared == kind or (
                isinstance(declared, Sequence) and not isinstance(declared, str) and kind in declared
            ):
                typed[name] = meant
    return typed


def _without_stop_text(text: str, stop_text: str) -> str:
    for ending in (stop_text, stop_text.rstrip()):
        if ending and text.endswith(ending):
            return text.removesuffix(ending)
    return text


def _num_steps(text: str) -> int:
    """Return an upper bound of the steps of the parsers' patterns, which search for an end from every opener.

    In a run of blanks they also try every split between two parts of a pattern, or three parts if the blanks
    follow a mark (parsing.py: ``\\s*([\\s\\S]*?)\\s*```$`` after a fence).
    """
    num_steps = sum(1 for _ in _OPENERS.finditer(text)) * len(text)
    for run in _BLANKS.finditer(text):
        num_blanks = len(run.group())
        before = text[max(0, run.start() - 4) : run.start()]
        follows_mark = before.endswith((">", "`", "json"))
        num_steps += num_blanks**3 + num_blanks * len(text) if follows_mark else num_blanks**2
    return num_steps


_TOOL_FORMS = (("<function=", "qwen3.5"), ("<arg_key>", "glm"), ("<tool_call>", "qwen3"))
"""Marks of tool calls, most specific first, with the parser of renderers 0.1.12 for each."""


class TemplateRenderer(ChatRenderer):
    """A ``MessageRenderer`` that uses the tokenizer's own chat template, for models of no known family.

    The whole conversation is rendered with a mark in place of each turn of the model, and the text after the
    last mark is tokenized. Everything before the mark is already in the trajectory, so the template must
    render it in the same way again. A template that removes or rewrites something is refused. White space at
    the edges of a turn may differ, because many templates strip it. The trajectory keeps the sampled tokens.

    Templates write an end token after every turn. It is left out if the model has sampled it, which it has
    unless the turn was cut.

    The marks that the template writes around tool calls and reasoning select the parser of the package
    ``renderers``.
    """

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        template_arguments: Mapping[str, int | float | bool | str] | None = None,
    ) -> None:
        """Create a renderer of the tokenizer's template.

        Raises:
            ValueError: The tokenizer has no template.
        """
        if tokenizer.chat_template is None:
            raise ValueError(
                f"data.chat_template = true: the tokenizer of {tokenizer.name_or_path!r} has no template; "
                "must be false, or the model folder must have a chat template"
            )
        template = tokenizer.get_chat_template()
        tool_parser = _tool_parser(tokenizer, template)
        config = DefaultRendererConfig(
            tool_parser=tool_parser, reasoning_parser="think" if "</think>" in template else None
        )
        super().__init__(tokenizer, DefaultRenderer(tokenizer, config))
        self._arguments = dict(template_arguments or {})
        self._takes_tools = "tools" in template and tool_parser is not None

    def _ids_after_turn(
        self, conversation: Conversation, messages: tuple[Message, ...], tools: Sequence[ToolSpec]
    ) -> list[int]:
        ids = self._encode(self._text_after_last_turn(conversation, messages, tools))
        last_turn = conversation.turns[len(conversation.messages) - 1]
        return self._without_sampled_end(ids, last_turn)

    def _end_of(
        self, messages: tuple[Message, ...], answer: Message, tools: Sequence[ToolSpec]
    ) -> int | None:
        end: int | None = self._tokenizer.eos_token_id
        return end

    def _text_after_last_turn(
        self, conversation: Conversation, messages: tuple[Message, ...], tools: Sequence[ToolSpec]
    ) -> str:
        marks = {index: f"\ue000{index}\ue001" for index in conversation.turns}

        def with_turns(texts: Mapping[int, str]) -> list[Message]:
            """Return the messages, with these texts as the contents of the model's turns."""
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
            now, then = from_difference(head, before)
            raise ValueError(
                f"the chat template does not only append: before messages[{last}] it now renders "
                f"{now} where it had {then}"
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

    def rendered_ids(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec], *, for_answer: bool = True
    ) -> list[int]:
        """See ``ChatRenderer``."""
        return self._encode(self._render(messages, tools, for_answer=for_answer))

    def _check_tools(self, tools: Sequence[ToolSpec]) -> None:
        if tools and not self._takes_tools:
            raise ValueError(
                f"tools: {tools[0].name!r} was given, but the chat template does not tell the model of "
                "tools, or writes calls in a form that is not read here; use a model with such a "
                "template, name its renderer by data.renderer, or describe the tools in a message"
            )

    def _render(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec], *, for_answer: bool = True
    ) -> str:
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


def _tool_parser(tokenizer: "PreTrainedTokenizerBase", template: str) -> str | None:
    """Return the parser for the tool calls that the template writes.

    Returns None if no parser fits, or if the marks are not single tokens, which the library's parsers need.
    """
    vocabulary = tokenizer.get_vocab()
    if "<tool_call>" not in vocabulary or "</tool_call>" not in vocabulary:
        return None
    return next((parser for mark, parser in _TOOL_FORMS if mark in template), None)


class FamilyRenderer(ChatRenderer):
    """A ``MessageRenderer`` that uses the package ``renderers`` (0.1.12), which has about 25 model families.

    The package has programs in place of chat templates. They render a conversation, parse a turn, and extend
    the tokens of a conversation by new messages without rendering its text again ("bridge").

    A chat template may drop the reasoning of earlier turns when it renders a conversation again. A path keeps
    it, because the model's later turns attended to it. Therefore the library is set to keep reasoning
    (``thinking_retention="all"``), which affects only its bridge.
    """

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        family: str,
        template_arguments: Mapping[str, int | float | bool | str] | None = None,
    ) -> None:
        """``family`` is the library's name of the renderer.

        Raises:
            ValueError: The tokenizer is not of this family, or the family has no such argument.
        """
        self.family = family
        try:
            config = _config(family, template_arguments or {})
            library: Renderer = create_renderer(tokenizer, config)
        except Exception as error:
            # The library raises AssertionError for missing special tokens, pydantic's errors and its own.
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise ValueError(f"the tokenizer has no renderer {family!r}: {reason}") from error
        super().__init__(tokenizer, library)
        self._shows_tools: bool | None = None

    def _ids_after_turn(
        self, conversation: Conversation, messages: tuple[Message, ...], tools: Sequence[ToolSpec]
    ) -> list[int]:
        num_before = len(conversation.messages)
        new = messages[num_before:]
        for index, message in enumerate(new, start=num_before):
            if message["role"] == ASSISTANT:
                raise BridgeRefused(
                    f"messages[{index}] is an assistant's message that this model did not say after these "
                    "tokens; render the conversation again from the start"
                )
        turn = conversation.turns[num_before - 1]
        if not self._can_read(turn):
            # The bridges of GLM, DeepSeek V4 and Gemma 4 parse the turn (renderers 0.1.12).
            raise BridgeRefused(
                f"the turn before messages[{num_before}] has more markup than is read; render the "
                "conversation again from the start"
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
            # Both the turn (nested JSON, for instance) and the new messages can raise here. Messages that
            # cannot be rendered raise again when the conversation is rendered from the start.
            raise BridgeRefused(str(self._refusal(error))) from error
        if bridged is None:
            raise BridgeRefused(
                f"the renderer {self.family!r} cannot append messages[{num_before}:] to the turn before them "
                f"({self._why_refused(turn)}); render the conversation again from the start"
            )
        if bridged.token_ids[: len(path)] != path:
            raise BridgeRefused(
                f"the renderer {self.family!r} would take back tokens of the turn before "
                f"messages[{num_before}], which continues after a token that ends turns; render the "
                "conversation again from the start"
            )
        return bridged.token_ids[len(path) :]

    def _end_of(self, messages: tuple[Message, ...], answer: Message, tools: Sequence[ToolSpec]) -> int:
        """Return the end token of an answer, for formats whose turns end with the next message's role."""
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

    def rendered_ids(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec], *, for_answer: bool = True
    ) -> list[int]:
        """See ``ChatRenderer``."""
        try:
            return self._library.render_ids(
                message_forms(messages), tools=tool_forms(tools) or None, add_generation_prompt=for_answer
            )
        except Exception as error:
            raise self._refusal(error) from error

    def _refusal(self, error: Exception) -> ValueError:
        # The library raises exceptions of any type for messages that the family cannot express.
        return ValueError(
            f"the renderer {self.family!r} refuses these messages: {type(error).__name__}: {error}"
        )

    def _check_tools(self, tools: Sequence[ToolSpec]) -> None:
        """Raise ValueError if the family's format has no place for tools. The library would drop them."""
        if not tools:
            return
        if self._shows_tools is None:
            probe = ({"role": "user", "content": "x"},)
            self._shows_tools = self.rendered_ids(probe, tools) != self.rendered_ids(probe, ())
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
