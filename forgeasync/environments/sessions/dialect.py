"""Code that the three APIs share: reading requests, writing answers, and errors.

A dialect declares the objects of its API as ``Fields``. Their attributes are the fields that a session reads.
Class variables name the other fields of the API, by how they are handled:

    not_honoured    ignored, and listed in a header: the run's own sampling is used
    without_effect  ignored, because they do not change an answer
    only            accepted with one value, refused with any other
    refused         refused, because they would change the prompt or the answer

Every other field is unknown. It is ignored and listed in a header, so that newer client libraries work.
"""

import dataclasses
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Protocol, TypeVar

import msgspec
from msgspec import inspect

from forgeasync.environments.environment import Turn
from forgeasync.environments.messages import (
    Message,
    ToolCall,
    ToolSpec,
    check_size,
    show,
)

Json = dict[str, Any]

MAX_DEPTH = 64
"""Maximum nesting of objects and lists in a tool's parameters and in the arguments of a call."""

MAX_NODES = 100_000
"""Maximum number of values in a tool's parameters and in the arguments of a call."""

MAX_UNKNOWN_NAMES = 16
"""Maximum number of unknown fields that are listed; ``...`` stands for the rest."""

MAX_UNKNOWN_CHARS = 80
"""Maximum characters of the name of an unknown field, with its path."""


STATUSES = {
    "invalid_api_key": 401,
    "invalid_token": 401,
    "model_not_found": 404,
    "not_found": 404,
    "session_not_found": 404,
    "method_not_allowed": 405,
    "body_timeout": 408,
    "session_closed": 410,
    "too_many_turns": 410,
    "body_too_large": 413,
    "too_many_requests": 429,
    "too_many_sessions": 429,
    "server_error": 500,
    "run_over": 503,
    "starting": 503,
    "deadline_exceeded": 504,
}
"""HTTP statuses by the code of an error. All other codes have status 400."""

_FINAL = frozenset({"session_closed", "too_many_turns", "run_over", "deadline_exceeded"})
"""Codes of errors after which clients must not retry (``x-should-retry: false``)."""

_RETRY_AFTER_S = {"too_many_requests": 1, "too_many_sessions": 5, "starting": 1}
"""Seconds to wait before a retry, by the code of the error; they are sent as a header."""


class RequestError(Exception):
    """A request is answered with an error.

    The SDKs retry statuses 408, 409, 429 and 5xx, unless ``may_retry`` is false.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        """``param`` is the wrong field. The answer's status and headers follow from ``code``."""
        super().__init__(message)
        self.param = param
        self.code = code
        self.status = STATUSES.get(code or "", 400)
        self.may_retry = code not in _FINAL

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the answer, in addition to the content's headers."""
        after_s = _RETRY_AFTER_S.get(self.code or "")
        headers = {} if after_s is None else {"retry-after": str(after_s)}
        # openai 3.52 and anthropic 2.11, _base_client.py, _should_retry: the server's header has priority.
        return headers if self.may_retry else {**headers, "x-should-retry": "false"}


@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceRequest:
    """One request for turns of the model."""

    messages: tuple[Message, ...]
    """The client's messages, in the format of Chat Completions."""
    instructions: str | None = None
    """A system message before all other messages, including those of ``previous_id``."""
    previous_id: str | None = None
    """Id of the response whose conversation ``messages`` continue."""
    tools: tuple[ToolSpec, ...] = ()
    must_call: tuple[ToolSpec, ...] = ()
    """Tools of which the turn must begin with a call; empty if no call is required."""
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    num_turns: int = 1
    is_streamed: bool = False
    keeps_response: bool = False
    """Whether a later request may name the response as its previous one."""
    ignored: tuple[str, ...] = ()
    """Fields of the request that are not honoured."""
    unknown: tuple[str, ...] = ()
    """Fields of the request that the API does not have. See ``read_body``."""
    body: Mapping[str, Any]
    """Body of the request. A response repeats parts of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceResult:
    """The ``num_turns`` turns that answer a request."""

    id: str
    created_s: int
    """Time in seconds since 1970."""
    model: str
    turns: tuple[Turn, ...]


class Dialect(Protocol):
    """One API: reads its requests and writes its answers."""

    def read(self, body: Mapping[str, Any]) -> InferenceRequest:
        """Return the request in a body.

        Raises:
            RequestError: A field is malformed, or requests something that is not served. The error names it.
        """
        ...

    def whole(self, request: InferenceRequest, reply: InferenceResult) -> Json:
        """Return the body of the answer."""
        ...

    def events(self, request: InferenceRequest, reply: InferenceResult) -> Iterator[bytes]:
        """Yield the answer as server-sent events."""
        ...

    def error(self, problem: RequestError) -> Json:
        """Return the body of an error."""
        ...

    def error_event(self, problem: RequestError) -> bytes:
        """Return the event that reports an error after the headers were sent."""
        ...


# ---- reading


class JsonObject(dict[str, Any]):
    """An object with any keys, within ``MAX_DEPTH`` and ``MAX_NODES``."""


class Arguments(JsonObject):
    """The arguments of a tool call, which may also be given as the text of a JSON object."""


class Fields(msgspec.Struct, kw_only=True):
    """An object of a request. A null field counts as missing, as in the SDKs."""

    not_honoured: ClassVar[frozenset[str]] = frozenset()
    without_effect: ClassVar[frozenset[str]] = frozenset()
    only: ClassVar[Mapping[str, tuple[object, str]]] = {}
    """The accepted value of each field, and the reason why others are refused."""
    refused: ClassVar[Mapping[str, str]] = {}
    """What to do instead, for each field."""


def names(text: str) -> frozenset[str]:
    """Return the names in a text that are separated by blanks."""
    return frozenset(text.split())


def refusals(text: str, why: str = "a session cannot do what it asks for; leave it out") -> dict[str, str]:
    """Return the names in a text that are separated by blanks, each with ``why``."""
    return dict.fromkeys(text.split(), why)


ToolName = Annotated[str, msgspec.Meta(min_length=1)]
Count = Annotated[int, msgspec.Meta(ge=1)]
StopText = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
StopTexts = Annotated[list[StopText], msgspec.Meta(max_length=16)]

ONLY_THE_MODEL_CALLS: Mapping[str, tuple[object, str]] = {
    "allowed_callers": (["direct"], "only the model calls tools"),
    "defer_loading": (False, "there is no search for tools"),
}
"""``Fields.only`` of a tool."""


class StreamOptions(Fields):
    """Options for streamed answers of OpenAI's APIs."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class OpenAIBody(Fields, kw_only=True):
    """Fields that Chat Completions and Responses share."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    without_effect = names(
        "prompt_cache_key prompt_cache_options prompt_cache_retention safety_identifier service_tier user"
    )
    only: ClassVar = {
        "parallel_tool_calls": (True, "a turn may have several calls"),
        "top_logprobs": (0, "log-probabilities are not given out"),
    }


FieldsT = TypeVar("FieldsT", bound=Fields)


def read_body(body: Mapping[str, Any], kind: type[FieldsT]) -> tuple[FieldsT, dict[str, Any]]:
    """Return the fields of a body, and ``ignored``, ``unknown`` and ``body`` of its ``InferenceRequest``.

    At most ``MAX_UNKNOWN_NAMES`` unknown fields are named. To be safe in a header and in a log, names have
    ``?`` in place of characters other than letters, digits and ``_-.[]``. Indices of lists are left out.

    Raises:
        RequestError: A field is malformed, or requests something that is not served. The error names it.
    """
    try:
        read = msgspec.convert(body, kind, dec_hook=_json_object)
    except msgspec.ValidationError as error:
        raise _refusal(body, kind, str(error)) from None
    ignored: set[str] = set()
    unknown: dict[str, None] = {}
    for name, is_known in _fields_without_effect(body, read, ""):
        if is_known:
            ignored.add(name)
        elif len(unknown) <= MAX_UNKNOWN_NAMES:
            unknown[_header_safe(name)] = None
    named = tuple(unknown)
    if len(named) > MAX_UNKNOWN_NAMES:
        named = (*named[:MAX_UNKNOWN_NAMES], "...")
    return read, {"ignored": tuple(sorted(ignored)), "unknown": named, "body": body}


def read_own_body(body: Mapping[str, Any], kind: type[FieldsT]) -> FieldsT:
    """Return the fields of a body of forgeasync's own API, where unknown fields are refused as misspelled.

    Raises:
        RequestError: A field is malformed or unknown. The error names it.
    """
    read, named = read_body(body, kind)
    if unknown := named["unknown"]:
        name = unknown[0]
        raise wrong(name, body.get(name), "this endpoint has no such field", code="unsupported_field")
    return read


def parse_json(text: str | bytes) -> Any:
    """Parse JSON.

    Raises:
        ValueError: The text is not JSON, is nested too deeply, or has half a surrogate pair, a number that is
            not finite, or a number with thousands of digits.
    """
    try:
        return msgspec.json.decode(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def wrong(where: str, value: object, remedy: str, *, code: str = "invalid_value") -> RequestError:
    """Return the error for a field, with its value and what would be right."""
    return RequestError(f"{where} is {show(value)}; {remedy}", param=where, code=code)


def _json_object(kind: type, value: object) -> object:
    """Read a ``JsonObject``; msgspec adds the path to its ValueError."""
    assert issubclass(kind, JsonObject), kind
    if kind is Arguments and isinstance(value, str):
        try:
            value = parse_json(value or "{}")
        except ValueError:
            raise ValueError("must be JSON") from None
    if not isinstance(value, dict):
        raise ValueError("must be an object")
    try:
        check_size(value, max_depth=MAX_DEPTH, max_values=MAX_NODES)
    except ValueError as error:
        raise ValueError(f"must not be {error}") from None
    return kind(value)


def _fields_without_effect(given: Any, read: object, where: str) -> Iterator[tuple[str, bool]]:
    """Yield the path of each given field that has no effect, and whether the API has such a field.

    Raises:
        RequestError: A field is refused.
    """
    if isinstance(read, list):
        for index, one in enumerate(read):
            yield from _fields_without_effect(given[index], one, f"{where}[{index}]")
    if not isinstance(read, Fields):
        return
    kind = type(read)
    attributes = dict(zip(kind.__struct_encode_fields__, kind.__struct_fields__, strict=True))
    for name, value in given.items():
        if value is None or name == kind.__struct_config__.tag_field:
            continue
        path = f"{where}.{name}" if where else name
        if name in kind.not_honoured:
            # A field that is switched off requests nothing.
            if value is not False and value != []:
                yield _without_indices(path), True
        elif name in kind.only:
            served, why = kind.only[name]
            if value != served or type(value) is not type(served):
                raise wrong(path, value, f"must be {json.dumps(served)}: {why}", code="unsupported_value")
        elif name in kind.refused and name not in attributes:
            raise wrong(path, value, kind.refused[name], code="unsupported_field")
        elif name not in attributes and name not in kind.without_effect:
            yield _without_indices(path), False
        if name in attributes:
            yield from _fields_without_effect(value, getattr(read, attributes[name]), path)


def _without_indices(path: str) -> str:
    return re.sub(r"\[\d+\]", "[]", path)


def _header_safe(name: str) -> str:
    shown = re.sub(r"[^A-Za-z0-9_.\[\]-]", "?", name[: MAX_UNKNOWN_CHARS + 1]) or "?"
    return shown if len(shown) <= MAX_UNKNOWN_CHARS else f"{shown[: MAX_UNKNOWN_CHARS - 3]}..."


def _refusal(body: Any, kind: type[Fields], error: str) -> RequestError:
    """Convert an error of msgspec to one that names the field, its value and what would be right."""
    match = re.fullmatch(r"(.*?)(?: - at `\$(.*)`)?", error, re.DOTALL)
    assert match is not None
    problem, path = match[1], (match[2] or "").removeprefix(".")
    if missing := re.fullmatch(r"Object missing required field `(.*)`", problem):
        where = f"{path}.{missing[1]}" if path else missing[1]
        return RequestError(f"{where} is missing", param=where, code="missing_field")
    value, types = _at(body, kind, path)
    served = [repr(word) for one in types if isinstance(one, inspect.LiteralType) for word in one.values]
    if served and isinstance(value, str):
        refusal = wrong(path, value, f"must be {' or '.join(served)}", code="unsupported_value")
    else:
        refusal = wrong(path or "the body", value, problem[0].lower() + problem[1:])
    refusal.param = path or None
    return refusal


def _at(body: Any, kind: type[Fields], path: str) -> tuple[Any, list[inspect.Type]]:
    """Return the value at a path of a body, and its allowed types."""
    value, types = body, [inspect.type_info(kind)]
    for name, index in re.findall(r"([^.\[\]]+)(?=\.|\[|$)|\[(\d+)\]", path):
        if index:
            value = value[int(index)]
            types = [one.item_type for one in types if isinstance(one, inspect.ListType)]
        else:
            structs = [
                one
                for one in types
                if isinstance(one, inspect.StructType)
                and (one.tag_field in (None, name) or value.get(one.tag_field, one.tag) == one.tag)
            ]
            tags = [inspect.LiteralType((str(one.tag),)) for one in structs if one.tag_field == name]
            fields = [field for one in structs for field in one.fields if field.encode_name == name]
            value, types = value.get(name), [*tags, *(field.type for field in fields)]
        types = [inner for one in types for inner in getattr(one, "types", [one])]
    return value, types


# ---- messages and tools


class TextPart(Protocol):
    """A part of a message's content."""

    text: str


def joined_text(content: str | Sequence[TextPart] | None) -> str:
    """Return the text of a content: a string, or a list of parts."""
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part.text for part in content)


def tool_spec(name: str, description: str | None, parameters: Mapping[str, Any] | None) -> ToolSpec:
    """Return a tool; without ``parameters`` it takes none."""
    return ToolSpec(
        name=name,
        description=description or "",
        parameters={"type": "object", "properties": {}} if parameters is None else parameters,
    )


def chosen_tools(tools: Iterable[ToolSpec], choice: object, name: str | None = None) -> dict[str, Any]:
    """Return the fields of an ``InferenceRequest`` that say which tools the model has.

    ``choice`` is ``none``, ``auto`` or None. Any other value requires a call of the tool ``name``, or of any
    tool if ``name`` is None.

    Raises:
        RequestError: There is no such tool.
    """
    tools = tuple(tools)
    if choice == "none":
        return {}
    if choice in (None, "auto"):
        return {"tools": tools}
    must_call = tuple(tool for tool in tools if name is None or tool.name == name)
    if not must_call:
        raise wrong("tool_choice", name or choice, "needs a matching tool in `tools`")
    return {"tools": tools, "must_call": must_call}


def call_message_form(name: str, arguments: Mapping[str, Any] | None, *, call_id: str | None) -> Json:
    """Return a tool call as it stands in an assistant's message."""
    identity = {} if call_id is None else {"id": call_id}
    return {**identity, "type": "function", "function": {"name": name, "arguments": arguments or {}}}


def stop_texts(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    """Return the texts that end a turn, given as one string or as a list of strings."""
    return (stop,) if isinstance(stop, str) else tuple(stop or ())


# ---- writing


def shown(turn: Turn) -> Turn:
    """Return the turn as clients see it.

    The APIs cannot express tool calls that cannot be parsed, or that do not fit into JSON or into a request.
    Such calls are appended to the text, each on its own line.
    """
    calls = [call for call in turn.tool_calls if _can_come_back(call)]
    as_text = [broken.text for broken in turn.broken_tool_calls]
    as_text += [
        # ASCII, so that every client can send it back.
        json.dumps({"name": call.name, "arguments": call.arguments})
        for call in turn.tool_calls
        if call not in calls
    ]
    text = "\n".join([turn.text] * bool(turn.text) + as_text)
    return dataclasses.replace(turn, text=text, tool_calls=tuple(calls), broken_tool_calls=())


def _can_come_back(call: ToolCall) -> bool:
    """Whether the call can be sent to a client as JSON, and back."""
    try:
        check_size(call.arguments, max_depth=MAX_DEPTH, max_values=MAX_NODES)
        # UTF-8 cannot encode half a surrogate pair.
        parse_json(json.dumps([call.name, call.arguments], ensure_ascii=False, allow_nan=False).encode())
    except ValueError:
        return False
    return True


def dumps(data: Json) -> str:
    """Return JSON that every parser reads: ASCII, without NaN."""
    return json.dumps(data, allow_nan=False, separators=(",", ":"))


def sse(data: Json, event: str | None = None) -> bytes:
    """Return one server-sent event."""
    line = f"data: {dumps(data)}\n\n"
    return (f"event: {event}\n{line}" if event else line).encode()


class OpenAIErrors:
    """The error methods of a ``Dialect`` for OpenAI's APIs."""

    def error(self, problem: RequestError) -> Json:
        """See ``Dialect``."""
        kind = {401: "authentication_error", 429: "rate_limit_error"}.get(
            problem.status, "server_error" if problem.status >= 500 else "invalid_request_error"
        )
        return {
            "error": {"message": str(problem), "type": kind, "param": problem.param, "code": problem.code},
        }

    def error_event(self, problem: RequestError) -> bytes:
        """See ``Dialect``."""
        return sse(self.error(problem))
