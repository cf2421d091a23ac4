"""A session: the URLs through which a client uses one agent, with limits, counts and feedback.

Each request begins a sampling, or joins that of an earlier attempt (``Samplings``).
"""

import asyncio
import concurrent.futures
import dataclasses
import functools
import logging
import math
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, Protocol, runtime_checkable

import msgspec

from forgeasync.environments.conversation import ConversationTree
from forgeasync.environments.environment import (
    ContextFull,
    EpisodeOver,
    RespondingAgent,
    TooManyTurns,
    Turn,
)
from forgeasync.environments.messages import ASSISTANT, Message, ToolSpec, checked_message
from forgeasync.environments.rendering import NoCallOpening
from forgeasync.environments.sessions.dialect import (
    Fields,
    InferenceRequest,
    InferenceResult,
    RequestError,
    read_own_body,
    shown,
)

MAX_FAILED = 1024
"""Maximum number of bodies whose refused or failed attempts are remembered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """The parts of a request that identify it."""

    digest: bytes
    """Digest of the path and the body."""
    num_retries: int


@dataclass(slots=True, kw_only=True, eq=False)
class Sampling:
    """Turns of a request, in flight or finished."""

    attempt: Attempt
    request: InferenceRequest
    reply: asyncio.Task[InferenceResult]
    """The task that samples the turns."""
    num_waiting: int = 0
    """Number of requests that wait for the turns."""
    is_delivered: bool = False
    """Whether a response was written completely."""
    ended_s: float | None = None


class Samplings:
    """The samplings of one session: each request begins one, or joins that of an earlier attempt.

    A pure state machine; times are in seconds of one clock. Both SDKs send ``x-stainless-retry-count``:
    - A first attempt (count 0) begins a sampling, even if another request has the same body: parallel
      sub-agents send the same requests.
    - A later attempt joins a sampling with the same body. It prefers one without waiting requests that was
      not delivered. Otherwise it begins a sampling if an attempt with this body was refused or has failed,
      since it is the retry of that attempt. Otherwise it joins one that was delivered (the response may be
      lost), or one with waiting requests.
    """

    def __init__(self, *, keep_s: float, max_kept: int) -> None:
        """Samplings that have ended are kept for ``keep_s``, at most ``max_kept`` of them."""
        self._keep_s = keep_s
        self._max_kept = max_kept
        self._all: list[Sampling] = []
        self._num_failed: OrderedDict[bytes, int] = OrderedDict()

    def find(self, attempt: Attempt) -> Sampling | None:
        """Return the sampling that the attempt joins; None if it begins one."""
        if not attempt.num_retries:
            return None
        same = [one for one in self._all if one.attempt.digest == attempt.digest]
        lost = [one for one in same if not one.num_waiting and not one.is_delivered]
        if lost:
            return lost[0]
        if num_failed := self._num_failed.pop(attempt.digest, 0):
            if num_failed > 1:
                self._num_failed[attempt.digest] = num_failed - 1
            return None
        return max(same, key=lambda one: (not one.num_waiting, one.is_delivered), default=None)

    def begin(
        self, attempt: Attempt, request: InferenceRequest, reply: asyncio.Task[InferenceResult]
    ) -> Sampling:
        """Add a sampling."""
        sampling = Sampling(attempt=attempt, request=request, reply=reply)
        self._all.append(sampling)
        return sampling

    def refused(self, attempt: Attempt) -> None:
        """Record that the client of an attempt must retry, because nothing was sampled for it."""
        self._num_failed[attempt.digest] = self._num_failed.pop(attempt.digest, 0) + 1
        while len(self._num_failed) > MAX_FAILED:
            self._num_failed.popitem(last=False)

    def ended(self, sampling: Sampling, *, has_failed: bool, now_s: float) -> None:
        """Record the end of a sampling. A failed one is removed, so that a retry samples again."""
        sampling.ended_s = now_s
        if has_failed and sampling in self._all:
            self._all.remove(sampling)

    def expired(self, now_s: float) -> list[Sampling]:
        """Remove and return the samplings beyond the limits of time and number."""
        idle = [one for one in self._all if one.ended_s is not None and not one.num_waiting]
        num_over = len(idle) - self._max_kept
        gone = [
            one
            for index, one in enumerate(idle)
            if index < num_over or (one.ended_s is not None and now_s - one.ended_s > self._keep_s)
        ]
        self._all = [one for one in self._all if one not in gone]
        return gone

    def clear(self) -> list[Sampling]:
        """Remove and return all samplings."""
        gone, self._all = self._all, []
        return gone


_LOGGER = logging.getLogger(__name__)

MAX_FEEDBACK = 64
"""Maximum number of ``Feedback`` entries of a session."""

MAX_COMMENT_CHARS = 10_000
"""Maximum length of a comment in characters."""

MAX_SCORE = 1e6


class SessionEnd(StrEnum):
    """How a session ended."""

    FEEDBACK = "feedback"
    """Feedback ended the session."""
    CLOSED = "closed"
    """The client closed the session, or its episode ended."""
    IDLE = "idle"
    """The session had no turn for ``serving.idle_session_s``."""
    TIME = "time"
    """The session was open for ``serving.session_s``."""
    RUN_OVER = "run_over"
    """The run has ended."""

    @property
    def words(self) -> str:
        """Message for a client that requests another turn."""
        why = {
            SessionEnd.FEEDBACK: "feedback has ended it",
            SessionEnd.CLOSED: "it was closed",
            SessionEnd.IDLE: "it had no turn for too long (serving.idle_session_s)",
            SessionEnd.TIME: "it was open for too long (serving.session_s)",
            SessionEnd.RUN_OVER: "the run that served it has ended",
        }[self]
        return f"this session is closed: no further turn is sampled in it, because {why}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Feedback:
    """A verdict of a person or a judge on a session."""

    score: float
    comment: str | None = None


class _FeedbackBody(Fields):
    score: Annotated[float, msgspec.Meta(ge=-MAX_SCORE, le=MAX_SCORE)]
    comment: Annotated[str, msgspec.Meta(max_length=MAX_COMMENT_CHARS)] | None = None
    finished: bool | None = None


def read_feedback(body: Mapping[str, Any]) -> tuple[Feedback, bool]:
    """Return a request's feedback, and whether it ends the session (unless ``finished`` is false).

    Raises:
        RequestError: A field is malformed or unknown. The error names it.
    """
    read = read_own_body(body, _FeedbackBody)
    return Feedback(score=read.score, comment=read.comment), read.finished is not False


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionLimits:
    """Limits of one session. Times are in seconds.

    Raises:
        ValueError: A limit is not positive and finite.
    """

    max_body_bytes: int = 8 * 2**20
    """Maximum size of a request's body after decompression. A larger one gets 413."""
    max_turns_at_once: int = 64
    """Maximum number of turns that are sampled at the same time. Further requests get 429."""
    max_open_requests: int = 256
    """Maximum number of open requests, including those that wait for the turn of another request."""
    idle_s: float = 120.0
    """Time for the first headers of a connection to arrive, and between two requests of a connection."""
    body_s: float = 30.0
    """Time for a request's body to arrive."""
    turn_s: float = 1800.0
    """Time for a request's turns to be sampled. After that, the request gets 504."""
    write_s: float = 60.0
    """Time for a client to read an answer, or one piece of a stream."""
    keep_alive_s: float = 10.0
    """Time between two keep-alive comments in a stream. The first one sends the headers."""
    keep_reply_s: float = 300.0
    """Time for which an answer is kept for retries."""
    max_kept_replies: int = 256
    max_shown_turns: int = 4096
    """Maximum number of turns, and of responses, that are recognized when a client sends them back."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not (value > 0 and math.isfinite(value)):
                raise ValueError(f"SessionLimits.{field.name} = {value}; must be positive and finite")


@runtime_checkable
class TokenAgent(RespondingAgent, Protocol):
    """An agent that renders its own prompts, so it can count tokens and force tool calls."""

    async def respond(
        self,
        messages: str | Sequence[Message],
        tools: Sequence[ToolSpec] | None = None,
        *,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        must_call: Sequence[ToolSpec] = (),
    ) -> Turn:
        """See ``EpisodeAgent``."""
        ...

    def num_prompt_tokens(
        self,
        messages: str | Sequence[Message],
        tools: Sequence[ToolSpec] | None = None,
        *,
        must_call: Sequence[ToolSpec] = (),
    ) -> int:
        """See ``EpisodeAgent``."""
        ...


@dataclass(slots=True, kw_only=True)
class SessionCounts:
    """Counts of a session so far."""

    num_requests: int = 0
    """Requests for turns, with any outcome."""
    num_refused: int = 0
    """Requests that were answered with a status from 400 to 499."""
    num_failed: int = 0
    """Requests that were answered with a status of at least 500."""
    num_turns: int = 0
    """Turns sampled."""
    num_retries_joined: int = 0
    """Retries that received the turns that an earlier attempt had started."""
    num_not_honoured: int = 0
    """Requests with fields that a policy in training cannot honour, such as ``temperature``."""
    num_with_unknown_fields: int = 0
    """Requests with fields that the endpoint does not know, which were ignored."""
    num_abandoned: int = 0
    """Turns that were started, but that no client received."""
    num_ours: int = 0
    """Assistant messages in requests that are unchanged turns of this session."""
    num_rewritten: int = 0
    """Other assistant messages in requests: changed, after a changed history, or written elsewhere."""
    num_shown_as_text: int = 0
    """Tool calls that the client's API cannot express, and that were shown as text."""


class Session:
    """A client's access to one agent, from ``SessionServer.open``. Methods are thread-safe unless noted."""

    def __init__(
        self,
        agent: RespondingAgent,
        *,
        name: str,
        origin: str,
        api_key_of: Callable[[str], str],
        when_closed: Callable[["Session"], None],
        limits: SessionLimits,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        """``origin`` is the server's URL without a path. ``api_key_of`` returns the key for a session id.
        ``loop`` is the server's event loop, on which the agent and ``when_closed`` are called."""
        self.id = secrets.token_urlsafe(16)
        self.name = name
        """Name of the model in answers to clients."""
        self.anthropic_base_url = f"{origin}/sessions/{self.id}"
        """URL for Anthropic's clients, which append ``/v1/messages``."""
        self.base_url = f"{self.anthropic_base_url}/v1"
        """URL for OpenAI's clients."""
        self.api_key = api_key_of(self.id)
        self.created_s = int(time.time())
        self.counts = SessionCounts()
        self.feedback: list[Feedback] = []
        self.end: SessionEnd | None = None
        """How the session ended; None while it is open."""
        self.num_open_requests = 0
        self._agent = agent
        self._limits = limits
        self._loop = loop
        self._when_closed = when_closed
        self._samplings = Samplings(keep_s=limits.keep_reply_s, max_kept=limits.max_kept_replies)
        self._tree: ConversationTree[Message] = ConversationTree()
        """The turns of the session, each with its ``Turn.message``."""
        self._responses: OrderedDict[str, tuple[Message, ...]] = OrderedDict()
        """Conversations up to and including each stored response, without instructions, by its id."""
        self._lock = threading.Lock()
        self._num_sampling = 0
        self._warned: set[str] = set()
        """Warnings about the session's clients that are already logged."""
        self._finished: concurrent.futures.Future[None] = concurrent.futures.Future()

    @property
    def is_closed(self) -> bool:
        """Whether the session has ended."""
        return self.end is not None

    def close(self, end: SessionEnd = SessionEnd.CLOSED) -> None:
        """Close the session: turns in flight are cancelled, and further requests get 410 with ``end``.

        Closing a session again does nothing.
        """
        with self._lock:
            if self.end is not None:
                return
            self.end = end
        self._finished.set_result(None)
        self._loop.call_soon_threadsafe(self._cancel)

    async def finished(self) -> tuple[Feedback, ...]:
        """Wait until the session has ended, and return all feedback. May be awaited on any loop."""
        await asyncio.shield(asyncio.wrap_future(self._finished))
        return tuple(self.feedback)

    def add_feedback(self, feedback: Feedback, *, is_last: bool) -> None:
        """Store feedback; with ``is_last``, also close the session.

        Raises:
            RequestError: The session is closed, or has ``MAX_FEEDBACK`` entries.
        """
        if self.end is not None:
            raise closed(self.end)
        if len(self.feedback) >= MAX_FEEDBACK:
            raise RequestError(f"the session has {MAX_FEEDBACK} verdicts, and takes no more", param="score")
        self.feedback.append(feedback)
        if is_last:
            self.close(SessionEnd.FEEDBACK)

    def begin(self, request: InferenceRequest, attempt: Attempt) -> Sampling:
        """Return the sampling that answers a request: a new one, or that of an earlier attempt.

        Call it on the server's loop, and call ``leave`` afterwards.

        Raises:
            RequestError: The session is closed or busy.
        """
        self._forget()
        if self.end is not None:
            raise closed(self.end)
        sampling = self._samplings.find(attempt)
        if sampling is not None:
            self.counts.num_retries_joined += 1
        else:
            self._check_room(request, attempt)
            self._note(request)
            reply = self._loop.create_task(self._sample(request))
            sampling = self._samplings.begin(attempt, request, reply)
            self._num_sampling += request.num_turns
            reply.add_done_callback(lambda _: self._ended(sampling))
        sampling.num_waiting += 1
        return sampling

    def num_prompt_tokens(self, request: InferenceRequest) -> int:
        """Return the number of prompt tokens that a turn would have. Call it on the server's loop.

        Raises:
            RequestError: The session is closed, or its agent has no tokenizer.
            ValueError: The messages cannot be rendered.
        """
        if self.end is not None:
            raise closed(self.end)
        if not isinstance(self._agent, TokenAgent):
            raise RequestError(
                "tokens cannot be counted here: this session's agent has no tokenizer", code="not_found"
            )
        messages = self._history(request, is_continued=False)
        return self._agent.num_prompt_tokens(messages, request.tools or None, must_call=request.must_call)

    def leave(self, sampling: Sampling, *, is_delivered: bool) -> None:
        """End a request's wait; ``is_delivered`` says whether its answer was written completely."""
        sampling.num_waiting -= 1
        sampling.is_delivered |= is_delivered

    def _check_room(self, request: InferenceRequest, attempt: Attempt) -> None:
        most = self._limits.max_turns_at_once
        if request.num_turns > most:
            raise RequestError(f"n is {request.num_turns}; must be at most {most} here", param="n")
        if self._num_sampling + request.num_turns > most:
            self._samplings.refused(attempt)
            raise RequestError(
                f"{self._num_sampling} turns of this session are being sampled; at most {most} may be",
                code="too_many_requests",
            )

    def _note(self, request: InferenceRequest) -> None:
        self.counts.num_not_honoured += bool(request.ignored)
        self.counts.num_with_unknown_fields += bool(request.unknown)
        asks = "asks for %s; the run's own sampling is used"
        sends = "sends %s, which no endpoint knows; ignored"
        for names, what in ((request.ignored, asks), (request.unknown, sends)):
            if names and what not in self._warned:
                self._warned.add(what)
                line = f"session %r: a client {what} (logged once per session)"
                _LOGGER.warning(line, self.name, ", ".join(names))

    async def _sample(self, request: InferenceRequest) -> InferenceResult:
        """Sample the turns of a request; every exception becomes a RequestError."""
        try:
            history = self._history(request, is_continued=True)
            reply = await self._reply(request, history)
        except Exception as error:
            raise as_request_error(error) from error
        if request.keeps_response:
            num_before = int(request.instructions is not None)
            self._responses[f"resp_{reply.id}"] = (*history[num_before:], reply.turns[0].message)
            while len(self._responses) > self._limits.max_shown_turns:
                self._responses.popitem(last=False)
        return reply

    async def _reply(self, request: InferenceRequest, history: tuple[Message, ...]) -> InferenceResult:
        responses = [self._loop.create_task(self._turn(request, history)) for _ in range(request.num_turns)]
        try:
            # Unlike wait_for, this does not wait until cancelled tasks have ended.
            _, late = await asyncio.wait(responses, timeout=self._limits.turn_s)
        finally:
            for response in responses:
                response.cancel()
        if late:
            self.counts.num_abandoned += request.num_turns
            raise RequestError(f"no turn within {self._limits.turn_s:g} s", code="deadline_exceeded")
        # Only the agent can have cancelled a turn here, at the end of its episode.
        end = self.end or SessionEnd.CLOSED
        errors = [closed(end) if response.cancelled() else response.exception() for response in responses]
        failures = [error for error in errors if error is not None]
        turns = tuple(
            response.result() for response, error in zip(responses, errors, strict=True) if error is None
        )
        self.counts.num_turns += len(turns)
        if failures:
            self.counts.num_abandoned += len(turns)
            raise failures[0]
        self._remember(history, turns)
        return InferenceResult(
            id=secrets.token_hex(16), created_s=int(time.time()), model=self.name, turns=turns
        )

    async def _turn(self, request: InferenceRequest, history: tuple[Message, ...]) -> Turn:
        respond = self._agent.respond
        if request.must_call:
            if not isinstance(self._agent, TokenAgent):
                raise NoCallOpening("a call cannot be forced here: this session's agent has no tokenizer")
            respond = functools.partial(self._agent.respond, must_call=request.must_call)
        return await respond(history, request.tools or None, max_tokens=request.max_tokens, stop=request.stop)

    def _history(self, request: InferenceRequest, *, is_continued: bool) -> tuple[Message, ...]:
        """Return the messages before a turn, with turns of this session as their ``Turn.message``.

        ``is_continued`` says whether a turn will follow the messages.
        """
        messages = self._conversation(request)
        ours = self._tree.turns_handed_back(_checked(messages), is_continued=is_continued)
        if is_continued:
            self.counts.num_ours += len(ours)
            self.counts.num_rewritten += sum(one["role"] == ASSISTANT for one in messages) - len(ours)
        return tuple(ours[i].kept if i in ours else one for i, one in enumerate(messages))

    def _remember(self, history: tuple[Message, ...], turns: Sequence[Turn]) -> None:
        """Store turns, to recognize them when the client sends them back."""
        checked = _checked(history)
        for turn in turns:
            seen = shown(turn)
            num_calls = len(turn.tool_calls) + len(turn.broken_tool_calls)
            self.counts.num_shown_as_text += num_calls - len(seen.tool_calls)
            message = checked_message("a turn", turn.message)
            shown_message = checked_message("a turn", seen.message)
            self._tree.add((*checked, message), (), turn.message, after=None, shown=shown_message)
            if self._tree.num_turns > self._limits.max_shown_turns:
                self._tree.forget_oldest()

    def _conversation(self, request: InferenceRequest) -> tuple[Message, ...]:
        first: tuple[Message, ...] = ()
        if request.instructions is not None:
            first = ({"role": "system", "content": request.instructions},)
        if request.previous_id is None:
            return first + request.messages
        earlier = self._responses.get(request.previous_id)
        if earlier is None:
            raise RequestError(
                f"previous_response_id is {request.previous_id[:80]!r}; must be a response of this session "
                "that was not asked for with store = false",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        return first + earlier + request.messages

    def _ended(self, sampling: Sampling) -> None:
        task = sampling.reply
        self._num_sampling -= sampling.request.num_turns
        problem = None if task.cancelled() else task.exception()
        has_failed = task.cancelled() or problem is not None
        self._samplings.ended(sampling, has_failed=has_failed, now_s=self._loop.time())
        if task.cancelled():
            self.counts.num_abandoned += sampling.request.num_turns
        elif isinstance(problem, RequestError) and problem.status >= 500 and problem.may_retry:
            for _ in range(sampling.num_waiting):
                self._samplings.refused(sampling.attempt)
        self._forget()

    def _forget(self) -> None:
        for gone in self._samplings.expired(self._loop.time()):
            self._count_abandoned(gone)

    def _count_abandoned(self, gone: Sampling) -> None:
        if gone.ended_s is not None and not gone.is_delivered:
            self.counts.num_abandoned += gone.request.num_turns

    def _cancel(self) -> None:
        self._when_closed(self)
        for gone in self._samplings.clear():
            gone.reply.cancel()
            self._count_abandoned(gone)


def _checked(messages: Sequence[Message]) -> tuple[Message, ...]:
    return tuple(checked_message(f"messages[{i}]", one) for i, one in enumerate(messages))


def closed(end: SessionEnd) -> RequestError:
    """Return the error for requests to a session that has ended."""
    return RequestError(end.words, code="session_closed")


def as_request_error(error: BaseException) -> RequestError:
    """Convert an exception to the error that a client gets. Unexpected exceptions are logged."""
    match error:
        case RequestError():
            return error
        case NoCallOpening():
            remedy = "leave the choice of tools to the model ('auto')"
            return RequestError(f"{error}; {remedy}", param="tool_choice", code="unsupported_value")
        case ContextFull():
            return RequestError(str(error), param="messages", code="context_length_exceeded")
        case TooManyTurns():
            return RequestError(str(error), code="too_many_turns")
        case EpisodeOver():
            return closed(SessionEnd.CLOSED)
        case ValueError():
            return RequestError(str(error), param="messages", code="invalid_messages")
    _LOGGER.error("a request to a session failed", exc_info=error)
    return RequestError("the server failed to answer; its log says why", code="server_error")
