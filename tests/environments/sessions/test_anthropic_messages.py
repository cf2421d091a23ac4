"""Anthropic's Messages through the unmodified anthropic SDK."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import anthropic
import pytest
from anthropic.types import Message, RawMessageStreamEvent

from forgeasync.environments import ContextFull, EpisodeOver, Session, SessionLimits, ToolSpec
from forgeasync.rollouts import FinishReason
from tests.environments.sessions.turns import RICH, TURNS
from tests.support.sessions import WEATHER, ScriptedAgent, anthropic_client, call, say, serving, strictly

USER = {"role": "user", "content": "What is the weather in Oslo?"}
TOOL = {"name": "weather", "description": "Says.", "input_schema": WEATHER}

Way = Callable[..., Awaitable[Message]]


async def ask(session: Session, messages: list[Any], **more: Any) -> Message:
    """The answer as the SDK has it, checked field by field as it came over the wire."""
    async with anthropic_client(session) as client:
        raw = await client.messages.with_raw_response.create(
            **{"model": "m", "max_tokens": 50, "messages": messages, **more}
        )
        strictly(Message, json.loads(raw.http_response.content))
        return await raw.parse()


async def ask_streamed(session: Session, messages: list[Any], **more: Any) -> Message:
    """The same, streamed and put together by the SDK."""
    given = {"model": "m", "max_tokens": 50, "messages": messages, **more}
    async with anthropic_client(session) as client:
        async with client.messages.stream(**given) as stream:
            async for event in stream:
                if event.type in ("message_start", "message_delta", "content_block_start"):
                    strictly(RawMessageStreamEvent, event.to_dict(), extra=["parsed_output"])
            return await stream.get_final_message()


@pytest.mark.parametrize("way", [ask, ask_streamed])
@pytest.mark.parametrize("name", TURNS)
def test_a_turn_comes_back_as_the_same_turn(name: str, way: Way) -> None:
    turn = TURNS[name]

    async def test() -> None:
        agent = ScriptedAgent([turn, say("Bye.")])
        async with serving(agent) as (_, session):
            first = await way(session, [USER], tools=[TOOL])
            results = [
                {"type": "tool_result", "tool_use_id": block.id, "content": "rain"}
                for block in first.content
                if block.type == "tool_use"
            ]
            later = {"role": "user", "content": [*results, {"type": "text", "text": "And now?"}]}
            # What the SDK made of the answer goes back as it is.
            given = {"role": "assistant", "content": first.content}
            await way(session, [USER, given, later], tools=[TOOL])
        sent = agent.calls[1].messages
        assert sent[:2] == (USER, turn.message)
        assert [message["role"] for message in sent[2:]] == ["tool"] * len(results) + ["user"]
        assert (session.counts.num_ours, session.counts.num_rewritten) == (1, 0)
        assert (first.usage.input_tokens, first.usage.output_tokens) == (11, 7)

    asyncio.run(test())


def test_what_a_client_sees_of_a_turn() -> None:
    async def test() -> None:
        agent = ScriptedAgent([RICH, say("x", finish_reason=FinishReason.LENGTH), say("x")])
        async with serving(agent) as (_, session):
            first, cut, last = [await ask_streamed(session, [USER]) for _ in range(3)]
        assert [block.type for block in first.content] == ["thinking", "text", "tool_use", "tool_use"]
        assert first.content[0].thinking == RICH.reasoning
        assert first.content[3].input == RICH.tool_calls[1].arguments
        reasons = [one.stop_reason for one in (first, cut, last)]
        assert reasons == ["tool_use", "max_tokens", "end_turn"]
        assert first.model == "policy"

    asyncio.run(test())


@pytest.mark.parametrize("way", [ask, ask_streamed])
def test_the_text_that_ended_a_turn_is_named(way: Way) -> None:
    """One of the run's own texts is none of the client's, and calls are answered before all else."""
    turns = [
        say("a", stop_text="END"),
        say("a", stop_text="\n"),
        say("a"),
        say("a", stop_text="END", tool_calls=(call("c", city="Oslo"),)),
        say("a", finish_reason=FinishReason.LENGTH),
    ]

    async def test() -> None:
        async with serving(ScriptedAgent(turns)) as (_, session):
            got = [await way(session, [USER], stop_sequences=["STOP", "END"]) for _ in turns]
        assert [(one.stop_reason, one.stop_sequence) for one in got] == [
            ("stop_sequence", "END"),
            ("end_turn", None),
            ("end_turn", None),
            ("tool_use", None),
            ("max_tokens", None),
        ]

    asyncio.run(test())


@pytest.mark.parametrize("name", ["rich", "empty", "only broken"])
def test_every_event_of_a_stream(name: str) -> None:
    async def test() -> None:
        async with serving(ScriptedAgent([TURNS[name]])) as (_, session), anthropic_client(session) as client:
            stream = await client.messages.create(model="m", max_tokens=5, messages=[USER], stream=True)
            kinds = []
            async for event in stream:
                strictly(RawMessageStreamEvent, event.to_dict())
                kinds.append(event.type)
        assert kinds[0] == "message_start"
        assert kinds[-2:] == ["message_delta", "message_stop"]
        blocks = [kind for kind in kinds if kind in ("content_block_start", "content_block_stop")]
        num_blocks = 4 if name == "rich" else 1
        assert blocks == ["content_block_start", "content_block_stop"] * num_blocks

    asyncio.run(test())


def test_what_the_agent_is_asked() -> None:
    async def test() -> None:
        agent = ScriptedAgent(answer=lambda _: say("ok"))
        async with serving(agent) as (_, session):
            cached = {"cache_control": {"type": "ephemeral"}}
            await ask(
                session,
                [
                    {"role": "user", "content": [{"type": "text", "text": "a", **cached}]},
                    {
                        "role": "assistant",
                        "content": [
                            {"type": "tool_use", "id": "t", "name": "weather", "input": {"city": "x"}}
                        ],
                    },
                    {
                        "role": "user",
                        "content": [
                            {"type": "text", "text": "before"},
                            {"type": "tool_result", "tool_use_id": "t", "is_error": True},
                            {
                                "type": "tool_result",
                                "tool_use_id": "u",
                                "content": [{"type": "text", "text": "r"}],
                            },
                        ],
                    },
                ],
                system=[{"type": "text", "text": "Be ", **cached}, {"type": "text", "text": "brief."}],
                tools=[{**TOOL, **cached}],
                stop_sequences=["END"],
                max_tokens=9,
            )
            await ask(session, [USER], tools=[TOOL], tool_choice={"type": "none"})
        first, second = agent.calls
        function = {"name": "weather", "arguments": {"city": "x"}}
        assert list(first.messages) == [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "a"},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"id": "t", "type": "function", "function": function}],
            },
            {"role": "user", "content": "before"},
            {"role": "tool", "tool_call_id": "t", "content": ""},
            {"role": "tool", "tool_call_id": "u", "content": "r"},
        ]
        assert first.tools == (ToolSpec(name="weather", description="Says.", parameters=WEATHER),)
        assert (first.max_tokens, tuple(first.stop)) == (9, ("END",))
        assert second.tools is None

    asyncio.run(test())


def test_thoughts_may_be_dropped_but_not_changed() -> None:
    turn = say("It rains.", reasoning="Hm.", tool_calls=(call("c", city="Oslo"),))

    async def test() -> None:
        agent = ScriptedAgent([turn, say("a"), say("b")])
        async with serving(agent) as (_, session):
            content = [block.to_dict() for block in (await ask(session, [USER])).content]
            await ask(session, [USER, {"role": "assistant", "content": content[1:]}, USER])
            content[0]["thinking"] = "Ha."
            await ask(session, [USER, {"role": "assistant", "content": content}, USER])
        assert agent.calls[1].messages[1] == turn.message
        assert agent.calls[2].messages[1]["reasoning_content"] == "Ha."
        assert (session.counts.num_ours, session.counts.num_rewritten) == (1, 1)

    asyncio.run(test())


def test_what_is_not_honoured_is_named() -> None:
    async def test() -> None:
        agent = ScriptedAgent(answer=lambda _: say("ok"))
        async with serving(agent) as (_, session), anthropic_client(session) as client:
            raw = await client.messages.with_raw_response.create(
                model="m",
                max_tokens=5,
                messages=[
                    USER,
                    {
                        "role": "user",
                        "content": [
                            {"type": "tool_result", "tool_use_id": "t", "content": "x", "is_error": True}
                        ],
                    },
                ],
                thinking={"type": "enabled", "budget_tokens": 1024},
                extra_body={"temperature": 1.0, "top_k": 3, "top_p": 0.9},
                output_config={"effort": "low"},
                metadata={"user_id": "u"},
                tools=[{**TOOL, "strict": True}],
            )
        assert raw.headers["x-forgeasync-ignored"] == (
            "messages[].content[].is_error, output_config.effort, temperature, thinking, tools[].strict, "
            "top_k, top_p"
        )
        assert session.counts.num_not_honoured == 1

    asyncio.run(test())


REFUSED: dict[str, Any] = {
    "tool_choice": {"type": "any"},
    "tool_choice.name": {"type": "tool"},
    "tool_choice.disable_parallel_tool_use": {"type": "auto", "disable_parallel_tool_use": True},
    "output_config": {"format": {"type": "json_schema", "schema": {}}},
    "container": "c",
    "mcp_servers": [],
    "tools": [{"type": "web_search_20250305", "name": "web_search"}],
    "stop_sequences": ["x"] * 17,
    "max_tokens": 0,
    "system": 5,
    "context_management": {"edits": []},
    "thread": {"type": "create"},
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_field_that_cannot_be_served_is_refused_by_its_name(name: str) -> None:
    async def test() -> None:
        agent = ScriptedAgent([say("ok")])
        async with serving(agent) as (_, session), anthropic_client(session) as client:
            with pytest.raises(anthropic.BadRequestError) as caught:
                body = {name.partition(".")[0]: REFUSED[name]}
                await client.messages.create(model="m", max_tokens=5, messages=[USER], extra_body=body)
        body = caught.value.response.json()
        assert set(body) == {"type", "error"} and body["type"] == "error"
        assert body["error"]["type"] == "invalid_request_error"
        assert name in body["error"]["message"]
        assert not agent.calls

    asyncio.run(test())


@pytest.mark.parametrize(
    ("message", "where"),
    [
        ({"role": "user", "content": [{"type": "image", "source": {}}]}, "messages[0].content[0]"),
        ({"role": "tool", "content": "x"}, "messages[0].role"),
        ({"role": "user", "content": 5}, "messages[0].content"),
        (
            {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]},
            "messages[0].content[0]",
        ),
        ({"role": "user", "content": [{"type": "tool_result"}]}, "messages[0].content[0].tool_use_id"),
        ({"role": "user", "content": [{"type": "new_kind", "text": "x"}]}, "messages[0].content[0]"),
    ],
)
def test_a_message_that_cannot_be_read_is_named(message: Any, where: str) -> None:
    async def test() -> None:
        agent = ScriptedAgent([say("ok")])
        async with serving(agent) as (_, session):
            with pytest.raises(anthropic.BadRequestError) as caught:
                await ask(session, [message])
        assert where in caught.value.response.json()["error"]["message"]

    asyncio.run(test())


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "kind", "text"),
    [
        (ContextFull("5000 tokens"), 400, "invalid_request_error", "prompt is too long: 5000 tokens"),
        (EpisodeOver("given up"), 410, "not_found_error", "closed"),
        (RuntimeError("secret"), 500, "api_error", "failed to answer"),
    ],
)
def test_errors_before_and_after_the_headers(
    error: Exception, status: int, kind: str, text: str, is_late: bool
) -> None:
    """Late ones come in an event, whose status is that of the headers."""

    async def test() -> None:
        agent = ScriptedAgent([error])
        limits = SessionLimits(keep_alive_s=0.01 if is_late else 600)
        async with (
            serving(agent, limits=limits) as (_, session),
            anthropic_client(session, max_retries=0) as client,
        ):
            if is_late:
                agent.gate.clear()
            with pytest.raises(anthropic.APIStatusError) as caught:
                stream = await client.messages.create(model="m", max_tokens=5, messages=[USER], stream=True)
                agent.gate.set()
                async for _ in stream:
                    pass
        assert caught.value.status_code == (200 if is_late else status)
        assert caught.value.body["error"]["type"] == kind
        assert text in caught.value.body["error"]["message"]

    asyncio.run(test())


def test_models_and_what_is_not_there() -> None:
    async def test() -> None:
        agent = ScriptedAgent()
        async with serving(agent) as (_, session), anthropic_client(session) as client:
            raw = await client.models.with_raw_response.list()
            (model,) = json.loads(raw.http_response.content)["data"]
            assert strictly(anthropic.types.ModelInfo, model).id == "policy"
            with pytest.raises(anthropic.NotFoundError, match="agent has no tokenizer"):
                await client.messages.count_tokens(model="m", messages=[USER])

    asyncio.run(test())
