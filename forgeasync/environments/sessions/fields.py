"""Reads the fields of a request one by one.

What is left of an object is ignored and named (``ignore_rest``), so that a client library that is newer than
this code goes on working; or it is refused (``refuse_rest``), where the API is our own.
"""

import json
import math
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

from forgeasync.environments.messages import NestedTooDeeply, ToolSpec, levels, show
from forgeasync.environments.sessions.problems import RequestError

Json = dict[str, Any]

MAX_DEPTH = 64
"""How deep objects and lists may be nested in a tool's parameters and in the arguments of a call."""

MAX_NODES = 100_000
"""How many values those may have."""

MAX_UNKNOWN_NAMES = 16
"""How many fields that were ignored are named; ``...`` stands for the rest of them."""

MAX_UNKNOWN_CHARS = 80
"""Of such a name, with the path to it."""

MAX_STOPS = 16
MAX_STOP_CHARS = 256


class Fields:
    """The fields of one JSON object. Null counts as absent, as it does for the SDKs."""

    def __init__(self, value: object, where: str = "", *, unknown: dict[str, None] | None = None) -> None:
        """``where`` is the object's own place in the body; ``unknown`` collects what ``ignore_rest`` finds.

        Raises RequestError if ``value`` is no object.
        """
        if not isinstance(value, Mapping):
            raise wrong(where or "the body", value, "must be a JSON object", param=where or None)
        self._fields = {name: found for name, found in value.items() if found is not None}
        self._unknown = {} if unknown is None else unknown
        self.where = where

    def inner(self, place: str, value: object) -> "Fields":
        """Return the fields of an object inside this one, at ``place``, such as ``messages[0]``."""
        return Fields(value, self.path(place), unknown=self._unknown)

    def path(self, name: str) -> str:
        """How an error calls the field."""
        return f"{self.where}.{name}" if self.where else name

    def take(self, name: str) -> Any:
        """Return the field, None if it is absent."""
        return self._fields.pop(name, None)

    def required(self, name: str) -> Any:
        """Return the field.

        Raises RequestError if it is absent, like the methods below if it is not what they say.
        """
        if name not in self._fields:
            raise RequestError(f"{self.path(name)} is missing", param=self.path(name), code="missing_field")
        return self.take(name)

    def text(self, name: str) -> str | None:
        """Return a string that can be encoded."""
        value = self.take(name)
        return None if value is None else checked_text(self.path(name), value)

    def flag(self, name: str) -> bool:
        """Return a boolean, False if absent."""
        value = self.take(name)
        if value is not None and not isinstance(value, bool):
            raise wrong(self.path(name), value, "must be true or false")
        return bool(value)

    def count(self, name: str, *, most: int | None = None) -> int | None:
        """Return an integer from 1 to ``most``."""
        value = self.take(name)
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool) or value < 1 or (most and value > most):
            raise wrong(self.path(name), value, f"must be an integer from 1{f' to {most}' if most else ''}")
        return value

    def items(self, name: str) -> list[Any]:
        """Return a list, empty if absent."""
        value = self.take(name)
        if value is not None and not isinstance(value, list):
            raise wrong(self.path(name), value, "must be a list")
        return value or []

    def required_items(self, name: str) -> list[Any]:
        """Return a list."""
        value = self.required(name)
        if not isinstance(value, list):
            raise wrong(self.path(name), value, "must be a list")
        return value

    def only(self, name: str, *served: object, why: str) -> None:
        """Refuse every value of the field but ``served``; ``why`` says what would be right."""
        value = self.take(name)
        if value is not None and not any(value == one and type(value) is type(one) for one in served):
            raise wrong(self.path(name), value, why, code="unsupported_value")

    def given(self, names: Collection[str]) -> tuple[str, ...]:
        """Take those of the fields that are there, and return their names in order."""
        return tuple(sorted(self.path(name) for name in names if self.take(name) is not None))

    def refuse(self, names: Collection[str], *, why: str) -> None:
        """Refuse those of the fields that are there."""
        for name in names:
            if name in self._fields:
                raise wrong(self.path(name), self._fields[name], why, code="unsupported_field")

    def refuse_rest(self) -> None:
        """Refuse what nobody has taken."""
        self.refuse(sorted(self._fields), why="this endpoint has no such field")

    def ignore_rest(self) -> None:
        """Note the names of what nobody has taken, for ``unknown``."""
        above = re.sub(r"\[\d+\]", "[]", self.where)
        for name in self._fields:
            if len(self._unknown) <= MAX_UNKNOWN_NAMES:
                self._unknown[_header_safe(f"{above}.{name}" if above else name)] = None

    @property
    def unknown(self) -> tuple[str, ...]:
        """What was ignored in the whole body, each once, at most ``MAX_UNKNOWN_NAMES`` of them.

        Names are safe in a header and in a log: ``?`` stands for whatever is no letter, no digit and none of
        ``_-.[]``. Indices of lists are left out.
        """
        names = tuple(self._unknown)
        return names if len(names) <= MAX_UNKNOWN_NAMES else (*names[:MAX_UNKNOWN_NAMES], "...")


def _header_safe(name: str) -> str:
    shown = re.sub(r"[^A-Za-z0-9_.\[\]-]", "?", name[: MAX_UNKNOWN_CHARS + 1]) or "?"
    return shown if len(shown) <= MAX_UNKNOWN_CHARS else f"{shown[: MAX_UNKNOWN_CHARS - 3]}..."


def wrong(
    where: str, value: object, why: str, *, param: str | None = None, code: str = "invalid_value"
) -> RequestError:
    """Return the error for a field, with its value and what would be right."""
    return RequestError(f"{where} is {show(value)}; {why}", param=param or where, code=code)


def checked_text(where: str, value: object) -> str:
    """Return ``value`` if it is a string that can be encoded; raises RequestError otherwise."""
    if not isinstance(value, str):
        raise wrong(where, value, "must be a string")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise wrong(where, value, f"half a surrogate pair at {error.start}") from error
    return value


def joined_text(fields: Fields, name: str, value: object, kinds: Collection[str]) -> str:
    """Return the text of the content ``name``: a string, or a list of parts of these types, with ``text``."""
    if not isinstance(value, list):
        return checked_text(fields.path(name), value)
    texts = []
    for index, part in enumerate(value):
        inside = fields.inner(f"{name}[{index}]", part)
        if inside.take("type") not in kinds:
            raise wrong(
                inside.where,
                part,
                f"must be of type {' or '.join(sorted(kinds))}: this model reads text only",
                code="unsupported_value",
            )
        texts.append(checked_text(inside.path("text"), inside.required("text")))
        for listed in ("annotations", "logprobs"):
            inside.only(listed, [], why="must be empty")
        # The SDK's ``parse`` adds ``parsed`` to what it returns.
        inside.given(["parsed", "prompt_cache_breakpoint"])
        inside.ignore_rest()
    return "".join(texts)


def checked_arguments(where: str, value: object) -> Json:
    """Return a tool call's arguments, given as an object or as its JSON."""
    if isinstance(value, str):
        try:
            value = parse_json(value or "{}")
        except (ValueError, RecursionError) as error:
            raise wrong(where, value, "must be JSON") from error
    if not isinstance(value, dict):
        raise wrong(where, value, "must be an object")
    check_size(where, value)
    return value


def parse_json(text: str | bytes) -> Any:
    """Parse JSON; raises ValueError also for NaN and for numbers that have no float, which Python reads."""
    return json.loads(text, parse_constant=_finite, parse_float=_finite)


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:20]} is no finite number")
    return number


def check_size(where: str, value: Json) -> None:
    """Refuse an object that is nested too deeply or has too many values to be worked on safely."""
    num_nodes = 0
    try:
        for level in levels(value, max_depth=MAX_DEPTH):
            num_nodes += len(level)
            if num_nodes > MAX_NODES:
                raise wrong(where, value, f"must have at most {MAX_NODES} values")
            for text in level:
                if isinstance(text, str):
                    checked_text(where, text)
    except NestedTooDeeply as error:
        raise RequestError(f"{where} is {error}", param=where, code="invalid_value") from None


def make_tool(where: str, name: object, description: str | None, parameters: object) -> ToolSpec:
    """Return a tool whose fields stand at ``where``."""
    if parameters is None:
        parameters = {"type": "object", "properties": {}}
    if not isinstance(parameters, dict):
        raise wrong(f"{where}.parameters", parameters, "must be a JSON schema of type object")
    check_size(f"{where}.parameters", parameters)
    named = checked_text(f"{where}.name", name)
    if not named:
        raise wrong(f"{where}.name", name, "must not be empty")
    return ToolSpec(name=named, description=description or "", parameters=parameters)


def read_tools(
    fields: Fields, read_tool: Callable[[Fields], tuple[ToolSpec, bool]]
) -> tuple[tuple[ToolSpec, ...], tuple[str, ...]]:
    """Return the tools, and the names of what they ask for that is not honoured.

    ``read_tool`` returns a tool, and whether it asks for arguments that are sure to follow the schema.
    """
    read = [read_tool(fields.inner(f"tools[{i}]", tool)) for i, tool in enumerate(fields.items("tools"))]
    return tuple(tool for tool, _ in read), ("tools.strict",) * any(is_strict for _, is_strict in read)


def refuse_other_callers(tool: Fields) -> None:
    """Refuse a tool that is not to be shown to the model at once, or not to be called by it alone."""
    tool.only("allowed_callers", ["direct"], why="must be ['direct']: only the model calls tools")
    tool.only("defer_loading", False, why="must be false: there is no search for tools")


def may_call_tools(where: str, choice: object) -> bool:
    """Return whether the choice leaves tools to the model; raises RequestError if it forces a call."""
    if choice not in ("auto", "none"):
        raise wrong(
            where,
            choice,
            "must be 'auto' or 'none': a call cannot be forced upon a policy",
            code="unsupported_value",
        )
    return choice == "auto"


def read_call(fields: Fields, *, id_name: str, arguments_name: str) -> Json:
    """Return a tool call as it stands in an assistant's message."""
    function = {
        "name": checked_text(fields.path("name"), fields.required("name")),
        "arguments": checked_arguments(fields.path(arguments_name), fields.required(arguments_name)),
    }
    call_id = checked_text(fields.path(id_name), fields.required(id_name))
    fields.refuse(["namespace", "toolset_name"], why="tools have one name here")
    return {"id": call_id, "type": "function", "function": function}


def read_stops(fields: Fields, name: str) -> tuple[str, ...]:
    """Return the texts that end a turn, given as one string or as a list of them."""
    value = fields.take(name)
    stops = [] if value is None else value if isinstance(value, list) else [value]
    if len(stops) > MAX_STOPS:
        raise wrong(fields.path(name), value, f"must have at most {MAX_STOPS} texts")
    for index, stop in enumerate(stops):
        where = f"{fields.path(name)}[{index}]"
        if not 0 < len(checked_text(where, stop)) <= MAX_STOP_CHARS:
            raise wrong(where, stop, f"must have 1 to {MAX_STOP_CHARS} characters")
    return tuple(stops)
