"""Who may ask a session, what hostile clients cannot do, and verdicts from outside."""

import asyncio
import contextlib
import json
import re
from typing import Any

import aiohttp
import pytest

from forgeasync.environments import MAX_COMMENT_CHARS, Feedback, Session, SessionLimits, SessionServer
from tests.support.sessions import ScriptedAgent, say, serving, until

BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


async def post(
    session: Session,
    path: str = "/v1/chat/completions",
    *,
    key: str | None = None,
    headers: dict[str, str] | None = None,
    **more: Any,
) -> tuple[int, Any]:
    """Status and JSON of an answer."""
    given = headers or {"authorization": f"Bearer {session.api_key if key is None else key}"}
    more = more if "data" in more else {"json": BODY}
    async with (
        aiohttp.ClientSession() as client,
        client.post(session.anthropic_base_url + path, headers=given, **more) as answer,
    ):
        return answer.status, await answer.json()


async def connected(
    session: Session, raw: bytes, **options: Any
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A socket on which bytes have been sent."""
    host, port = re.match(r"http://([^:/]+):(\d+)/", session.base_url).groups()
    reader, writer = await asyncio.open_connection(host, int(port), **options)
    writer.write(raw)
    return reader, writer


async def send(session: Session, raw: bytes) -> bytes:
    """What the server says to bytes on a socket, until it closes."""
    reader, writer = await connected(session, raw)
    with contextlib.suppress(ConnectionError):
        await writer.drain()
        return await reader.read()
    return b""


def head(session: Session, length: int, *more: str) -> bytes:
    """The beginning of a request with a body of some length."""
    lines = [
        f"POST /sessions/{session.id}/v1/chat/completions HTTP/1.1",
        "host: x",
        f"x-api-key: {session.api_key}",
        f"content-length: {length}",
        *more,
    ]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


async def test_sessions_are_apart() -> None:
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
        a.anthropic_base_url = a.anthropic_base_url.replace(a.id, "unknown")
        status, body = await post(a)
        assert (status, body["error"]["code"]) == (404, "session_not_found")


async def test_a_key_may_come_in_either_header_and_paths_that_are_not_served() -> None:
    async with serving(ScriptedAgent(answer=lambda _: say("ok"))) as (_, session):
        async with aiohttp.ClientSession(headers={"x-api-key": session.api_key}) as client:
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
        assert (await post(session, headers={"x-api-key": right}))[0] == 200
        for api_key, bearer, status in [(wrong, right, 200), (right, wrong, 200), (wrong, wrong, 401)]:
            headers = {"x-api-key": api_key, "Authorization": f"Bearer {bearer}"}
            assert (await post(session, headers=headers))[0] == status


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


async def test_a_server_for_other_machines() -> None:
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


async def test_a_server_that_does_not_run_opens_nothing() -> None:
    server = SessionServer()
    with pytest.raises(RuntimeError, match="not running"):
        server.open(ScriptedAgent())
    async with server:
        session = server.open(ScriptedAgent())
    assert session.is_closed
    with pytest.raises(aiohttp.ClientConnectionError):
        await post(session)
    with pytest.raises(RuntimeError, match="not running"):
        server.open(ScriptedAgent())


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


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
@pytest.mark.parametrize("name", BODIES)
async def test_bodies_that_cannot_be_read(name: str, path: str, caplog: pytest.LogCaptureFixture) -> None:
    agent = ScriptedAgent([say("ok")])
    async with serving(agent) as (_, session):
        status, body = await post(session, path, data=BODIES[name])
        assert status == 400
        assert body["error"]["message"]
        assert len(json.dumps(body)) < 1000
        # The server goes on.
        assert (await post(session))[0] == 200
    assert not caplog.records


@pytest.mark.parametrize(
    ("parameters", "problem"),
    [("[" * 70 + "]" * 70, "nested deeper than 64"), ("[" + "1," * 100_001 + "1]", "at most 100000 values")],
)
async def test_parameters_of_a_tool_are_bounded(parameters: str, problem: str) -> None:
    agent = ScriptedAgent([say("ok")])
    function = f'{{"name": "f", "parameters": {{"a": {parameters}}}}}'
    tools = f'[{{"type": "function", "function": {function}}}]'
    raw = f'{{"model": "m", "messages": [{{"role": "user", "content": "hi"}}], "tools": {tools}}}'
    async with serving(agent) as (_, session):
        status, body = await post(session, data=raw.encode())
    assert (status, body["error"]["param"]) == (400, "tools[0].function.parameters")
    assert problem in body["error"]["message"]
    assert not agent.calls


async def test_a_body_that_is_too_large() -> None:
    async def chunks() -> Any:
        for _ in range(40):
            yield b"x" * 1000

    limits = SessionLimits(max_body_bytes=20_000)
    async with serving(ScriptedAgent([say("ok")]), limits=limits) as (_, session):
        for data in (b"x" * 20_001, chunks()):
            status, body = await post(session, data=data)
            assert (status, body["error"]["code"]) == (413, "body_too_large")
        assert (await post(session, data=b" " * 10_000_000, compress="deflate"))[0] == 413
        assert (await post(session, data=json.dumps(BODY).ljust(20_000).encode()))[0] == 200


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
async def test_a_body_that_is_not_compressed_as_it_says(coding: str) -> None:
    async with serving(ScriptedAgent([say("ok")])) as (_, session):
        raw = head(session, 100, "connection: close", f"content-encoding: {coding}") + b"\xff" * 100
        assert (await send(session, raw)).startswith(b"HTTP/1.1 400")
        assert (await post(session))[0] == 200


async def test_a_body_that_never_arrives() -> None:
    agent = ScriptedAgent()
    async with serving(agent, limits=SessionLimits(body_s=0.05)) as (_, session):
        answer = await send(session, head(session, 100) + b"{")
    assert answer.startswith(b"HTTP/1.1 408")
    assert b"did not arrive within 0.05 s" in answer
    assert not agent.calls


@pytest.mark.parametrize("raw", [b"", b"POST /sessions/x HTTP/1.1\r\nhost: x\r\n"])
async def test_headers_that_never_arrive(raw: bytes) -> None:
    async with serving(ScriptedAgent(), limits=SessionLimits(idle_s=0.05)) as (_, session):
        # A server that hangs up before it has read everything resets the connection.
        with contextlib.suppress(ConnectionError):
            assert await send(session, raw) == b""


async def test_a_client_that_reads_nothing_holds_nothing_up() -> None:
    agent = ScriptedAgent([say("x" * 20_000_000)])
    async with serving(agent, limits=SessionLimits(write_s=0.05)) as (_, session):
        raw = json.dumps(BODY).encode()
        _, writer = await connected(session, head(session, len(raw)) + raw, limit=1)
        await until(lambda: session.counts.num_turns == 1)
        await until(lambda: session.num_open_requests == 0)
        session.close()
        await until(lambda: session.counts.num_abandoned == 1)
        writer.transport.abort()


async def test_open_requests_are_bounded() -> None:
    agent = ScriptedAgent(answer=lambda _: say("ok"))
    agent.gate.clear()
    async with serving(agent, limits=SessionLimits(max_open_requests=3)) as (_, session):
        waiting = [asyncio.create_task(post(session)) for _ in range(3)]
        await until(lambda: session.num_open_requests == 3)
        status, body = await post(session)
        assert (status, body["error"]["code"]) == (429, "too_many_requests")
        agent.gate.set()
        assert [status for status, _ in await asyncio.gather(*waiting)] == [200] * 3


@pytest.mark.parametrize(
    "headers",
    [
        {"x-stainless-retry-count": "-1"},
        {"x-stainless-retry-count": "1" * 30},
        {"x-stainless-retry-count": "١"},
    ],
)
async def test_headers_that_cannot_be_read(headers: dict[str, str]) -> None:
    agent = ScriptedAgent([say("ok")])
    async with serving(agent) as (_, session):
        status, body = await post(session, headers={"x-api-key": session.api_key, **headers})
    assert status == 400 and next(iter(headers)) in body["error"]["message"]
    assert not agent.calls


@pytest.mark.parametrize("value", [0, -1, float("inf"), float("nan")])
def test_limits_are_positive_and_finite(value: float) -> None:
    with pytest.raises(ValueError, match=r"SessionLimits\.turn_s"):
        SessionLimits(turn_s=value)


# ---- feedback


async def judge(session: Session, body: Any) -> tuple[int, Any]:
    """``body`` is JSON, or bytes."""
    data = body if isinstance(body, bytes) else json.dumps(body)
    return await post(session, "/feedback", data=data)


async def test_feedback_is_waited_for_and_the_wait_may_be_given_up() -> None:
    async with serving(ScriptedAgent(answer=lambda _: say("ok"))) as (_, session):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(session.finished(), 0.01)
        first = {"score": 0.5, "comment": "half right", "finished": False}
        assert await judge(session, first) == (200, {"num_feedback": 1, "finished": False})
        assert (await post(session))[0] == 200
        finished = asyncio.create_task(session.finished())
        assert await judge(session, {"score": 1}) == (200, {"num_feedback": 2, "finished": True})
        assert await finished == (Feedback(score=0.5, comment="half right"), Feedback(score=1.0))
        assert (await post(session))[0] == (await judge(session, {"score": 1}))[0] == 410
        assert len(session.feedback) == 2


NESTED = [b'{"score": ' + b"[" * depth + b"]" * depth + b"}" for depth in range(700, 1000, 20)]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "score"),
        ({"score": "good"}, "score"),
        ({"score": True}, "score"),
        ({"score": 1e7}, "score"),
        ({"score": 10**400}, "score"),
        ({"score": 1, "comment": 5}, "comment"),
        ({"score": 1, "comment": "x" * (MAX_COMMENT_CHARS + 1)}, "comment"),
        ({"score": 1, "finished": "yes"}, "finished"),
        ({"score": 1, "stars": 5}, "stars"),
        *((raw, None) for raw in (b"", b"[" * 100_000, b'{"score": NaN}', *NESTED)),
    ],
)
async def test_feedback_that_cannot_be_read(body: Any, field: str | None) -> None:
    async with serving(ScriptedAgent()) as (_, session):
        status, answer = await judge(session, body)
        assert status == 400 and field in (None, answer["error"]["param"])
        assert not session.feedback and not session.is_closed


async def test_verdicts_are_bounded() -> None:
    async with serving(ScriptedAgent()) as (_, session):
        for _ in range(64):
            session.add_feedback(Feedback(score=1.0), is_last=False)
        status, answer = await judge(session, {"score": 1})
        assert (status, answer["error"]["param"]) == (400, "score")
        assert len(session.feedback) == 64
