"""The connection to one MCP server: calls that tell apart what a tool says and what became of its server."""

import asyncio
import contextlib
from collections.abc import Mapping
from typing import Any

from mcp.client.client import Client
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.exceptions import MCPError
from mcp_types import CallToolResult, Tool
from pydantic import ValidationError

from forgeasync.config import HttpServer, McpServerSection, StdioServer
from forgeasync.environments.mcp_servers.http import http_client
from forgeasync.environments.mcp_servers.stdio import StdioTransport
from forgeasync.observability import last_words

MAX_TOOLS = 512
"""Most tools of one server."""

PROBE_S = 5.0
"""A server that does not list its tools within this time, after a call of it was cut off, is lost."""

CLOSE_S = 2.0
"""Time to say goodbye to a server."""


class ServerLost(Exception):
    """The server has ended, cannot be reached or does not answer; the text says what is known."""


class CallRefused(Exception):
    """The server has answered a call with an error of the protocol."""


class Connection:
    """A client of one server, which a task of its own enters and leaves, as the scopes of anyio need it."""

    def __init__(self, section: McpServerSection) -> None:
        self._section = section
        self._process: StdioTransport | None = None
        self._owner: asyncio.Task[None] | None = None
        self._client: Client | None = None
        self._leave = asyncio.Event()
        self.tools: tuple[Tool, ...] = ()
        self.is_suspect = False
        """A call was cut off: nobody knows whether the server still answers."""

    async def open(self, *, limit_s: float) -> None:
        """Start or reach the server and list its tools.

        Raises:
            ServerLost: it does not come up within ``limit_s``; everything of it is gone again.
        """
        opened: asyncio.Future[tuple[Client, tuple[Tool, ...]]] = asyncio.get_running_loop().create_future()
        self._owner = asyncio.ensure_future(self._own(opened))
        try:
            async with asyncio.timeout(limit_s):
                waiting: list[asyncio.Future[Any]] = [opened, self._owner]
                await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        except TimeoutError:
            await self.close()
            raise ServerLost(self._said(f"it did not come up within {limit_s:g} s")) from None
        except BaseException:
            await self.close()
            raise
        if not opened.done():
            raise ServerLost(self._said(_reason(self._owner)))
        self._client, self.tools = opened.result()

    async def call(self, name: str, arguments: Mapping[str, Any]) -> CallToolResult:
        """Call a tool.

        Raises:
            CallRefused: the server answers with an error.
            ServerLost: it has ended or does not answer any more.
        """
        assert self._client is not None and self._owner is not None
        calling = asyncio.ensure_future(self._client.call_tool(name, dict(arguments)))
        try:
            await asyncio.wait([calling, self._owner], return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            self.is_suspect = True
            raise
        finally:
            calling.cancel()
            calling.add_done_callback(_forget)
        if not calling.done():
            raise ServerLost(self._said(_reason(self._owner)))
        error = calling.exception()
        if error is None:
            return calling.result()
        # The client has one kind of error for what a server answers and for what became of it.
        if not await self.is_alive():
            raise ServerLost(self._said(_told(error))) from error
        if isinstance(error, MCPError | ValidationError | RuntimeError):
            raise CallRefused(_told(error)) from error
        raise error

    async def is_alive(self) -> bool:
        """Ask the server for its tools; whether it has answered."""
        assert self._client is not None and self._owner is not None
        if self._owner.done():
            return False
        asking = asyncio.ensure_future(self._client.list_tools())
        try:
            await asyncio.wait([asking, self._owner], timeout=PROBE_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            asking.cancel()
            asking.add_done_callback(_forget)
        is_alive = asking.done() and asking.exception() is None and not self._owner.done()
        self.is_suspect = not is_alive
        return is_alive

    async def close(self) -> None:
        """Leave the server; one that was started ends with all that it has started."""
        self._leave.set()
        if self._owner is None:
            return
        try:
            await asyncio.wait([self._owner], timeout=CLOSE_S)
        finally:
            if self._process is not None:
                self._process.kill()
            self._owner.cancel()
            self._owner.add_done_callback(_forget)

    async def _own(self, opened: "asyncio.Future[tuple[Client, tuple[Tool, ...]]]") -> None:
        async with contextlib.AsyncExitStack() as stack:
            match self._section:
                case StdioServer():
                    transport: Any = StdioTransport(self._section)
                    self._process = transport
                case HttpServer():
                    http = await stack.enter_async_context(http_client(self._section))
                    transport = streamable_http_client(self._section.url, http_client=http)
            # Nothing is cached: what is listed must be what the server says now.
            client = await stack.enter_async_context(Client(transport, cache=None))
            opened.set_result((client, await _list_tools(client)))
            await self._leave.wait()

    def _said(self, reason: str) -> str:
        if self._process is None:
            return reason
        return f"{reason}; its process {self._process.problem}"


async def _list_tools(client: Client) -> tuple[Tool, ...]:
    tools: list[Tool] = []
    cursor: str | None = None
    while True:
        page = await client.list_tools(cursor=cursor)
        tools += page.tools
        if len(tools) > MAX_TOOLS:
            raise ValueError(f"it has more than {MAX_TOOLS} tools")
        if page.next_cursor is None or not page.tools:
            return tuple(tools)
        cursor = page.next_cursor


def _reason(owner: "asyncio.Task[None]") -> str:
    if not owner.done() or owner.cancelled():
        return "the connection was closed"
    error = owner.exception()
    return "the connection has ended" if error is None else _told(error)


def _told(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {last_words(error)}"[:500]


def _forget(ended: "asyncio.Future[Any]") -> None:
    if not ended.cancelled():
        ended.exception()
