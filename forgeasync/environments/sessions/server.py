"""Serves agents to clients that bring their own loop: Chat Completions, Responses and Anthropic's Messages.

    async with SessionServer() as server:
        session = server.open(agent)
        client = openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key)
        ...
        session.close()

docs/sessions.md says what is served, what is not honoured, and what is refused.
"""

import asyncio
import secrets
from types import TracebackType
from typing import Self

from aiohttp import web

from forgeasync.config import WILDCARDS, is_loopback
from forgeasync.environments.sessions.front_desk import FrontDesk
from forgeasync.environments.sessions.limits import SessionLimits
from forgeasync.environments.sessions.registry import Registry
from forgeasync.environments.sessions.session import RespondingAgent, Session
from forgeasync.environments.sessions.session_end import SessionEnd
from forgeasync.environments.sessions.session_handler import SessionHandler

MIN_TOKEN_CHARS = 16


class SessionServer:
    """An HTTP server of sessions; serves while it is entered, on the event loop in which it was entered.

    An agent's ``respond`` is called on that loop, whatever loop the agent was made on.
    """

    def __init__(
        self,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        token: str | None = None,
        public_host: str | None = None,
        limits: SessionLimits | None = None,
        desk: FrontDesk | None = None,
    ) -> None:
        """``port`` 0 takes any that is free. Keys of sessions are derived from ``token``, at random without
        one; it is required where other machines can reach ``host``. ``public_host`` is how clients reach the
        server, ``host`` by default. With ``desk``, which needs a token, clients that have the token open
        sessions by themselves.

        Raises:
            ValueError: ``host`` is not of this machine alone and there is no token of 16 characters, or it is
                a wildcard and there is no ``public_host``.
        """
        assert desk is None or token is not None, "clients open sessions with the token"
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
        self._desk = desk
        self._token = token
        self._sessions = Registry((token or secrets.token_hex(32)).encode())
        self._runner: web.AppRunner | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._origin = ""

    async def __aenter__(self) -> Self:
        """Listen.

        Raises:
            OSError: the address is in use, or is none of this machine's.
        """
        app = SessionHandler(self._sessions, self._limits, self._desk, self._token).application()
        # With handler_cancellation a request whose client is gone ends at once; its sampling goes on.
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
        # Lets the cancelled turns end, so that their clients are told.
        await asyncio.sleep(0)
        await self._runner.cleanup()
        self._runner = None

    @property
    def url(self) -> str:
        """The server's URL, without a path."""
        return self._origin

    @property
    def port(self) -> int:
        """The port that it listens on."""
        assert self._runner is not None, "it runs"
        return self._runner.addresses[0][1]

    def close_sessions(self, end: SessionEnd) -> None:
        """Close all sessions; the server goes on answering."""
        for session in self._sessions.all():
            session.close(end)

    def open(self, agent: RespondingAgent, *, name: str = "policy") -> Session:
        """Return a new session for the agent, from any thread; ``name`` is what clients are told that the
        model is called, whatever they ask for.

        Raises:
            RuntimeError: the server is not running.
        """
        if self._runner is None or self._loop is None:
            raise RuntimeError("open was called on a server that is not running; call it within 'async with'")
        session = Session(
            agent,
            name=name,
            origin=self._origin,
            api_key_of=self._sessions.key_of,
            when_closed=self._sessions.remove,
            limits=self._limits,
            loop=self._loop,
        )
        self._sessions.add(session)
        return session
