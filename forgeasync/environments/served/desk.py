"""The front desk: people who come get an episode that is on offer, or else a session that is not trained on.

Who waits for whom: an episode waits here for a client, a client for nobody. Offers are taken in the order in
which they were made, so that the oldest groups of the buffer are taken first.
"""

import asyncio
import concurrent.futures
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from forgeasync.config import ServingSection
from forgeasync.environments.agent import EpisodeAgent
from forgeasync.environments.environment import EpisodeOver
from forgeasync.environments.served.counts import ServingCounts, ServingReport, Untrained
from forgeasync.environments.served.served_session import ServedSession, WatchedAgent
from forgeasync.environments.sessions.dialect import RequestError
from forgeasync.environments.sessions.server import OpenedSession, SessionServer
from forgeasync.environments.sessions.session import Session, SessionEnd


@dataclass(slots=True, kw_only=True, eq=False)
class _Offer:
    """An episode that waits for a client."""

    agent: EpisodeAgent
    claimed: "concurrent.futures.Future[ServedSession]" = field(default_factory=concurrent.futures.Future)


class ServingDesk:
    """Opens the sessions of one worker (``FrontDesk``)."""

    def __init__(self, section: ServingSection, *, now_s: Callable[[], float] = time.monotonic) -> None:
        """``now_s`` is the clock of the sessions' deadlines."""
        self._section = section
        self._now_s = now_s
        self._lock = threading.Lock()
        self._offers: deque[_Offer] = deque()
        self._open: set[ServedSession] = set()
        self._of_agent: dict[int, ServedSession] = {}
        self._server: SessionServer | None = None
        self._untrained_agent: Callable[[], EpisodeAgent] | None = None
        self._is_over = False
        self.counts = ServingCounts()

    def serve(self, server: SessionServer) -> None:
        """Open sessions on this server from now on."""
        self._server = server

    def connect(self, untrained_agent: Callable[[], EpisodeAgent]) -> None:
        """Serve sessions that no episode takes by agents that this makes."""
        self._untrained_agent = untrained_agent

    async def offered(self, agent: EpisodeAgent) -> ServedSession:
        """Put an agent's episode on offer; return its session once a client has opened it.

        May be awaited on any loop.
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
        """See ``FrontDesk``."""
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
        if len(self._open) >= self._section.max_open_sessions:
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
                # Opens it, through open_for.
                _ = offer.agent.base_url
            except EpisodeOver:
                # The episode was given up while it was on offer.
                continue
            served = self._of_agent.pop(id(offer.agent))
            # A rollout that was cancelled meanwhile has closed its agent, and with it the session.
            if offer.claimed.set_running_or_notify_cancel():
                offer.claimed.set_result(served)
                return OpenedSession(session=served.session, trains=True)
            served.session.close()
        self.counts.add(f"num_untrained_{Untrained.NO_TICKET}")
        return OpenedSession(session=self._opened(self._untrained_agent()).session, trains=False)

    def open_for(self, agent: EpisodeAgent) -> Session:
        """Return a new session of an agent whose episode was on offer; on the server's loop."""
        served = self._opened(agent)
        self._of_agent[id(agent)] = served
        return served.session

    def end(self) -> None:
        """The run has ended: close all sessions and open none from now on."""
        self._is_over = True
        assert self._server is not None
        self._server.close_sessions(SessionEnd.RUN_OVER)

    def report(self) -> ServingReport:
        """Return counts and current values."""
        with self._lock:
            num_on_offer = len(self._offers)
        return self.counts.report(num_open=len(self._open), num_on_offer=num_on_offer)

    def _take(self) -> _Offer | None:
        with self._lock:
            return self._offers.popleft() if self._offers else None

    def _opened(self, agent: EpisodeAgent) -> ServedSession:
        assert self._server is not None, "it runs before anybody can ask"
        watched = WatchedAgent(agent, self.counts.took, now_s=self._now_s)
        session = self._server.open(watched, name="policy")
        served = ServedSession(session, watched, self._section, on_end=self._ended, now_s=self._now_s)
        self._open.add(served)
        return served

    def _ended(self, served: ServedSession) -> None:
        self._open.discard(served)
        assert served.session.end is not None
        self.counts.add(f"num_ended_{served.session.end}")
        for feedback in served.feedback:
            self.counts.add("num_feedback")
            self.counts.add("feedback_sum", feedback.score)
