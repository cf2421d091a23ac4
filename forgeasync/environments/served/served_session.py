"""A session of a person: its turns are watched, and it ends when it was idle or open for too long."""

import asyncio
import concurrent.futures
from collections.abc import Callable, Sequence

from forgeasync.config import ServingSection
from forgeasync.environments.environment import Turn
from forgeasync.environments.messages import Message, ToolSpec
from forgeasync.environments.sessions.session import Feedback, Session, SessionEnd, TokenAgent


class WatchedAgent:
    """Passes requests for turns on to an agent and knows which are under way; for the server's loop.

    A turn goes on when nobody waits for it any more: what a generator has begun to sample belongs to the
    trajectory, so a session is over only when none is under way.
    """

    def __init__(
        self, agent: TokenAgent, took: Callable[[float], None], *, now_s: Callable[[], float]
    ) -> None:
        """``took`` is called with the seconds of every turn that was sampled, by the clock ``now_s``."""
        self._now_s = now_s
        self._agent = agent
        self._took = took
        self._turns: set[asyncio.Task[Turn]] = set()
        self.quiet_since_s: float | None = None
        """When the last turn ended, by ``now_s``; None before the first one has begun."""

    @property
    def num_under_way(self) -> int:
        """Turns that are being sampled."""
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
        turn = asyncio.create_task(self._respond(messages, tools, max_tokens, stop, must_call))
        self._turns.add(turn)

        def ended(turn: "asyncio.Task[Turn]") -> None:
            self._turns.discard(turn)
            self.quiet_since_s = self._now_s()
            # Also retrieves the error of a turn that nobody waits for.
            if not turn.cancelled() and turn.exception() is None:
                self._took(self._now_s() - begun_s)

        turn.add_done_callback(ended)
        return await asyncio.shield(turn)

    async def _respond(
        self,
        messages: str | Sequence[Message],
        tools: Sequence[ToolSpec] | None,
        max_tokens: int | None,
        stop: Sequence[str],
        must_call: Sequence[ToolSpec],
    ) -> Turn:
        return await self._agent.respond(
            messages, tools, max_tokens=max_tokens, stop=stop, must_call=must_call
        )

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
        """Wait until no turn is under way."""
        while self._turns:
            await asyncio.wait(self._turns)


class ServedSession:
    """A session with its end. Made on the server's loop; ``ended`` may be awaited on any loop."""

    def __init__(
        self,
        session: Session,
        agent: WatchedAgent,
        section: ServingSection,
        *,
        on_end: Callable[["ServedSession"], None],
        now_s: Callable[[], float],
    ) -> None:
        """``on_end`` is called on the server's loop; ``now_s`` is the clock of both deadlines."""
        self._now_s = now_s
        self.session = session
        self._agent = agent
        self._section = section
        self._on_end = on_end
        self._ended: concurrent.futures.Future[SessionEnd] = concurrent.futures.Future()
        # The loop itself keeps only weak references to tasks.
        self._watching = asyncio.get_running_loop().create_task(self._watch())

    @property
    def feedback(self) -> tuple[Feedback, ...]:
        """What was said of it so far."""
        return tuple(self.session.feedback)

    async def ended(self) -> SessionEnd:
        """Wait until the session is closed and none of its turns is under way; return how it ended."""
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
            # A turn that ends meanwhile moves the deadline, by less than this.
            await asyncio.wait([finished], timeout=min(max(left_s, 0.0), section.idle_session_s))
        await self._agent.until_quiet()
        assert self.session.end is not None
        self._on_end(self)
        self._ended.set_result(self.session.end)
