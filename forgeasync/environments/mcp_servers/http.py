"""The HTTP client of MCP servers that run elsewhere: it reads no more of an answer than fits.

The transport of mcp 2.3.0 bounds events of a stream, but not answers in JSON (mcp/client/streamable_http.py).
"""

from collections.abc import AsyncIterator

import httpx2

from forgeasync.config import HttpServer

MAX_RESPONSE_BYTES = 16 * 2**20
"""Most bytes of one response, which may be a stream of events that lasts as long as the episode."""

CONNECT_S = 30.0
SILENCE_S = 300.0
"""Time between two pieces of a response."""


class ResponseTooLarge(httpx2.RequestError):
    """A server has sent more than is read, or compressed it."""


def http_client(section: HttpServer) -> httpx2.AsyncClient:
    """Return a client for one server, not entered."""
    return httpx2.AsyncClient(
        transport=_BoundedTransport(),
        headers=section.headers | {"accept-encoding": "identity"},
        timeout=httpx2.Timeout(CONNECT_S, read=SILENCE_S),
    )


class _BoundedTransport(httpx2.AsyncHTTPTransport):
    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        response = await super().handle_async_request(request)
        if response.headers.get("content-encoding", "identity") != "identity":
            # Its size is known only once it is unpacked.
            await response.aclose()
            raise ResponseTooLarge("the server compresses its responses, though it was asked not to")
        assert isinstance(response.stream, httpx2.AsyncByteStream)
        response.stream = _BoundedStream(response.stream)
        return response


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
