"""Fields that no endpoint knows: a newer client library goes on working, and what it asked for is named."""

import copy
import typing
from collections.abc import Callable
from typing import Any

import anthropic.types
import openai.types.chat as chat
import openai.types.responses as responses
import pytest
from anthropic.types.beta.message_create_params import MessageCreateParamsBase
from openai.types.chat.completion_create_params import CompletionCreateParamsBase
from openai.types.responses.response_create_params import ResponseCreateParamsBase
from openai.types.responses.response_input_param import FunctionCallOutput
from openai.types.shared_params import FunctionDefinition

from forgeasync.environments import MAX_UNKNOWN_CHARS, MAX_UNKNOWN_NAMES, RequestError
from tests.environments.sessions.apis import APIS, CHAT, HEADER, MESSAGES, RESPONSES, USER
from tests.support.sessions import ScriptedAgent, say, serving

CALLED = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
THOUGHT = {"type": "thinking", "thinking": "r", "signature": "s"}
RESULT = {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "rain"}]}
BODIES = {
    "chat": CHAT.body(
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "a"}]},
            {"role": "assistant", "content": "b", "tool_calls": [CALLED]},
            {"role": "tool", "tool_call_id": "c", "content": "rain"},
        ],
        stream_options={"include_usage": True},
        tools=[CHAT.tool()],
    ),
    "responses": RESPONSES.body(
        [
            {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
            {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "r"}]},
            {"role": "assistant", "content": [{"type": "output_text", "text": "b"}]},
            {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "rain"},
        ],
        stream_options={"include_obfuscation": False},
        text={"format": {"type": "text"}},
        tools=[RESPONSES.tool()],
    ),
    "messages": MESSAGES.body(
        [
            {"role": "user", "content": [{"type": "text", "text": "a"}]},
            {
                "role": "assistant",
                "content": [
                    THOUGHT,
                    {"type": "text", "text": "b"},
                    {"type": "tool_use", "id": "c", "name": "weather", "input": {}},
                ],
            },
            {"role": "user", "content": [RESULT]},
        ],
        system=[{"type": "text", "text": "Be brief."}],
        tool_choice={"type": "auto"},
        output_config={"effort": "low"},
        tools=[MESSAGES.tool()],
    ),
}

NOT_READ = {"parameters", "input_schema", "input", "arguments", "properties", "format"}
"""Objects of a tool, not of the API; and the format of an answer, of which only text is served."""


def objects(value: Any, place: str = "", name: str = "") -> Any:
    """Every object of a body that the API reads, with its place."""
    if isinstance(value, dict):
        if name not in NOT_READ or (name == "input" and not place.endswith("]")):
            yield place, value
        for key, inner in value.items():
            if key not in NOT_READ or isinstance(inner, list):
                yield from objects(inner, f"{place}.{key}" if place else key, key)
    elif isinstance(value, list):
        for inner in value:
            yield from objects(inner, f"{place}[]", name if name not in NOT_READ else "")


@pytest.mark.parametrize("kind", BODIES)
def test_a_field_at_any_depth_is_ignored_and_named(kind: str) -> None:
    api, body = APIS[kind].dialect, BODIES[kind]
    plain = api.read(body)
    assert plain.unknown == ()
    places = [place for place, _ in objects(body)]
    assert len(places) >= 10
    for index, place in enumerate(places):
        changed = copy.deepcopy(body)
        list(objects(changed))[index][1]["of_next_year"] = [{"x": 1}]
        asked = api.read(changed)
        assert asked.unknown == (f"{place}.of_next_year".removeprefix("."),), place
        # The model is shown the same.
        assert (asked.messages, asked.tools) == (plain.messages, plain.tools), place


KNOWN: list[tuple[str, Any, str, Callable[[dict[str, Any]], dict[str, Any]]]] = [
    ("chat", CompletionCreateParamsBase, "", lambda body: body),
    ("chat", chat.ChatCompletionStreamOptionsParam, "", lambda body: body["stream_options"]),
    ("chat", chat.ChatCompletionFunctionToolParam, "", lambda body: body["tools"][0]),
    ("chat", FunctionDefinition, "", lambda body: body["tools"][0]["function"]),
    ("chat", chat.ChatCompletionUserMessageParam, "", lambda body: body["messages"][1]),
    ("chat", chat.ChatCompletionAssistantMessageParam, "", lambda body: body["messages"][2]),
    ("chat", chat.ChatCompletionToolMessageParam, "", lambda body: body["messages"][3]),
    ("chat", chat.ChatCompletionContentPartTextParam, "", lambda body: body["messages"][1]["content"][0]),
    ("responses", ResponseCreateParamsBase, "", lambda body: body),
    ("responses", responses.FunctionToolParam, "", lambda body: body["tools"][0]),
    ("responses", responses.ResponseTextConfigParam, "", lambda body: body["text"]),
    ("responses", responses.EasyInputMessageParam, "", lambda body: body["input"][0]),
    ("responses", responses.ResponseInputTextParam, "", lambda body: body["input"][0]["content"][0]),
    ("responses", responses.ResponseReasoningItemParam, "", lambda body: body["input"][1]),
    ("responses", responses.ResponseOutputMessageParam, "", lambda body: body["input"][2]),
    ("responses", responses.ResponseOutputTextParam, "", lambda body: body["input"][2]["content"][0]),
    ("responses", responses.ResponseFunctionToolCallParam, "", lambda body: body["input"][3]),
    ("responses", FunctionCallOutput, "", lambda body: body["input"][4]),
    # ``betas`` is a header.
    ("messages", MessageCreateParamsBase, "betas", lambda body: body),
    ("messages", anthropic.types.ToolParam, "", lambda body: body["tools"][0]),
    ("messages", anthropic.types.ToolChoiceAutoParam, "", lambda body: body["tool_choice"]),
    ("messages", anthropic.types.OutputConfigParam, "", lambda body: body["output_config"]),
    ("messages", anthropic.types.TextBlockParam, "", lambda body: body["messages"][0]["content"][0]),
    ("messages", anthropic.types.ThinkingBlockParam, "", lambda body: body["messages"][1]["content"][0]),
    ("messages", anthropic.types.ToolUseBlockParam, "", lambda body: body["messages"][1]["content"][2]),
    ("messages", anthropic.types.ToolResultBlockParam, "", lambda body: body["messages"][2]["content"][0]),
]


@pytest.mark.parametrize(
    ("kind", "params", "not_sent", "find"), KNOWN, ids=[f"{one[0]}-{one[1].__name__}" for one in KNOWN]
)
def test_every_field_of_the_sdk_is_known(
    kind: str, params: Any, not_sent: str, find: Callable[[dict[str, Any]], dict[str, Any]]
) -> None:
    """Each is served, named as not honoured, without effect, or refused by its name; none by accident."""
    api, body = APIS[kind].dialect, BODIES[kind]
    for name in typing.get_type_hints(params).keys() - {not_sent}:
        changed = copy.deepcopy(body)
        find(changed).setdefault(name, {"a": "value"})
        try:
            asked = api.read(changed)
        except RequestError as error:
            assert name in str(error.param), (name, str(error))
        else:
            assert asked.unknown == (), name


HOSTILE = {
    "line breaks": ({"a\r\nset-cookie: x": 1}, "a??set-cookie??x"),
    "separators": ({"a, b; c": 1}, "a??b??c"),
    "not ASCII": ({"é\x00\u2028": 1}, "???"),
    "empty": ({"": 1}, "?"),
    "long": ({"a" * 100_000: 1}, "a" * (MAX_UNKNOWN_CHARS - 3) + "..."),
    "nearly long": ({"a" * MAX_UNKNOWN_CHARS: 1}, "a" * MAX_UNKNOWN_CHARS),
    "many": (
        {f"f{index}": 1 for index in range(100_000)},
        ", ".join(f"f{index}" for index in range(MAX_UNKNOWN_NAMES)) + ", ...",
    ),
    "just enough": (
        {f"f{index}": 1 for index in range(MAX_UNKNOWN_NAMES)},
        ", ".join(f"f{index}" for index in range(MAX_UNKNOWN_NAMES)),
    ),
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("name", HOSTILE)
async def test_a_hostile_name_cannot_leave_its_header(
    name: str, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    fields, shown = HOSTILE[name]
    async with serving(ScriptedAgent([say("ok")])) as (_, session):
        _, answer = await CHAT.post(session, CHAT.body([USER], stream=stream, **fields))
    assert (answer.status, answer.headers[HEADER]) == (200, shown)
    assert "set-cookie" not in answer.headers
    (said,) = [one.getMessage() for one in caplog.records if "which no endpoint knows" in one.getMessage()]
    assert shown in said and "\n" not in said


def test_the_same_field_of_many_messages_is_named_once() -> None:
    messages = [USER | {"weight": index} for index in range(1000)]
    asked = CHAT.dialect.read(CHAT.body(messages, weight=1))
    assert asked.unknown == ("messages[].weight", "weight")
