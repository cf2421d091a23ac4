"""Finding the turn that messages continue: the same as by comparing with every turn, and in linear time."""

import copy
import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forgeasync.environments import (
    ASSISTANT,
    AnsweredMessages,
    ConversationTree,
    Message,
    ToolSpec,
    checked_message,
    checked_messages,
    conversation,
    is_same_message,
    lookup_key,
)
from forgeasync.environments.conversation import Continuation

TOOLSETS = (
    (),
    (ToolSpec(name="add", description="", parameters={"type": "object", "properties": {"a": {}}}),),
    (ToolSpec(name="add", description="", parameters={"type": "object", "properties": {"b": {}}}),),
)


def search_naively(
    turns: Sequence[AnsweredMessages[int]], messages: tuple[Message, ...], tools: tuple[ToolSpec, ...]
) -> Continuation[int]:
    """Compare the messages with every turn; the earliest of the longest paths counts."""
    longest = None
    for one in turns:
        path = one.messages
        is_begun = len(messages) > len(path) and all(
            is_same_message(ours, theirs) for ours, theirs in zip(path, messages, strict=False)
        )
        if one.tools != tools or not is_begun:
            continue
        if longest is None or len(path) > len(longest.messages):
            longest = one
    num_kept = 0 if longest is None else len(longest.messages)
    return Continuation(
        after=longest,
        is_rewritten=any(is_same_message(one.messages[0], messages[0]) for one in turns)
        and any(message["role"] == ASSISTANT for message in messages[num_kept:]),
    )


def own_turns_naively(turns: Sequence[AnsweredMessages[int]], messages: Sequence[Message]) -> dict[int, int]:
    found: dict[int, int] = {}
    for index, message in enumerate(messages):
        for one in turns:
            if one.kept not in found.values() and is_same_message(one.messages[-1], message):
                found[index] = one.kept
                break
    return found


ARGUMENTS = st.sampled_from(
    [{}, {"a": 1}, {"a": True}, {"a": 1.0}, {"a": [1]}, {"a": {"b": None}}, {"a": "1"}]
)
CALLS = st.builds(
    lambda name, arguments, identity: {
        "type": "function",
        "function": {"name": name, "arguments": arguments},
        **({} if identity is None else {"id": identity}),
    },
    st.sampled_from("fg"),
    ARGUMENTS,
    st.sampled_from([None, "c0", "c1"]),
)
ANSWERS = st.fixed_dictionaries(
    {"role": st.just(ASSISTANT), "content": st.sampled_from("ab")},
    optional={
        "reasoning_content": st.sampled_from("xy"),
        "tool_calls": st.lists(CALLS, min_size=1, max_size=2),
    },
)
OTHERS = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "tool", "system"]), "content": st.sampled_from("ab")},
    optional={"name": st.just("n"), "tool_call_id": st.sampled_from(["c0", "c1"])},
)


@st.composite
def requests(draw: st.DrawFn, known: Sequence[tuple[Message, ...]]) -> tuple[Message, ...]:
    """A conversation from nothing, or an earlier one as a client may hand it back: whole or in part, with
    reasoning or ids dropped, messages changed, removed or put in."""
    start = draw(st.sampled_from([(), *known]))
    messages: list[dict[str, Any]] = [copy.deepcopy(dict(one)) for one in start]
    messages = messages[: draw(st.integers(0, len(messages)))] if draw(st.booleans()) else messages
    if draw(st.booleans()):
        for message in messages:
            message.pop("reasoning_content", None)
    if draw(st.booleans()):
        for message in messages:
            for one in message.get("tool_calls", ()):
                one.pop("id", None)
    if messages and draw(st.integers(0, 3)) == 0:
        place = draw(st.integers(0, len(messages) - 1))
        messages[place : place + draw(st.integers(0, 1))] = draw(
            st.lists(st.one_of(ANSWERS, OTHERS), max_size=1)
        )
    return (*messages, draw(OTHERS))


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_the_tree_finds_what_a_naive_search_finds(data: st.DataObject) -> None:
    tree: ConversationTree[int] = ConversationTree()
    paths: list[tuple[Message, ...]] = []
    followed: set[int] = set()
    for _ in range(data.draw(st.integers(1, 12))):
        messages = checked_messages(data.draw(requests(paths)))
        tools = data.draw(st.sampled_from(TOOLSETS))
        found = tree.find(messages, copy.deepcopy(tools))
        expected = search_naively(tree.turns, messages, tools)
        assert found.after is expected.after and found.is_rewritten is expected.is_rewritten
        assert tree.own_turns(messages) == own_turns_naively(tree.turns, messages)
        # Several answers to the same messages may read the same.
        for _another in range(data.draw(st.integers(1, 2))):
            answer = checked_message("turn", data.draw(ANSWERS))
            paths.append((*messages, answer))
            tree.add(paths[-1], tools, len(paths) - 1, after=found.after)
            if found.after is not None:
                followed.add(found.after.kept)
    assert tree.num_turns == len(paths)
    assert [one.kept for one in tree.leaves] == [one for one in range(len(paths)) if one not in followed]


@settings(max_examples=100, deadline=None)
@given(st.one_of(ANSWERS, OTHERS), st.one_of(ANSWERS, OTHERS))
def test_the_same_messages_have_the_same_key(ours: Message, theirs: Message) -> None:
    ours, theirs = checked_message("ours", ours), checked_message("theirs", theirs)
    if is_same_message(ours, theirs):
        assert lookup_key(ours) == lookup_key(theirs)
    # The key has all that a client cannot drop.
    bare = {key: theirs[key] for key in ("role", "content", "tool_calls") if key in theirs}
    for call in bare.get("tool_calls", ()):
        call.pop("id", None)
    assert is_same_message(ours, bare) == (lookup_key(ours) == lookup_key(bare))


class CountingMessage(dict[str, Any]):
    """A message that counts how often it is compared with another."""

    num_compared = 0

    def __eq__(self, other: object) -> bool:
        CountingMessage.num_compared += 1
        return dict.__eq__(self, other)

    __hash__ = None  # type: ignore[assignment]


@pytest.mark.parametrize("drops_reasoning", [False, True])
def test_messages_of_long_episodes_are_compared_once_or_twice(
    drops_reasoning: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1,000 turns: ten conversations of 100, in which all turns say the same, as loops with a tool do."""

    def counting(ours: Message, theirs: Message) -> bool:
        CountingMessage.num_compared += 1
        return is_same_message(ours, theirs)

    monkeypatch.setattr(conversation, "is_same_message", counting)
    tree: ConversationTree[int] = ConversationTree()
    for agent in range(10):
        messages: list[Message] = [CountingMessage(role="system", content=f"agent {agent}")]
        for number in range(100):
            messages.append(CountingMessage(role="user", content="go on"))
            CountingMessage.num_compared = 0
            found = tree.find(tuple(messages), ())
            assert (found.num_known, found.is_rewritten) == (len(messages) - 1 if number else 0, False)
            # Where reasoning was dropped, a turn and what followed it are two places with the same message.
            assert CountingMessage.num_compared <= 2 * len(messages)
            CountingMessage.num_compared = 0
            answer = CountingMessage(role=ASSISTANT, content="", reasoning_content=f"thought {number % 7}")
            tree.add((*messages, answer), (), tree.num_turns, after=found.after)
            assert CountingMessage.num_compared <= 2 * len(messages)
            messages.append(
                CountingMessage(role=ASSISTANT, content="") if drops_reasoning else CountingMessage(answer)
            )
    messages[101] = CountingMessage(role="user", content="something else")
    messages.append(CountingMessage(role="user", content="go on"))
    CountingMessage.num_compared = 0
    found = tree.find(tuple(messages), ())
    assert (found.num_known, found.is_rewritten) == (101, True)
    assert len(tree.own_turns(messages)) == 100
    # Seven thoughts are told apart one by one where all else is equal, and there are turns enough of each.
    assert CountingMessage.num_compared <= 10 * len(messages)


def test_a_history_makes_no_more_work_than_the_tree_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """500 turns that look alike without their thoughts, and a client that sends 1,000 messages after one."""
    num_compared = 0

    def counting(ours: Message, theirs: Message) -> bool:
        nonlocal num_compared
        num_compared += 1
        return is_same_message(ours, theirs)

    user = {"role": "user", "content": "hi"}
    tree: ConversationTree[int] = ConversationTree()
    for number in range(500):
        answer = {"role": ASSISTANT, "content": "yes", "reasoning_content": str(number)}
        tree.add((user, answer), (), number, after=None)
    monkeypatch.setattr(conversation, "is_same_message", counting)
    bare = {"role": ASSISTANT, "content": "yes"}
    for number in range(3):
        found = tree.turns_handed_back((user, bare, *[user] * 1000))
        # Each time another one, which has been continued less.
        assert {index: one.kept for index, one in found.items()} == {1: number}
    assert num_compared < 3 * 2 * 500


def test_a_turn_comes_back_in_the_form_in_which_it_was_shown() -> None:
    tree: ConversationTree[int] = ConversationTree()
    question = checked_messages("?")
    answer = {"role": ASSISTANT, "content": "a", "reasoning_content": "r"}
    tree.add((*question, answer), (), 0, after=None, shown={**answer, "content": "a and more"})
    for content, num_found in (("a", 1), ("a and more", 1), ("more", 0)):
        history = (*question, {"role": ASSISTANT, "content": content}, *question)
        assert len(tree.turns_handed_back(history)) == num_found


def test_what_is_forgotten_leaves_the_rest() -> None:
    tree: ConversationTree[int] = ConversationTree()
    user, answer = {"role": "user", "content": "hi"}, {"role": ASSISTANT, "content": "yes"}
    first = (user, answer)
    second = (*first, user, {**answer, "content": "no"})
    other = ({**user, "content": "ho"}, answer)
    for number, path in enumerate((first, second, other)):
        tree.add(path, (), number, after=None, shown={**path[-1], "content": "shown"})
    kept = []
    for _ in range(3):
        tree.forget_oldest()
        histories = [(*path, user) for path in (first, second, other)]
        kept.append([[one.kept for one in tree.turns_handed_back(path).values()] for path in histories])
    assert kept == [[[], [1], [2]], [[], [], [2]], [[], [], []]]
    assert tree.num_turns == 0 and tree.own_turns(second) == {}


def test_examples_without_ids_of_calls_come_back() -> None:
    """A call in an example at the beginning has no id where whoever wrote it gave none."""
    example = {
        "role": ASSISTANT,
        "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}],
    }
    ours = checked_message("ours", example)
    assert is_same_message(ours, checked_message("theirs", json.loads(json.dumps(example))))
    with_id = {**example, "tool_calls": [{**example["tool_calls"][0], "id": "c0"}]}
    assert not is_same_message(ours, checked_message("theirs", with_id))


@pytest.mark.parametrize("thoughts", [("x", "y"), ("y", "x"), ("x", "x")])
def test_the_earliest_of_turns_that_cannot_be_told_apart_is_continued(thoughts: tuple[str, str]) -> None:
    tree: ConversationTree[int] = ConversationTree()
    question = checked_messages("?")
    for number, thought in enumerate(thoughts):
        answer = {"role": ASSISTANT, "content": "a", "reasoning_content": thought}
        tree.add((*question, answer), (), number, after=None)
    bare = (*question, {"role": ASSISTANT, "content": "a"}, {"role": "user", "content": "!"})
    found = tree.find(bare, ())
    assert found.after is tree.turns[0] and not found.is_rewritten
    assert tree.own_turns(bare) == {1: 0}
