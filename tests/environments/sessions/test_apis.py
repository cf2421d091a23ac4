"""The three APIs through their unmodified SDKs: what clients see, what the agent is asked, and refusals."""

import asyncio
import json
from typing import Any

import anthropic
import openai
import pytest

from forgeasync.environments import (
    ContextFull,
    EpisodeOver,
    SessionLimits,
    ToolSpec,
    TooManyTurns,
    assistant,
    result,
    user,
)
from forgeasync.environments import call as call_of
from forgeasync.observability import SESSION_COUNTS
from forgeasync.rollouts import FinishReason
from tests.environments.sessions.apis import (
    APIS,
    CHAT,
    FUNCTION,
    HEADER,
    MESSAGES,
    RESPONSES,
    RICH,
    TURNS,
    USER,
    Api,
)
from tests.support.sessions import (
    ScriptedAgent,
    anthropic_client,
    call,
    openai_client,
    say,
    serving,
    strictly,
)

BRIEF = {"role": "system", "content": "Be brief."}

by_stream = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])


@by_stream
@pytest.mark.parametrize("api", APIS.values(), ids=APIS)
@pytest.mark.parametrize("name", TURNS)
async def test_a_turn_is_shown_whole_and_comes_back_as_the_same_turn(
    name: str, api: Api, stream: bool
) -> None:
    turn = TURNS[name]
    agent = ScriptedAgent([turn, say("Bye.")])
    async with serving(agent) as (_, session):
        first = await api.ask(session, [USER], stream=stream, tools=[api.tool()])
        # What the SDK made of the answer goes back as it is.
        history = [USER, *api.said(first), *api.answering(first, "And now?")]
        await api.ask(session, history, stream=stream, tools=[api.tool()])
    calls = () if name == "no JSON" else turn.tool_calls
    assert api.calls(first) == [(one.name, one.arguments) for one in calls]
    assert api.reasoning(first) == (turn.reasoning or "") and api.text(first).startswith(turn.text)
    assert name != "rich" or api.text(first) == turn.text, "and nothing else"
    assert all(broken.text in api.text(first) for broken in turn.broken_tool_calls)
    assert api.usage(first) == (11, 7)
    results = [result(one.id, "rain") for one in calls]
    assert agent.calls[1].messages == (USER, turn.message, *results, user("And now?"))
    num_as_text = len(turn.broken_tool_calls) + len(turn.tool_calls) - len(calls)
    counts = session.counts
    assert (counts.num_ours, counts.num_rewritten, counts.num_shown_as_text) == (1, 0, num_as_text)


@by_stream
@pytest.mark.parametrize(
    ("api", "endings"),
    [
        (CHAT, ["tool_calls", "length", "stop"]),
        (RESPONSES, ["completed", "max_output_tokens", "completed"]),
        (MESSAGES, ["tool_use", "max_tokens", "end_turn"]),
    ],
    ids=APIS,
)
async def test_how_a_turn_ended_is_said(api: Api, endings: list[str], stream: bool) -> None:
    turns = [RICH, TURNS["cut"], TURNS["text"]]
    async with serving(ScriptedAgent(turns)) as (_, session):
        got = [await api.ask(session, [USER], stream=stream) for _ in turns]
    assert [api.ending(one) for one in got] == endings
    assert len({one.id for one in got}) == 3 and {one.model for one in got} == {"policy"}


TOOL_RESULT = {"type": "tool_result", "tool_use_id": "t", "content": "x", "is_error": True}
SAMPLING = {"temperature": 0.3, "top_p": 0.5}


@pytest.mark.parametrize(
    ("api", "fields", "ignored"),
    [
        (
            CHAT,
            SAMPLING
            | {"seed": 3, "frequency_penalty": 1, "presence_penalty": 1, "logit_bias": {"5": 1}}
            | {"user": "someone", "top_k": 5, "min_p": 0.1},
            "frequency_penalty, logit_bias, min_p, presence_penalty, seed, temperature, top_k, top_p",
        ),
        (
            RESPONSES,
            SAMPLING
            | {"reasoning": {"effort": "low"}, "include": ["reasoning.encrypted_content"]}
            | {"text": {"format": {"type": "text"}, "verbosity": "low"}, "user": "someone"}
            | {"tools": [RESPONSES.tool(strict=True)]},
            "include, reasoning, temperature, text.verbosity, tools[].strict, top_p",
        ),
        (
            MESSAGES,
            SAMPLING
            | {"thinking": {"type": "enabled", "budget_tokens": 1024}, "top_k": 3}
            | {"output_config": {"effort": "low"}, "metadata": {"user_id": "u"}}
            | {"tools": [MESSAGES.tool(strict=True)]}
            | {"messages": [USER, {"role": "user", "content": [TOOL_RESULT]}]},
            "messages[].content[].is_error, output_config.effort, temperature, thinking, tools[].strict, "
            "top_k, top_p",
        ),
    ],
    ids=APIS,
)
async def test_what_has_no_effect_is_named_counted_and_logged_once(
    api: Api, fields: dict[str, Any], ignored: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Beside fields that are not honored, one of the next SDK, which no endpoint knows."""
    next_year = {"field_of_next_year": {"level": 3}}
    async with serving(ScriptedAgent(answer=lambda _: say("ok"))) as (_, session):
        for stream in (False, True):
            _, plain = await api.post(session, api.body([USER], stream=stream))
            assert (plain.status, plain.headers.get(HEADER)) == (200, None)
            _, answer = await api.post(session, api.body([USER], stream=stream, **fields, **next_year))
            assert (answer.status, answer.headers[HEADER]) == (200, f"{ignored}, field_of_next_year")
            assert api.text(await api.ask(session, [USER], stream=stream, extra_body=next_year)) == "ok"
    counts = session.counts
    assert (counts.num_refused, counts.num_not_honoured, counts.num_with_unknown_fields) == (0, 2, 4)
    assert "num_with_unknown_fields" in SESSION_COUNTS, "it is a metric"
    said = [one.getMessage() for one in caplog.records if "once per session" in one.getMessage()]
    assert len(said) == 2 and sum("field_of_next_year" in one for one in said) == 1


DEEP: Any = []
for _ in range(70):
    DEEP = [DEEP]

REFUSED: list[tuple[Api, str, Any]] = [
    (CHAT, "logprobs", True),
    (CHAT, "top_logprobs", 3),
    (CHAT, "response_format", {"type": "json_object"}),
    (CHAT, "parallel_tool_calls", False),
    (CHAT, "tool_choice", {"type": "function", "function": {"name": "weather"}}),
    (CHAT, "store", True),
    (CHAT, "modalities", ["text", "audio"]),
    (CHAT, "audio", {"voice": "alloy", "format": "wav"}),
    (CHAT, "prediction", {"type": "content", "content": "x"}),
    (CHAT, "web_search_options", {}),
    (CHAT, "functions", [{"name": "f"}]),
    (CHAT, "moderation", {"model": "m"}),
    (CHAT, "guided_json", {"type": "object"}),
    (CHAT, "chat_template_kwargs", {"enable_thinking": False}),
    (CHAT, "n", 0),
    (CHAT, "max_tokens", -1),
    (CHAT, "max_completion_tokens", True),
    (CHAT, "stop", [""]),
    (CHAT, "stream_options", {"include_usage": 1}),
    (CHAT, "tools", [{"type": "custom", "custom": {"name": "x"}}]),
    (RESPONSES, "background", True),
    (RESPONSES, "conversation", "c"),
    (RESPONSES, "prompt", {"id": "p"}),
    (RESPONSES, "max_tool_calls", 3),
    (RESPONSES, "parallel_tool_calls", False),
    (RESPONSES, "tool_choice", "required"),
    (RESPONSES, "top_logprobs", 2),
    (RESPONSES, "truncation", "auto"),
    (RESPONSES, "text", {"format": {"type": "json_schema", "name": "x", "schema": {}}}),
    (RESPONSES, "include", ["message.output_text.logprobs"]),
    (RESPONSES, "tools", [{"type": "web_search"}]),
    (RESPONSES, "max_output_tokens", 0),
    (RESPONSES, "store", "yes"),
    (RESPONSES, "metadata", {"a": DEEP}),
    (RESPONSES, "input", [{"type": "item_reference", "id": "msg_1"}]),
    (RESPONSES, "moderation", {"model": "m"}),
    (RESPONSES, "context_management", [{"type": "compaction"}]),
    (MESSAGES, "tool_choice", {"type": "any"}),
    (MESSAGES, "tool_choice.name", {"type": "tool"}),
    (MESSAGES, "tool_choice.disable_parallel_tool_use", {"type": "auto", "disable_parallel_tool_use": True}),
    (MESSAGES, "output_config", {"format": {"type": "json_schema", "schema": {}}}),
    (MESSAGES, "container", "c"),
    (MESSAGES, "mcp_servers", []),
    (MESSAGES, "tools", [{"type": "web_search_20250305", "name": "web_search"}]),
    (MESSAGES, "stop_sequences", ["x"] * 17),
    (MESSAGES, "max_tokens", 0),
    (MESSAGES, "system", 5),
    (MESSAGES, "context_management", {"edits": []}),
    (MESSAGES, "thread", {"type": "create"}),
]


def called(function: object) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [{"function": function}]}


ANNOTATED = {"type": "output_text", "text": "x", "annotations": [1]}
UNREADABLE: list[tuple[Api, Any, str]] = [
    (CHAT, {"role": "user", "content": [{"type": "image_url"}]}, ".content[0].type"),
    (CHAT, {"role": "user"}, ".content"),
    (CHAT, {"role": "critic", "content": "x"}, ".role"),
    (CHAT, {"role": "user", "content": 5}, ".content"),
    (CHAT, {"role": "assistant", "content": "x", "refusal": "no"}, ".refusal"),
    (CHAT, {"role": "user", "content": "x", "reasoning_content": "y"}, ".reasoning_content"),
    (CHAT, {"role": "user", "content": "x", "tool_calls": [{"id": "a"}]}, ".tool_calls"),
    (CHAT, {"role": "assistant", "tool_calls": [{"id": "a"}]}, ".tool_calls[0].function"),
    (CHAT, called({"name": "f", "arguments": "{"}), ".tool_calls[0].function.arguments"),
    (CHAT, called({"name": "f", "arguments": "[" * 5000}), ".tool_calls[0].function.arguments"),
    (CHAT, called({"name": "f", "arguments": '{"a": 1e999}'}), ".tool_calls[0].function.arguments"),
    (CHAT, "hello", ""),
    (RESPONSES, {"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}, ".content[0].type"),
    (RESPONSES, {"role": "tool", "content": "x"}, ".role"),
    (RESPONSES, {"type": "function_call", "name": "f", "arguments": "{}"}, ".call_id"),
    (RESPONSES, {"type": "function_call", "call_id": "c", "name": "f", "arguments": "["}, ".arguments"),
    (RESPONSES, {"type": "function_call_output", "call_id": "c"}, ".output"),
    (RESPONSES, {"type": "computer_call"}, ".type"),
    (RESPONSES, {"role": "assistant", "content": [ANNOTATED]}, ".content[0].annotations"),
    (RESPONSES, 5, ""),
    (MESSAGES, {"role": "user", "content": [{"type": "image", "source": {}}]}, ".content[0]"),
    (MESSAGES, {"role": "tool", "content": "x"}, ".role"),
    (MESSAGES, {"role": "user", "content": 5}, ".content"),
    (MESSAGES, {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]}, ".content[0]"),
    (MESSAGES, {"role": "user", "content": [{"type": "tool_result"}]}, ".content[0].tool_use_id"),
    (MESSAGES, {"role": "user", "content": [{"type": "new_kind", "text": "x"}]}, ".content[0]"),
]


async def refusal(api: Api, body: Any) -> dict[str, Any]:
    """The error with which a request is refused before the agent is asked."""
    agent = ScriptedAgent([say("ok")])
    async with serving(agent) as (_, session):
        refused, answer = await api.post(session, body)
    assert (answer.status, agent.calls, session.counts.num_refused) == (400, [], 1)
    if api is MESSAGES:
        assert set(refused) == {"type", "error"} and refused["type"] == "error"
        assert refused["error"]["type"] == "invalid_request_error"
    return refused["error"]


@pytest.mark.parametrize(("api", "name", "value"), REFUSED)
async def test_a_field_that_cannot_be_served_is_refused_by_its_name(api: Api, name: str, value: Any) -> None:
    error = await refusal(api, api.body([USER], **{name.partition(".")[0]: value}))
    assert name in error["message"]
    assert api is MESSAGES or error["param"].startswith(name)


@pytest.mark.parametrize(("api", "message", "place"), UNREADABLE)
async def test_a_message_that_cannot_be_read_is_named(api: Api, message: Any, place: str) -> None:
    error = await refusal(api, api.body([USER, message]))
    where = f"{api.messages_field}[1]{place}"
    assert where in error["message"] if api is MESSAGES else error["param"] == where


# ---- Chat Completions


async def test_what_the_agent_is_asked_by_chat_completions() -> None:
    agent = ScriptedAgent(answer=lambda _: say("ok"))
    async with serving(agent) as (_, session):
        await CHAT.ask(
            session,
            [
                {"role": "developer", "content": "Be brief."},
                {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            ],
            tools=[CHAT.tool()],
            max_completion_tokens=5,
            stop=["\n", "END"],
        )
        await CHAT.ask(session, [USER], tools=[CHAT.tool()], tool_choice="none", max_tokens=6, stop="x")
    first, second = agent.calls
    assert first.messages == (BRIEF, user("ab"))
    assert first.tools == (ToolSpec(**FUNCTION),)
    assert (first.max_tokens, tuple(first.stop)) == (5, ("\n", "END"))
    assert (second.tools, second.max_tokens, tuple(second.stop)) == (None, 6, ("x",))


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
async def test_a_changed_turn_stays_as_the_client_has_it(change: dict[str, Any]) -> None:
    agent = ScriptedAgent([RICH, say("Bye.")])
    async with serving(agent) as (_, session):
        answer = (await CHAT.ask(session, [USER])).choices[0].message.to_dict()
        await CHAT.ask(session, [USER, {**answer, **change}, USER])
    sent = agent.calls[1].messages[1]
    assert sent != RICH.message
    for key, value in change.items():
        if key != "tool_calls":
            assert sent[key] == value
    assert (session.counts.num_ours, session.counts.num_rewritten) == (0, 1)


@pytest.mark.parametrize("stream", [False, True])
async def test_several_turns_for_one_request(stream: bool) -> None:
    turns = [say(f"answer {index}", reasoning=f"r{index}") for index in range(4)]
    agent = ScriptedAgent([*turns, say("end")])
    agent.gate.clear()
    async with serving(agent) as (_, session):
        asking = asyncio.create_task(CHAT.ask(session, [USER], stream=stream, n=4))
        while len(agent.calls) < 4:
            await asyncio.sleep(0.001)
        agent.gate.set()
        got = await asking
        assert [choice.index for choice in got.choices] == [0, 1, 2, 3]
        assert [choice.message.content for choice in got.choices] == [turn.text for turn in turns]
        assert (got.usage.prompt_tokens, got.usage.completion_tokens) == (11, 28)
        # Each of them can be gone on from.
        await CHAT.ask(session, [USER, got.choices[2].message, USER], stream=stream)
    assert agent.most_at_once == 4
    assert agent.calls[4].messages[1] == turns[2].message
    assert session.counts.num_turns == 5


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
async def test_what_an_agent_raises_is_told_without_internals(
    name: str, is_streamed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    error, status, code = ENDINGS[name]
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


async def test_one_turn_that_fails_among_several() -> None:
    agent = ScriptedAgent([say("a"), ContextFull("full"), say("c")])
    async with serving(agent) as (_, session), openai_client(session) as client:
        with pytest.raises(openai.BadRequestError, match="full"):
            await client.chat.completions.create(model="m", messages=[USER], n=3)
    assert (session.counts.num_turns, session.counts.num_abandoned) == (2, 2)


async def test_models_by_both_sdks_and_what_is_not_there() -> None:
    async with serving(ScriptedAgent()) as (_, session):
        async with openai_client(session) as client:
            (model,) = json.loads((await client.models.with_raw_response.list()).content)["data"]
            assert strictly(openai.types.Model, model) == await client.models.retrieve("policy")
            assert model["id"] == "policy"
            with pytest.raises(openai.NotFoundError, match="there is no model 'gpt'"):
                await client.models.retrieve("gpt")
        async with anthropic_client(session) as client:
            raw = await client.models.with_raw_response.list()
            (model,) = json.loads(raw.http_response.content)["data"]
            assert strictly(anthropic.types.ModelInfo, model).id == "policy"
            with pytest.raises(anthropic.NotFoundError, match="agent has no tokenizer"):
                await client.messages.count_tokens(model="m", messages=[USER])


# ---- Responses


async def test_a_conversation_by_previous_response_id() -> None:
    turns = [
        say("", reasoning="think", tool_calls=(call("call_0", city="Oslo"),)),
        TURNS["broken"],
        say("end"),
    ]
    agent = ScriptedAgent([*turns, say("other")])
    brief = {"instructions": "Be brief.", "tools": [RESPONSES.tool()]}
    async with serving(agent) as (_, session):
        first = await RESPONSES.ask(session, "Oslo?", **brief)
        output = {"type": "function_call_output", "call_id": "call_0", "output": "rain"}
        second = await RESPONSES.ask(session, [output], previous_response_id=first.id, **brief)
        assert second.previous_response_id == first.id
        await RESPONSES.ask(session, "Thanks.", previous_response_id=second.id, **brief)
        # Instructions are not carried over.
        await RESPONSES.ask(session, "Thanks.", previous_response_id=first.id)
    oslo, thanks = user("Oslo?"), user("Thanks.")
    sent = [list(one.messages) for one in agent.calls]
    assert sent[0] == [BRIEF, oslo]
    assert sent[1] == [BRIEF, oslo, turns[0].message, result("call_0", "rain")]
    assert sent[2] == [*sent[1], turns[1].message, thanks]
    assert sent[3] == [oslo, turns[0].message, thanks]


async def test_a_response_that_was_not_kept_cannot_be_gone_on_from() -> None:
    agent = ScriptedAgent(answer=lambda _: say("ok"))
    async with serving(agent) as (server, session):
        first = await RESPONSES.ask(session, "hi", store=False)
        other = server.open(agent)
        elsewhere = await RESPONSES.ask(other, "hi")
        for unknown in (first.id, elsewhere.id, "resp_x"):
            with pytest.raises(openai.BadRequestError, match=unknown) as caught:
                await RESPONSES.ask(session, "go on", previous_response_id=unknown)
            assert caught.value.code == "previous_response_not_found"
    assert len(agent.calls) == 2


async def test_items_of_a_history_become_messages() -> None:
    given = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "one"},
        {"role": "assistant", "content": "two"},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
        {"type": "function_call", "call_id": "c2", "name": "f", "arguments": '{"x": 1}'},
        {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "r1"}]},
        {"type": "function_call_output", "call_id": "c2", "output": "r2"},
        {"type": "reasoning", "id": "rs", "summary": []},
        {"type": "function_call", "call_id": "c3", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c3", "output": ""},
    ]

    agent = ScriptedAgent([say("ok")])
    async with serving(agent) as (_, session):
        await RESPONSES.ask(session, given)
    assert list(agent.calls[0].messages) == [
        BRIEF,
        user("a"),
        assistant("one"),
        assistant("two", call_of("c1", "f"), call_of("c2", "f", x=1)),
        result("c1", "r1"),
        result("c2", "r2"),
        assistant("", call_of("c3", "f")),
        result("c3", ""),
    ]
    assert session.counts.num_rewritten == 3


async def test_an_error_of_responses_after_the_headers_is_an_event() -> None:
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


# ---- Anthropic's Messages


@pytest.mark.parametrize("stream", [False, True])
async def test_the_text_that_ended_a_turn_is_named(stream: bool) -> None:
    """One of the run's own texts is none of the client's, and calls are answered before all else."""
    turns = [
        say("a", stop_text="END"),
        say("a", stop_text="\n"),
        say("a"),
        say("a", stop_text="END", tool_calls=(call("c", city="Oslo"),)),
        say("a", finish_reason=FinishReason.LENGTH),
    ]
    async with serving(ScriptedAgent(turns)) as (_, session):
        got = [
            await MESSAGES.ask(session, [USER], stream=stream, stop_sequences=["STOP", "END"]) for _ in turns
        ]
    assert [(one.stop_reason, one.stop_sequence) for one in got] == [
        ("stop_sequence", "END"),
        ("end_turn", None),
        ("end_turn", None),
        ("tool_use", None),
        ("max_tokens", None),
    ]


def text(words: str, **more: object) -> dict[str, object]:
    return {"type": "text", "text": words, **more}


async def test_what_the_agent_is_asked_by_messages() -> None:
    agent = ScriptedAgent(answer=lambda _: say("ok"))
    async with serving(agent) as (_, session):
        cached = {"cache_control": {"type": "ephemeral"}}
        await MESSAGES.ask(
            session,
            [
                {"role": "user", "content": [text("a", **cached)]},
                {
                    "role": "assistant",
                    "content": [{"type": "tool_use", "id": "t", "name": "weather", "input": {"city": "x"}}],
                },
                {
                    "role": "user",
                    "content": [
                        text("before"),
                        {"type": "tool_result", "tool_use_id": "t", "is_error": True},
                        {"type": "tool_result", "tool_use_id": "u", "content": [text("r")]},
                    ],
                },
            ],
            system=[text("Be ", **cached), text("brief.")],
            tools=[{**MESSAGES.tool(), **cached}],
            stop_sequences=["END"],
            max_tokens=9,
        )
        await MESSAGES.ask(session, [USER], tools=[MESSAGES.tool()], tool_choice={"type": "none"})
    first, second = agent.calls
    assert list(first.messages) == [
        BRIEF,
        user("a"),
        assistant("", call_of("t", "weather", city="x")),
        user("before"),
        result("t", ""),
        result("u", "r"),
    ]
    assert first.tools == (ToolSpec(**FUNCTION),)
    assert (first.max_tokens, tuple(first.stop)) == (9, ("END",))
    assert second.tools is None


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "kind", "text"),
    [
        (ContextFull("5000 tokens"), 400, "invalid_request_error", "prompt is too long: 5000 tokens"),
        (EpisodeOver("given up"), 410, "not_found_error", "closed"),
        (RuntimeError("secret"), 500, "api_error", "failed to answer"),
    ],
)
async def test_errors_before_and_after_the_headers(
    error: Exception, status: int, kind: str, text: str, is_late: bool
) -> None:
    """Late ones come in an event, whose status is that of the headers."""
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
