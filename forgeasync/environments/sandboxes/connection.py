"""The host's side of a box's supervisor: starting it, calls to it, and its end.

Whatever blocks (starting a process, waiting for its end) runs in threads, so that the event loop goes on. A
connection belongs to the loop that has started it.
"""

import asyncio
import contextlib
import functools
import marshal
import os
import socket
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from forgeasync.environments.sandboxes.holder import Holder
from forgeasync.environments.sandboxes.inside import wire
from forgeasync.environments.sandboxes.program import launch
from forgeasync.environments.sandboxes.results import SandboxClosed, SandboxError, SandboxUnavailable

P = ParamSpec("P")
R = TypeVar("R")

END_LIMIT_S = 0.5
"""How long the end of a call may take to be explained, and a supervisor without a holder to end."""
_ANSWER_LIMIT_S = 0.3
"""How long a supervisor may take to say that it has ended all processes, before the whole box is."""
_FULL_PAUSE_S = 0.005
_MAX_ERROR_BYTES = 4096
_NUM_THREADS = 8


@functools.cache
def _threads() -> ThreadPoolExecutor:
    # Threads of our own: those of the loop may all be taken by blocking steps of environments. They live as
    # long as this process, and must: a box is killed when the thread that started it ends.
    return ThreadPoolExecutor(max_workers=_NUM_THREADS, thread_name_prefix="sandbox")


os.register_at_fork(after_in_child=_threads.cache_clear)


async def in_thread(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Run a blocking function in a thread of the sandboxes' own."""
    return await asyncio.get_running_loop().run_in_executor(
        _threads(), functools.partial(function, *args, **kwargs)
    )


class CallLost(Exception):
    """A call has ended without a result."""

    def __init__(self, cause: int) -> None:
        super().__init__(f"call lost ({cause})")
        self.cause = cause
        """As in wire.py."""


class CallChannel:
    """One call: frames to and from the process that watches over it."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        lost: "asyncio.Future[int]",
        on_close: Callable[[], object],
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._lost = lost
        self._on_close = on_close

    async def send(self, kind: int, payload: bytes) -> None:
        """Send a frame, once there is room for it."""
        self._writer.write(wire.FRAME.pack(kind, len(payload)) + payload)
        # A call that has died shows when its result is received.
        with contextlib.suppress(ConnectionError):
            await self._writer.drain()

    async def send_object(self, request: Mapping[str, object]) -> None:
        """Send a request."""
        await self.send(wire.REQUEST, marshal.dumps(dict(request)))

    async def receive(self) -> tuple[int, bytes]:
        """Return the next frame.

        Raises:
            CallLost: there is none, because the call has died.
            SandboxError: the box sends what is no frame, or could not start the command.
        """
        try:
            kind, size = wire.FRAME.unpack(await self._reader.readexactly(wire.FRAME.size))
            if size > wire.MAX_PAYLOAD_BYTES:
                raise SandboxError(f"the box has sent a frame of {size} bytes")
            payload = await self._reader.readexactly(size)
        except (asyncio.IncompleteReadError, ConnectionError):
            raise CallLost(await self._cause()) from None
        if kind == wire.FAILED:
            raise SandboxError(f"the box could not start a process: {payload.decode(errors='replace')}")
        return kind, payload

    async def _cause(self) -> int:
        try:
            return await asyncio.wait_for(asyncio.shield(self._lost), END_LIMIT_S)
        except TimeoutError:
            return wire.LOST_TAMPERED

    def close(self) -> None:
        """End the call: its process sees it and kills what it has started."""
        self._writer.close()
        self._on_close()


class Connection:
    """The supervisor of a box that has been set up."""

    def __init__(self, control: socket.socket, holder: Holder | None) -> None:
        self._control = control
        self._holder = holder
        self._lost: dict[int, asyncio.Future[int]] = {}
        self._next_call = 0
        self._one_end = threading.Lock()
        self._ended = False
        self._listener: asyncio.Task[None] | None = None

    @classmethod
    async def open(
        cls, settings: Mapping[str, object], *, holder: Holder | None, limit_s: float
    ) -> "Connection":
        """Start a supervisor, in the namespaces of ``holder`` if there is one. Owns the holder from here on.

        Raises:
            SandboxUnavailable: the kernel refused what it needs, or it did not answer within ``limit_s``.
        """
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        connection = cls(ours, holder)
        try:
            with theirs:
                await in_thread(launch, settings, theirs)
            async with asyncio.timeout(limit_s):
                answer = await asyncio.get_running_loop().sock_recv(ours, _MAX_ERROR_BYTES)
        except TimeoutError:
            await connection.close()
            raise SandboxUnavailable(f"the box was not ready within {limit_s} s") from None
        except BaseException:
            await connection.close()
            raise
        if answer != wire.READY:
            await connection.close()
            text = answer.removeprefix(wire.FAILED_SETUP).decode(errors="replace") or "its supervisor died"
            raise SandboxUnavailable(f"the box could not be set up: {text}")
        connection._listener = asyncio.create_task(connection._listen())
        return connection

    async def _listen(self) -> None:
        """Learn of calls that have died, until the supervisor ends."""
        loop = asyncio.get_running_loop()
        data = b""
        while True:
            try:
                part = await loop.sock_recv(self._control, wire.CHUNK_BYTES)
            except OSError:
                part = b""
            if not part:
                break
            data += part
            while len(data) >= wire.LOST.size:
                number, cause = wire.LOST.unpack_from(data)
                data = data[wire.LOST.size :]
                if (lost := self._lost.get(number)) is not None and not lost.done():
                    lost.set_result(cause)
        # The box's code has killed its supervisor: before a call hears of it, all the rest is gone.
        await asyncio.shield(in_thread(self._end))
        self._mark_ended(wire.LOST_TAMPERED)

    def _mark_ended(self, cause: int) -> None:
        self._ended = True
        for lost in self._lost.values():
            if not lost.done():
                lost.set_result(cause)

    @property
    def has_ended(self) -> bool:
        """Whether the supervisor is gone."""
        return self._ended

    async def call(self) -> CallChannel:
        """Start a process that watches over a call; closing the channel ends the call.

        Raises:
            SandboxClosed: the supervisor is gone.
        """
        if self._ended:
            raise SandboxClosed("the box has ended")
        ours, theirs = socket.socketpair()
        try:
            number, self._next_call = self._next_call, self._next_call + 1
            lost = self._lost[number] = asyncio.get_running_loop().create_future()
            try:
                await self._ask(wire.ASK_CALL, number, theirs)
            finally:
                theirs.close()
            reader, writer = await asyncio.open_unix_connection(sock=ours)
        except BaseException:
            ours.close()
            self._lost.pop(number, None)
            raise
        return CallChannel(reader, writer, lost, on_close=functools.partial(self._lost.pop, number, None))

    async def _ask(self, what: int, number: int, attached: socket.socket | None = None) -> None:
        fds = [] if attached is None else [attached.fileno()]
        while True:
            try:
                socket.send_fds(self._control, [wire.ASK.pack(what, number)], fds)
                return
            except BlockingIOError:
                await asyncio.sleep(_FULL_PAUSE_S)
            except OSError:
                raise SandboxClosed("the box has ended") from None

    async def end_all(self) -> None:
        """Kill all processes of the box's own; if the supervisor cannot even do that, the whole box."""
        waiting = [one for one in self._lost.values() if not one.done()]
        await self._ask(wire.ASK_END_ALL, 0)
        if waiting:
            done, _ = await asyncio.wait(
                waiting, timeout=_ANSWER_LIMIT_S, return_when=asyncio.FIRST_COMPLETED
            )
            if not done:
                await self.close()

    async def close(self) -> None:
        """End the supervisor and all processes of the box. Returns when they are gone."""
        if self._listener is not None:
            self._listener.cancel()
            await asyncio.wait([self._listener])
        self._mark_ended(wire.LOST_CLOSED)
        # The thread goes on even if this task is cancelled: nothing is left behind.
        await asyncio.shield(in_thread(self._end))

    def _end(self) -> None:
        with self._one_end:
            with contextlib.suppress(OSError):
                self._control.shutdown(socket.SHUT_WR)
            if self._holder is None:
                _wait_for_end(self._control)
            else:
                self._holder.close()
            self._control.close()


def _wait_for_end(control: socket.socket) -> None:
    """Wait until a supervisor has ended its processes and itself."""
    if control.fileno() < 0:
        return
    control.settimeout(END_LIMIT_S)
    with contextlib.suppress(OSError):
        while control.recv(wire.CHUNK_BYTES):
            pass
