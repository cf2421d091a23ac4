"""The connection to one environment server of Verifiers, for one request after the other."""

import asyncio
import contextlib
import functools
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import zmq
import zmq.asyncio

from forgeasync.environments.verifiers_server.wire import (
    EpisodeReport,
    Refusal,
    Report,
    Request,
    WireError,
    cancel_request,
    health_request,
    read_frames,
    read_reply,
)

MAX_FRAME_BYTES = 64 * 2**20
"""A server that sends a larger frame is disconnected by libzmq before it is read."""

LINGER_MS = 1000
"""Time for a last request, which gives an episode up, to leave after the connection was closed."""

_MAX_WAITING_MESSAGES = 64
_MAX_SOCKETS = 16_384


class ServerLost(Exception):
    """The server has ended, cannot be reached, does not answer or does not keep to the wire; says which."""


@functools.cache
def _context() -> zmq.Context[zmq.Socket[bytes]]:
    """One for all episodes of the process: each has threads of its own."""
    context = zmq.Context()
    # Every connection has two sockets, and libzmq's own bound is 1023.
    context.set(zmq.MAX_SOCKETS, _MAX_SOCKETS)
    return context


class Connection:
    """A client of one server, on the event loop on which it is entered.

        async with Connection("tcp://127.0.0.1:5000") as connection:
            report = await connection.run(request, health_s=30.0)

    Entering reaches nothing yet: libzmq connects as soon as the server is there.
    """

    def __init__(self, address: str) -> None:
        self._address = address

    async def __aenter__(self) -> Self:
        context = zmq.asyncio.Context.shadow(_context().underlying)
        self._socket: Any = context.socket(zmq.DEALER)
        self._monitor: Any = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._disconnected: asyncio.Future[Any] = asyncio.ensure_future(self._monitor.recv_multipart())
        self._set_up(self._socket)
        return self

    def _set_up(self, socket: Any) -> None:
        socket.linger = LINGER_MS
        socket.maxmsgsize = MAX_FRAME_BYTES
        socket.rcvhwm = _MAX_WAITING_MESSAGES
        socket.ipv6 = 1
        socket.connect(self._address)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._disconnected.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._disconnected
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close()

    async def check_health(self, *, limit_s: float) -> None:
        """Ask the server for a sign of life.

        Raises:
            ServerLost: there is none within ``limit_s``.
        """
        request = health_request()
        await self._send(request)
        refusal = None

        def take(request_id: str, is_last: bool, payload: bytes) -> None:
            nonlocal refusal
            _expect(request_id, {request.request_id})
            refusal = read_reply(payload)

        if not await self._receive(take, limit_s=limit_s):
            raise ServerLost(f"{self._address} has not answered for {limit_s:g} s")
        if refusal is not None:
            raise ServerLost(f"{self._address} says that it is not well: {refusal.error}")

    async def run(self, request: Request, *, health_s: float) -> EpisodeReport | Refusal:
        """Have the server run an episode; cancelling gives it up there too.

        Raises:
            ServerLost: the connection has ended, what the server sends cannot be read, or it has been silent
                for ``health_s`` and then has not answered a question for its health for as long again.
        """
        await self.check_health(limit_s=health_s)
        report = Report()
        outcome: EpisodeReport | Refusal | None = None
        health: Request | None = None

        def take(request_id: str, is_last: bool, payload: bytes) -> None:
            nonlocal outcome, health
            _expect(request_id, {request.request_id} | ({health.request_id} if health else set()))
            if request_id != request.request_id:
                read_reply(payload)
                health = None
            elif is_last:
                outcome = report.finish(payload)
            else:
                report.apply(payload)

        await self._send(request)
        try:
            while outcome is None:
                if await self._receive(take, limit_s=health_s):
                    continue
                if health is not None:
                    raise ServerLost(f"{self._address} has not answered for {2 * health_s:g} s")
                health = health_request()
                await self._send(health)
        finally:
            if outcome is None:
                self._give_up(request)
        return outcome

    def _give_up(self, run: Request) -> None:
        """Tell the server to give an episode up, with which it goes on when its client has left.

        Nothing is waited for: what it answers does not matter any more.
        """
        frames = cancel_request(run).frames
        if not self._disconnected.done():
            # On the connection of the run: it arrives after the run itself.
            self._socket.send_multipart(frames)
            return
        # libzmq does not open a connection again that it has closed itself. Any client may give any run up.
        with _context().socket(zmq.DEALER) as another:
            self._set_up(another)
            another.send_multipart(frames)

    def _send(self, request: Request) -> "asyncio.Future[Any]":
        return self._socket.send_multipart(request.frames)

    async def _receive(self, take: Callable[[str, bool, bytes], None], *, limit_s: float) -> bool:
        """Wait for one message and have it taken in; whether one has come within ``limit_s``."""
        receiving: asyncio.Future[list[bytes]] = self._socket.recv_multipart()
        try:
            done, _ = await asyncio.wait(
                [receiving, self._disconnected], timeout=limit_s, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            receiving.cancel()
        if not done:
            return False
        if receiving not in done:
            raise ServerLost(
                f"{self._address} has closed the connection: it has ended, or sent a message of more than "
                f"{MAX_FRAME_BYTES} bytes"
            )
        try:
            take(*read_frames(receiving.result()))
        except WireError as error:
            raise ServerLost(f"{self._address} does not keep to the wire of Verifiers: {error}") from error
        return True


def _expect(request_id: str, expected: set[str]) -> None:
    if request_id not in expected:
        raise WireError(f"a message answers request {request_id[:40]!r}, which was not made")
