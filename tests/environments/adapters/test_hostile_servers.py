"""Servers that do not keep to their wire: in this process, so that they can say anything."""

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio
from aiohttp import WSMsgType, web
from aiohttp.test_utils import TestServer

from forgeasync.config import OpenEnvServer, VerifiersServer
from forgeasync.environments import EpisodeInterrupted, ServerLost, build_environment, check_environment
from forgeasync.environments.openenv import connection as openenv_connection
from forgeasync.environments.openenv.environment import EpisodeFailed
from forgeasync.environments.verifiers_server import connection as verifiers_connection
from forgeasync.rollouts import Score
from forgeasync.testing import HandTime, ScriptedAgent
from tests.support.adapters.episodes import task

pack = msgspec.msgpack.encode
OK = pack({"success": True, "error": None})


class SessionAgent(ScriptedAgent):
    """Nobody asks its session."""

    base_url = "http://127.0.0.1:1/sessions/a/v1"
    api_key = "k"


Answers = Sequence[list[bytes]]
"""The frames that are sent for a run; ``ID`` stands for the id of the request."""

ID = b"<id>"


def run_verifiers(answers: Answers, *, health: bytes = OK, heard: list[bytes] | None = None) -> Score:
    """An episode with a server that answers a run so, and the first questions for its health well."""
    heard = [] if heard is None else heard
    clock = HandTime()

    async def serve(socket: Any) -> None:
        sending: set[asyncio.Task[None]] = set()
        while True:
            client, request_id, method, _ = await socket.recv_multipart()
            heard.append(method)
            if method == b"run":
                sending.add(asyncio.create_task(answer(socket, client, request_id)))
            elif method == b"health" and b"run" not in heard:
                await socket.send_multipart([client, request_id, b"reply", health])

    async def answer(socket: Any, client: bytes, request_id: bytes) -> None:
        for frames in answers:
            await socket.send_multipart([client, *(request_id if one == ID else one for one in frames)])

    async def go() -> Score:
        context = zmq.asyncio.Context()
        socket = context.socket(zmq.ROUTER)
        port = socket.bind_to_random_port("tcp://127.0.0.1")
        serving = asyncio.create_task(serve(socket))
        section = VerifiersServer(kind="verifiers", address=f"tcp://127.0.0.1:{port}", health_s=1.0)
        running = asyncio.ensure_future(build_environment(section).rollout(task(), SessionAgent()))
        try:
            await clock.stand_until(lambda: running.done() or b"run" in heard)
            if not answers:
                await clock.pass_until(running.done)
            return await running
        except EpisodeInterrupted:
            # What is sent last arrives after the client has left.
            await clock.stand_until(lambda: b"run" not in heard or heard[-1] == b"cancel")
            raise
        finally:
            serving.cancel()
            context.destroy(linger=0)

    return clock.run(go())


def delta(**fields: Any) -> list[bytes]:
    return [ID, b"delta", pack({"trace": "t"} | fields)]


def reply(**fields: Any) -> list[bytes]:
    summary = {"id": "t", "nodes": 1, "calls": 0}
    return [ID, b"reply", pack({"success": True, "head": {"ok": True}, "traces": [summary]} | fields)]


REWARDS = {"rewards": {"r": {"score": 0.75}}, "ok": True}


def test_a_server_that_keeps_to_the_wire() -> None:
    heard: list[bytes] = []
    score = run_verifiers([delta(nodes=[{}]), delta(set=REWARDS), reply()], heard=heard)
    assert score.value == 0.75 and heard == [b"health", b"run"], "what has ended is not given up"


@pytest.mark.parametrize(
    ("answers", "problem"),
    [
        ([[b"\x00\xff"]], "a message has 1 frames"),
        ([[ID, b"gossip", OK]], "of kind b'gossip'"),
        ([[ID, b"delta", b"\xc1garbage"]], "a delta cannot be read"),
        ([[ID, b"reply", b""]], "a reply cannot be read"),
        ([[b"another", b"reply", OK]], "answers request 'another', which was not made"),
        ([[b"\xff\xfe", b"delta", OK]], "which was not made"),
        ([[ID, b"reply", OK]], "has no head"),
        ([reply()], "of trace 't' nothing of 1 messages"),
        ([delta(nodes=[{}, {}]), reply()], "of trace 't' 2 and 0 of 1 messages"),
        (
            [[ID, b"delta", pack(bytes(2**17))]],
            "closed the connection",
        ),
        ([], "has not answered for 2 s"),
    ],
)
def test_a_server_that_does_not_is_lost_and_told_to_give_up(
    monkeypatch: pytest.MonkeyPatch, answers: Answers, problem: str
) -> None:
    monkeypatch.setattr(verifiers_connection, "MAX_FRAME_BYTES", 2**16)
    heard: list[bytes] = []
    with pytest.raises(EpisodeInterrupted, match=problem):
        run_verifiers(answers, heard=heard)
    assert heard[-1] == b"cancel"


def test_a_server_that_says_it_is_not_well() -> None:
    with pytest.raises(EpisodeInterrupted, match="it is not well: out of disk"):
        run_verifiers([], health=pack({"success": False, "error": "out of disk"}))


def test_a_port_where_something_else_listens() -> None:
    async def go() -> list[str]:
        server = await asyncio.start_server(lambda _, writer: writer.write(b"220 mail\r\n" * 99), "127.0.0.1")
        port = server.sockets[0].getsockname()[1]
        sections = [
            VerifiersServer(kind="verifiers", address=f"tcp://127.0.0.1:{port}", health_s=0.3),
            OpenEnvServer(kind="openenv", url=f"ws://127.0.0.1:{port}/ws", open_s=0.5),
        ]
        return [
            problem.remedy
            for section in sections
            for problem in await asyncio.to_thread(lambda section=section: list(check_environment(section)))
        ]

    assert [remedy[:15] for remedy in asyncio.run(go())] == ["cannot be used:"] * 2


Serve = Callable[[web.WebSocketResponse], Awaitable[None]]


def run_openenv(serve: Serve, *, texts: Sequence[str] = ("a", "b"), **more: Any) -> tuple[Score, list[Any]]:
    """An episode with a websocket that behaves so; returns the score and what the model was told."""

    async def handle(request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse(max_msg_size=0)
        await socket.prepare(request)
        await serve(socket)
        return socket

    async def go() -> tuple[Score, list[Any]]:
        app = web.Application()
        app.router.add_get("/ws", handle)
        agent = ScriptedAgent(*texts)
        async with TestServer(app) as server:
            section = OpenEnvServer.model_validate(
                {
                    "kind": "openenv",
                    "url": f"ws://127.0.0.1:{server.port}/ws",
                    "action": {"kind": "text", "field": "message"},
                    "observation_field": "text",
                }
                | more
            )
            return await build_environment(section).rollout(task(), agent), agent.heard

    return asyncio.run(go())


def observation(text: str = "seen", **data: Any) -> str:
    return json.dumps({"type": "observation", "data": {"observation": {"text": text}, "done": False} | data})


def failure(code: str, message: str) -> str:
    return json.dumps({"type": "error", "data": {"code": code, "message": message}})


def answering(*answers: str | bytes | None) -> Serve:
    """One answer for each request; None closes the connection, bytes are sent as such."""

    async def serve(socket: web.WebSocketResponse) -> None:
        for answer in answers:
            if (await socket.receive()).type is not WSMsgType.TEXT:
                return
            if answer is None:
                await socket.close(code=1011)
            elif isinstance(answer, bytes):
                await socket.send_bytes(answer)
            else:
                await socket.send_str(answer)
        await socket.receive()

    return serve


def test_an_environment_that_keeps_to_the_wire() -> None:
    score, heard = run_openenv(
        answering(
            observation("start"), observation("x" * 30, reward=True), observation(reward=-0.5, done=True)
        ),
        max_result_characters=20,
    )
    assert score.value == 0.5
    assert heard[0][-1]["content"] == "say it\n\nstart"
    assert heard[1][-1]["content"] == "x" * 20 + "\n[10 more characters were cut]"


@pytest.mark.parametrize(
    ("answers", "error", "problem"),
    [
        (["no JSON"], EpisodeInterrupted, "a message is no JSON"),
        ([b"\x00\x01"], EpisodeInterrupted, "it sends bytes"),
        ([None], EpisodeInterrupted, r"closed the connection \(code 1011\)"),
        ([observation(), None], EpisodeInterrupted, r"closed the connection \(code 1011\)"),
        (["[]"], EpisodeInterrupted, "a message is list of 0; must be an object"),
        ([observation("x" * 70_000)], EpisodeInterrupted, "exceeds limit 65536"),
        ([observation(), "[" * 60_000], EpisodeInterrupted, "nested too deeply"),
        ([observation(done="yes")], EpisodeInterrupted, "done is 'yes'"),
        ([observation(), observation(reward="much")], EpisodeInterrupted, "a reward is 'much'"),
        ([observation(), observation(reward=float("nan"))], ValueError, "reward is nan; must be finite"),
        ([observation(), observation(done=True)], ValueError, "no step had a reward"),
        ([observation(observation={})], ValueError, "observation_field = 'text'"),
        ([failure("FACTORY_ERROR", "no GPU")], EpisodeFailed, "FACTORY_ERROR: no GPU"),
    ],
)
def test_an_environment_that_does_not(
    monkeypatch: pytest.MonkeyPatch, answers: list[str | bytes | None], error: type[Exception], problem: str
) -> None:
    monkeypatch.setattr(openenv_connection, "MAX_MESSAGE_BYTES", 65_536)
    with pytest.raises(error, match=problem):
        run_openenv(answering(*answers))


def test_messages_that_nobody_has_asked_for() -> None:
    async def talk(socket: web.WebSocketResponse) -> None:
        await socket.receive()
        for _ in range(4):
            await socket.send_str(observation())
        await socket.receive()

    async def repeat(socket: web.WebSocketResponse) -> None:
        await socket.receive()
        await socket.send_str(observation())
        await socket.send_str(observation())
        await socket.receive()

    for serve in (talk, repeat):
        with pytest.raises(EpisodeInterrupted, match="nobody has asked for"):
            run_openenv(serve)


def test_a_flood_is_not_kept_while_the_model_takes_its_turn() -> None:
    async def flood(request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        await socket.receive()
        with contextlib.suppress(ConnectionError):
            for _ in range(100):
                await socket.send_str(observation())
            await socket.receive()
        return socket

    async def go() -> None:
        app = web.Application()
        app.router.add_get("/ws", flood)
        url = "ws://127.0.0.1:{}/ws"
        async with (
            TestServer(app) as server,
            openenv_connection.Connection(url.format(server.port), open_s=300.0) as session,
        ):
            await session.reset({})
            await asyncio.wait([session._reader])
            assert len(session._inbox) <= 2
            with pytest.raises(ServerLost, match="nobody has asked for"):
                await session.step({})

    asyncio.run(go())


def test_why_a_session_has_ended_is_read_before_its_end() -> None:
    async def end(socket: web.WebSocketResponse) -> None:
        await socket.send_str(failure("SESSION_ERROR", "no"))
        await socket.close()

    with pytest.raises(EpisodeFailed, match="SESSION_ERROR: no"):
        run_openenv(end)


def test_an_action_that_is_refused_is_told_to_the_model() -> None:
    refusal = json.dumps(
        {"type": "error", "data": {"code": "VALIDATION_ERROR", "message": "Invalid message"}}
    )
    score, heard = run_openenv(answering(observation(), refusal, observation(reward=1, done=True)))
    assert score.value == 1.0 and score.penalties["failed_calls"] == 1.0
    assert heard[1][-1]["content"] == "Error: this is no action of the environment: Invalid message"


def test_a_server_that_never_answers_is_left_when_the_episode_is_cancelled() -> None:
    asked, left = asyncio.Event(), asyncio.Event()

    async def silent(socket: web.WebSocketResponse) -> None:
        await socket.receive()
        asked.set()
        assert (await socket.receive()).json() == {"type": "close"}
        left.set()
        await socket.receive()

    async def go() -> None:
        app = web.Application()

        async def handle(request: web.Request) -> web.WebSocketResponse:
            socket = web.WebSocketResponse()
            await socket.prepare(request)
            await silent(socket)
            return socket

        app.router.add_get("/ws", handle)
        async with TestServer(app) as server:
            section = OpenEnvServer(kind="openenv", url=f"ws://127.0.0.1:{server.port}/ws")
            running = asyncio.ensure_future(build_environment(section).rollout(task(), ScriptedAgent()))
            await asked.wait()
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            await left.wait()

    asyncio.run(go())
