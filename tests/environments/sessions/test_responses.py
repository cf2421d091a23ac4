"""Responses through the unmodified openai SDK."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent

from forgeasync.environments import ContextFull, Session
from tests.environments.sessions.turns import RICH, TURNS
from tests.support.sessions import WEATHER, ScriptedAgent, call, openai_client, say, serving, strictly

USER = {"role": "user", "content": "What is the weather in Oslo?"}
TOOL = {"type": "function", "name": "weather", "description": "Says.", "parameters": WEATHER, "strict": False}

Way = Callable[..., Awaitable[Response]]


async def ask(session: Session, given: Any, **more: Any) -> Response:
    """The answer as the SDK has it, checked field by field as it came over the wire."""
    async with openai_client(session) as client:
        raw = await client.responses.with_raw_response.create(model="m", input=given, **more)
        strictly(Response, json.loads(raw.content))
        return raw.parse()


async def ask_streamed(session: Session, given: Any, **more: Any) -> Response:
    """The same, streamed and put together by the SDK; the events build what the last one has."""
    async with openai_client(session) as client:
        events = []
        async for event in await client.responses.create(model="m", input=given, stream=True, **more):
            strictly(ResponseStreamEvent, event.to_dict())
            events.append(event)
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
        final = events[-1].response
        done = [event.item for event in events if event.type == "response.output_item.done"]
        assert done == final.output
        for kind in ("output_text", "reasoning_text", "function_call_arguments"):
            deltas = "".join(event.delta for event in events if event.type == f"response.{kind}.delta")
            field = "arguments" if kind == "function_call_arguments" else "text"
            ends = [getattr(event, field) for event in events if event.type == f"response.{kind}.done"]
            assert deltas == "".join(ends)
        assert final.output_text == "".join(
            event.delta for event in events if event.type == "response.output_text.delta"
        )
        # The SDK's own helper accepts the same events.
        return final


@pytest.mark.parametrize("way", [ask, ask_streamed])
@pytest.mark.parametrize("name", TURNS)
def test_a_turn_comes_back_as_the_same_turn(name: str, way: Way) -> None:
    turn = TURNS[name]

    async def test() -> None:
        agent = ScriptedAgent([turn, say("Bye.")])
        async with serving(agent) as (_, session):
            first = await way(session, [USER], tools=[TOOL])
            results = [
                {"type": "function_call_output", "call_id": item.call_id, "output": "rain"}
                for item in first.output
                if item.type == "function_call"
            ]
            later = [*results, {"role": "user", "content": "And now?"}]
            # What the SDK made of the answer goes back as it is.
            await way(session, [USER, *first.output, *later], tools=[TOOL])
        sent = agent.calls[1].messages
        assert sent[:2] == (USER, turn.message)
        assert [message["role"] for message in sent[2:]] == ["tool"] * len(results) + ["user"]
        assert (session.counts.num_ours, session.counts.num_rewritten) == (1, 0)
        usage = first.usage
        assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (11, 7, 18)

    asyncio.run(test())


def test_the_sdks_stream_helper() -> None:
    async def test() -> None:
        agent = ScriptedAgent([RICH])
        async with serving(agent) as (_, session), openai_client(session) as client:
            async with client.responses.stream(model="m", input="Oslo?", tools=[TOOL]) as stream:
                final = await stream.get_final_response()
        assert final.output_text == RICH.text
        assert [item.type for item in final.output] == [
            "reasoning",
            "message",
            "function_call",
            "function_call",
        ]

    asyncio.run(test())


def test_how_a_response_ends() -> None:
    async def test() -> None:
        agent = ScriptedAgent([TURNS["cut"], TURNS["text"]])
        async with serving(agent) as (_, session):
            cut, whole = [await ask_streamed(session, "hi", max_output_tokens=3) for _ in range(2)]
        assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        assert (whole.status, whole.incomplete_details) == ("completed", None)
        assert agent.calls[0].messages == ({"role": "user", "content": "hi"},)
        assert agent.calls[0].max_tokens == 3

    asyncio.run(test())


def test_a_conversation_by_previous_response_id() -> None:
    turns = [
        say("", reasoning="think", tool_calls=(call("call_0", city="Oslo"),)),
        TURNS["broken"],
        say("end"),
    ]

    async def test() -> None:
        agent = ScriptedAgent([*turns, say("other")])
        async with serving(agent) as (_, session):
            first = await ask(session, "Oslo?", instructions="Be brief.", tools=[TOOL])
            result = {"type": "function_call_output", "call_id": "call_0", "output": "rain"}
            second = await ask(
                session, [result], instructions="Be brief.", tools=[TOOL], previous_response_id=first.id
            )
            assert second.previous_response_id == first.id
            await ask(
                session, "Thanks.", instructions="Be brief.", tools=[TOOL], previous_response_id=second.id
            )
            # Instructions are not carried over.
            await ask(session, "Thanks.", previous_response_id=first.id)
        system = {"role": "system", "content": "Be brief."}
        user = {"role": "user", "content": "Oslo?"}
        tool = {"role": "tool", "tool_call_id": "call_0", "content": "rain"}
        thanks = {"role": "user", "content": "Thanks."}
        sent = [list(one.messages) for one in agent.calls]
        assert sent[0] == [system, user]
        assert sent[1] == [system, user, turns[0].message, tool]
        assert sent[2] == [system, user, turns[0].message, tool, turns[1].message, thanks]
        assert sent[3] == [user, turns[0].message, thanks]

    asyncio.run(test())


def test_a_response_that_was_not_kept_cannot_be_gone_on_from() -> None:
    async def test() -> None:
        agent = ScriptedAgent(answer=lambda _: say("ok"))
        async with serving(agent) as (server, session):
            first = await ask(session, "hi", store=False)
            other = server.open(agent)
            elsewhere = await ask(other, "hi")
            for unknown in (first.id, elsewhere.id, "resp_x"):
                with pytest.raises(openai.BadRequestError, match=unknown) as caught:
                    await ask(session, "go on", previous_response_id=unknown)
                assert caught.value.code == "previous_response_not_found"
        assert len(agent.calls) == 2

    asyncio.run(test())


def test_items_of_a_history_become_messages() -> None:
    given = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "one"},
        {"role": "assistant", "content": "two"},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
        {"type": "function_call", "call_id": "c2", "name": "f", "arguments": '{"x": 1}'},
        {
            "type": "function_call_output",
            "call_id": "c1",
            "output": [{"type": "input_text", "text": "r1"}],
        },
        {"type": "function_call_output", "call_id": "c2", "output": "r2"},
        {"type": "reasoning", "id": "rs", "summary": []},
        {"type": "function_call", "call_id": "c3", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c3", "output": ""},
    ]

    def tool_call(call_id: str, **arguments: Any) -> dict[str, Any]:
        return {"id": call_id, "type": "function", "function": {"name": "f", "arguments": arguments}}

    async def test() -> None:
        agent = ScriptedAgent([say("ok")])
        async with serving(agent) as (_, session):
            await ask(session, given)
        assert list(agent.calls[0].messages) == [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "one"},
            {
                "role": "assistant",
                "content": "two",
                "tool_calls": [tool_call("c1"), tool_call("c2", x=1)],
            },
            {"role": "tool", "tool_call_id": "c1", "content": "r1"},
            {"role": "tool", "tool_call_id": "c2", "content": "r2"},
            {"role": "assistant", "content": "", "tool_calls": [tool_call("c3")]},
            {"role": "tool", "tool_call_id": "c3", "content": ""},
        ]
        assert session.counts.num_rewritten == 3

    asyncio.run(test())


def test_what_is_not_honoured_and_what_is_repeated() -> None:
    async def test() -> None:
        agent = ScriptedAgent(answer=lambda _: say("ok"))
        async with serving(agent) as (_, session), openai_client(session) as client:
            raw = await client.responses.with_raw_response.create(
                model="m",
                input="hi",
                temperature=0.3,
                top_p=0.5,
                reasoning={"effort": "low"},
                text={"format": {"type": "text"}, "verbosity": "low"},
                include=["reasoning.encrypted_content"],
                tools=[{**TOOL, "strict": True}],
                tool_choice="none",
                metadata={"a": "b"},
                user="someone",
            )
            assert raw.headers["x-forgeasync-ignored"] == (
                "include, reasoning, temperature, text.verbosity, tools[].strict, top_p"
            )
            response = raw.parse()
        assert (response.metadata, response.tool_choice, response.tools) == ({"a": "b"}, "none", [])
        assert agent.calls[0].tools is None

    asyncio.run(test())


DEEP: Any = []
for _ in range(70):
    DEEP = [DEEP]

REFUSED: dict[str, Any] = {
    "background": True,
    "conversation": "c",
    "prompt": {"id": "p"},
    "max_tool_calls": 3,
    "parallel_tool_calls": False,
    "tool_choice": "required",
    "top_logprobs": 2,
    "truncation": "auto",
    "text": {"format": {"type": "json_schema", "name": "x", "schema": {}}},
    "include": ["message.output_text.logprobs"],
    "tools": [{"type": "web_search"}],
    "max_output_tokens": 0,
    "store": "yes",
    "metadata": {"a": DEEP},
    "input": [{"type": "item_reference", "id": "msg_1"}],
    "moderation": {"model": "m"},
    "context_management": [{"type": "compaction"}],
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_field_that_cannot_be_served_is_refused_by_its_name(name: str) -> None:
    async def test() -> None:
        agent = ScriptedAgent([say("ok")])
        async with serving(agent) as (_, session), openai_client(session) as client:
            body = {"model": "m", "input": "hi", name: REFUSED[name]}
            with pytest.raises(openai.BadRequestError) as caught:
                await client.post("/responses", content=json.dumps(body).encode(), cast_to=object)
        assert caught.value.param.startswith(name)
        assert name in caught.value.message
        assert not agent.calls

    asyncio.run(test())


@pytest.mark.parametrize(
    ("item", "where"),
    [
        (
            {"role": "user", "content": [{"type": "input_image", "image_url": "x"}]},
            "input[0].content[0].type",
        ),
        ({"role": "tool", "content": "x"}, "input[0].role"),
        ({"type": "function_call", "name": "f", "arguments": "{}"}, "input[0].call_id"),
        ({"type": "function_call", "call_id": "c", "name": "f", "arguments": "["}, "input[0].arguments"),
        ({"type": "function_call_output", "call_id": "c"}, "input[0].output"),
        ({"type": "computer_call"}, "input[0].type"),
        (
            {"role": "assistant", "content": [{"type": "output_text", "text": "x", "annotations": [1]}]},
            "input[0].content[0].annotations",
        ),
        (5, "input[0]"),
    ],
)
def test_an_item_that_cannot_be_read_is_named(item: Any, where: str) -> None:
    async def test() -> None:
        agent = ScriptedAgent([say("ok")])
        async with serving(agent) as (_, session):
            with pytest.raises(openai.BadRequestError) as caught:
                await ask(session, [item])
        assert caught.value.param == where

    asyncio.run(test())


def test_an_error_after_the_headers_is_an_event() -> None:
    async def test() -> None:
        from forgeasync.environments import SessionLimits

        agent = ScriptedAgent([ContextFull("full")])
        agent.gate.clear()
        async with (
            serving(agent, limits=SessionLimits(keep_alive_s=0.01)) as (_, session),
            openai_client(session) as client,
        ):
            stream = await client.responses.create(model="m", input="hi", stream=True)
            agent.gate.set()
            events = [event async for event in stream]
        assert [event.type for event in events] == ["error"]
        assert events[0].code == "context_length_exceeded"

    asyncio.run(test())
