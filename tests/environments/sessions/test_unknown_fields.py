"""Fields that no endpoint knows: a newer client library goes on working, and what it asked for is named."""

import copy
from typing import Any

import pytest

from forgeasync.environments import MAX_UNKNOWN_CHARS, MAX_UNKNOWN_NAMES
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
