"""What goes over the wire to an environment server of Verifiers 0.4.0 and back, as bytes and as records.

A client is a DEALER socket. A request is three frames, ``[request_id, method, payload]``, an answer is
``[request_id, kind, payload]``; payloads are msgpack (verifiers/v1/serve/client.py, server.py).

    run     {"task_data": {...}, "client": {...}, "model": "...", "sampling": {...}}
    health  {}
    cancel  {"request_id": "..."}

``run`` is answered by any number of ``delta`` frames, which grow the traces of its episode
(verifiers/v1/serve/delta.py), and one ``reply``; the other two by one ``reply``. Only what a score and an
ending need is read: the messages of the conversation are our own session's already.
"""

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
from msgspec import UNSET, Struct, UnsetType

T = TypeVar("T")

MAX_TRACES = 1024
"""Most traces of one episode."""

MAX_ERROR_CHARACTERS = 500

KEY_VARIABLE = "FORGEASYNC_API_KEY"
"""Environment variable in which a server finds the bearer token of an endpoint that is not ours."""


class WireError(ValueError):
    """What a server has sent is not what this wire carries."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request, by the id that its answers carry."""

    request_id: str
    method: str
    payload: bytes

    @property
    def frames(self) -> list[bytes]:
        """The frames of its message."""
        return [self.request_id.encode(), self.method.encode(), self.payload]


def run_request(*, task_data: Mapping[str, Any], base_url: str, api_key: str, model: str) -> Request:
    """Return the request for one episode, which samples at ``base_url``.

    The key goes in a header of its own: a server takes bearer tokens from its environment variables
    (verifiers/v1/configs/client.py), and our sessions look at ``x-api-key`` first.

    Raises:
        ValueError: msgpack cannot hold the task.
    """
    client = {
        "type": "eval",
        "base_url": base_url,
        "headers": {"x-api-key": api_key},
        # Not the server's default, with which it would send its user's own key to our session.
        "api_key_var": KEY_VARIABLE,
    }
    return _request("run", {"task_data": task_data, "client": client, "model": model, "sampling": {}})


def health_request() -> Request:
    """Return the request for a sign of life."""
    return _request("health", {})


def cancel_request(run: Request) -> Request:
    """Return the request to give an episode up."""
    return _request("cancel", {"request_id": run.request_id})


def _request(method: str, payload: Mapping[str, Any]) -> Request:
    try:
        packed = msgspec.msgpack.encode(payload)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ValueError(f"the task cannot be sent as msgpack: {error}") from error
    return Request(request_id=uuid.uuid4().hex, method=method, payload=packed)


class _Skipped(Struct):
    """A record of which nothing is read."""


class RecordedReward(Struct):
    """One reward of a trace."""

    score: float
    weight: float = 1.0


class RecordedError(Struct):
    """What went wrong on the server."""

    type: str
    message: str


class _Endpoint(Struct):
    base_url: str | None = None


class _AgentConfig(Struct):
    client: _Endpoint | None = None


class RecordedAgent(Struct):
    """Who took the turns of a trace."""

    config: _AgentConfig
    name: str = "agent"
    trainable: bool = True


class _Changes(Struct):
    rewards: dict[str, RecordedReward | None] | UnsetType = UNSET
    metrics: dict[str, float | None] | UnsetType = UNSET
    ok: bool | UnsetType = UNSET
    is_timeout: bool | UnsetType = UNSET
    stop_condition: str | UnsetType | None = UNSET
    agent: RecordedAgent | UnsetType = UNSET


class _Delta(Struct):
    trace: str
    discard: bool = False
    set: _Changes = msgspec.field(default_factory=_Changes)
    errors: list[RecordedError] = msgspec.field(default_factory=list)
    nodes: list[_Skipped] = msgspec.field(default_factory=list)
    calls: list[_Skipped] = msgspec.field(default_factory=list)


class _Summary(Struct):
    id: str
    nodes: int
    calls: int


class _Head(Struct):
    ok: bool = False
    is_timeout: bool = False
    errors: list[RecordedError] = msgspec.field(default_factory=list)


class _Reply(Struct):
    success: bool
    error: str | None = None
    head: _Head | None = None
    traces: list[_Summary] = msgspec.field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class Trace:
    """What one agent of an episode has done, as far as it is read."""

    rewards: dict[str, RecordedReward | None] = field(default_factory=dict)
    """By name; None where the server could not score."""
    metrics: dict[str, float | None] = field(default_factory=dict)
    ok: bool = False
    stop_condition: str | None = None
    is_timeout: bool = False
    agent_name: str = "agent"
    is_trainable: bool = True
    base_url: str | None = None
    """Where its turns were sampled."""
    errors: list[RecordedError] = field(default_factory=list)
    num_nodes: int = 0
    num_calls: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeReport:
    """One finished episode, as its server tells it."""

    traces: tuple[Trace, ...]
    ok: bool
    is_timeout: bool
    errors: tuple[RecordedError, ...]
    """Errors of the episode itself; each trace has its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """The server has answered a request with an error."""

    error: str


class Report:
    """The report on one episode while it grows."""

    def __init__(self) -> None:
        self._traces: dict[str, Trace] = {}

    def apply(self, payload: bytes) -> None:
        """Take a delta in.

        Raises:
            WireError: it is none.
        """
        delta = _decode(payload, _Delta, "a delta")
        if delta.discard:
            self._traces.pop(delta.trace, None)
            return
        trace = self._traces.setdefault(delta.trace, Trace())
        if len(self._traces) > MAX_TRACES:
            raise WireError(f"an episode has more than {MAX_TRACES} traces")
        trace.num_nodes += len(delta.nodes)
        trace.num_calls += len(delta.calls)
        trace.errors += delta.errors
        changes = delta.set
        if changes.rewards is not UNSET:
            trace.rewards = changes.rewards
        if changes.metrics is not UNSET:
            trace.metrics = changes.metrics
        if changes.ok is not UNSET:
            trace.ok = changes.ok
        if changes.is_timeout is not UNSET:
            trace.is_timeout = changes.is_timeout
        if changes.stop_condition is not UNSET:
            trace.stop_condition = changes.stop_condition
        if changes.agent is not UNSET:
            trace.agent_name = changes.agent.name
            trace.is_trainable = changes.agent.trainable
            client = changes.agent.config.client
            trace.base_url = None if client is None else client.base_url

    def finish(self, payload: bytes) -> EpisodeReport | Refusal:
        """Read the reply, with which the episode is over.

        Raises:
            WireError: it is none, or a part of the episode has not arrived.
        """
        reply = _decode(payload, _Reply, "a reply")
        if not reply.success:
            return _refusal(reply)
        if reply.head is None:
            raise WireError("the reply to a run has no head")
        return EpisodeReport(
            traces=tuple(self._finished(reply.traces)),
            ok=reply.head.ok,
            is_timeout=reply.head.is_timeout,
            errors=tuple(reply.head.errors),
        )

    def _finished(self, summaries: Sequence[_Summary]) -> list[Trace]:
        traces = []
        for summary in summaries:
            trace = self._traces.get(summary.id)
            if trace is None or (trace.num_nodes, trace.num_calls) != (summary.nodes, summary.calls):
                arrived = "nothing" if trace is None else f"{trace.num_nodes} and {trace.num_calls}"
                raise WireError(
                    f"of trace {summary.id[:40]!r} {arrived} of {summary.nodes} messages and "
                    f"{summary.calls} calls have arrived"
                )
            traces.append(trace)
        return traces


def read_reply(payload: bytes) -> Refusal | None:
    """Return the error that a request other than ``run`` is answered with, None if it has succeeded.

    Raises:
        WireError: it is no reply.
    """
    reply = _decode(payload, _Reply, "a reply")
    return None if reply.success else _refusal(reply)


def one_line(text: str) -> str:
    """Return the beginning of what a server says, on one line, to quote it in an error."""
    return " ".join(text[:MAX_ERROR_CHARACTERS].split())


def _refusal(reply: _Reply) -> Refusal:
    return Refusal(error=one_line(reply.error or "no reason"))


def read_frames(frames: Sequence[bytes]) -> tuple[str, bool, bytes]:
    """Return the id of the request that a message answers, whether it is the last answer, and its payload.

    Raises:
        WireError: it is no answer.
    """
    if len(frames) != 3:
        raise WireError(f"a message has {len(frames)} frames; must have 3: request id, kind, payload")
    request_id, kind, payload = frames
    if kind not in (b"delta", b"reply"):
        raise WireError(f"a message is of kind {kind[:40]!r}; must be delta or reply")
    return request_id.decode("ascii", errors="replace"), kind == b"reply", payload


def _decode(payload: bytes, kind: type[T], what: str) -> T:
    try:
        return msgspec.msgpack.decode(payload, type=kind)
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        raise WireError(f"{what} cannot be read: {one_line(str(error))}") from error
