"""Who may ask a session, and what hostile clients cannot do."""

import asyncio
import contextlib
import gc
import json
import re
import weakref
from typing import Any

import aiohttp
import pytest

from forgeasync.environments import Session, SessionLimits, SessionServer
from tests.support.sessions import ScriptedAgent, say, serving, until

BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


async def post(
    session: Session, path: str = "/chat/completions", *, key: str | None = None, **more: Any
) -> tuple[int, Any]:
    """Status and JSON of an answer."""
    headers = {"authorization": f"Bearer {session.api_key if key is None else key}"}
    more = {"json": BODY, **more} if "data" not in more else more
    async with (
        aiohttp.ClientSession() as client,
        client.post(session.base_url + path, headers=headers, **more) as answer,
    ):
        return answer.status, await answer.json()


async def send(session: Session, raw: bytes) -> bytes:
    """What the server says to bytes on a socket, until it closes."""
    host, port = re.match(r"http://([^:/]+):(\d+)/", session.base_url).groups()
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(raw)
    with contextlib.suppress(ConnectionError):
        await writer.drain()
        return await reader.read()
    return b""


def test_urls_and_secrets() -> None:
    async def test() -> None:
        async with SessionServer() as server:
            sessions = [server.open(ScriptedAgent(), name="m") for _ in range(50)]
            for session in sessions:
                base = rf"http://127\.0\.0\.1:\d+/sessions/{re.escape(session.id)}"
                assert re.fullmatch(base + "/v1", session.base_url)
                assert re.fullmatch(base, session.anthropic_base_url)
                assert len(session.id) >= 22 and len(session.api_key) == 64
            assert len({session.id for session in sessions}) == 50
            assert len({session.api_key for session in sessions}) == 50

    asyncio.run(test())


def test_sessions_are_apart() -> None:
    async def test() -> None:
        first, second = ScriptedAgent([say("one")]), ScriptedAgent([say("two")])
        async with SessionServer() as server:
            a, b = server.open(first), server.open(second)
            for key in (b.api_key, "", "x", "Bearer", a.api_key[:-1], a.api_key + "x", "\u00e9"):
                status, body = await post(a, key=key)
                assert (status, body["error"]["code"]) == (401, "invalid_api_key")
                assert a.api_key not in json.dumps(body)
            status, body = await post(a)
            assert body["choices"][0]["message"]["content"] == "one"
            assert (len(first.calls), len(second.calls)) == (1, 0)
            b.close()
            status, body = await post(b)
            assert (status, body["error"]["code"]) == (410, "session_closed")
            # Whether a session was closed is nobody else's business.
            assert (await post(b, key=a.api_key))[0] == 401
            a.id, url = "unknown", a.base_url
            a.base_url = url.replace(url.split("/")[4], "unknown")
            status, body = await post(a)
            assert (status, body["error"]["code"]) == (404, "session_not_found")

    asyncio.run(test())


def test_a_key_may_come_in_either_header_and_paths_that_are_not_served() -> None:
    async def test() -> None:
        async with serving(ScriptedAgent(answer=lambda _: say("ok"))) as (_, session):
            async with aiohttp.ClientSession(headers={"x-api-key": session.api_key}) as client:
                async with client.post(session.base_url + "/chat/completions", json=BODY) as answer:
                    assert answer.status == 200
                for method, path in [
                    ("GET", "/chat/completions"),
                    ("POST", "/embeddings"),
                    ("POST", "/models"),
                    ("DELETE", "/responses/x"),
                    ("GET", "/../../other/v1/models"),
                ]:
                    async with client.request(method, session.base_url + path) as answer:
                        assert answer.status == 404
                        assert "message" in (await answer.json())["error"]
                root = session.base_url.partition("/sessions")[0]
                for path in ("/", "/sessions", "/v1/models", "/sessions//v1/models"):
                    async with client.get(root + path) as answer:
                        assert answer.status == 404
            # Verifiers' programs in Anthropic's form say EMPTY in the one and the key in the other.
            right, wrong = session.api_key, "EMPTY"
            for api_key, bearer, status in [(wrong, right, 200), (right, wrong, 200), (wrong, wrong, 401)]:
                headers = {"x-api-key": api_key, "Authorization": f"Bearer {bearer}"}
                async with (
                    aiohttp.ClientSession(headers=headers) as client,
                    client.post(session.base_url + "/chat/completions", json=BODY) as answer,
                ):
                    assert answer.status == status

    asyncio.run(test())


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"host": "0.0.0.0"}, "token is missing"),
        ({"host": "10.0.0.1"}, "token is missing"),
        ({"host": "node7"}, "token is missing"),
        ({"host": "::"}, "token is missing"),
        ({"host": ""}, "token is missing"),
        ({"host": "10.0.0.1", "token": "short"}, "token has 5 characters"),
        ({"host": "0.0.0.0", "token": "x" * 16}, "public_host is missing"),
    ],
)
def test_other_machines_are_let_in_only_with_a_token(options: dict[str, str], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        SessionServer(**options)


def test_a_server_for_other_machines() -> None:
    async def test() -> None:
        token = "a token of the user's"
        keys = []
        for _ in range(2):
            async with SessionServer(host="0.0.0.0", token=token, public_host="127.0.0.1") as server:
                session = server.open(ScriptedAgent([say("ok")]))
                assert session.base_url.startswith("http://127.0.0.1:")
                assert (await post(session))[0] == 200
                assert (await post(session, key=token))[0] == 401
                assert token not in session.api_key
                keys.append(session.api_key)
        assert keys[0] != keys[1]
        async with SessionServer(host="::1") as server:
            session = server.open(ScriptedAgent([say("ok")]))
            assert session.base_url.startswith("http://[::1]:")

    asyncio.run(test())


def test_a_server_that_does_not_run_opens_nothing() -> None:
    server = SessionServer()
    with pytest.raises(RuntimeError, match="not running"):
        server.open(ScriptedAgent())

    async def test() -> None:
        async with server:
            session = server.open(ScriptedAgent())
        assert session.is_closed
        with pytest.raises(aiohttp.ClientConnectionError):
            await post(session)
        with pytest.raises(RuntimeError, match="not running"):
            server.open(ScriptedAgent())

    asyncio.run(test())


def test_a_port_that_is_taken() -> None:
    async def test() -> None:
        async with serving(ScriptedAgent()) as (_, session):
            port = int(session.base_url.split(":")[2].partition("/")[0])
            with pytest.raises(OSError, match="address already in use"):
                async with SessionServer(port=port):
                    pass

    asyncio.run(test())


def with_depth(depth: int) -> bytes:
    return b'{"model": ' + b"[" * depth + b"]" * depth + b"}"


DEEP = b'{"a":' * 3000 + b"1" + b"}" * 3000

BODIES = {
    "empty": b"",
    "no JSON": b"{",
    "a list": b"[]",
    "null": b"null",
    "text": b'"hi"',
    "bytes": b"\xff\xfe\x00",
    "NaN": b'{"model": "m", "messages": NaN}',
    "infinite": b'{"model": "m", "messages": [], "temperature": 1e999}',
    "deep": DEEP,
    "deep list": b"[" * 100_000,
    **{f"{depth} deep": with_depth(depth) for depth in range(100, 1000, 50)},
    "half a surrogate pair": b'{"model": "m", "messages": [{"role": "user", "content": "\\ud800"}]}',
    "half a surrogate pair in a name": b'{"model": "m", "messages": [], "\\udfff": 1}',
    "huge number": b'{"model": "m", "n": ' + b"9" * 5000 + b"}",
    "no model": b'{"messages": []}',
    "model is a number": b'{"model": 5, "messages": []}',
    "no messages": b'{"model": "m"}',
    "messages is text": b'{"model": "m", "messages": "hi"}',
    "no message": b'{"model": "m", "messages": []}',
    "tools that are many": b'{"model": "m", "messages": [], "tools": {}}',
}


@pytest.mark.parametrize("path", ["/chat/completions", "/responses", "/messages"])
@pytest.mark.parametrize("name", BODIES)
def test_bodies_that_cannot_be_read(name: str, path: str, caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        agent = ScriptedAgent([say("ok")])
        async with serving(agent) as (_, session):
            status, body = await post(session, path, data=BODIES[name])
            assert status == 400
            assert body["error"]["message"]
            assert len(json.dumps(body)) < 1000
            # The server goes on.
            assert (await post(session))[0] == 200
        assert not caplog.records

    asyncio.run(test())


@pytest.mark.parametrize(
    ("parameters", "problem"),
    [
        ("[" * 70 + "]" * 70, "nested deeper than 64"),
        ("[" + "1," * 100_001 + "1]", "at most 100000 values"),
    ],
)
def test_parameters_of_a_tool_are_bounded(parameters: str, problem: str) -> None:
    async def test() -> None:
        agent = ScriptedAgent([say("ok")])
        function = f'{{"name": "f", "parameters": {{"a": {parameters}}}}}'
        tools = f'[{{"type": "function", "function": {function}}}]'
        raw = f'{{"model": "m", "messages": [{{"role": "user", "content": "hi"}}], "tools": {tools}}}'
        async with serving(agent) as (_, session):
            status, body = await post(session, data=raw.encode())
        assert (status, body["error"]["param"]) == (400, "tools[0].function.parameters")
        assert problem in body["error"]["message"]
        assert not agent.calls

    asyncio.run(test())


def test_a_body_that_is_too_large() -> None:
    async def chunks() -> Any:
        for _ in range(40):
            yield b"x" * 1000

    async def test() -> None:
        limits = SessionLimits(max_body_bytes=20_000)
        async with serving(ScriptedAgent([say("ok")]), limits=limits) as (_, session):
            for data in (b"x" * 20_001, chunks()):
                status, body = await post(session, data=data)
                assert (status, body["error"]["code"]) == (413, "body_too_large")
            bomb = {"headers": {}, "data": b" " * 10_000_000, "compress": "deflate"}
            async with (
                aiohttp.ClientSession(headers={"x-api-key": session.api_key}) as client,
                client.post(session.base_url + "/chat/completions", **bomb) as answer,
            ):
                assert answer.status == 413
            assert (await post(session, data=json.dumps(BODY).ljust(20_000).encode()))[0] == 200

    asyncio.run(test())


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
def test_a_body_that_is_not_compressed_as_it_says(coding: str) -> None:
    async def test() -> None:
        async with serving(ScriptedAgent([say("ok")])) as (_, session):
            raw = b"\xff" * 100
            head = (
                f"POST /sessions/{session.id}/v1/chat/completions HTTP/1.1\r\nhost: x\r\n"
                f"connection: close\r\nx-api-key: {session.api_key}\r\n"
                f"content-length: 100\r\ncontent-encoding: {coding}\r\n\r\n"
            )
            assert (await send(session, head.encode() + raw)).startswith(b"HTTP/1.1 400")
            assert (await post(session))[0] == 200

    asyncio.run(test())


def test_a_body_that_never_arrives() -> None:
    async def test() -> None:
        agent = ScriptedAgent()
        async with serving(agent, limits=SessionLimits(body_s=0.05)) as (_, session):
            head = (
                f"POST /sessions/{session.id}/v1/chat/completions HTTP/1.1\r\nhost: x\r\n"
                f"x-api-key: {session.api_key}\r\ncontent-length: 100\r\n\r\n{{"
            )
            answer = await send(session, head.encode())
        assert answer.startswith(b"HTTP/1.1 408")
        assert b"did not arrive within 0.05 s" in answer
        assert not agent.calls

    asyncio.run(test())


@pytest.mark.parametrize("raw", [b"", b"POST /sessions/x HTTP/1.1\r\nhost: x\r\n"])
def test_headers_that_never_arrive(raw: bytes) -> None:
    async def test() -> None:
        async with serving(ScriptedAgent(), limits=SessionLimits(idle_s=0.05)) as (_, session):
            # A server that hangs up before it has read everything resets the connection.
            with contextlib.suppress(ConnectionError):
                assert await send(session, raw) == b""

    asyncio.run(test())


def test_a_closed_session_is_not_held_on_to() -> None:
    async def test() -> None:
        async with SessionServer() as server:
            session = server.open(ScriptedAgent([say("ok")]))
            await post(session)
            watched = weakref.ref(session)
            session.close()
            del session
            # A connection refers to its last request for a while.
            while watched() is not None:
                await asyncio.sleep(0.001)
                gc.collect()

    asyncio.run(test())


def test_a_client_that_reads_nothing_holds_nothing_up() -> None:
    async def test() -> None:
        agent = ScriptedAgent([say("x" * 20_000_000)])
        async with serving(agent, limits=SessionLimits(write_s=0.05)) as (_, session):
            raw = json.dumps(BODY).encode()
            head = (
                f"POST /sessions/{session.id}/v1/chat/completions HTTP/1.1\r\nhost: x\r\n"
                f"x-api-key: {session.api_key}\r\ncontent-length: {len(raw)}\r\n\r\n"
            )
            host, port = "127.0.0.1", session.base_url.split(":")[2].partition("/")[0]
            _, writer = await asyncio.open_connection(host, int(port), limit=1)
            writer.write(head.encode() + raw)
            await until(lambda: session.counts.num_turns == 1)
            await until(lambda: session.num_open_requests == 0)
            session.close()
            await until(lambda: session.counts.num_abandoned == 1)
            writer.transport.abort()

    asyncio.run(test())


def test_open_requests_are_bounded() -> None:
    async def test() -> None:
        agent = ScriptedAgent(answer=lambda _: say("ok"))
        agent.gate.clear()
        async with serving(agent, limits=SessionLimits(max_open_requests=3)) as (_, session):
            waiting = [asyncio.create_task(post(session)) for _ in range(3)]
            await until(lambda: session.num_open_requests == 3)
            status, body = await post(session)
            assert (status, body["error"]["code"]) == (429, "too_many_requests")
            agent.gate.set()
            assert [status for status, _ in await asyncio.gather(*waiting)] == [200] * 3

    asyncio.run(test())


@pytest.mark.parametrize(
    "headers",
    [
        {"x-stainless-retry-count": "-1"},
        {"x-stainless-retry-count": "1" * 30},
        {"x-stainless-retry-count": "١"},
        {"Idempotency-Key": ""},
        {"Idempotency-Key": "k" * 300},
    ],
)
def test_headers_that_cannot_be_read(headers: dict[str, str]) -> None:
    async def test() -> None:
        agent = ScriptedAgent([say("ok")])
        async with serving(agent) as (_, session):
            async with (
                aiohttp.ClientSession(headers={"x-api-key": session.api_key, **headers}) as client,
                client.post(session.base_url + "/chat/completions", json=BODY) as answer,
            ):
                assert answer.status == 400
                assert next(iter(headers)) in (await answer.json())["error"]["message"]
        assert not agent.calls

    asyncio.run(test())


@pytest.mark.parametrize("value", [0, -1, float("inf"), float("nan")])
def test_limits_are_positive_and_finite(value: float) -> None:
    with pytest.raises(ValueError, match=r"SessionLimits\.turn_s"):
        SessionLimits(turn_s=value)
