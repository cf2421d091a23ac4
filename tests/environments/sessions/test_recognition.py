"""What clients are shown of turns, and how it becomes the same turns again."""

import asyncio
import copy
import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forgeasync.environments import (
    AnthropicMessages,
    Attempt,
    BrokenToolCall,
    ChatCompletions,
    Dialect,
    InferenceRequest,
    InferenceResult,
    Message,
    Responses,
    Session,
    SessionLimits,
    ToolCall,
    Turn,
    assistant,
    shown,
    user,
)
from forgeasync.rollouts import FinishReason
from tests.support.sessions import Asking, ScriptedAgent, say, serving

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

USER = user("hi")

FIRST = Attempt(digest=b"", num_retries=0)


async def ask(session: Session, messages: Sequence[Message]) -> InferenceResult:
    """One turn of a session, without HTTP."""
    sampling = session.begin(InferenceRequest(messages=tuple(messages), body={}), FIRST)
    try:
        return await sampling.reply
    finally:
        session.leave(sampling, is_delivered=True)


def counted(session: Session) -> tuple[int, int]:
    return session.counts.num_ours, session.counts.num_rewritten


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


async def check_comes_back(turn: Turn, kept: bool, api: Dialect) -> None:
    """A client hands a turn back, over the wire, and the agent gets what it has said."""
    agent = ScriptedAgent([turn, say("end")])
    async with serving(agent) as (_, session):
        body = api.whole(InferenceRequest(messages=(USER,), body={}), await ask(session, [USER]))
        body = json.loads(json.dumps(body, allow_nan=False))
        back = json.dumps(handed_back(api, body, kept), ensure_ascii=False)
        await ask(session, api.read(json.loads(back.encode())).messages)
    assert agent.calls[1].messages == (USER, turn.message, USER)
    assert counted(session) == (1, 0)


DIALECTS = [ChatCompletions(), Responses(), AnthropicMessages()]


@settings(max_examples=120, deadline=None)
@given(TURNS, st.booleans(), st.sampled_from(DIALECTS))
def test_every_turn_comes_back_through_every_api(turn: Turn, kept: bool, api: Dialect) -> None:
    asyncio.run(check_comes_back(turn, kept, api))


async def test_the_oldest_turns_are_forgotten() -> None:
    asked, theirs = [user(str(index)) for index in range(5)], assistant("x")
    agent = ScriptedAgent(answer=lambda _: say("x", reasoning="r"))
    async with serving(agent, limits=SessionLimits(max_shown_turns=3)) as (_, session):
        for message in asked:
            await ask(session, [message])
        # The forgotten one first: each turn that is added makes another one be forgotten.
        for message in (asked[0], asked[4]):
            await ask(session, [message, theirs, USER])
    assert agent.calls[5].messages == (asked[0], theirs, USER)
    assert agent.calls[6].messages[1] == assistant("x", reasoning="r")
    assert counted(session) == (1, 1)


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
async def test_a_call_that_could_not_come_back_is_shown_as_text(name: str, value: Any, text: str) -> None:
    odd = ToolCall(id="a", name=name, arguments={"x": value})
    even = ToolCall(id="b", name="g", arguments={})
    turn = say("Hm.", tool_calls=(odd, even))
    seen = shown(turn)
    assert seen.text == f"Hm.\n{text}"
    assert seen.tool_calls == (even,)
    for api in DIALECTS:
        await check_comes_back(turn, True, api)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_conversations_that_look_alike_keep_to_turns_that_were_sampled(data: st.DataObject) -> None:
    """Clients that branch and are told the same things: each history is one that was sampled.

    Few texts make few differences, so that many turns look alike where a client drops thoughts.
    """
    drops = data.draw(st.booleans())
    picks = data.draw(st.lists(st.tuples(st.integers(0, 99), st.sampled_from("ab")), min_size=1, max_size=12))
    says = data.draw(
        st.lists(st.tuples(st.sampled_from(["yes", ""]), st.booleans()), min_size=12, max_size=12)
    )
    broken = BrokenToolCall(text="<tool", problem="cut")
    answered: dict[str, list[Turn]] = {}
    """By the messages before them, the turns that were really sampled."""
    conversations: list[list[dict[str, Any]]] = [[]]

    def answer(asking: Asking) -> Turn:
        text, is_broken = says[asking.number - 1]
        return say(
            text, reasoning=f"thought {asking.number}", broken_tool_calls=(broken,) if is_broken else ()
        )

    async def test() -> None:
        agent = ScriptedAgent(answer=answer)
        async with serving(agent) as (_, session):
            for index, content in picks:
                client = conversations[index % len(conversations)]
                asked = [*client, {"role": "user", "content": content}]
                given_back = [
                    {key: value for key, value in one.items() if not (drops and key == "reasoning_content")}
                    for one in asked
                ]
                turn = (await ask(session, given_back)).turns[0]
                messages = agent.calls[-1].messages
                assert len(messages) == len(asked)
                for place, message in enumerate(messages):
                    if message["role"] == "assistant":
                        sampled = answered[json.dumps(messages[:place])]
                        assert message in [turn.message for turn in sampled]
                if not drops:
                    thoughts = [one.get("reasoning_content") for one in asked]
                    assert [one.get("reasoning_content") for one in messages] == thoughts
                answered.setdefault(json.dumps(messages), []).append(turn)
                seen = {"role": "assistant", "content": shown(turn).text, "reasoning_content": turn.reasoning}
                conversations.append([*asked, seen])
        assert session.counts.num_rewritten == 0

    asyncio.run(test())
