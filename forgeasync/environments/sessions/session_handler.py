"""Answers HTTP requests to sessions: who may ask, what is read, and how it is written out."""

import asyncio
import contextlib
import hashlib
from collections.abc import Awaitable, Mapping
from typing import Any

from aiohttp import web

from forgeasync.environments.sessions.anthropic_messages import AnthropicMessages
from forgeasync.environments.sessions.chat_completions import ChatCompletions
from forgeasync.environments.sessions.feedback import read_feedback
from forgeasync.environments.sessions.fields import Fields, Json, parse_json
from forgeasync.environments.sessions.front_desk import FrontDesk
from forgeasync.environments.sessions.inference import (
    Api,
    InferenceRequest,
    InferenceResult,
    dumps,
    openai_error,
)
from forgeasync.environments.sessions.limits import SessionLimits
from forgeasync.environments.sessions.models import models
from forgeasync.environments.sessions.problems import RequestError, as_request_error, closed
from forgeasync.environments.sessions.registry import Registry, is_among
from forgeasync.environments.sessions.responses import Responses
from forgeasync.environments.sessions.samplings import Attempt, Sampling
from forgeasync.environments.sessions.session import Session, Work
from forgeasync.environments.sessions.session_end import SessionEnd

_APIS: Mapping[str, Api] = {
    "/v1/chat/completions": ChatCompletions(),
    "/v1/responses": Responses(),
    "/v1/messages": AnthropicMessages(),
}

OPENING_PATH = "/sessions"
"""Where clients open sessions, if the server lets them."""

IGNORED_HEADER = "x-forgeasync-ignored"
"""Names the fields of a request that were not honoured, and those that no endpoint knows."""

MAX_KEY_CHARS = 255
"""Of an idempotency key."""


class SessionHandler:
    """Finds the session of a request and answers it."""

    def __init__(
        self, sessions: Registry, limits: SessionLimits, desk: FrontDesk | None, token: str | None
    ) -> None:
        """Clients open sessions at ``desk`` with ``token``; without a desk they cannot."""
        self._sessions = sessions
        self._limits = limits
        self._desk = desk
        self._token = token

    def application(self) -> web.Application:
        """Return the application to serve."""
        app = web.Application(client_max_size=self._limits.max_body_bytes)
        app.router.add_route("*", "/{path:.*}", self._handle)
        return app

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        path = _path_in_session(request)
        session = None
        try:
            if self._desk is not None and request.path == OPENING_PATH:
                return await self._open(request, self._desk)
            session = self._checked_session(request)
            if session.num_open_requests >= self._limits.max_open_requests:
                raise RequestError(
                    f"{session.num_open_requests} requests of this session are open; no more may be",
                    status=429,
                    code="too_many_requests",
                    retry_after_s=1,
                )
            session.num_open_requests += 1
            try:
                return await self._route(request, session, path)
            finally:
                session.num_open_requests -= 1
        except RecursionError:
            # From parsing a body, or from showing a value of it in an error: a session lets no other one out.
            problem = RequestError("the body is nested too deeply", code="invalid_json")
        except Exception as error:
            problem = as_request_error(error)
        if session is not None:
            _count(session, problem)
        return _error_response(path, problem)

    async def _open(self, request: web.Request, desk: FrontDesk) -> web.StreamResponse:
        if request.method != "POST":
            raise RequestError(
                f"{request.method} {OPENING_PATH} is not served; POST opens a session",
                status=405,
                code="method_not_allowed",
            )
        assert self._token is not None, "a server with a desk has a token"
        if not is_among(_given_keys(request), self._token):
            raise RequestError(
                "the token is missing or wrong; give the server's token as a bearer token",
                status=401,
                code="invalid_token",
            )
        if raw := await self._read(request):
            # It has no fields yet: what a client asks for is not ignored.
            Fields(_parsed(raw)).refuse_rest()
        opened = desk.open()
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
        parts = request.path.split("/")
        session_id = parts[2] if len(parts) > 2 and parts[1] == "sessions" else ""
        return self._sessions.find(session_id, _given_keys(request))

    async def _route(self, request: web.Request, session: Session, path: str) -> web.StreamResponse:
        match request.method, path:
            case "POST", "/v1/chat/completions" | "/v1/responses" | "/v1/messages":
                return await self._answer(request, session, path)
            case "POST", "/feedback":
                feedback, is_last = read_feedback(_parsed(await self._read(request)))
                session.add_feedback(feedback, is_last=is_last)
                return _json_response({"num_feedback": len(session.feedback), "finished": session.is_closed})
            case "DELETE", "/" if self._desk is not None:
                session.close(SessionEnd.CLOSED)
                return _json_response({"id": session.id, "end": SessionEnd.CLOSED.value})
            case "GET", _ if path == "/v1/models" or path.startswith("/v1/models/"):
                return _json_response(
                    models(session, path, of_anthropic="anthropic-version" in request.headers)
                )
        raise RequestError(
            f"{request.method} {path[:80]} is not served; there are POST of {', '.join(_APIS)} and "
            "/feedback, and GET of /v1/models"
            + ("" if self._desk is None else ", and DELETE of the session itself"),
            status=404,
            code="not_found",
        )

    async def _answer(self, request: web.Request, session: Session, path: str) -> web.StreamResponse:
        session.counts.num_requests += 1
        raw = await self._read(request)
        api = _APIS[path]
        asked = api.read(_parsed(raw))
        sampling = session.begin(asked, _attempt(request, path, raw))
        is_delivered = False
        try:
            if asked.is_streamed:
                is_delivered, response = await self._stream(request, session, api, sampling)
            else:
                reply = await _outcome(sampling, session)
                response = _json_response(api.whole(asked, reply), headers=_ignored_header(asked))
                is_delivered = await self._write(request, response)
        finally:
            session.leave(sampling, is_delivered=is_delivered)
        return response

    async def _stream(
        self, request: web.Request, session: Session, api: Api, sampling: Sampling[Work]
    ) -> tuple[bool, web.StreamResponse]:
        """Return whether all was written, and the response.

        Until the first sign of life is due an error still gets its own status.
        """
        asked, task = sampling.work.asked, sampling.work.reply
        response = web.StreamResponse(
            headers={
                "content-type": "text/event-stream",
                "cache-control": "no-cache",
                **_ignored_header(asked),
            }
        )
        done, _ = await asyncio.wait([task], timeout=self._limits.keep_alive_s)
        if done:
            await _outcome(sampling, session)
        return await self._deliver(self._written_stream(request, response, session, api, sampling)), response

    async def _written_stream(
        self,
        request: web.Request,
        response: web.StreamResponse,
        session: Session,
        api: Api,
        sampling: Sampling[Work],
    ) -> None:
        task = sampling.work.reply
        await self._within(response.prepare(request))
        while not task.done():
            await self._within(response.write(b": the turn is being sampled\n\n"))
            await asyncio.wait([task], timeout=self._limits.keep_alive_s)
        try:
            reply = await _outcome(sampling, session)
        except RequestError as problem:
            # The headers have left: only an event can tell.
            _count(session, problem)
            await self._within(response.write(api.error_event(problem)))
        else:
            for event in api.events(sampling.work.asked, reply):
                await self._within(response.write(event))
        await self._within(response.write_eof())

    async def _write(self, request: web.Request, response: web.Response) -> bool:
        async def written() -> None:
            await self._within(response.prepare(request))
            await self._within(response.write_eof())

        return await self._deliver(written())

    async def _deliver(self, writing: Awaitable[None]) -> bool:
        """Whether all was written; a client that is gone or takes nothing in is no error of ours."""
        with contextlib.suppress(ConnectionError, TimeoutError):
            await writing
            return True
        return False

    async def _within(self, writing: Awaitable[object]) -> None:
        async with asyncio.timeout(self._limits.write_s):
            await writing

    async def _read(self, request: web.Request) -> bytes:
        try:
            async with asyncio.timeout(self._limits.body_s):
                return await request.read()
        except TimeoutError as error:
            raise RequestError(
                f"the body did not arrive within {self._limits.body_s:g} s", status=408, code="body_timeout"
            ) from error
        except web.HTTPRequestEntityTooLarge as error:
            raise RequestError(
                f"the body is larger than {self._limits.max_body_bytes} bytes",
                status=413,
                code="body_too_large",
            ) from error
        except (web.RequestPayloadError, ConnectionError) as error:
            raise RequestError("the body cannot be read", code="invalid_body") from error


async def _outcome(sampling: Sampling[Work], session: Session) -> InferenceResult:
    """Wait for a sampling without ending it where the wait is ended."""
    task = sampling.work.reply
    await asyncio.wait([task])
    if task.cancelled():
        raise closed(session.end or SessionEnd.CLOSED)
    return task.result()


def _given_keys(request: web.Request) -> tuple[str, str]:
    """Both keys of a request: some programs fill one of the headers with a word of their own."""
    bearer = request.headers.get("Authorization", "")
    return request.headers.get("x-api-key", ""), bearer.removeprefix("Bearer ")


def _attempt(request: web.Request, path: str, raw: bytes) -> Attempt:
    key = request.headers.get("Idempotency-Key")
    if key is not None and not 0 < len(key) <= MAX_KEY_CHARS:
        raise RequestError(
            f"Idempotency-Key has {len(key)} characters; must have 1 to {MAX_KEY_CHARS}",
            param="Idempotency-Key",
        )
    count = request.headers.get("x-stainless-retry-count", "0")
    if not (count.isascii() and count.isdigit() and len(count) <= 4):
        raise RequestError(
            f"x-stainless-retry-count is {count[:20]!r}; must be a number below 10000",
            param="x-stainless-retry-count",
        )
    digest = hashlib.blake2b(path.encode() + b"\n" + raw).digest()
    return Attempt(digest=digest, num_retries=int(count), idempotency_key=key)


def _parsed(raw: bytes) -> Mapping[str, Any]:
    try:
        body = parse_json(raw)
    except ValueError as error:
        raise RequestError(f"the body is no JSON: {error}", code="invalid_json") from error
    Fields(body)
    return body


def _path_in_session(request: web.Request) -> str:
    return "/" + "/".join(request.path.split("/")[3:])


def _count(session: Session, problem: RequestError) -> None:
    if problem.status >= 500:
        session.counts.num_failed += 1
    else:
        session.counts.num_refused += 1


def _ignored_header(asked: InferenceRequest) -> dict[str, str]:
    names = (*asked.ignored, *asked.unknown)
    return {IGNORED_HEADER: ", ".join(names)} if names else {}


def _json_response(
    body: Json, *, status: int = 200, headers: Mapping[str, str] | None = None
) -> web.Response:
    return web.Response(text=dumps(body), status=status, content_type="application/json", headers=headers)


def _error_response(path: str, problem: RequestError) -> web.Response:
    api = _APIS["/v1/messages"] if path.startswith("/v1/messages") else None
    body = openai_error(problem) if api is None else api.error(problem)
    return _json_response(body, status=problem.status, headers=problem.headers)
