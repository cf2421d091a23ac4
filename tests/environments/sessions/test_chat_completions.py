"""Chat Completions through the unmodified openai SDK."""

import asyncio
import json
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from forgeasync.environments import (
    ChatCompletions,
    ContextFull,
    Dialect,
    EpisodeOver,
    RequestError,
    Responses,
    Session,
    ToolSpec,
    TooManyTurns,
)
from forgeasync.rollouts import FinishReason
from tests.environments.sessions.turns import RICH, TURNS
from tests.support.sessions import (
    WEATHER,
    ScriptedAgent,
    call,
    openai_client,
    say,
    serving,
    strictly,
)

USER = {"role": "user", "content": "What is the weather in Oslo?"}
TOOL = {
    "type": "function",
    "function": {"name": "weather", "description": "Says how the weather is.", "parameters": WEATHER},
}


async def ask(session: Session, messages: list[Any], **more: Any) -> ChatCompletion:
    """The answer as the SDK has it, checked field by field as it came over the wire."""
    async with openai_client(session) as client:
        raw = await client.chat.completions.with_raw_response.create(model="m", messages=messages, **more)
        strictly(ChatCompletion, json.loads(raw.content), extra=["reasoning_content"])
        return raw.parse()


async def ask_streamed(session: Session, messages: list[Any], **more: Any) -> ChatCompletion:
    """The same, streamed and put together by the SDK."""
    async with openai_client(session) as client:
        async with client.chat.completions.stream(
            model="m", messages=messages, stream_options={"include_usage": True}, **more
        ) as stream:
            async for event in stream:
                if event.type == "chunk":
                    strictly(ChatCompletionChunk, event.chunk.to_dict(), extra=["reasoning_content"])
            try:
                return await stream.get_final_completion()
            except openai.LengthFinishReasonError as error:
                # The SDK's helper takes a turn that was cut for an error, and has it all the same.
                return error.completion


@pytest.mark.parametrize("way", [ask, ask_streamed])
@pytest.mark.parametrize("name", TURNS)
def test_a_turn_comes_back_as_the_same_turn(name: str, way: Any) -> None:
    turn = TURNS[name]

    async def test() -> None:
        agent = ScriptedAgent([turn, say("Bye.")])
        async with serving(agent) as (_, session):
            first = await way(session, [USER], tools=[TOOL])
            message = first.choices[0].message
            # What the SDK made of the answer goes back as it is.
            await way(session, [USER, message, {"role": "user", "content": "And now?"}], tools=[TOOL])
        assert agent.calls[1].messages[1] == turn.message
        assert agent.calls[1].messages[0] == USER
        assert (session.counts.num_ours, session.counts.num_rewritten) == (1, 0)
        num_as_text = len(turn.broken_tool_calls) + (name == "no JSON")
        assert session.counts.num_shown_as_text == num_as_text
        for broken in turn.broken_tool_calls:
            assert broken.text in message.content
        assert first.usage.prompt_tokens == 11
        assert first.usage.completion_tokens == 7
        assert first.usage.total_tokens == 18

    asyncio.run(test())


def test_what_a_client_sees_of_a_turn() -> None:
    async def test() -> None:
        agent = ScriptedAgent([RICH, say("", finish_reason=FinishReason.LENGTH), say("x", tool_calls=())])
        async with serving(agent) as (_, session):
            first, cut, last = [await ask(session, [USER]) for _ in range(3)]
        choice = first.choices[0]
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "Let me look."
        assert choice.message.model_extra == {"reasoning_content": RICH.reasoning}
        assert [one.id for one in choice.message.tool_calls] == ["call_a", "call_b"]
        assert json.loads(choice.message.tool_calls[1].function.arguments) == RICH.tool_calls[1].arguments
        assert (cut.choices[0].finish_reason, last.choices[0].finish_reason) == ("length", "stop")
        assert last.choices[0].message.tool_calls is None
        assert first.model == "policy"
        assert len({first.id, cut.id, last.id}) == 3

    asyncio.run(test())


def test_what_the_agent_is_asked() -> None:
    async def test() -> None:
        agent = ScriptedAgent(answer=lambda _: say("ok"))
        async with serving(agent) as (_, session):
            await ask(
                session,
                [
                    {"role": "developer", "content": "Be brief."},
                    {
                        "role": "user",
                        "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
                    },
                ],
                tools=[TOOL],
                max_completion_tokens=5,
                stop=["\n", "END"],
            )
            await ask(session, [USER], tools=[TOOL], tool_choice="none", max_tokens=6, stop="x")
        first, second = agent.calls
        assert first.messages == (
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "ab"},
        )
        assert first.tools == (
            ToolSpec(name="weather", description="Says how the weather is.", parameters=WEATHER),
        )
        assert (first.max_tokens, tuple(first.stop)) == (5, ("\n", "END"))
        assert (second.tools, second.max_tokens, tuple(second.stop)) == (None, 6, ("x",))

    asyncio.run(test())


def test_tools_over_several_turns_and_what_a_client_may_leave_out() -> None:
    first = say("", reasoning="think", tool_calls=(call("call_0", city="Oslo"),))
    second = say("", reasoning="think more", tool_calls=(call("call_0", city="Rome"),))

    async def test() -> None:
        agent = ScriptedAgent([first, second, say("Done.")])
        async with serving(agent) as (_, session):
            messages: list[Any] = [USER]
            for city in ("Oslo", "Rome"):
                answer = (await ask(session, messages, tools=[TOOL])).choices[0].message
                # Many loops keep only the fields that the API documents.
                kept = {
                    "role": "assistant",
                    "tool_calls": [one.to_dict() for one in answer.tool_calls],
                }
                kept["tool_calls"][0]["function"]["arguments"] = json.dumps({"city": city}, indent=2)
                messages += [kept, {"role": "tool", "tool_call_id": "call_0", "content": "rain"}]
            await ask(session, messages, tools=[TOOL])
        sent = agent.calls[2].messages
        assert sent[1] == first.message
        assert sent[3] == second.message
        assert sent[2] == {"role": "tool", "tool_call_id": "call_0", "content": "rain"}

    asyncio.run(test())


@pytest.mark.parametrize(
    "change",
    [
        {"content": "Something else."},
        {"reasoning_content": "I thought otherwise."},
        {"tool_calls": None},
        {"tool_calls": [{"id": "z", "type": "function", "function": {"name": "weather", "arguments": "{}"}}]},
    ],
    ids=["text", "reasoning", "no calls", "other calls"],
)
def test_a_changed_turn_stays_as_the_client_has_it(change: dict[str, Any]) -> None:
    async def test() -> None:
        agent = ScriptedAgent([RICH, say("Bye.")])
        async with serving(agent) as (_, session):
            answer = (await ask(session, [USER])).choices[0].message.to_dict()
            await ask(session, [USER, {**answer, **change}, USER])
        sent = agent.calls[1].messages[1]
        assert sent != RICH.message
        for key, value in change.items():
            if key != "tool_calls":
                assert sent[key] == value
        assert (session.counts.num_ours, session.counts.num_rewritten) == (0, 1)

    asyncio.run(test())


@pytest.mark.parametrize("way", [ask, ask_streamed])
def test_several_turns_for_one_request(way: Any) -> None:
    async def test() -> None:
        turns = [say(f"answer {index}", reasoning=f"r{index}") for index in range(4)]
        agent = ScriptedAgent([*turns, say("end")])
        agent.gate.clear()
        async with serving(agent) as (_, session):
            asking = asyncio.create_task(way(session, [USER], n=4))
            while len(agent.calls) < 4:
                await asyncio.sleep(0.001)
            agent.gate.set()
            got = await asking
            assert [choice.index for choice in got.choices] == [0, 1, 2, 3]
            assert [choice.message.content for choice in got.choices] == [turn.text for turn in turns]
            assert (got.usage.prompt_tokens, got.usage.completion_tokens) == (11, 28)
            # Each of them can be gone on from.
            await way(session, [USER, got.choices[2].message, USER])
        assert agent.most_at_once == 4
        assert agent.calls[4].messages[1] == turns[2].message
        assert session.counts.num_turns == 5

    asyncio.run(test())


def test_the_same_visible_text_after_different_thoughts() -> None:
    """A client that drops reasoning hands back the same text twice; each is its own turn."""
    turns = [say("OK", reasoning="first"), say("OK", reasoning="second"), say("end")]

    async def test() -> None:
        agent = ScriptedAgent(turns)
        async with serving(agent) as (_, session):
            messages: list[Any] = [USER]
            for _ in range(3):
                answer = (await ask(session, messages)).choices[0].message
                messages += [{"role": "assistant", "content": answer.content}, USER]
        assert agent.calls[2].messages[1::2] == (turns[0].message, turns[1].message)

    asyncio.run(test())


def test_sampling_of_the_client_is_named_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        agent = ScriptedAgent(answer=lambda _: say("ok"))
        async with serving(agent) as (_, session), openai_client(session) as client:
            for _ in range(2):
                raw = await client.chat.completions.with_raw_response.create(
                    model="m",
                    messages=[USER],
                    temperature=0.0,
                    top_p=0.5,
                    seed=3,
                    frequency_penalty=1,
                    presence_penalty=1,
                    logit_bias={"5": 1},
                    user="someone",
                    extra_body={"top_k": 5, "min_p": 0.1},
                )
            assert raw.headers["x-forgeasync-ignored"] == (
                "frequency_penalty, logit_bias, min_p, presence_penalty, seed, temperature, top_k, top_p"
            )
            plain = await client.chat.completions.with_raw_response.create(model="m", messages=[USER])
            assert "x-forgeasync-ignored" not in plain.headers
            stream = await client.chat.completions.with_raw_response.create(
                model="m", messages=[USER], temperature=1, stream=True
            )
            assert stream.headers["x-forgeasync-ignored"] == "temperature"
            async for _ in stream.parse():
                pass
        assert session.counts.num_not_honoured == 3
        assert len([one for one in caplog.records if "once per session" in one.getMessage()]) == 1

    asyncio.run(test())


REFUSED: dict[str, Any] = {
    "logprobs": True,
    "top_logprobs": 3,
    "response_format": {"type": "json_object"},
    "parallel_tool_calls": False,
    "tool_choice": {"type": "function", "function": {"name": "weather"}},
    "store": True,
    "modalities": ["text", "audio"],
    "audio": {"voice": "alloy", "format": "wav"},
    "prediction": {"type": "content", "content": "x"},
    "web_search_options": {},
    "functions": [{"name": "f"}],
    "moderation": {"model": "m"},
    "guided_json": {"type": "object"},
    "chat_template_kwargs": {"enable_thinking": False},
    "n": 0,
    "max_tokens": -1,
    "max_completion_tokens": True,
    "stop": [""],
    "stream_options": {"include_usage": 1},
    "tools": [{"type": "custom", "custom": {"name": "x"}}],
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_field_that_cannot_be_served_is_refused_by_its_name(name: str) -> None:
    async def test() -> None:
        agent = ScriptedAgent([say("ok")])
        async with serving(agent) as (_, session), openai_client(session) as client:
            with pytest.raises(openai.BadRequestError) as caught:
                await client.chat.completions.create(
                    model="m", messages=[USER], extra_body={name: REFUSED[name]}
                )
        assert caught.value.param.startswith(name)
        assert name in caught.value.message
        assert not agent.calls
        assert session.counts.num_refused == 1

    asyncio.run(test())


@pytest.mark.parametrize(
    ("message", "where"),
    [
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
            "messages[1].content[0].type",
        ),
        ({"role": "user"}, "messages[1].content"),
        ({"role": "critic", "content": "x"}, "messages[1].role"),
        ({"role": "user", "content": 5}, "messages[1].content"),
        ({"role": "assistant", "content": "x", "refusal": "no"}, "messages[1].refusal"),
        ({"role": "user", "content": "x", "reasoning_content": "y"}, "messages[1].reasoning_content"),
        ({"role": "user", "content": "x", "tool_calls": [{"id": "a"}]}, "messages[1].tool_calls"),
        ({"role": "assistant", "tool_calls": [{"id": "a"}]}, "messages[1].tool_calls[0].function"),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]},
            "messages[1].tool_calls[0].function.arguments",
        ),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[" * 5000}}]},
            "messages[1].tool_calls[0].function.arguments",
        ),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": '{"a": 1e999}'}}]},
            "messages[1].tool_calls[0].function.arguments",
        ),
        ("hello", "messages[1]"),
    ],
)
def test_a_message_that_cannot_be_read_is_named(message: Any, where: str) -> None:
    async def test() -> None:
        agent = ScriptedAgent([say("ok")])
        async with serving(agent) as (_, session), openai_client(session) as client:
            with pytest.raises(openai.BadRequestError) as caught:
                await client.post(
                    "/chat/completions",
                    content=json.dumps({"model": "m", "messages": [USER, message]}).encode(),
                    cast_to=object,
                )
        assert caught.value.param == where
        assert not agent.calls

    asyncio.run(test())


ENDINGS: dict[str, tuple[Exception, int, str | None]] = {
    "full": (ContextFull("5000 tokens; model.max_context_length = 4096"), 400, "context_length_exceeded"),
    "over": (EpisodeOver("the group was given up"), 410, "session_closed"),
    "turns": (TooManyTurns("the model has taken 9 turns"), 410, "too_many_turns"),
    "message": (ValueError("messages[2] has a bad role"), 400, "invalid_messages"),
    "own": (RuntimeError("secret at /home/x"), 500, "server_error"),
    "key": (KeyError("secret"), 500, "server_error"),
    "recursion": (RecursionError("secret"), 500, "server_error"),
}


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("name", ENDINGS)
def test_what_an_agent_raises_is_told_without_internals(
    name: str, is_streamed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    error, status, code = ENDINGS[name]

    async def test() -> None:
        agent = ScriptedAgent([error])
        async with serving(agent) as (_, session), openai_client(session, max_retries=0) as client:
            with pytest.raises(openai.APIStatusError) as caught:
                await client.chat.completions.create(model="m", messages=[USER], stream=is_streamed)
        assert (caught.value.status_code, caught.value.code) == (status, code)
        if status == 500:
            assert "secret" not in caught.value.response.text
            assert "secret" in caplog.text
            assert session.counts.num_failed == 1
        elif status == 400:
            assert str(error) in caught.value.message
        # An error that no retry mends is not asked for again by the SDK.
        assert caught.value.response.headers.get("x-should-retry") == ("false" if status == 410 else None)

    asyncio.run(test())


def test_the_last_message_is_the_models_is_refused_by_the_agent() -> None:
    async def test() -> None:
        agent = ScriptedAgent([say("ok")])
        async with serving(agent) as (_, session), openai_client(session) as client:
            with pytest.raises(openai.BadRequestError, match=r"messages\[1\], the last one"):
                await client.chat.completions.create(
                    model="m", messages=[USER, {"role": "assistant", "content": "x"}]
                )

    asyncio.run(test())


def test_one_turn_that_fails_among_several() -> None:
    async def test() -> None:
        agent = ScriptedAgent([say("a"), ContextFull("full"), say("c")])
        async with serving(agent) as (_, session), openai_client(session) as client:
            with pytest.raises(openai.BadRequestError, match="full"):
                await client.chat.completions.create(model="m", messages=[USER], n=3)
        assert (session.counts.num_turns, session.counts.num_abandoned) == (2, 2)

    asyncio.run(test())


def test_models() -> None:
    async def test() -> None:
        agent = ScriptedAgent()
        async with serving(agent) as (_, session), openai_client(session) as client:
            assert [model.id async for model in client.models.list()] == ["policy"]
            raw = await client.models.with_raw_response.list()
            for model in json.loads(raw.content)["data"]:
                strictly(openai.types.Model, model)
            assert (await client.models.retrieve("policy")).id == "policy"
            with pytest.raises(openai.NotFoundError, match="there is no model 'gpt'"):
                await client.models.retrieve("gpt")

    asyncio.run(test())


@pytest.mark.parametrize("choice", ["", 0, False, {}, "any"])
@pytest.mark.parametrize("api", [ChatCompletions(), Responses()])
def test_only_an_absent_choice_of_tools_is_the_default(api: Dialect, choice: object) -> None:
    """Both APIs of OpenAI read it by the same code."""
    given = {"model": "m", "messages" if isinstance(api, ChatCompletions) else "input": [USER]}
    tool = {"type": "function", "name": "f"}
    tool = {"type": "function", "function": {"name": "f"}} if isinstance(api, ChatCompletions) else tool
    choices = [{}, {"tool_choice": None}, {"tool_choice": "auto"}, {"tool_choice": "none"}]
    assert [len(api.read({**given, "tools": [tool], **one}).tools) for one in choices] == [1, 1, 1, 0]
    with pytest.raises(RequestError, match=r"^tool_choice(\.type)? is "):
        api.read({**given, "tools": [tool], "tool_choice": choice})
