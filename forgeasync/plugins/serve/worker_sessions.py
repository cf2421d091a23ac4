"""Matches clients with waiting episodes; a client without an episode gets a session that is not trained on.

Episodes wait for clients; clients never wait. Episodes are assigned in the order in which they were offered,
so that the oldest groups of the buffer come first.
"""

import asyncio
import concurrent.futures
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from forgeasync.config import ScoreSource, ServingSection
from forgeasync.environments import (
    EpisodeAgent,
    EpisodeOver,
    Feedback,
    Message,
    OpenedSession,
    RequestError,
    ServingReport,
    ServingSetup,
    Session,
    SessionEnd,
    SessionLimits,
    SessionServer,
    TokenAgent,
    ToolSpec,
    Turn,
)

NUM_LATENCIES = 1024
"""Number of most recent turns from which the latency percentiles are computed."""


class Untrained(StrEnum):
    """Why a session is not trained on."""

    NO_TICKET = "no_ticket"
    """No episode was waiting when the session was opened: limits of the buffer, of payload memory or of the
    KV cache allowed no further group."""
    NO_TURN = "no_turn"
    """The session ended before its first turn."""
    NO_SCORE = "no_score"
    """Nothing in ``serving.score_from`` gave a score."""


class ServingCounts:
    """Session counts and turn latencies of one worker. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        names = (
            "num_opened",
            "num_refused",
            "num_feedback",
            "feedback_sum",
            "num_judged",
            "num_unreadable_judgements",
            *(f"num_ended_{end}" for end in SessionEnd),
            *(f"num_untrained_{reason}" for reason in Untrained),
            *(f"num_scored_by_{source}" for source in ScoreSource),
        )
        self._counts: dict[str, float] = dict.fromkeys(names, 0)
        self._turns_s: deque[float] = deque(maxlen=NUM_LATENCIES)

    def add(self, name: str, number: float = 1) -> None:
        """Add to a count."""
        with self._lock:
            assert name in self._counts, name
            self._counts[name] += number

    def took(self, turn_s: float) -> None:
        """Record the duration of a finished turn, in seconds."""
        with self._lock:
            self._turns_s.append(turn_s)

    def report(self, *, num_open: int, num_on_offer: int) -> ServingReport:
        """Return the current counts and latency percentiles."""
        with self._lock:
            turns_s = list(self._turns_s)
            counts = dict(self._counts)
        return ServingReport(
            counts=counts,
            num_open=num_open,
            num_on_offer=num_on_offer,
            turn_p50_s=float(np.percentile(turns_s, 50)) if turns_s else None,
            turn_p99_s=float(np.percentile(turns_s, 99)) if turns_s else None,
        )


class TrackedAgent:
    """Forwards turns to an agent and tracks those in flight. Use it on the server's event loop only.

    A turn continues when its client disconnects, because its tokens belong to the trajectory. A session is
    therefore over only when no turn is in flight.
    """

    def __init__(
        self, agent: TokenAgent, took: Callable[[float], None], *, now_s: Callable[[], float]
    ) -> None:
        """``took`` is called with the duration of every completed turn, in seconds by the clock ``now_s``."""
        self._now_s = now_s
        self._agent = agent
        self._took = took
        self._turns: set[asyncio.Task[Turn]] = set()
        self.quiet_since_s: float | None = None
        """Time of the end of the last turn, by ``now_s``; None until the first turn has ended."""

    @property
    def num_under_way(self) -> int:
        """Number of turns in flight."""
        return len(self._turns)

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
        begun_s = self._now_s()
        turn = asyncio.create_task(
            self._agent.respond(messages, tools, max_tokens=max_tokens, stop=stop, must_call=must_call)
        )
        self._turns.add(turn)

        def ended(turn: "asyncio.Task[Turn]") -> None:
            self._turns.discard(turn)
            self.quiet_since_s = self._now_s()
            # Retrieving the exception prevents asyncio's warning if nobody awaits the turn.
            if not turn.cancelled() and turn.exception() is None:
                self._took(self._now_s() - begun_s)

        turn.add_done_callback(ended)
        return await asyncio.shield(turn)

    def num_prompt_tokens(
        self,
        messages: str | Sequence[Message],
        tools: Sequence[ToolSpec] | None = None,
        *,
        must_call: Sequence[ToolSpec] = (),
    ) -> int:
        """See ``EpisodeAgent``."""
        return self._agent.num_prompt_tokens(messages, tools, must_call=must_call)

    async def until_quiet(self) -> None:
        """Wait until no turn is in flight."""
        while self._turns:
            await asyncio.wait(self._turns)


class ServedSession:
    """A session with its deadlines. Create it on the server's event loop; await ``ended`` on any loop."""

    def __init__(
        self,
        session: Session,
        agent: TrackedAgent,
        section: ServingSection,
        *,
        on_end: Callable[["ServedSession"], None],
        now_s: Callable[[], float],
    ) -> None:
        """``on_end`` is called on the server's event loop; ``now_s`` is the clock of both deadlines."""
        self._now_s = now_s
        self.session = session
        self._agent = agent
        self._section = section
        self._on_end = on_end
        self._ended: concurrent.futures.Future[SessionEnd] = concurrent.futures.Future()
        # A reference is needed: event loops keep only weak references to tasks.
        self._watching = asyncio.get_running_loop().create_task(self._watch())

    @property
    def feedback(self) -> tuple[Feedback, ...]:
        """Feedback of the client so far."""
        return tuple(self.session.feedback)

    async def ended(self) -> SessionEnd:
        """Wait until the session is closed and none of its turns is in flight; return how it ended."""
        return await asyncio.shield(asyncio.wrap_future(self._ended))

    async def _watch(self) -> None:
        opened_s = self._now_s()
        section = self._section
        finished = asyncio.ensure_future(self.session.finished())
        while not finished.done():
            due = [(opened_s + section.session_s, SessionEnd.TIME)]
            if not self._agent.num_under_way:
                quiet_since_s = self._agent.quiet_since_s
                since_s = opened_s if quiet_since_s is None else quiet_since_s
                due.append((since_s + section.idle_session_s, SessionEnd.IDLE))
            due_s, end = min(due)
            left_s = due_s - self._now_s()
            if left_s <= 0:
                self.session.close(end)
            # A turn that ends during the wait moves the idle deadline, by at most ``idle_session_s``.
            await asyncio.wait([finished], timeout=min(max(left_s, 0.0), section.idle_session_s))
        await self._agent.until_quiet()
        assert self.session.end is not None
        self._on_end(self)
        self._ended.set_result(self.session.end)


@dataclass(slots=True, kw_only=True, eq=False)
class _Offer:
    """A waiting episode, to be claimed by a client."""

    agent: EpisodeAgent
    claimed: "concurrent.futures.Future[ServedSession]" = field(default_factory=concurrent.futures.Future)


class WorkerSessions:
    """Opens the sessions of one worker (``SessionService``, and ``SessionOpener`` of its server)."""

    def __init__(self, setup: ServingSetup, *, now_s: Callable[[], float] = time.monotonic) -> None:
        """Create the server, which does not listen yet. ``now_s`` is the clock of the sessions' deadlines."""
        section = self.section = setup.section
        self.server = SessionServer(
            host=section.host,
            port=setup.port,
            token=setup.token,
            public_host=section.public_host,
            limits=SessionLimits(max_turns_at_once=section.max_turns_at_once),
            opener=self,
        )
        self._now_s = now_s
        self._lock = threading.Lock()
        self._offers: deque[_Offer] = deque()
        self._open: set[ServedSession] = set()
        self._of_agent: dict[int, ServedSession] = {}
        self._untrained_agent: Callable[[], EpisodeAgent] | None = None
        self._is_over = False
        self.counts = ServingCounts()

    def connect(self, untrained_agent: Callable[[], EpisodeAgent]) -> None:
        """Set the factory of agents for sessions that are not trained on. ``open`` fails until then."""
        self._untrained_agent = untrained_agent

    async def offered(self, agent: EpisodeAgent) -> ServedSession:
        """Offer an agent's episode to clients; return its session once a client has opened it.

        May be awaited on any event loop.
        """
        offer = _Offer(agent=agent)
        with self._lock:
            self._offers.append(offer)
        try:
            return await asyncio.wrap_future(offer.claimed)
        finally:
            with self._lock:
                if offer in self._offers:
                    self._offers.remove(offer)

    def open(self) -> OpenedSession:
        """See ``SessionOpener``."""
        if self._is_over:
            raise RequestError(
                "no session is opened any more, because the run has ended",
                status=503,
                code="run_over",
                may_retry=False,
            )
        if self._untrained_agent is None:
            raise RequestError(
                "generators are not connected yet", status=503, code="starting", retry_after_s=1
            )
        if len(self._open) >= self.section.max_open_sessions:
            self.counts.add("num_refused")
            raise RequestError(
                f"{len(self._open)} sessions are open, which is serving.max_open_sessions; end one of "
                "them or try again later",
                status=429,
                code="too_many_sessions",
                retry_after_s=5,
            )
        self.counts.add("num_opened")
        while (offer := self._take()) is not None:
            try:
                # Reading ``base_url`` opens the session through ``open_for``.
                _ = offer.agent.base_url
            except EpisodeOver:
                # The episode was abandoned while it waited.
                continue
            served = self._of_agent.pop(id(offer.agent))
            # False if the rollout was cancelled meanwhile, which closes its agent and the session.
            if offer.claimed.set_running_or_notify_cancel():
                offer.claimed.set_result(served)
                return OpenedSession(session=served.session, trains=True)
            served.session.close()
        self.counts.add(f"num_untrained_{Untrained.NO_TICKET}")
        return OpenedSession(session=self._opened(self._untrained_agent()).session, trains=False)

    def open_for(self, agent: EpisodeAgent) -> Session:
        """Open and return a session for an agent with an offered episode. Runs on the server's event loop."""
        served = self._opened(agent)
        self._of_agent[id(agent)] = served
        return served.session

    def end(self) -> None:
        """Close all sessions and refuse new ones. Called at the end of the run."""
        self._is_over = True
        self.server.close_sessions(SessionEnd.RUN_OVER)

    def report(self) -> ServingReport:
        """Return the counts, and the numbers of open sessions and of waiting episodes."""
        with self._lock:
            num_on_offer = len(self._offers)
        return self.counts.report(num_open=len(self._open), num_on_offer=num_on_offer)

    def _take(self) -> _Offer | None:
        with self._lock:
            return self._offers.popleft() if self._offers else None

    def _opened(self, agent: EpisodeAgent) -> ServedSession:
        watched = TrackedAgent(agent, self.counts.took, now_s=self._now_s)
        session = self.server.open(watched, name="policy")
        served = ServedSession(session, watched, self.section, on_end=self._ended, now_s=self._now_s)
        self._open.add(served)
        return served

    def _ended(self, served: ServedSession) -> None:
        self._open.discard(served)
        assert served.session.end is not None
        self.counts.add(f"num_ended_{served.session.end}")
        for feedback in served.feedback:
            self.counts.add("num_feedback")
            self.counts.add("feedback_sum", feedback.score)
