"""The tools of MCP servers, for one episode."""

import asyncio
from collections.abc import Mapping
from functools import partial
from types import TracebackType
from typing import Any, Self

from mcp_types import CallToolResult, TextContent

from forgeasync.config import McpServerSection
from forgeasync.environments.environment import EpisodeInterrupted
from forgeasync.environments.mcp_servers.connection import CallRefused, Connection, ServerLost
from forgeasync.environments.messages import ToolSpec
from forgeasync.environments.tools.tool import Tool, ToolFailed, ToolServerLost

START_S = 30.0
"""Time for a server to come up, in seconds."""

MAX_RESTARTS = 1
"""Times that one server is started again in an episode."""


class McpTools:
    """Starts or reaches MCP servers and has their tools; make it within ``rollout``.

        async with McpTools({"files": StdioServer(command=("python", "-m", "my_package.server"))}) as mcp:
            run = await run_tools(agent, task.prompt, Toolbox(mcp.tools))

    With several servers, tools are called ``<server>__<tool>``. A server that dies or hangs fails the call
    that was under way; the next call starts it again, once in an episode. What it held in memory is gone
    then, and the model is told so.
    """

    def __init__(self, servers: Mapping[str, McpServerSection], *, start_s: float = START_S) -> None:
        """``servers`` are sections by name; ``start_s`` is the time for each to come up."""
        self._servers = [_Server(name, section, start_s=start_s) for name, section in servers.items()]
        self.tools: tuple[Tool, ...] = ()

    async def __aenter__(self) -> Self:
        """Start all servers.

        Raises:
            EpisodeInterrupted: one does not come up.
        """
        try:
            await asyncio.gather(*(server.start() for server in self._servers))
            self.tools = tuple(
                tool for server in self._servers for tool in server.tools(is_alone=len(self._servers) == 1)
            )
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """End all servers that were started, and leave the others; may be called again."""
        await asyncio.gather(*(server.close() for server in self._servers))


class _Server:
    """One server, through its restarts."""

    def __init__(self, name: str, section: McpServerSection, *, start_s: float) -> None:
        self._name = name
        self._section = section
        self._start_s = start_s
        self._connection = Connection(section)
        self._one_restart = asyncio.Lock()
        self._num_restarts = 0
        self._lost: str | None = None
        """Why the connection cannot be used any more."""

    async def start(self) -> None:
        try:
            await self._connection.open(limit_s=self._start_s)
        except ServerLost as error:
            raise EpisodeInterrupted(f"MCP server {self._name!r} cannot be used: {error}") from error

    async def close(self) -> None:
        await self._connection.close()

    def tools(self, *, is_alone: bool) -> list[Tool]:
        prefix = "" if is_alone else f"{self._name}__"
        return [
            Tool(
                spec=ToolSpec(
                    name=prefix + one.name,
                    description=one.description or "",
                    parameters=one.input_schema,
                ),
                run=partial(self._call, one.name),
            )
            for one in self._connection.tools
        ]

    async def _call(self, tool: str, arguments: Mapping[str, Any]) -> str:
        await self._revive()
        connection = self._connection
        try:
            result = await connection.call(tool, arguments)
        except CallRefused as error:
            raise ToolFailed(f"Error: {error}") from error
        except ServerLost as error:
            if connection is self._connection:
                self._lost = str(error)
            raise ToolServerLost(
                "the server of this tool was lost during the call; another call connects to it anew, "
                "without what it held in memory"
            ) from error
        if result.is_error:
            raise ToolFailed(_text(result))
        return _text(result)

    async def _revive(self) -> None:
        """Start the server again if it is lost.

        Raises:
            EpisodeInterrupted: it has been started again before, or does not come up.
        """
        async with self._one_restart:
            if self._lost is None and self._connection.is_suspect and not await self._connection.is_alive():
                self._lost = "it does not answer any more"
            if self._lost is None:
                return
            if self._num_restarts >= MAX_RESTARTS:
                raise EpisodeInterrupted(f"MCP server {self._name!r} was lost again: {self._lost}")
            self._num_restarts += 1
            await self._connection.close()
            self._connection = Connection(self._section)
            await self.start()
            self._lost = None


def _text(result: CallToolResult) -> str:
    """Everything that is text; of everything else, what kind it is."""
    parts = [
        one.text if isinstance(one, TextContent) else f"[{one.type}: cannot be shown]"
        for one in result.content
    ]
    return "\n".join(parts)
