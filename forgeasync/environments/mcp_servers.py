"""Tools of MCP servers. Every episode has its own connections and server processes.

Servers are not trusted: the size of what they send is bounded, and all their processes are killed at the end.
"""

import asyncio
import contextlib
import os
import secrets
import tempfile
from collections.abc import AsyncIterator, Coroutine, Mapping
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar

import anyio
import httpx2
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from mcp.client.client import Client
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.exceptions import MCPError
from mcp.shared.message import SessionMessage
from mcp_types import CallToolResult, TextContent, jsonrpc_message_adapter
from mcp_types import Tool as ToolOfServer
from pydantic import ValidationError

from forgeasync.config import HttpServer, McpServerSection, StdioServer
from forgeasync.environments.environment import EpisodeInterrupted
from forgeasync.environments.messages import ToolSpec
from forgeasync.environments.tools import Tool, ToolFailed, ToolServerLost, retrieve_exception
from forgeasync.observability import describe_error
from forgeasync.processes import close_pipes, kill, marked_processes, own_mark

ResponseT = TypeVar("ResponseT")

MAX_RESPONSE_BYTES = 16 * 2**20
"""Maximum bytes of a response, which may be a stream of events for the whole episode."""

CONNECT_S = 30.0
SILENCE_S = 300.0
"""Maximum time between two pieces of a response, in seconds."""


class ResponseTooLarge(httpx2.RequestError):
    """A response is larger than ``MAX_RESPONSE_BYTES``, or is compressed."""


def http_client(section: HttpServer) -> httpx2.AsyncClient:
    """Return a client for one server that bounds the size of responses. The caller enters it.

    The transport of mcp 2.3.0 bounds events of a stream, but not answers in JSON
    (mcp/client/streamable_http.py).
    """
    return httpx2.AsyncClient(
        # With an explicit transport, proxies in environment variables are ignored.
        transport=httpx2.AsyncHTTPTransport(),
        event_hooks={"response": [_bound]},
        headers=section.headers | {"accept-encoding": "identity"},
        timeout=httpx2.Timeout(CONNECT_S, read=SILENCE_S),
    )


async def _bound(response: httpx2.Response) -> None:
    if response.headers.get("content-encoding", "identity") != "identity":
        # The size is known only after decompression.
        raise ResponseTooLarge("the server compresses its responses, though it was asked not to")
    assert isinstance(response.stream, httpx2.AsyncByteStream)
    response.stream = _BoundedStream(response.stream)


class _BoundedStream(httpx2.AsyncByteStream):
    def __init__(self, stream: httpx2.AsyncByteStream) -> None:
        self._stream = stream

    async def __aiter__(self) -> AsyncIterator[bytes]:
        num_left = MAX_RESPONSE_BYTES
        async for part in self._stream:
            num_left -= len(part)
            if num_left < 0:
                raise ResponseTooLarge(f"the server sent a response of more than {MAX_RESPONSE_BYTES} bytes")
            yield part

    async def aclose(self) -> None:
        await self._stream.aclose()


MAX_MESSAGE_BYTES = 4 * 2**20
"""Maximum bytes of a message. A server that sends a longer one is killed."""

MAX_UNREADABLE_LINES = 1000
"""Maximum lines that are not messages. A server that writes more is killed."""

MAX_STDERR_BYTES = 4096
"""Maximum bytes that are kept of the end of standard error."""

EXIT_S = 1.0
"""Seconds for a server to end by itself after its standard input is closed."""

_MARK = "FORGEASYNC_MCP_SERVER"
"""Environment variable that marks the processes of a server."""

MessageStream = MemoryObjectReceiveStream[SessionMessage | Exception]


class StdioTransport:
    """One server process, with its message streams for the client of the package mcp.

    It replaces ``stdio_client`` of mcp 2.3.0 (mcp/client/stdio.py), which reads lines of any length into
    memory, passes HOME and USER to the server, and kills only the server's process group.
    """

    def __init__(self, section: StdioServer) -> None:
        self._section = section
        self._mark = secrets.token_hex(16)
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._stderr = b""
        """The end of the server's standard error."""
        self._why_killed: str | None = None

    @property
    def problem(self) -> str:
        """Description of the server's state, for an error message."""
        code = None if self._process is None else self._process.returncode
        if self._why_killed is not None:
            ended = f"was killed, since {self._why_killed}"
        else:
            ended = "is not running" if code is None else f"has ended with exit code {code}"
        words = self._stderr.decode(errors="replace").strip()[-500:]
        return f"{ended}: {words}" if words else ended

    async def __aenter__(self) -> tuple[MessageStream, MemoryObjectSendStream[SessionMessage]]:
        """Start the server and return its streams. Raises OSError or ValueError if it cannot be started."""
        folder = self._folder = tempfile.TemporaryDirectory(
            prefix="forgeasync-mcp-", ignore_cleanup_errors=True
        )
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self._section.command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                limit=MAX_MESSAGE_BYTES,
                env=self._environment(folder.name),
                cwd=self._section.cwd or folder.name,
                start_new_session=True,
            )
        except BaseException:
            folder.cleanup()
            raise
        to_client, from_server = anyio.create_memory_object_stream[SessionMessage | Exception](0)
        to_server, from_client = anyio.create_memory_object_stream[SessionMessage](0)
        works = (self._read(to_client), self._write(from_client), self._read_stderr())
        self._tasks = [asyncio.ensure_future(work) for work in works]
        return from_server, to_server

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        """Give the server ``EXIT_S`` to end by itself, then kill its remaining processes."""
        assert self._folder is not None and self._process is not None and self._process.stdin is not None
        try:
            self._process.stdin.close()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(EXIT_S):
                    await self._process.wait()
        finally:
            self.kill()
            self._folder.cleanup()
            try:
                # Readers end once every process that inherited the pipes has ended.
                gone = asyncio.ensure_future(self._process.wait())
                _, left = await asyncio.wait([gone, *self._tasks], timeout=EXIT_S)
                for task in left:
                    task.cancel()
            finally:
                close_pipes(self._process)

    def kill(self) -> None:
        """Kill the server and all processes that it has started."""
        # Repeat until none is found, because a process may start another one before it is killed.
        while kill(marked_processes(self._mark, _MARK)):
            pass

    def _environment(self, folder: str) -> dict[str, str]:
        own = {
            "PATH": os.environ.get("PATH", os.defpath),
            "LANG": "C.UTF-8",
            "HOME": folder,
            "TMPDIR": folder,
        }
        return own | self._section.env | {_MARK: self._mark} | own_mark()

    async def _read(self, to_client: MemoryObjectSendStream[SessionMessage | Exception]) -> None:
        assert self._process is not None and self._process.stdout is not None
        num_unreadable = 0
        # A closed stream tells the client that the connection has ended.
        async with to_client:
            while True:
                try:
                    line = await self._process.stdout.readuntil(b"\n")
                except asyncio.IncompleteReadError:
                    # Wait for the exit code, which is more informative than the end of the output.
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(EXIT_S):
                            await self._process.wait()
                    return
                except asyncio.LimitOverrunError:
                    self._refuse(f"it wrote a message of more than {MAX_MESSAGE_BYTES} bytes")
                    return
                try:
                    message = jsonrpc_message_adapter.validate_json(line, by_name=False)
                except ValueError:
                    num_unreadable += 1
                    if num_unreadable > MAX_UNREADABLE_LINES:
                        self._refuse(f"it wrote more than {MAX_UNREADABLE_LINES} lines that are not messages")
                        return
                    continue
                try:
                    await to_client.send(SessionMessage(message))
                except (anyio.BrokenResourceError, anyio.ClosedResourceError):
                    return

    async def _write(self, from_client: MemoryObjectReceiveStream[SessionMessage]) -> None:
        assert self._process is not None and self._process.stdin is not None
        async with from_client:
            async for one in from_client:
                text = one.message.model_dump_json(by_alias=True, exclude_unset=True)
                try:
                    self._process.stdin.write(text.encode() + b"\n")
                    await self._process.stdin.drain()
                except (ConnectionError, RuntimeError):
                    # The server is gone. The reader reports that to the client.
                    return

    async def _read_stderr(self) -> None:
        assert self._process is not None and self._process.stderr is not None
        while part := await self._process.stderr.read(MAX_STDERR_BYTES):
            self._stderr = (self._stderr + part)[-MAX_STDERR_BYTES:]

    def _refuse(self, why: str) -> None:
        self._why_killed = why
        self.kill()


MAX_TOOLS = 512
"""Maximum number of tools of one server."""

PROBE_S = 5.0
"""Seconds for a server to list its tools after a failed call; after that, it is lost."""

CLOSE_S = 2.0
"""Seconds to close a connection."""


class ServerLost(Exception):
    """The server has ended, cannot be reached, or does not answer."""


class Connection:
    """A client of one server. Its own task enters and leaves the scopes of anyio, as these require."""

    def __init__(self, section: McpServerSection) -> None:
        self._section = section
        self._process: StdioTransport | None = None
        self._owner: asyncio.Task[None] | None = None
        self._client: Client | None = None
        self._leave = asyncio.Event()
        self.tools: tuple[ToolOfServer, ...] = ()
        self.is_suspect = False
        """Whether a call was cancelled (at its time limit), after which the server may not answer."""

    async def open(self, *, limit_s: float) -> None:
        """Start the server or connect to it, and list its tools.

        Raises:
            ServerLost: The server does not answer within ``limit_s`` seconds. Its processes are killed.
        """
        opened: asyncio.Future[tuple[Client, tuple[ToolOfServer, ...]]] = (
            asyncio.get_running_loop().create_future()
        )
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
            ToolFailed: The server answers with an error.
            ServerLost: The server has ended or does not answer.
        """
        assert self._client is not None and self._owner is not None
        try:
            calling = await self._request(self._client.call_tool(name, dict(arguments)))
        except asyncio.CancelledError:
            self.is_suspect = True
            raise
        if not calling.done():
            raise ServerLost(self._said(_reason(self._owner)))
        error = calling.exception()
        if error is None:
            return calling.result()
        # The client raises the same errors for a server's answers and for a lost server.
        if not await self.is_alive():
            raise ServerLost(self._said(_message_of(error))) from error
        if isinstance(error, MCPError | ValidationError | RuntimeError):
            raise ToolFailed(f"Error: {_message_of(error)}") from error
        raise error

    async def is_alive(self) -> bool:
        """Return whether the server lists its tools within ``PROBE_S``."""
        assert self._client is not None and self._owner is not None
        if self._owner.done():
            return False
        asking = await self._request(self._client.list_tools(), limit_s=PROBE_S)
        is_alive = asking.done() and asking.exception() is None and not self._owner.done()
        self.is_suspect = not is_alive
        return is_alive

    async def _request(
        self, request: Coroutine[Any, Any, ResponseT], *, limit_s: float | None = None
    ) -> asyncio.Future[ResponseT]:
        """Return the future of a request, cancelled after ``limit_s`` or if the connection ends first."""
        assert self._owner is not None
        asking = asyncio.ensure_future(request)
        try:
            await asyncio.wait([asking, self._owner], timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            asking.cancel()
            asking.add_done_callback(retrieve_exception)
        return asking

    async def close(self) -> None:
        """Close the connection. A server that it has started is killed with its processes."""
        self._leave.set()
        if self._owner is None:
            return
        try:
            await asyncio.wait([self._owner], timeout=CLOSE_S)
        finally:
            if self._process is not None:
                self._process.kill()
            self._owner.cancel()
            self._owner.add_done_callback(retrieve_exception)

    async def _own(self, opened: "asyncio.Future[tuple[Client, tuple[ToolOfServer, ...]]]") -> None:
        async with contextlib.AsyncExitStack() as stack:
            match self._section:
                case StdioServer():
                    transport: Any = StdioTransport(self._section)
                    self._process = transport
                case HttpServer():
                    http = await stack.enter_async_context(http_client(self._section))
                    transport = streamable_http_client(self._section.url, http_client=http)
            # No cache, because the list of tools must be up to date.
            client = await stack.enter_async_context(Client(transport, cache=None))
            opened.set_result((client, await _list_tools(client)))
            await self._leave.wait()

    def _said(self, reason: str) -> str:
        if self._process is None:
            return reason
        return f"{reason}; its process {self._process.problem}"


async def _list_tools(client: Client) -> tuple[ToolOfServer, ...]:
    tools: list[ToolOfServer] = []
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
    return "the connection has ended" if error is None else _message_of(error)


def _message_of(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {describe_error(error)}"[:500]


START_S = 30.0
"""Default time for a server to start, in seconds."""


class McpTools:
    """Starts MCP servers, or connects to them, and provides their tools. Create it within ``rollout``.

        async with fa.McpTools({"files": fa.StdioServer(command=("python", "-m", "my_server"))}) as mcp:
            run = await fa.run_tools(agent, task.prompt, fa.Toolbox(mcp.tools))

    With several servers, tools are named ``<server>__<tool>``. If a server dies or hangs, the call in flight
    fails. Its result tells the model that the next call restarts the server without its memory, which happens
    at most once in an episode.
    """

    def __init__(self, servers: Mapping[str, McpServerSection], *, start_s: float = START_S) -> None:
        """``servers`` are sections by name; ``start_s`` is the time for each to start, in seconds."""
        self._servers = [_Server(name, section, start_s=start_s) for name, section in servers.items()]
        self.tools: tuple[Tool, ...] = ()

    async def __aenter__(self) -> Self:
        """Start all servers.

        Raises:
            EpisodeInterrupted: A server does not start.
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
        """End the servers that were started here, and disconnect from the others. May be called again."""
        await asyncio.gather(*(server.close() for server in self._servers))


class _Server:
    """One server, across its restarts."""

    def __init__(self, name: str, section: McpServerSection, *, start_s: float) -> None:
        self._name = name
        self._section = section
        self._start_s = start_s
        self._connection = Connection(section)
        self._one_restart = asyncio.Lock()
        self._was_restarted = False
        self._lost: str | None = None
        """Reason why the connection is lost; None while it is usable."""

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
        except ServerLost as error:
            if connection is self._connection:
                self._lost = str(error)
            raise ToolServerLost(
                "the server of this tool was lost during the call; the next call connects to it again, "
                "and finds nothing that it held in memory"
            ) from error
        if result.is_error:
            raise ToolFailed(_text(result))
        return _text(result)

    async def _revive(self) -> None:
        """Restart the server if it is lost.

        Raises:
            EpisodeInterrupted: The server was restarted before, or does not start.
        """
        async with self._one_restart:
            if self._lost is None and self._connection.is_suspect and not await self._connection.is_alive():
                self._lost = "it stopped answering"
            if self._lost is None:
                return
            if self._was_restarted:
                raise EpisodeInterrupted(f"MCP server {self._name!r} was lost again: {self._lost}")
            self._was_restarted = True
            await self._connection.close()
            self._connection = Connection(self._section)
            await self.start()
            self._lost = None


def _text(result: CallToolResult) -> str:
    """Return the text of a result, with the type in place of content that is not text."""
    parts = [
        one.text if isinstance(one, TextContent) else f"[{one.type}: cannot be shown]"
        for one in result.content
    ]
    return "\n".join(parts)
