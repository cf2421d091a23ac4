"""Messages of a conversation in the format of chat endpoints, and tool calls in them.

    {"role": "user", "content": "2 + 2 ="}
    {"role": "assistant", "content": "", "tool_calls": [{"id": "call_0", "type": "function",
        "function": {"name": "add", "arguments": "{\\"a\\": 2, \\"b\\": 2}"}}]}
    {"role": "tool", "tool_call_id": "call_0", "content": "4"}

An assistant's message may also carry ``reasoning_content``.
"""

import json
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Message = Mapping[str, Any]
"""A message in the format of chat endpoints: ``{"role": "user", "content": "2 + 2 ="}``."""

ASSISTANT = "assistant"
"""Role of the model's messages."""
TOOL = "tool"

MAX_SHOWN = 80
"""Maximum characters of a value that an error quotes."""

MAX_DEPTH = 128
"""Maximum nesting of objects and lists in a tool's parameters and in the arguments of a call. Sessions accept
less from their clients."""

_KEYS = frozenset({"role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolSpec:
    """The description of a tool that the model sees; ``parameters`` is a JSON schema of type object."""

    name: str
    description: str
    parameters: Mapping[str, Any]

    @property
    def message_form(self) -> dict[str, Any]:
        """The tool in the format of chat endpoints."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}

    @property
    def lookup_key(self) -> Hashable:
        """Key that is equal for equal tools; ``parameters`` must be JSON within ``MAX_DEPTH``."""
        return self.name, self.description, _frozen(self.parameters)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A complete tool call of the model. It is not checked whether the tool exists."""

    id: str
    """Id that the result refers to."""
    name: str
    """Name of the tool, as the model wrote it."""
    arguments: Mapping[str, Any]
    """Arguments by name, as the model wrote them."""

    @property
    def message_form(self) -> dict[str, Any]:
        """The call as it stands in an assistant's message."""
        arguments = json.dumps(self.arguments, ensure_ascii=False)
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": arguments}}


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokenToolCall:
    """A tool call that cannot be parsed: it is cut off, is not JSON, or names no tool."""

    text: str
    """The model's text."""
    problem: str
    """Description of the problem, for the model."""


def check_size(value: object, *, max_depth: int = MAX_DEPTH, max_values: int | None = None) -> None:
    """Refuse a JSON value that is nested too deeply or has too many values.

    Keys of objects count as values. The check does not recurse, so deep nesting cannot exhaust the stack.

    Raises:
        ValueError: There are more than ``max_depth`` levels (``value`` itself is the first), or more than
            ``max_values`` values. The text continues a sentence that ends with "are".
    """
    level: list[Any] = [value]
    num_values = 0
    for _ in range(max_depth):
        num_values += len(level)
        if max_values is not None and num_values > max_values:
            raise ValueError(f"too large; must have at most {max_values} values")
        objects = [one for one in level if isinstance(one, Mapping)]
        lists = [one for one in level if isinstance(one, list | tuple)]
        level = [child for one in objects for pair in one.items() for child in pair]
        level += [child for one in lists for child in one]
        if not level:
            return
    raise ValueError(f"nested deeper than {max_depth}")


def read_arguments(written: object) -> dict[str, Any]:
    """Return the arguments of a tool call, which are given as an object or as JSON text.

    Raises:
        ValueError: They are not JSON, not an object, or nested deeper than ``MAX_DEPTH``. The text continues
            a sentence that ends with "are".
    """
    read = written
    if isinstance(written, str):
        try:
            read = json.loads(written or "{}")
        except RecursionError:
            raise ValueError(f"nested deeper than {MAX_DEPTH}") from None
        except ValueError as error:
            raise ValueError(f"not JSON: {error}: {show(written)}") from None
    if not isinstance(read, Mapping):
        raise ValueError(f"{show(read)}; must be an object")
    check_size(read)
    return dict(read)


def checked_tools(tools: Sequence[ToolSpec] | None) -> tuple[ToolSpec, ...]:
    """Check the tools of a model, and return them as a tuple.

    Raises:
        ValueError: The parameters of a tool are nested deeper than ``MAX_DEPTH``. The error names the tool.
    """
    specs = tuple(tools or ())
    for index, tool in enumerate(specs):
        try:
            check_size(tool.parameters)
        except ValueError as error:
            # The parameters are not quoted, because their repr could recurse too deeply.
            raise ValueError(f"tools[{index}], {show(tool.name)}: its parameters are {error}") from None
    return specs


def checked_messages(messages: str | Sequence[Message]) -> tuple[Message, ...]:
    """Return copies of the messages in one form: a string is one user message, arguments are objects.

    Raises:
        ValueError: A message is malformed, the list is empty, or the last message is the model's own.
    """
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    if isinstance(messages, Mapping) or not isinstance(messages, Sequence):
        raise ValueError(f"messages must be a list of messages or a string, not {show(messages)}")
    if not messages:
        raise ValueError("messages is empty; must have at least one message that the model answers to")
    copies = tuple(checked_message(f"messages[{index}]", one) for index, one in enumerate(messages))
    if copies[-1]["role"] == ASSISTANT:
        raise ValueError(
            f"messages[{len(copies) - 1}], the last one, has role {ASSISTANT!r}; must be what the model "
            "answers to"
        )
    return copies


def checked_message(where: str, message: object) -> Message:
    """Return a copy of one message in the form that ``is_same_message`` compares.

    Raises:
        ValueError: The message is malformed. The error names ``where``.
    """
    if not isinstance(message, Mapping):
        raise ValueError(f"{where} is {show(message)}; must read {{'role': 'user', 'content': '...'}}")
    if not isinstance(message.get("role"), str):
        raise ValueError(f"{where}: its 'role' is {show(message.get('role'))}; must be a string")
    if unknown := message.keys() - _KEYS:
        raise ValueError(f"{where} has {show(sorted(unknown))}; must have no other keys than {sorted(_KEYS)}")
    copy = {key: value for key, value in message.items() if value is not None}
    calls = copy.get("tool_calls", [])
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        raise ValueError(f"{where}: its 'tool_calls' is {show(calls)}; must be a list")
    # Chat endpoints send null where an assistant only calls tools.
    copy["content"] = _text(where, copy.get("content", "" if calls else None))
    for key in ("name", "tool_call_id", "reasoning_content"):
        if key in copy and not isinstance(copy[key], str):
            raise ValueError(f"{where}: its {key!r} is {show(copy[key])}; must be a string")
    if calls:
        copy["tool_calls"] = [
            _checked_call(f"{where}.tool_calls[{index}]", call) for index, call in enumerate(calls)
        ]
    else:
        copy.pop("tool_calls", None)
    return copy


def is_same_message(ours: Message, theirs: Message) -> bool:
    """Whether ``theirs``, which a client sends back, is the same message as ``ours``.

    Many clients drop the reasoning of an assistant's message and the ids of its tool calls, so a message
    without them is still the same. All fields that are present must be equal.
    """
    if ours["role"] != theirs["role"] or ours["content"] != theirs["content"]:
        return False
    for key in ("name", "tool_call_id", "reasoning_content"):
        if key in theirs and ours.get(key) != theirs[key]:
            return False
    own_calls, their_calls = ours.get("tool_calls", ()), theirs.get("tool_calls", ())
    return len(own_calls) == len(their_calls) and all(
        own["function"] == other["function"] and ("id" not in other or other["id"] == own.get("id"))
        for own, other in zip(own_calls, their_calls, strict=True)
    )


def lookup_key(message: Message) -> Hashable:
    """Return a key that is equal for all messages that ``is_same_message`` considers the same.

    It has every field that clients must not drop.
    """
    calls = tuple(
        (call["function"]["name"], _frozen(call["function"]["arguments"]))
        for call in message.get("tool_calls", ())
    )
    return message["role"], message["content"], calls


def show(value: object) -> str:
    """Return the beginning of a value's repr, for an error message."""
    try:
        shown = repr(value)
    except RecursionError:
        return f"a {type(value).__name__} that is nested too deeply to be shown"
    return shown if len(shown) <= MAX_SHOWN else shown[:MAX_SHOWN] + "..."


def _frozen(value: object) -> Hashable:
    """Return a hashable value that is equal for equal JSON values."""
    match value:
        case Mapping():
            return frozenset((key, _frozen(one)) for key, one in value.items())
        case list() | tuple():
            return tuple(_frozen(one) for one in value)
        case None | bool() | int() | float() | str():
            return value
    # An environment may pass values that are not JSON. ``is_same_message`` compares them exactly.
    # mypy looks at the __hash__ of instances, which is not that of the class.
    return type(value)  # type: ignore[return-value]


def _text(where: str, content: object) -> str:
    """Return the text of a message's content, which may be a list of text parts."""
    if isinstance(content, Sequence) and not isinstance(content, str):
        parts = []
        for part in content:
            if (
                not isinstance(part, Mapping)
                or part.get("type") != "text"
                or not isinstance(part.get("text"), str)
            ):
                raise ValueError(
                    f"{where}: its 'content' has {show(part)}; must have parts of type 'text' only"
                )
            parts.append(part["text"])
        return "".join(parts)
    if not isinstance(content, str):
        raise ValueError(f"{where}: its 'content' is {show(content)}; must be a string")
    return content


def _checked_call(where: str, call: object) -> Mapping[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ValueError(
            f"{where} is {show(call)}; must read {{'id': ..., 'type': 'function', 'function': "
            "{'name': ..., 'arguments': ...}}"
        )
    assert isinstance(call, Mapping)
    try:
        arguments = read_arguments(function.get("arguments", {}))
    except ValueError as error:
        raise ValueError(f"{where}: its arguments are {error}") from None
    identity = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
    return {
        **identity,
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }
