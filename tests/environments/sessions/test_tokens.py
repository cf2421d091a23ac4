"""A real agent behind a session: what a client sends adds tokens to those that were sampled, no others."""

import asyncio
import json
from typing import Any

import anthropic
import openai
import pytest

from forgeasync.environments import (
    EpisodeAgent,
    FamilyRenderer,
    MessageRenderer,
    PlainRenderer,
    Session,
    SessionServer,
    TemplateRenderer,
    ToolSpec,
    TurnLimits,
    build_renderer,
)
from forgeasync.testing import ScriptedGenerator
from tests.support.chat import CHATML, make_tokenizer
from tests.support.chat_families import family_tokenizer
from tests.support.sessions import anthropic_client, openai_client

MAX_CONTEXT_LENGTH = 400


class Chat:
    """A client that keeps its history in the form of its API."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.messages: list[Any] = []
        self.num_tokens: list[tuple[int, int]] = []
        """Before each turn, and of it, as the API says."""

    async def ask(self, text: str) -> str:
        async with openai_client(self.session) as client:
            self.messages.append({"role": "user", "content": text})
            got = await client.chat.completions.create(model="m", messages=self.messages)
        self.messages.append(got.choices[0].message)
        self.num_tokens.append((got.usage.prompt_tokens, got.usage.completion_tokens))
        return got.choices[0].message.content


class ResponsesChat(Chat):
    async def ask(self, text: str) -> str:
        async with openai_client(self.session) as client:
            self.messages.append({"role": "user", "content": text})
            got = await client.responses.create(model="m", input=self.messages)
        self.messages += got.output
        self.num_tokens.append((got.usage.input_tokens, got.usage.output_tokens))
        return got.output_text


class PreviousIdChat(Chat):
    async def ask(self, text: str) -> str:
        async with openai_client(self.session) as client:
            previous = {"previous_response_id": self.messages[-1]} if self.messages else {}
            got = await client.responses.create(model="m", input=text, **previous)
        self.messages.append(got.id)
        self.num_tokens.append((got.usage.input_tokens, got.usage.output_tokens))
        return got.output_text


class AnthropicChat(Chat):
    async def ask(self, text: str) -> str:
        async with anthropic_client(self.session) as client:
            self.messages.append({"role": "user", "content": text})
            got = await client.messages.create(model="m", max_tokens=100, messages=self.messages)
        self.messages.append({"role": "assistant", "content": got.content})
        self.num_tokens.append((got.usage.input_tokens, got.usage.output_tokens))
        return got.content[0].text


@pytest.mark.parametrize("kind", [Chat, ResponsesChat, PreviousIdChat, AnthropicChat])
def test_a_conversation_is_one_growing_row_of_tokens(kind: type[Chat]) -> None:
    tokenizer = make_tokenizer(CHATML)
    model = ScriptedGenerator(tokenizer, ["four", "  no, <5>\n", "", "end"])
    limits = TurnLimits(max_turn_tokens=50, max_context_length=MAX_CONTEXT_LENGTH, max_turns=10)
    agent = EpisodeAgent(model, build_renderer(tokenizer, chat_template=True), limits)

    async def test() -> Chat:
        async with SessionServer() as server:
            chat = kind(server.open(agent))
            said = [await chat.ask(text) for text in ("2 + 2 =", "sure?", "well", "bye")]
            assert said == ["four", "  no, <5>\n", "", "end"]
            assert chat.session.counts.num_ours == 0 + 1 + 2 + 3
            return chat

    chat = asyncio.run(test())
    assert agent.num_rewritten == 0
    assert [request.after for request in model.requests] == [None, 0, 1, 2]
    for before, after in zip(model.paths, model.paths[1:], strict=False):
        assert after[: len(before)] == before
    for path, (num_before, num_sampled) in zip(model.paths, chat.num_tokens, strict=True):
        assert num_before + num_sampled == len(path)


def test_a_branch_and_a_history_that_was_rewritten() -> None:
    tokenizer = make_tokenizer(CHATML)
    model = ScriptedGenerator(tokenizer, ["one", "two", "three", "four"])
    limits = TurnLimits(max_turn_tokens=50, max_context_length=MAX_CONTEXT_LENGTH, max_turns=10)
    agent = EpisodeAgent(model, build_renderer(tokenizer, chat_template=True), limits)

    async def test() -> None:
        async with SessionServer() as server:
            session = server.open(agent)
            first, second = Chat(session), Chat(session)
            await first.ask("count")
            second.messages = list(first.messages)
            await asyncio.gather(first.ask("on"), second.ask("further"))
            second.messages[1] = {"role": "assistant", "content": "ONE"}
            await second.ask("again")
            assert session.counts.num_rewritten == 2

    asyncio.run(test())
    # Two turns go on from the first one; what was changed begins anew.
    assert [request.after for request in model.requests] == [None, 0, 0, None]
    assert agent.num_rewritten == 1


GET = {"type": "object", "properties": {"x": {"type": "integer"}}}
NAMES = ("get_value", "set_value")
NO_THOUGHTS = "<think>\n\n</think>\n\n"
OPENINGS = {
    "qwen3": (
        NO_THOUGHTS + '<tool_call>\n{"name": "',
        NO_THOUGHTS + '<tool_call>\n{"name": "set_value", "arguments":',
        ' {"x": 1}}\n</tool_call>',
    ),
    "qwen3.5": (
        "\n</think>\n\n<tool_call>\n<function=",
        "\n</think>\n\n<tool_call>\n<function=set_value>\n",
        "<parameter=x>\n1\n</parameter>\n</function>\n</tool_call>",
    ),
    "glm-4.5": (
        "\n<think></think>\n<tool_call>",
        "\n<think></think>\n<tool_call>set_value\n",
        "<arg_key>x</arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
    ),
    "llama-3": ('{"name": "', '{"name": "set_value", "parameters":', ' {"x": 1}}'),
}
"""What a call of either tool begins with, what one of ``set_value`` begins with, and how it goes on."""


async def forced_chat(session: Session, name: str | None) -> tuple[str, Any, int, int]:
    tools = [{"type": "function", "function": {"name": one, "parameters": GET}} for one in NAMES]
    named = {"type": "function", "function": {"name": name}}
    async with openai_client(session) as client:
        got = await client.chat.completions.create(
            model="m",
            messages=[{"role": "user", "content": "set x"}],
            tools=tools,
            tool_choice="required" if name is None else named,
        )
    (called,) = got.choices[0].message.tool_calls
    assert got.choices[0].finish_reason == "tool_calls"
    called = called.function
    return called.name, json.loads(called.arguments), got.usage.prompt_tokens, got.usage.completion_tokens


async def forced_responses(session: Session, name: str | None) -> tuple[str, Any, int, int]:
    tools = [{"type": "function", "name": one, "parameters": GET} for one in NAMES]
    async with openai_client(session) as client:
        got = await client.responses.create(
            model="m",
            input="set x",
            tools=tools,
            tool_choice="required" if name is None else {"type": "function", "name": name},
        )
    (called,) = got.output
    return called.name, json.loads(called.arguments), got.usage.input_tokens, got.usage.output_tokens


async def forced_messages(session: Session, name: str | None) -> tuple[str, Any, int, int]:
    async with anthropic_client(session) as client:
        given: Any = {
            "model": "m",
            "messages": [{"role": "user", "content": "set x"}],
            "tools": [{"name": one, "input_schema": GET} for one in NAMES],
            "tool_choice": {"type": "any"} if name is None else {"type": "tool", "name": name},
        }
        counted = await client.messages.count_tokens(**given)
        got = await client.messages.create(max_tokens=100, **given)
    (called,) = got.content
    assert got.usage.input_tokens == counted.input_tokens
    return called.name, called.input, got.usage.input_tokens, got.usage.output_tokens


@pytest.mark.parametrize("ask", [forced_chat, forced_responses, forced_messages])
@pytest.mark.parametrize("name", [None, "set_value"])
@pytest.mark.parametrize("family", OPENINGS)
def test_a_forced_call_is_begun_by_given_tokens_and_sampled_to_its_end(
    family: str, name: str | None, ask: Any
) -> None:
    any_opening, opening, rest = OPENINGS[family]
    if name is None:
        rest = opening.removeprefix(any_opening) + rest
        opening = any_opening
    tokenizer = family_tokenizer(family)
    model = ScriptedGenerator(tokenizer, [rest, "done"])
    limits = TurnLimits(max_turn_tokens=100, max_context_length=2000, max_turns=10)
    agent = EpisodeAgent(model, FamilyRenderer(tokenizer, family), limits)

    async def test() -> None:
        async with SessionServer() as server:
            session = server.open(agent)
            called, arguments, num_before, num_sampled = await ask(session, name)
        assert (called, arguments) == ("set_value", {"x": 1})
        given = model.requests[0].given_ids.tolist()
        assert tokenizer.decode(given).endswith(opening)
        assert model.ids == given + model.ids[len(given) :]
        # What was given counts as prompt, and what counts as sampled is what the generator has sampled.
        assert (num_before, num_sampled) == (len(given), len(model.ids) - len(given))
        # The next turn follows all of it.
        turn = agent.turns[0]
        result = {"role": "tool", "tool_call_id": "call_0", "content": "ok"}
        await agent.respond([*turn.messages, result], turn.tools)
        assert model.requests[1].after == 0 and agent.num_rewritten == 0
        assert model.paths[1][: len(model.paths[0])] == model.paths[0]
        assert tokenizer.decode(model.paths[0]).count("set_value") == tokenizer.decode(model.paths[1]).count(
            "set_value"
        )

    asyncio.run(test())


def test_a_forced_turn_of_a_history_that_was_rewritten_keeps_its_tokens() -> None:
    tokenizer = family_tokenizer("qwen3")
    _, opening, rest = OPENINGS["qwen3"]
    model = ScriptedGenerator(tokenizer, [rest, "done"])
    limits = TurnLimits(max_turn_tokens=100, max_context_length=2000, max_turns=10)
    agent = EpisodeAgent(model, FamilyRenderer(tokenizer, "qwen3"), limits)
    tools = [ToolSpec(name="set_value", description="", parameters=GET)]

    async def test() -> None:
        turn = await agent.respond("set x", tools, must_call=tools)
        result = {"role": "tool", "tool_call_id": turn.tool_calls[0].id, "content": "ok"}
        asked, inserted = ({"role": "user", "content": text} for text in ("set x", "please"))
        await agent.respond([asked, inserted, turn.message, result], tools)
        assert (agent.num_rewritten, agent.num_from_text) == (1, 0)
        said = agent.turns[0].kept.said.ids_T.tolist()
        assert tokenizer.decode(said).startswith(opening + rest)
        assert model.paths[0][-len(said) :] == said
        given = model.requests[1].given_ids.tolist()
        assert any(given[start : start + len(said)] == said for start in range(len(given)))

    asyncio.run(test())


@pytest.mark.parametrize("kind", [PlainRenderer, TemplateRenderer])
def test_a_call_is_not_forced_where_the_format_has_none(kind: Any) -> None:
    tokenizer = make_tokenizer(CHATML)
    model = ScriptedGenerator(tokenizer, ["x"])
    limits = TurnLimits(max_turn_tokens=50, max_context_length=MAX_CONTEXT_LENGTH, max_turns=10)
    renderer: MessageRenderer = kind(tokenizer)
    agent = EpisodeAgent(model, renderer, limits)

    async def test() -> None:
        async with SessionServer() as server:
            with pytest.raises(openai.BadRequestError, match="leave the choice of tools") as caught:
                await forced_chat(server.open(agent), None)
            assert caught.value.param == "tool_choice"
        assert not model.requests

    asyncio.run(test())


def test_tokens_are_counted_as_a_turn_would_have_them() -> None:
    tokenizer = make_tokenizer(CHATML)
    # Text that the tokenizer would cut otherwise if it were tokenized again.
    model = ScriptedGenerator(tokenizer, ["four", "  no, <5>\n"])
    limits = TurnLimits(max_turn_tokens=50, max_context_length=MAX_CONTEXT_LENGTH, max_turns=10)
    agent = EpisodeAgent(model, build_renderer(tokenizer, chat_template=True), limits)

    async def test() -> None:
        async with SessionServer() as server:
            chat = AnthropicChat(server.open(agent))
            async with anthropic_client(chat.session) as client:
                for text in ("2 + 2 =", "sure?"):
                    asked = [*chat.messages, {"role": "user", "content": text}]
                    counted = [
                        (await client.messages.count_tokens(model="m", messages=asked)).input_tokens
                        for _ in range(2)
                    ]
                    await chat.ask(text)
                    assert counted == [chat.num_tokens[-1][0]] * 2
                changed = [{"role": "user", "content": "3 + 3 ="}, *chat.messages[1:], asked[-1]]
                await client.messages.count_tokens(model="m", messages=changed)
                with pytest.raises(anthropic.BadRequestError, match="messages is empty"):
                    await client.messages.count_tokens(model="m", messages=[])
                raw = await client.messages.with_raw_response.count_tokens(
                    model="m", messages=asked, extra_body={"of_next_year": 1}
                )
                assert raw.headers["x-forgeasync-ignored"] == "of_next_year"
            counts = chat.session.counts
            assert (counts.num_requests, counts.num_turns) == (2, 2)
            assert (counts.num_ours, counts.num_rewritten) == (1, 0)
        assert (len(model.requests), agent.num_rewritten, agent.num_from_text) == (2, 0, 0)

    asyncio.run(test())
