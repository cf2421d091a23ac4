"""Reads what a model has written in one turn: text, reasoning and tool calls.

The parsers are those of the package ``renderers`` (0.1.12). What they read is hostile, and they have no
limits of their own: several of their patterns take time that grows with the square of a turn's length, nested
JSON exhausts the stack, and long numbers raise. So a turn that would take them too long is not parsed at all,
whatever they raise becomes a broken tool call, and arguments are checked before anyone sees them.
"""

import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from renderers.base import ParsedResponse, ParsedToolCall, Renderer, ToolCallParseStatus

from forgeasync.environments.messages import BrokenToolCall, ToolCall, ToolSpec
from forgeasync.environments.rendering.renderer import ParsedTurn
from forgeasync.rollouts import FinishReason, SampledTurn, text_of_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_CALLS = 64
"""Most tool calls of one turn; further ones are broken."""
MAX_NAME = 128
"""Most characters of a tool's name, and of the id that a model gives a call."""
MAX_DEPTH = 32
"""Deepest nesting of objects and lists in arguments."""
MAX_VALUES = 10_000
"""Most values in the arguments of one call, nested ones included."""
MAX_BROKEN_TEXT = 2_000
"""Most characters that are kept of a broken tool call."""
MAX_STEPS = 5_000_000
"""Most steps that the patterns of the parsers may take for one turn, by the estimate of ``_num_steps``:
about half a second."""

# Where patterns of renderers 0.1.12 (parsing.py, kimi_k25.py) begin that then look for an end, each time up
# to the end of the text if there is none.
_OPENERS = re.compile(r"<parameter|<function=|<invoke|<arg_key>|<arg_value>|<｜DSML｜|<\|tool_calls?_")
_BLANKS = re.compile(r"\s{64,}")

_PROBLEMS = {
    ToolCallParseStatus.INVALID_JSON: "it is no JSON object with 'name' and 'arguments'",
    ToolCallParseStatus.UNCLOSED_BLOCK: "it has no end",
    ToolCallParseStatus.MISSING_NAME: "it names no tool",
    ToolCallParseStatus.MALFORMED_STRUCTURE: "it does not have the form of a tool call",
}
_READABLE = frozenset(
    # The last two: the value of a parameter is not of its declared type, and a tool that was not declared.
    # Whoever has the tools tells the model so.
    {ToolCallParseStatus.OK, ToolCallParseStatus.INVALID_JSON, ToolCallParseStatus.UNKNOWN_TOOL}
)


class TurnReader:
    """Reads turns by a parser of the library, within limits; for one tokenizer."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", library: Renderer) -> None:
        self._tokenizer = tokenizer
        self._library = library
        markers = sorted((token for token in tokenizer.all_special_tokens if token), key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, markers))) if markers else None

    def read(self, before_ids: Sequence[int], turn: SampledTurn, tools: Sequence[ToolSpec]) -> ParsedTurn:
        """See ``MessageRenderer.parse``."""
        raw = self._raw(turn)
        if not self.can_read(turn):
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
        return ParsedTurn(
            text=self._without_markers(_without_stop_text(parsed.content, self._stop_text(turn))),
            reasoning=(
                None if parsed.reasoning_content is None else self._without_markers(parsed.reasoning_content)
            ),
            tool_calls=calls,
            broken_tool_calls=broken,
        )

    def can_read(self, turn: SampledTurn) -> bool:
        """Whether the parsers are done with a turn soon, whatever they make of it."""
        return _num_steps(self._raw(turn)) <= MAX_STEPS

    def _raw(self, turn: SampledTurn) -> str:
        return text_of_ids(self._tokenizer, turn.ids_T.tolist())

    def _unread(self, turn: SampledTurn, raw: str, problem: str) -> ParsedTurn:
        broken = BrokenToolCall(text=raw[:MAX_BROKEN_TEXT], problem=problem)
        return ParsedTurn(text=self._without_markers(turn.text), broken_tool_calls=(broken,))

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
        """What was sampled after the turn's text: one of the texts that end a turn, if it ended the turn."""
        whole = text_of_ids(self._tokenizer, turn.ids_T.tolist(), skip_special_tokens=True)
        return whole[len(turn.text) :] if whole.startswith(turn.text) else ""

    def _without_markers(self, text: str) -> str:
        return text if self._special is None else self._special.sub("", text)


def _problem_with(call: ParsedToolCall, turn: SampledTurn) -> str | None:
    """Why a call cannot be made; None if it can."""
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
    return _problem_with_values((call.name, call.arguments))


def _problem_with_values(values: object) -> str | None:
    """Why a value cannot be written as JSON, or is larger than anyone should have to look at."""
    left: list[tuple[object, int]] = [(values, 0)]
    num_values = 0
    while left:
        value, depth = left.pop()
        num_values += 1
        if num_values > MAX_VALUES:
            return f"its arguments have more than {MAX_VALUES} values"
        if depth > MAX_DEPTH + 1:
            return f"its arguments are nested more than {MAX_DEPTH} deep"
        match value:
            case Mapping():
                left += [(one, depth + 1) for pair in value.items() for one in pair]
            case list() | tuple():
                left += [(one, depth + 1) for one in value]
            case str():
                try:
                    value.encode()
                except UnicodeEncodeError:
                    return "its arguments have half of a surrogate pair, which is no character"
            case float():
                if not math.isfinite(value):
                    return f"its arguments have the number {value}, which JSON has not"
    return None


def _parameter_types(tool: ToolSpec) -> Mapping[str, Any]:
    properties = tool.parameters.get("properties", {})
    if not isinstance(properties, Mapping):
        return {}
    return {name: one.get("type") for name, one in properties.items() if isinstance(one, Mapping)}


_PYTHON_WORDS = {"True": ("boolean", True), "False": ("boolean", False), "None": ("null", None)}


def _typed(arguments: Mapping[str, Any], types: Mapping[str, Any]) -> dict[str, Any]:
    """Read Python's words for booleans and null where the tool declares that type.

    The chat templates of Qwen3-Coder and Qwen3.5 write them so, and models that learned from them do.
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
    """Bound the steps of the parsers' patterns, which look for an end from every opener.

    Within blanks they also try every way to share them between two or three parts of a pattern: three where
    the blanks follow a mark (parsing.py: ``\\s*([\\s\\S]*?)\\s*```$`` after a fence).
    """
    num_steps = sum(1 for _ in _OPENERS.finditer(text)) * len(text)
    for run in _BLANKS.finditer(text):
        num_blanks = len(run.group())
        before = text[max(0, run.start() - 4) : run.start()]
        follows_mark = before.endswith((">", "`", "json"))
        num_steps += num_blanks**3 + num_blanks * len(text) if follows_mark else num_blanks**2
    return num_steps
