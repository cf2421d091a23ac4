"""Verdicts on sessions, from outside."""

import asyncio
from typing import Any

import aiohttp
import pytest

from forgeasync.environments import MAX_COMMENT_CHARS, Feedback, Session
from tests.support.sessions import ScriptedAgent, say, serving

BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


async def post(session: Session, path: str, body: Any) -> tuple[int, Any]:
    async with (
        aiohttp.ClientSession(headers={"x-api-key": session.api_key}) as client,
        client.post(session.anthropic_base_url + path, json=body) as answer,
    ):
        return answer.status, await answer.json()


def test_feedback_ends_a_session() -> None:
    async def test() -> None:
        async with serving(ScriptedAgent(answer=lambda _: say("ok"))) as (_, session):
            finished = asyncio.create_task(session.finished())
            first = {"score": 0.5, "comment": "half right", "finished": False}
            assert await post(session, "/feedback", first) == (200, {"num_feedback": 1, "finished": False})
            assert (await post(session, "/v1/chat/completions", BODY))[0] == 200
            assert not finished.done()
            assert await post(session, "/feedback", {"score": -1}) == (
                200,
                {"num_feedback": 2, "finished": True},
            )
            assert await finished == (
                Feedback(score=0.5, comment="half right"),
                Feedback(score=-1.0),
            )
            assert (await post(session, "/v1/chat/completions", BODY))[0] == 410
            assert (await post(session, "/feedback", {"score": 1}))[0] == 410
            assert len(session.feedback) == 2

    asyncio.run(test())


def test_waiting_for_the_end_may_be_given_up() -> None:
    async def test() -> None:
        async with serving(ScriptedAgent()) as (_, session):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(session.finished(), 0.01)
            await post(session, "/feedback", {"score": 1})
            assert await session.finished() == (Feedback(score=1.0),)

    asyncio.run(test())


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
    ],
)
def test_feedback_that_cannot_be_read(body: Any, field: str) -> None:
    async def test() -> None:
        async with serving(ScriptedAgent()) as (_, session):
            status, answer = await post(session, "/feedback", body)
            assert (status, answer["error"]["param"]) == (400, field)
            assert not session.feedback and not session.is_closed

    asyncio.run(test())


DEEP = [b'{"score": ' + b"[" * depth + b"]" * depth + b"}" for depth in range(700, 1000, 20)]


DEEP = [b'{"score": ' + b"[" * depth + b"]" * depth + b"}" for depth in range(700, 1000, 20)]


@pytest.mark.parametrize("raw", [b"", b"[" * 100_000, b'{"score": NaN}', *DEEP])
def test_bodies_that_cannot_be_read(raw: bytes) -> None:
    async def test() -> None:
        async with serving(ScriptedAgent()) as (_, session):
            async with (
                aiohttp.ClientSession(headers={"x-api-key": session.api_key}) as client,
                client.post(session.anthropic_base_url + "/feedback", data=raw) as answer,
            ):
                assert answer.status == 400
            assert not session.feedback

    asyncio.run(test())


def test_verdicts_are_bounded() -> None:
    async def test() -> None:
        async with serving(ScriptedAgent()) as (_, session):
            for _ in range(64):
                session.add_feedback(Feedback(score=1.0), is_last=False)
            status, answer = await post(session, "/feedback", {"score": 1})
            assert (status, answer["error"]["param"]) == (400, "score")
            assert len(session.feedback) == 64

    asyncio.run(test())
