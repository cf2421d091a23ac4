"""HTTP server through which agent programs use Chat Completions, Responses and Anthropic's Messages.

    async with SessionServer() as server:
        session = server.open(agent)
        client = openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key)
        ...
        session.close()

docs/sessions.md lists what is served, ignored and refused.
"""

import asyncio
import contextlib
import hashlib
import hmac
import secrets
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Self

from aiohttp import web

from forgeasync.config import WILDCARDS, is_loopback
from forgeasync.environments.environment import RespondingAgent
from forgeasync.environments.sessions.anthropic_messages import AnthropicMessages
from forgeasync.environments.sessions.chat_completions import ChatCompletions
from forgeasync.environments.sessions.dialect import (
    Dialect,
    Fields,
    InferenceRequest,
    InferenceResult,
    Json,
    RequestError,
    dumps,
    parse_json,
    read_own_body,
    wrong,
)
from forgeasync.environments.sessions.responses import Responses
from forgeasync.environments.sessions.session import (
    Attempt,
    Sampling,
    Session,
    SessionEnd,
    SessionLimits,
    as_request_error,
    closed,
    read_feedback,
)

MIN_TOKEN_CHARS = 16

MAX_CLOSED = 4096
"""Number of closed sessions that are remembered. Their clients get 410, clients of older sessions 404."""

OPENING_PATH = "/sessions"
"""Path of the requests that open sessions, if the server has an ``opener``."""

IGNORED_HEADER = "x-forgeasync-ignored"
"""Header of an answer that lists fields of the request that are not honoured or unknown."""

_ANTHROPIC = AnthropicMessages()

_DIALECTS: Mapping[str, Dialect] = {
    "/v1/chat/completions": ChatCompletions(),
    "/v1/responses": Responses(),
    "/v1/messages": _ANTHROPIC,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedSession:
    """A session that a client has opened."""

    session: Session
    trains: bool
    """Whether the session is trained on if it gets feedback."""


SessionOpener = Callable[[], OpenedSession]
"""Opens a session for a client that has the server's token; called on the server's loop.

It raises ``RequestError`` if no further session may be opened.
"""


class SessionServer:
    """An HTTP server for sessions. It runs while its context is entered, on the event loop that entered it.

    The ``respond`` of every agent is called on that loop.
    """

    def __init__(
        self,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        token: str | None = None,
        public_host: str | None = None,
        limits: SessionLimits | None = None,
        opener: SessionOpener | None = None,
    ) -> None:
        """Configure the server.

        Args:
            host: The address to listen on.
            port: 0 takes any free port.
            token: A secret from which the keys of sessions are derived; a random one if None. Required if
                other machines can reach ``host``.
            public_host: The host name that clients use; ``host`` if None.
            limits: Limits of each session.
            opener: Opens sessions for clients that have the token. It requires a token.

        Raises:
            ValueError: Other machines can reach ``host`` and there is no token of 16 characters, or ``host``
                is a wildcard and there is no ``public_host``.
        """
        assert opener is None or token is not None, "clients open sessions with the token"
        if not is_loopback(host) and token is None:
            raise ValueError(
                f"host = {host!r} can be reached from other machines and token is missing; must have a "
                f"secret of at least {MIN_TOKEN_CHARS} characters, or host must be '127.0.0.1'"
            )
        if token is not None and len(token) < MIN_TOKEN_CHARS:
            raise ValueError(f"token has {len(token)} characters; must have at least {MIN_TOKEN_CHARS}")
        if host in WILDCARDS and public_host is None:
            raise ValueError(
                f"host = {host!r} stands for all addresses and public_host is missing; must be the name or "
                "the address by which clients reach this machine"
            )
        self._host = host
        self._port = port
        self._public_host = public_host or host
        self._limits = limits or SessionLimits()
        self._opener = opener
        self._token = token
        self._secret = (token or secrets.token_hex(32)).encode()
        # Any thread may add a session; everything else runs on the loop.
        self._open_sessions: dict[str, Session] = {}
        self._ends: OrderedDict[str, SessionEnd] = OrderedDict()
        """How each closed session ended, by session id."""
        self._runner: web.AppRunner | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._origin = ""

    async def __aenter__(self) -> Self:
        """Start to listen.

        Raises:
            OSError: The address is in use, or does not belong to this machine.
        """
        app = web.Application(client_max_size=self._limits.max_body_bytes)
        app.router.add_route("*", "/{path:.*}", self._handle)
        # With handler_cancellation a request ends when its client disconnects. Its turn is still sampled.
        runner = web.AppRunner(
            app,
            handler_cancellation=True,
            access_log=None,
            shutdown_timeout=1.0,
            lingering_time=1.0,
            keepalive_timeout=self._limits.idle_s,
        )
        await runner.setup()
        try:
            await web.TCPSite(runner, self._host, self._port).start()
        except BaseException:
            await runner.cleanup()
            raise
        port = runner.addresses[0][1]
        shown_host = f"[{self._public_host}]" if ":" in self._public_host else self._public_host
        self._origin = f"http://{shown_host}:{port}"
        self._runner, self._loop = runner, asyncio.get_running_loop()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close all sessions, and stop listening."""
        assert self._runner is not None
        self.close_sessions(SessionEnd.CLOSED)
        # Let the cancelled turns end, so that their clients get an answer.
        await asyncio.sleep(0)
        await self._runner.cleanup()
        self._runner = None

    @property
    def url(self) -> str:
        """The server's URL, without a path."""
        return self._origin

    @property
    def port(self) -> int:
        """The port that the server listens on."""
        assert self._runner is not None, "it runs"
        return self._runner.addresses[0][1]

    def close_sessions(self, end: SessionEnd) -> None:
        """Close all sessions. The server still answers requests."""
        for session in list(self._open_sessions.values()):
            session.close(end)

    def open(self, agent: RespondingAgent, *, name: str = "policy") -> Session:
        """Open a session for the agent; thread-safe. ``name`` is the model's name in all answers to clients.

        Raises:
            RuntimeError: The server is not running.
        """
        if self._runner is None or self._loop is None:
            raise RuntimeError("open was called on a server that is not running; call it within 'async with'")
        session = Session(
            agent,
            name=name,
            origin=self._origin,
            api_key_of=self._key_of,
            when_closed=self._forget,
            limits=self._limits,
            loop=self._loop,
        )
        self._open_sessions[session.id] = session
        return session

    def _key_of(self, session_id: str) -> str:
        return hmac.digest(self._secret, session_id.encode(), "sha256").hex()

    def _forget(self, session: Session) -> None:
        """Drop a closed session, except its id and how it ended."""
        assert session.end is not None, "it is closed"
        del self._open_sessions[session.id]
        self._ends[session.id] = session.end
        while len(self._ends) > MAX_CLOSED:
            self._ends.popitem(last=False)

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        path = _path_in_session(request)
        session = None
        try:
            if self._opener is not None and request.path == OPENING_PATH:
                return await self._open(request, self._opener)
            session = self._checked_session(request)
            if session.num_open_requests >= self._limits.max_open_requests:
                raise RequestError(
                    f"{session.num_open_requests} requests of this session are open; no more may be",
                    code="too_many_requests",
                )
            session.num_open_requests += 1
            try:
                return await self._route(request, session, path)
            finally:
                session.num_open_requests -= 1
        except Exception as error:
            problem = as_request_error(error)
        if session is not None:
            _count(session, problem)
        return _error_response(path, problem)

    async def _open(self, request: web.Request, opener: SessionOpener) -> web.StreamResponse:
        if request.method != "POST":
            raise RequestError(
                f"{request.method} {OPENING_PATH} is not served; POST opens a session",
                code="method_not_allowed",
            )
        assert self._token is not None, "a server with an opener has a token"
        if not _is_among(_given_keys(request), self._token):
            raise RequestError(
                "the token is missing or wrong; give the server's token as a bearer token",
                code="invalid_token",
            )
        if raw := await self._read(request):
            # The API defines no fields of this body, and unknown fields are refused.
            read_own_body(_parsed(raw), Fields)
        opened = opener()
        session = opened.session
        return _json_response(
            {
                "id": session.id,
                "base_url": session.base_url,
                "anthropic_base_url": session.anthropic_base_url,
                "api_key": session.api_key,
                "trains": opened.trains,
            },
            status=201,
        )

    def _checked_session(self, request: web.Request) -> Session:
        """Return the open session that a request may use.

        Raises:
            RequestError: There is no such session, the key does not belong to it, or the session is closed.
        """
        parts = request.path.split("/")
        session_id = parts[2] if len(parts) > 2 and parts[1] == "sessions" else ""
        session = self._open_sessions.get(session_id)
        end = self._ends.get(session_id) if session is None else session.end
        if session is None and end is None:
            raise RequestError(
                "there is no such session; paths begin with /sessions/<id>", code="session_not_found"
            )
        if not _is_among(_given_keys(request), self._key_of(session_id)):
            raise RequestError(
                "the key does not belong to this session; give its api_key as a bearer token or in x-api-key",
                code="invalid_api_key",
            )
        if session is None or end is not None:
            raise closed(end or SessionEnd.CLOSED)
        return session

    async def _route(self, request: web.Request, session: Session, path: str) -> web.StreamResponse:
        match request.method, path:
            case "POST", "/v1/chat/completions" | "/v1/responses" | "/v1/messages":
                return await self._answer(request, session, path)
            case "POST", "/v1/messages/count_tokens":
                inference = _ANTHROPIC.read_prompt(_parsed(await self._read(request)))
                num_tokens = session.num_prompt_tokens(inference)
                return _json_response({"input_tokens": num_tokens}, headers=_ignored_header(inference))
            case "POST", "/feedback":
                feedback, is_last = read_feedback(_parsed(await self._read(request)))
                session.add_feedback(feedback, is_last=is_last)
                return _json_response({"num_feedback": len(session.feedback), "finished": session.is_closed})
            case "DELETE", "/" if self._opener is not None:
                session.close(SessionEnd.CLOSED)
                return _json_response({"id": session.id, "end": SessionEnd.CLOSED.value})
            case "GET", _ if path == "/v1/models" or path.startswith("/v1/models/"):
                return _json_response(
                    _models(session, path, of_anthropic="anthropic-version" in request.headers)
                )
        raise RequestError(
            f"{request.method} {path[:80]} is not served; there are POST of {', '.join(_DIALECTS)}, "
            "/v1/messages/count_tokens and /feedback, and GET of /v1/models"
            + ("" if self._opener is None else ", and DELETE of the session itself"),
            code="not_found",
        )

    async def _answer(self, request: web.Request, session: Session, path: str) -> web.StreamResponse:
        session.counts.num_requests += 1
        raw = await self._read(request)
        dialect = _DIALECTS[path]
        inference = dialect.read(_parsed(raw))
        sampling = session.begin(inference, _attempt(request, path, raw))
        is_delivered = False
        try:
            if inference.is_streamed:
                # An error before the first keep-alive comment can still have its own status.
                done, _ = await asyncio.wait([sampling.reply], timeout=self._limits.keep_alive_s)
                if done:
                    await _outcome(sampling, session)
                headers = {"content-type": "text/event-stream", "cache-control": "no-cache"}
                response = web.StreamResponse(headers={**headers, **_ignored_header(inference)})
            else:
                reply = await _outcome(sampling, session)
                response = _json_response(dialect.whole(inference, reply), headers=_ignored_header(inference))
            # A client that disconnects or does not read is not an error of the server.
            with contextlib.suppress(ConnectionError, TimeoutError):
                await self._within(response.prepare(request))
                if inference.is_streamed:
                    async for piece in self._stream(session, dialect, sampling):
                        await self._within(response.write(piece))
                await self._within(response.write_eof())
                is_delivered = True
        finally:
            session.leave(sampling, is_delivered=is_delivered)
        return response

    async def _stream(self, session: Session, dialect: Dialect, sampling: Sampling) -> AsyncIterator[bytes]:
        """Yield keep-alive comments until the turns are sampled, and then their events."""
        task = sampling.reply
        while not task.done():
            yield b": the turn is being sampled\n\n"
            await asyncio.wait([task], timeout=self._limits.keep_alive_s)
        try:
            reply = await _outcome(sampling, session)
        except RequestError as problem:
            # The headers are already sent, so the error becomes an event.
            _count(session, problem)
            yield dialect.error_event(problem)
            return
        for event in dialect.events(sampling.request, reply):
            yield event

    async def _within(self, writing: Awaitable[object]) -> None:
        async with asyncio.timeout(self._limits.write_s):
            await writing

    async def _read(self, request: web.Request) -> bytes:
        try:
            async with asyncio.timeout(self._limits.body_s):
                return await request.read()
        except TimeoutError as error:
            raise RequestError(
                f"the body did not arrive within {self._limits.body_s:g} s", code="body_timeout"
            ) from error
        except web.HTTPRequestEntityTooLarge as error:
            raise RequestError(
                f"the body is larger than {self._limits.max_body_bytes} bytes", code="body_too_large"
            ) from error
        except (web.RequestPayloadError, ConnectionError) as error:
            raise RequestError("the body cannot be read", code="invalid_body") from error


def _is_among(keys: Sequence[str], secret: str) -> bool:
    """Compare keys from headers with a secret in constant time."""
    # compare_digest takes ASCII strings or bytes; headers may hold any bytes.
    wanted = secret.encode()
    matches = [hmac.compare_digest(key.encode(errors="surrogateescape"), wanted) for key in keys]
    return any(matches)


async def _outcome(sampling: Sampling, session: Session) -> InferenceResult:
    """Wait for the result of a sampling, which continues if the wait is cancelled."""
    task = sampling.reply
    await asyncio.wait([task])
    if task.cancelled():
        raise closed(session.end or SessionEnd.CLOSED)
    return task.result()


def _given_keys(request: web.Request) -> tuple[str, str]:
    """Return the keys in both headers, because some programs put a placeholder into one of them."""
    bearer = request.headers.get("Authorization", "")
    return request.headers.get("x-api-key", ""), bearer.removeprefix("Bearer ")


def _attempt(request: web.Request, path: str, raw: bytes) -> Attempt:
    count = request.headers.get("x-stainless-retry-count", "0")
    if not (count.isascii() and count.isdigit() and len(count) <= 4):
        raise RequestError(
            f"x-stainless-retry-count is {count[:20]!r}; must be a number below 10000",
            param="x-stainless-retry-count",
        )
    digest = hashlib.blake2b(path.encode() + b"\n" + raw).digest()
    return Attempt(digest=digest, num_retries=int(count))


def _parsed(raw: bytes) -> Mapping[str, Any]:
    try:
        body = parse_json(raw)
    except ValueError as error:
        raise RequestError(f"the body is not JSON: {error}", code="invalid_json") from error
    if not isinstance(body, dict):
        raise wrong("the body", body, "must be a JSON object")
    return body


def _path_in_session(request: web.Request) -> str:
    return "/" + "/".join(request.path.split("/")[3:])


def _count(session: Session, problem: RequestError) -> None:
    if problem.status >= 500:
        session.counts.num_failed += 1
    else:
        session.counts.num_refused += 1


def _ignored_header(inference: InferenceRequest) -> dict[str, str]:
    names = (*inference.ignored, *inference.unknown)
    return {IGNORED_HEADER: ", ".join(names)} if names else {}


def _json_response(
    body: Json, *, status: int = 200, headers: Mapping[str, str] | None = None
) -> web.Response:
    return web.Response(text=dumps(body), status=status, content_type="application/json", headers=headers)


def _error_response(path: str, problem: RequestError) -> web.Response:
    dialect = _ANTHROPIC if path.startswith("/v1/messages") else _DIALECTS["/v1/chat/completions"]
    return _json_response(dialect.error(problem), status=problem.status, headers=problem.headers)


def _models(session: Session, path: str, *, of_anthropic: bool) -> Json:
    """Return the answer to ``GET /v1/models`` or ``GET /v1/models/<name>``, as OpenAI or Anthropic writes it.

    Raises:
        RequestError: There is no model with this name.
    """
    name = path.removeprefix("/v1/models").removeprefix("/")
    if name not in ("", session.name):
        raise RequestError(
            f"there is no model {name[:80]!r}; must be {session.name!r}", code="model_not_found"
        )
    if of_anthropic:
        created = datetime.fromtimestamp(session.created_s, UTC).isoformat()
        model: Json = {
            "type": "model",
            "id": session.name,
            "display_name": session.name,
            "created_at": created,
            "lifecycle": "active",
        }
        listed: Json = {"has_more": False, "first_id": session.name, "last_id": session.name}
    else:
        model = {
            "id": session.name,
            "object": "model",
            "created": session.created_s,
            "owned_by": "forgeasync",
        }
        listed = {"object": "list"}
    return model if name else {**listed, "data": [model]}
