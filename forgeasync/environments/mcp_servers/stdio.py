"""An MCP server as a process: its messages are bounded, and nothing of it is left at the end.

A transport of our own for the client of the package mcp 2.3.0. Its ``stdio_client`` reads a line of any
length into memory, passes HOME and USER on, and kills the server's process group only
(mcp/client/stdio.py).
"""

import asyncio
import contextlib
import os
import secrets
import shutil
import tempfile
from collections import deque
from collections.abc import Coroutine
from types import TracebackType
from typing import Any

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from mcp.shared.message import SessionMessage
from mcp_types import jsonrpc_message_adapter

from forgeasync.config import StdioServer
from forgeasync.environments.episode_thread import kill
from forgeasync.environments.worker_mark import marked_processes, own_mark

MAX_MESSAGE_BYTES = 4 * 2**20
"""Longest message that a server may send; one that sends a longer one is killed."""

MAX_UNREADABLE_LINES = 1000
"""A server that writes more lines which are no messages is killed."""

MAX_STDERR_BYTES = 4096
"""What is kept of the end of its standard error."""

EXIT_S = 1.0
"""Time for a server to end by itself once its standard input is closed."""

_MARK = "FORGEASYNC_MCP_SERVER"
"""Environment variable by which the processes of a server are found, wherever they went."""

MessageStream = MemoryObjectReceiveStream[SessionMessage | Exception]


class StdioTransport:
    """One server process, and the streams of messages that the client of mcp reads and writes."""

    def __init__(self, section: StdioServer) -> None:
        self._section = section
        self._mark = secrets.token_hex(16)
        self._folder: str | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._stderr: deque[bytes] = deque()
        self._why_killed: str | None = None

    @property
    def problem(self) -> str:
        """Say what has become of the server."""
        code = None if self._process is None else self._process.returncode
        if self._why_killed is not None:
            ended = f"was killed, since {self._why_killed}"
        else:
            ended = "is not running" if code is None else f"has ended with exit code {code}"
        words = b"".join(self._stderr).decode(errors="replace").strip()[-500:]
        return f"{ended}: {words}" if words else ended

    async def __aenter__(self) -> tuple[MessageStream, MemoryObjectSendStream[SessionMessage]]:
        """Start the server. Raises OSError or ValueError if its program cannot be started."""
        self._folder = tempfile.mkdtemp(prefix="forgeasync-mcp-")
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self._section.command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                limit=MAX_MESSAGE_BYTES,
                env=self._environment(self._folder),
                cwd=self._section.cwd or self._folder,
                start_new_session=True,
            )
        except BaseException:
            self._remove_folder()
            raise
        to_client, from_server = anyio.create_memory_object_stream[SessionMessage | Exception](0)
        from_client, to_server = _turned(anyio.create_memory_object_stream[SessionMessage](0))
        self._start(self._read(to_client))
        self._start(self._write(from_client))
        self._start(self._read_stderr())
        return from_server, to_server

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        """Let the server end by itself for ``EXIT_S``, then kill what is left of it."""
        assert self._process is not None and self._process.stdin is not None
        try:
            self._process.stdin.close()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(EXIT_S):
                    await self._process.wait()
        finally:
            self.kill()
            self._remove_folder()
            # With all processes gone, reading ends by itself, and asyncio gives its pipes back.
            gone = asyncio.ensure_future(self._process.wait())
            _, left = await asyncio.wait([gone, *self._tasks], timeout=EXIT_S)
            for task in left:
                task.cancel()

    def kill(self) -> None:
        """Kill the server and everything that it has started, at once."""
        # Until nothing is found: a process may start another while it is looked for.
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

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.append(asyncio.ensure_future(work))

    async def _read(self, to_client: MemoryObjectSendStream[SessionMessage | Exception]) -> None:
        assert self._process is not None and self._process.stdout is not None
        num_unreadable = 0
        # A closed stream tells the client that the connection has ended.
        async with to_client:
            while True:
                try:
                    line = await self._process.stdout.readuntil(b"\n")
                except asyncio.IncompleteReadError:
                    # Its exit code says more than the end of its output.
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
                        self._refuse(f"it wrote more than {MAX_UNREADABLE_LINES} lines that are no messages")
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
                    # The server is gone: the client learns it from the end of what it reads.
                    return

    async def _read_stderr(self) -> None:
        assert self._process is not None and self._process.stderr is not None
        size = 0
        while part := await self._process.stderr.read(MAX_STDERR_BYTES):
            self._stderr.append(part)
            size += len(part)
            while size - len(self._stderr[0]) >= MAX_STDERR_BYTES:
                size -= len(self._stderr.popleft())

    def _refuse(self, why: str) -> None:
        self._why_killed = why
        self.kill()

    def _remove_folder(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


def _turned(
    streams: tuple[MemoryObjectSendStream[SessionMessage], MemoryObjectReceiveStream[SessionMessage]],
) -> tuple[MemoryObjectReceiveStream[SessionMessage], MemoryObjectSendStream[SessionMessage]]:
    send, receive = streams
    return receive, send
