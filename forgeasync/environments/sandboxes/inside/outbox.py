"""A call's socket, and the command's output on its way to the host: bounded, counted, never waited for."""

from __future__ import annotations

import os
import select

from . import wire

TYPE_CHECKING = False  # typing itself takes 13 ms to import
if TYPE_CHECKING:
    from typing import Any

_MOST_PENDING_BYTES = 4 * wire.CHUNK_BYTES
_MOST_READS_OF_A_PIPE = 32
"""The kernel lets ordinary users make a pipe of up to 1 MiB."""


class Outbox:
    """Frames that wait for room in the socket."""

    def __init__(self, sock: Any) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._pending = bytearray()

    @property
    def is_full(self) -> bool:
        """Whether to stop reading output until the host has taken some."""
        return len(self._pending) > _MOST_PENDING_BYTES

    @property
    def is_empty(self) -> bool:
        return not self._pending

    def put(self, kind: int, payload: bytes) -> None:
        self._pending += wire.FRAME.pack(kind, len(payload)) + payload
        self.send()

    def send(self) -> None:
        """Send what fits now."""
        try:
            while self._pending:
                del self._pending[: self._sock.send(self._pending)]
        except BlockingIOError:
            return
        except ConnectionError:
            # The host has closed the call; the reader sees it too, and the command is ended.
            self._pending.clear()

    def send_all(self) -> None:
        """Wait until all is sent, or the host has closed the call."""
        poll = select.poll()
        poll.register(self._sock.fileno(), select.POLLOUT)
        self.send()
        while self._pending:
            poll.poll()
            self.send()


class Output:
    """One of a command's output streams."""

    def __init__(self, fd: int, kind: int, outbox: Outbox) -> None:
        os.set_blocking(fd, False)
        self.fd = fd
        self.ended = False
        self.num_cut = 0
        self._kind = kind
        self._outbox = outbox
        self._room = 0

    def start(self, cap_bytes: int) -> None:
        """Begin a run, of which at most so many bytes are passed on."""
        self._room = cap_bytes
        self.num_cut = 0

    def pump(self) -> bytes:
        """Read once and return what was read; empty if there is nothing now, or the stream has ended."""
        try:
            data = os.read(self.fd, wire.CHUNK_BYTES)
        except BlockingIOError:
            return b""
        self.ended = not data
        return data

    def pass_on(self, data: bytes) -> None:
        """Send as much of ``data`` as there is room for, and count the rest."""
        if kept := data[: self._room]:
            self._outbox.put(self._kind, kept)
        self._room -= len(kept)
        self.num_cut += len(data) - len(kept)

    def drain(self) -> None:
        """Pass on what is in the pipe; a process that could not be ended may still fill it."""
        for _ in range(_MOST_READS_OF_A_PIPE):
            if not (data := self.pump()):
                return
            self.pass_on(data)


class Reader:
    """Frames that come from the host."""

    def __init__(self, sock: Any) -> None:
        self._sock = sock
        self._data = bytearray()
        self.ended = False

    def fileno(self) -> int:
        return self._sock.fileno()

    def receive(self) -> list[tuple[int, bytes]]:
        """Take what has come; ``ended`` is set once the host has closed the socket."""
        try:
            part = self._sock.recv(wire.CHUNK_BYTES)
        except BlockingIOError:
            return []
        except ConnectionError:
            part = b""
        self.ended = not part
        self._data += part
        frames = []
        while len(self._data) >= wire.FRAME.size:
            kind, size = wire.FRAME.unpack_from(self._data)
            end = wire.FRAME.size + size
            if len(self._data) < end:
                break
            frames.append((kind, bytes(self._data[wire.FRAME.size : end])))
            del self._data[:end]
        return frames

    def wait(self) -> list[tuple[int, bytes]]:
        """Wait for the next frames; none once the host has closed the socket."""
        while not self.ended:
            poll = select.poll()
            poll.register(self._sock.fileno(), select.POLLIN)
            poll.poll()
            if frames := self.receive():
                return frames
        return []

    def discard(self) -> None:
        """Throw away what comes until the host closes the socket.

        If this end closed first, with frames unread, the host would find its connection reset, and might lose
        what it has not read yet.
        """
        while self.wait():
            self._data.clear()
