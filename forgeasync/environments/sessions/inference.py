"""What the three APIs have in common: what a request asks for, and what it gets."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from forgeasync.environments.environment import Turn
from forgeasync.environments.messages import Message, ToolSpec
from forgeasync.environments.sessions.fields import Json
from forgeasync.environments.sessions.problems import RequestError

MAX_PIECES = 64
"""In at most this many pieces a text is streamed."""

MIN_PIECE_CHARS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceRequest:
    """One request for turns of the model."""

    messages: tuple[Message, ...]
    """As the client has them, in the format of Chat Completions."""
    instructions: str | None = None
    """A system message that stands before everything, also before ``previous_id``."""
    previous_id: str | None = None
    """The response whose conversation ``messages`` go on with."""
    tools: tuple[ToolSpec, ...] = ()
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    num_turns: int = 1
    is_streamed: bool = False
    keeps_response: bool = False
    """Whether a later request may name the response as its previous one."""
    ignored: tuple[str, ...] = ()
    """The fields that were given and are not honoured."""
    unknown: tuple[str, ...] = ()
    """The fields that were given and that the API's grammar does not know (``Fields.unknown``)."""
    body: Mapping[str, Any]
    """The request itself, for what a response repeats of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceResult:
    """The turns that answer a request, one for each that was asked for."""

    id: str
    created_s: int
    """Seconds since 1970."""
    model: str
    turns: tuple[Turn, ...]


class Api(Protocol):
    """The grammar of one API."""

    def read(self, body: Mapping[str, Any]) -> InferenceRequest:
        """Return what a request asks for.

        Raises:
            RequestError: a field is malformed, unknown, or asks for something that is not served; names it.
        """
        ...

    def whole(self, asked: InferenceRequest, reply: InferenceResult) -> Json:
        """Return the body of the answer."""
        ...

    def events(self, asked: InferenceRequest, reply: InferenceResult) -> Iterator[bytes]:
        """Yield the answer as server-sent events."""
        ...

    def error(self, problem: RequestError) -> Json:
        """Return the body of an error."""
        ...

    def error_event(self, problem: RequestError) -> bytes:
        """Return the event that tells of an error after the headers have left."""
        ...


def sse(data: Json, event: str | None = None) -> bytes:
    """Return one server-sent event."""
    line = f"data: {dumps(data)}\n\n"
    return (f"event: {event}\n{line}" if event else line).encode()


def dumps(data: Json) -> str:
    """Return JSON that every parser reads: ASCII, without NaN."""
    return json.dumps(data, allow_nan=False, separators=(",", ":"))


def pieces(text: str) -> Iterator[str]:
    """Cut a text for streaming."""
    length = max(MIN_PIECE_CHARS, -(-len(text) // MAX_PIECES))
    for start in range(0, len(text), length):
        yield text[start : start + length]


def openai_error(problem: RequestError) -> Json:
    """Return an error as OpenAI's endpoints shape it."""
    kind = {401: "authentication_error", 429: "rate_limit_error"}.get(
        problem.status, "server_error" if problem.status >= 500 else "invalid_request_error"
    )
    return {
        "error": {"message": str(problem), "type": kind, "param": problem.param, "code": problem.code},
    }
