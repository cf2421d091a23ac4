"""The connection to one environment server of OpenEnv: one session of the server, one answer per request."""

import asyncio
import contextlib
from collections import deque
from collections.abc import Mapping
from types import TracebackType
from typing import Any, NoReturn, Self

import aiohttp
from aiohttp import WSMsgType

from forgeasync.environments.openenv.wire import (
    CLOSE_MESSAGE,
    Observation,
    WireError,
    read_answer,
    read_schema,
    reset_message,
    step_message,
)

MAX_MESSAGE_BYTES = 16 * 2**20
"""Largest message of a server that is read."""

CLOSE_S = 2.0
"""Time to say goodbye to a server."""

_MAX_WAITING = 2
"""Messages that are kept until they are read: an answer, and the error with which a session ends."""


class ServerLost(Exception):
    """The server has ended, cannot be reached or does not keep to the wire; says which."""


class Connection:
    """One session with a server, which has an environment of its own.

        async with Connection("ws://127.0.0.1:8000/ws", open_s=30.0) as session:
            observation = await session.reset({"seed": 7})
            observation = await session.step({"message": "hello"})

    Messages are read at all times: servers ask whether their client is alive also while the model takes a
    turn, and hang up on one that does not answer (uvicorn after 20 s).
    """

    def __init__(self, url: str, *, open_s: float) -> None:
        """``open_s`` is the time to reach the server."""
        self._url = url
        self._open_s = open_s
        self._inbox: deque[str] = deque()
        self._arrived = asyncio.Event()

    async def __aenter__(self) -> Self:
        """Reach the server.

        Raises:
            ServerLost: it cannot be reached.
        """
        self._http = aiohttp.ClientSession()
        try:
            async with asyncio.timeout(self._open_s):
                self._socket = await self._http.ws_connect(
                    self._url,
                    max_msg_size=MAX_MESSAGE_BYTES,
                    timeout=aiohttp.ClientWSTimeout(ws_close=CLOSE_S),
                )
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            await self._http.close()
            raise ServerLost(f"{self._url} cannot be reached: {_told(error)}") from error
        except BaseException:
            await self._http.close()
            raise
        self._reader = asyncio.ensure_future(self._read())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        try:
            self._reader.cancel()
            with contextlib.suppress(ServerLost, asyncio.CancelledError):
                await self._reader
            with contextlib.suppress(ConnectionError, TimeoutError):
                async with asyncio.timeout(CLOSE_S):
                    await self._socket.send_str(CLOSE_MESSAGE)
                    await self._socket.close()
        finally:
            await self._http.close()

    async def reset(self, arguments: Mapping[str, Any]) -> Observation:
        """Begin an episode.

        Raises:
            ServerError: the server answers with an error.
            BadReward: the reward is no finite number.
            ServerLost: there is no answer, or it cannot be read.
        """
        return await self._ask(reset_message(arguments))

    async def step(self, action: Mapping[str, Any]) -> Observation:
        """Take an action; raises what ``reset`` raises."""
        return await self._ask(step_message(action))

    async def schema(self, part: str) -> Mapping[str, Any]:
        """Ask the server for the JSON schema of ``part``, such as ``action``.

        Raises:
            ServerLost: it cannot be had within the time to reach the server.
        """
        url = f"http{self._url.removeprefix('ws').removesuffix('/ws')}/schema"
        try:
            async with (
                asyncio.timeout(self._open_s),
                # Compressed, its size is known only once it is unpacked.
                self._http.get(url, headers={"accept-encoding": "identity"}, auto_decompress=False) as answer,
            ):
                answer.raise_for_status()
                body = bytearray()
                async for piece in answer.content.iter_any():
                    body += piece
                    if len(body) > MAX_MESSAGE_BYTES:
                        raise WireError(f"the answer of /schema has more than {MAX_MESSAGE_BYTES} bytes")
            return read_schema(body.decode(errors="replace"), part)
        except (aiohttp.ClientError, OSError, TimeoutError, WireError) as error:
            raise ServerLost(f"{url} cannot be read: {_told(error)}") from error

    async def _ask(self, message: str) -> Observation:
        if self._inbox:
            # Only an error may come unasked: with it a server says why it has ended the session.
            self._taken()
            raise ServerLost(f"{self._url} has sent an observation that nobody has asked for")
        # Where the server has gone the reader knows more than the failure to write does.
        with contextlib.suppress(ConnectionError):
            await self._socket.send_str(message)
        while not self._inbox:
            if self._reader.done():
                self._reader.result()
            self._arrived.clear()
            arriving = asyncio.ensure_future(self._arrived.wait())
            try:
                await asyncio.wait([arriving, self._reader], return_when=asyncio.FIRST_COMPLETED)
            finally:
                arriving.cancel()
        return self._taken()

    def _taken(self) -> Observation:
        try:
            return read_answer(self._inbox.popleft())
        except WireError as error:
            raise ServerLost(f"{self._url} does not keep to the wire of OpenEnv: {error}") from error

    async def _read(self) -> NoReturn:
        """Read until the connection ends.

        Raises:
            ServerLost: always, with the reason.
        """
        while True:
            message = await self._socket.receive()
            match message.type:
                case WSMsgType.TEXT:
                    if len(self._inbox) >= _MAX_WAITING:
                        raise ServerLost(f"{self._url} sends messages that nobody has asked for")
                    self._inbox.append(message.data)
                    self._arrived.set()
                case WSMsgType.BINARY:
                    raise ServerLost(f"{self._url} does not keep to the wire of OpenEnv: it sends bytes")
                case WSMsgType.ERROR:
                    raise ServerLost(f"{self._url} has sent what cannot be read: {_told(message.data)}")
                case _:
                    code = self._socket.close_code
                    raise ServerLost(f"{self._url} has closed the connection (code {code})")


def _told(error: object) -> str:
    return f"{type(error).__name__}: {error}"[:300]
