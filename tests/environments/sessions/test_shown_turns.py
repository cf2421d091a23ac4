"""What clients are shown of turns, and how it becomes the same turns again."""

import copy
import json
from hashlib import blake2b
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forgeasync.environments import (
    AnthropicMessages,
    BrokenToolCall,
    ChatCompletions,
    Dialect,
    InferenceRequest,
    Responses,
    ShownTurns,
    ToolCall,
    Turn,
    shown,
)
from forgeasync.environments.sessions.dialect import InferenceResult
from forgeasync.rollouts import FinishReason
from tests.support.sessions import say

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats() | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
CALLS = st.builds(
    ToolCall,
    id=st.from_regex("call_[0-9]", fullmatch=True),
    name=TEXT.filter(bool),
    arguments=st.dictionaries(TEXT, JSON, max_size=3),
)
TURNS = st.builds(
    Turn,
    text=TEXT,
    num_tokens=st.integers(1, 9),
    num_prompt_tokens=st.integers(1, 9),
    finish_reason=st.sampled_from(FinishReason),
    reasoning=st.none() | TEXT,
    tool_calls=st.lists(CALLS, max_size=2).map(tuple),
    broken_tool_calls=st.lists(st.builds(BrokenToolCall, text=TEXT, problem=TEXT), max_size=2).map(tuple),
)

USER = {"role": "user", "content": "hi"}


def handed_back(api: Dialect, body: dict[str, Any], kept: bool) -> dict[str, Any]:
    """The next request of a client that keeps its messages, with or without thoughts and ids."""
    body = copy.deepcopy(body)
    match api:
        case ChatCompletions():
            message = body["choices"][0]["message"]
            if not kept:
                message.pop("reasoning_content", None)
                for call in message.get("tool_calls", ()):
                    call.pop("id")
            return {"model": "m", "messages": [USER, message, USER]}
        case Responses():
            items = [item for item in body["output"] if kept or item["type"] != "reasoning"]
            return {"model": "m", "input": [USER, *items, USER]}
        case _:
            blocks = [block for block in body["content"] if kept or block["type"] != "thinking"]
            message = {"role": "assistant", "content": blocks}
            return {"model": "m", "max_tokens": 5, "messages": [USER, message, USER]}


@settings(max_examples=120, deadline=None)
@given(TURNS, st.booleans(), st.sampled_from([ChatCompletions(), Responses(), AnthropicMessages()]))
def test_every_turn_comes_back_through_every_api(turn: Turn, kept: bool, api: Dialect) -> None:
    turns = ShownTurns(max_turns=10)
    turns.remember(turns.history([USER]), turn)
    asked = InferenceRequest(messages=(USER,), body={})
    body = api.whole(asked, InferenceResult(id="x", created_s=0, model="m", turns=(turn,)))
    # Over the wire and back.
    body = json.loads(json.dumps(body, allow_nan=False))
    read = api.read(handed_back(api, body, kept))
    history = turns.history(read.messages)
    assert history.messages == (USER, turn.message, USER)
    assert (history.num_ours, history.num_rewritten) == (1, 0)


def test_a_turn_is_known_only_after_the_messages_that_it_answered() -> None:
    turns = ShownTurns(max_turns=10)
    broken = BrokenToolCall(text="<tool", problem="cut")
    turn = say("x", broken_tool_calls=(broken,))
    turns.remember(turns.history([USER]), turn)
    theirs = {"role": "assistant", "content": "x\n<tool"}
    assert turns.history([USER, theirs]).messages == (USER, turn.message)
    other = {"role": "user", "content": "ho"}
    history = turns.history([other, theirs])
    assert history.messages == (other, theirs)
    assert (history.num_ours, history.num_rewritten) == (0, 1)
    # What follows a message that was changed is not known either, whatever it reads.
    assert turns.history([USER, other, theirs]).num_rewritten == 1


def test_histories_have_digests_of_their_own() -> None:
    turns = ShownTurns(max_turns=10)
    two = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    digests = {
        turns.history(messages).digest
        for messages in ([], two[:1], two, two[::-1], [{"role": "system", "content": "a"}])
    }
    assert len(digests) == 5


def test_many_turns_that_look_alike_are_each_gone_on_from() -> None:
    """As with a large ``n`` and a client that drops thoughts."""
    turns = ShownTurns(max_turns=1000)
    first = turns.history([USER])
    for index in range(50):
        turns.remember(first, say("yes", reasoning=str(index)))
    theirs = [USER, {"role": "assistant", "content": "yes"}, USER]
    histories = [turns.history(theirs) for _ in range(50)]
    assert {history.messages[1]["reasoning_content"] for history in histories} == set(map(str, range(50)))
    for index, history in enumerate(histories):
        turns.remember(history, say(f"answer {index}"))
    for index, history in enumerate(histories):
        longer = turns.history([*theirs, {"role": "assistant", "content": f"answer {index}"}, USER])
        assert longer.messages[:3] == history.messages
        assert longer.num_ours == 2


def test_many_messages_after_many_readings_are_little_work(monkeypatch: pytest.MonkeyPatch) -> None:
    num_digests = 0

    def counting(data: bytes) -> Any:
        nonlocal num_digests
        num_digests += 1
        return blake2b(data)

    turns = ShownTurns(max_turns=1000)
    first = turns.history([USER])
    for index in range(500):
        turns.remember(first, say("yes", reasoning=str(index)))
    theirs = [USER, {"role": "assistant", "content": "yes"}, *[USER] * 1000]
    monkeypatch.setattr("forgeasync.environments.sessions.shown_turns.hashlib.blake2b", counting)
    turns.history(theirs)
    # Message by message and reading by reading there would be half a million.
    assert num_digests < 5 * 500


def test_the_oldest_turns_are_forgotten() -> None:
    turns = ShownTurns(max_turns=3)
    asked = [[{"role": "user", "content": str(index)}] for index in range(5)]
    for messages in asked:
        turns.remember(turns.history(messages), say("x", reasoning="r"))
    theirs = {"role": "assistant", "content": "x"}
    known = [turns.history([*messages, theirs]).num_ours for messages in asked]
    assert known == [0, 0, 1, 1, 1]


DEEP: Any = []
for _ in range(70):
    DEEP = [DEEP]


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("f", [float("inf")], '{"name": "f", "arguments": {"x": [Infinity]}}'),
        ("f", "\ud800", '{"name": "f", "arguments": {"x": "\\ud800"}}'),
        ("\udfff", 1, '{"name": "\\udfff", "arguments": {"x": 1}}'),
        ("f", DEEP, '{"name": "f", "arguments": {"x": ' + "[" * 71 + "]" * 71 + "}}"),
    ],
)
def test_a_call_that_could_not_come_back_is_shown_as_text(name: str, value: Any, text: str) -> None:
    odd = ToolCall(id="a", name=name, arguments={"x": value})
    even = ToolCall(id="b", name="g", arguments={})
    turn = say("Hm.", tool_calls=(odd, even))
    seen = shown(turn)
    assert seen.text == f"Hm.\n{text}"
    assert (seen.tool_calls, seen.num_as_text) == ((even,), 1)
    for api in (ChatCompletions(), Responses(), AnthropicMessages()):
        turns = ShownTurns(max_turns=10)
        turns.remember(turns.history([USER]), turn)
        reply = InferenceResult(id="x", created_s=0, model="m", turns=(turn,))
        body = json.loads(json.dumps(api.whole(InferenceRequest(messages=(USER,), body={}), reply)))
        back = json.loads(json.dumps(handed_back(api, body, True), ensure_ascii=False).encode())
        assert turns.history(api.read(back).messages).messages[1] == turn.message


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_conversations_that_look_alike_keep_to_turns_that_were_sampled(data: st.DataObject) -> None:
    """Clients that branch and are told the same things: each history is one that was sampled.

    Few texts make few differences, so that many turns look alike where a client drops thoughts.
    """
    turns = ShownTurns(max_turns=1000)
    answered: dict[str, list[Turn]] = {}
    """By the messages before them, the turns that were really sampled."""
    conversations: list[list[dict[str, Any]]] = [[]]
    drops = data.draw(st.booleans())
    for number in range(data.draw(st.integers(1, 12))):
        client = data.draw(st.sampled_from(conversations))
        asked = [*client, {"role": "user", "content": data.draw(st.sampled_from("ab"))}]
        given_back = [
            {key: value for key, value in one.items() if not (drops and key == "reasoning_content")}
            for one in asked
        ]
        history = turns.history(given_back)
        assert history.num_rewritten == 0
        assert len(history.messages) == len(asked)
        for index, message in enumerate(history.messages):
            if message["role"] == "assistant":
                sampled = answered[json.dumps(history.messages[:index])]
                assert message in [turn.message for turn in sampled]
        if not drops:
            thoughts = [one.get("reasoning_content") for one in asked]
            assert [one.get("reasoning_content") for one in history.messages] == thoughts
        broken = [BrokenToolCall(text="<tool", problem="cut")] * data.draw(st.integers(0, 1))
        turn = say(
            data.draw(st.sampled_from(["yes", ""])),
            reasoning=f"thought {number}",
            broken_tool_calls=tuple(broken),
        )
        turns.remember(history, turn)
        answered.setdefault(json.dumps(history.messages), []).append(turn)
        seen = {"role": "assistant", "content": shown(turn).text, "reasoning_content": turn.reasoning}
        conversations.append([*asked, seen])
