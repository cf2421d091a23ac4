"""A TCP proxy that cuts connections, as a network does."""

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Self

Cut = Callable[[int, bytes], bool]


class CuttingProxy:
    """Forwards connections to a port of this machine.

    After each chunk that the server sends ``cut`` is asked, with the connection's number and all that the
    server has sent on it so far. If it says so, both ends are closed at once, and the chunk is lost.
    """

    def __init__(self, port: int, cut: Cut) -> None:
        self._to = port
        self._cut = cut
        self._num = 0
        self._open: list[asyncio.StreamWriter] = []
        self.port = 0

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._server.close()
        self.cut_all()

    @property
    def num_connections(self) -> int:
        return self._num

    def cut_all(self) -> None:
        """Close every connection now."""
        for writer in self._open:
            writer.transport.abort()
        self._open.clear()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number = self._num
        self._num += 1
        back_reader, back_writer = await asyncio.open_connection("127.0.0.1", self._to)
        self._open += [writer, back_writer]

        async def forward() -> None:
            while chunk := await reader.read(65536):
                back_writer.write(chunk)
                await back_writer.drain()

        async def back() -> None:
            sent = b""
            while chunk := await back_reader.read(65536):
                sent += chunk
                if self._cut(number, sent):
                    break
                writer.write(chunk)
                await writer.drain()

        tasks = [asyncio.create_task(forward()), asyncio.create_task(back())]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        writer.transport.abort()
        back_writer.transport.abort()
