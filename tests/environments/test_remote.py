"""``kind: remote``: what the server is sent, what its replies mean, and what happens if it goes away."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web

from forgeasync.config import RemoteEnvironment
from forgeasync.environments import (
    Agent,
    ContextFull,
    EpisodeInterrupted,
    NoScore,
    ParseError,
    ToolError,
    TooManyTurns,
    build_environment,
    check_environment,
)
from forgeasync.rollouts import Score, Task
from forgeasync.testing import ScriptedAgent

TASK = Task(task_id="7", prompt="1 + 3 =", answer="4", source_index=7, source="sums", record={"level": 3})
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class UrlAgent(ScriptedAgent):
    """An agent whose session nobody asks."""

    base_url = "http://127.0.0.1:1/v1"
    anthropic_base_url = "http://127.0.0.1:1"
    api_key = "key"


async def healthy(request: web.Request) -> web.Response:
    return web.Response()


async def nothing(request: web.Request) -> web.Response:
    return web.Response(status=404)


def replies(body: object, status: int = 200) -> Handler:
    async def handle(request: web.Request) -> web.Response:
        if isinstance(body, bytes):
            return web.Response(body=body, status=status)
        return web.json_response(body, status=status)

    return handle


def rollout(
    post: Handler,
    *,
    health: Handler = healthy,
    delete: Handler = nothing,
    use: Callable[[Awaitable[Score]], Awaitable[Any]] | None = None,
    **keys: Any,
) -> Any:
    """Run an episode against a server with these handlers; the score, or what ``use`` makes of the call."""

    async def go() -> Any:
        app = web.Application()
        app.router.add_get("/health", health)
        app.router.add_post("/episodes", post)
        app.router.add_delete("/episodes/{episode}", delete)
        runner = web.AppRunner(app, shutdown_timeout=0.0)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        section = RemoteEnvironment(kind="remote", url=f"http://127.0.0.1:{port}", **keys)
        agent: Agent = UrlAgent()
        try:
            call = build_environment(section).rollout(TASK, agent)
            return await (call if use is None else use(call))
        finally:
            await runner.cleanup()

    return asyncio.run(go())


def recording(got: list[dict[str, Any]], reply: dict[str, Any]) -> Handler:
    """Keeps the requests."""

    async def handle(request: web.Request) -> web.Response:
        got.append(await request.json())
        return web.json_response(reply)

    return handle


class Held:
    """Handlers of an episode that ends only once it is deleted."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.deleted: list[str] = []
        self.has_begun, self.is_over = asyncio.Event(), asyncio.Event()

    async def post(self, request: web.Request) -> web.Response:
        self.begun.append((await request.json())["episode"])
        self.has_begun.set()
        await self.is_over.wait()
        return web.Response()

    async def delete(self, request: web.Request) -> web.Response:
        self.deleted.append(request.match_info["episode"])
        self.is_over.set()
        return web.Response()


def test_the_server_gets_the_task_and_the_session_and_its_reply_is_the_score() -> None:
    got: list[dict[str, Any]] = []
    reply = {"score": 0.5, "is_correct": True, "parts": {"speed": 2.0}, "feedback": "slow", "new": [1]}
    post = recording(got, reply)
    score = rollout(post)
    assert (score.value, score.is_correct, dict(score.parts)) == (0.5, True, {"speed": 2.0})
    assert score.feedback == "slow"
    (request,) = got
    assert len(request.pop("episode")) == 32
    assert request == {
        "task": {"prompt": "1 + 3 =", "answer": "4"},
        "base_url": UrlAgent.base_url,
        "anthropic_base_url": UrlAgent.anthropic_base_url,
        "api_key": "key",
        "model": "policy",
    }
    rollout(post, task_fields=None, model="m")
    assert (got[1]["task"], got[1]["model"]) == ({"level": 3}, "m")
    rollout(post, task_fields={"hard": "record.level", "id": "task_id", "n": "index"})
    assert got[2]["task"] == {"hard": 3, "id": "7", "n": 7}


def test_a_task_without_the_column_that_the_config_names_is_not_sent() -> None:
    words = r"environment\.task_fields\.hard = 'record\.levels', but the record of task 7 .* it has level"
    with pytest.raises(ValueError, match=words):
        rollout(replies({"score": 1.0}), task_fields={"hard": "record.levels"})


def test_an_endpoint_of_others_has_no_anthropic_url(monkeypatch: pytest.MonkeyPatch) -> None:
    """``apps.evaluate --base-url`` asks one, which is known to serve Chat Completions alone."""
    got: list[dict[str, Any]] = []

    def refuse(agent: Agent) -> str:
        raise ValueError("it has Chat Completions alone")

    monkeypatch.setattr(UrlAgent, "anthropic_base_url", property(refuse))
    assert rollout(recording(got, {"score": 0.5})).value == 0.5
    assert (got[0]["base_url"], got[0]["anthropic_base_url"]) == (UrlAgent.base_url, None)


@pytest.mark.parametrize(("score", "is_correct"), [(0.9, False), (1.0, True)])
def test_the_score_decides_what_is_correct_where_the_server_does_not(score: float, is_correct: bool) -> None:
    assert rollout(replies({"score": score})).is_correct is is_correct


@pytest.mark.parametrize(
    ("reply", "error", "words"),
    [
        ({"ending": "max_turns"}, TooManyTurns, "does not say why"),
        ({"ending": "length"}, ContextFull, "does not say why"),
        ({"ending": "parse_error", "problem": "no JSON"}, ParseError, "no JSON"),
        ({"ending": "tool_error"}, ToolError, "does not say why"),
        ({"ending": "no_score"}, NoScore, "does not say why"),
        ({"ending": "infrastructure"}, EpisodeInterrupted, "does not say why"),
        ({"ending": "environment_crash", "problem": "x" * 999}, RuntimeError, "x{300}$"),
        ({"ending": "timeout"}, RuntimeError, "failed"),
        ({"ending": "bored", "score": 1.0}, RuntimeError, "must be one of completed, max_turns"),
        ({}, RuntimeError, "a completed episode needs a score"),
        ({"score": "1"}, RuntimeError, "is not an episode"),
        ({"score": 1.0, "parts": {"a b": 1.0}}, ValueError, "a b"),
        ([1], RuntimeError, "is not an episode"),
        ("x" * 2**21, RuntimeError, "more than 1,048,576 bytes"),
        ({"score": True}, RuntimeError, "is not an episode"),
        ({"score": 1e31}, ValueError, "finite, at most"),
        ({"score": 1.0, "parts": {"a": -1e31}}, ValueError, "finite, at most"),
        ({"score": 1.0, "parts": {f"a{number}": 1.0 for number in range(65)}}, ValueError, "at most 64"),
        ({"score": 1.0, "parts": {"mean": 1.0}}, ValueError, "mean"),
        ({"ending": None, "score": 1.0}, RuntimeError, "is not an episode"),
        *(
            (text, RuntimeError, "is not an episode")
            for text in (
                b'{"score": NaN}',
                b'{"score": 1e999}',
                b'{"score": 1.0',
                b"",
                b"[" * 100_000,
                b'{"score": 1.0} {}',
                b"\xff",
            )
        ),
    ],
)
def test_endings_and_unreadable_replies_are_never_a_score(
    reply: object, error: type[Exception], words: str
) -> None:
    """Bytes are no JSON."""
    with pytest.raises(error, match=words):
        rollout(replies(reply))


@pytest.mark.parametrize(
    ("status", "error"), [(500, RuntimeError), (400, RuntimeError), (503, EpisodeInterrupted)]
)
def test_a_status_says_whether_the_episode_or_the_server_is_at_fault(
    status: int, error: type[Exception]
) -> None:
    with pytest.raises(error, match=f"status {status}.*why"):
        rollout(replies({"why": "because"}, status=status))


def test_a_server_that_is_not_there_interrupts_the_episode_and_is_refused_before_a_run() -> None:
    section = RemoteEnvironment(kind="remote", url="http://127.0.0.1:1")
    with pytest.raises(EpisodeInterrupted, match="Connect call failed"):
        asyncio.run(build_environment(section).rollout(TASK, UrlAgent()))
    (problem,) = check_environment(section)
    assert problem.field == "environment.url" and "start the server" in problem.remedy


def test_a_server_whose_health_is_bad_interrupts_an_episode_that_goes_on() -> None:
    held = Held()
    with pytest.raises(EpisodeInterrupted, match="health: status 404"):
        rollout(held.post, health=nothing, delete=held.delete, health_s=0.1)
    assert len(held.deleted) == 1


def test_an_episode_that_is_cancelled_is_cancelled_on_the_server() -> None:
    held = Held()

    async def cancel(call: Awaitable[Score]) -> None:
        task = asyncio.ensure_future(call)
        await held.has_begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    rollout(held.post, delete=held.delete, use=cancel)
    assert held.deleted == held.begun and len(held.begun) == 1
