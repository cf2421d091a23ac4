"""Agents behind a session: what a client sends adds tokens to those that were sampled, no others."""

import asyncio
import threading
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
    TurnLimits,
    choose_renderer,
)
from forgeasync.testing import ScriptedGenerator
from tests.environments.sessions.apis import APIS, CHAT, MESSAGES, RESPONSES, Api
from tests.support.chat import CHATML, make_tokenizer
from tests.support.chat_families import family_tokenizer
from tests.support.sessions import (
    ScriptedAgent,
    anthropic_client,
    openai_client,
    say,
)


class Conversation:
    """A client that keeps its history in the form of its API."""

    def __init__(self, session: Session, api: Api) -> None:
        self.session = session
        self.api = api
        self.messages: list[Any] = []
        self.num_tokens: list[tuple[int, int]] = []
        """Before each turn, and of it, as the API says."""

    async def ask(self, text: str) -> str:
        self.messages.append({"role": "user", "content": text})
        got = await self.api.ask(self.session, self.messages)
        self.messages += self.api.said(got)
        self.num_tokens.append(self.api.usage(got))
        return self.api.text(got)


class ByPreviousId(Conversation):
    """Only names what it continues."""

    async def ask(self, text: str) -> str:
        previous = {"previous_response_id": self.messages[-1]} if self.messages else {}
        got = await RESPONSES.ask(self.session, text, **previous)
        self.messages.append(got.id)
        self.num_tokens.append(RESPONSES.usage(got))
        return got.output_text


def make_agent(model: ScriptedGenerator, renderer: MessageRenderer) -> EpisodeAgent:
    limits = TurnLimits(max_turn_tokens=100, max_context_length=2000, max_turns=10)
    return EpisodeAgent(model, renderer, limits)


@pytest.mark.parametrize("api", [*APIS.values(), None], ids=[*APIS, "by previous id"])
async def test_a_conversation_is_one_growing_row_of_tokens(api: Api | None) -> None:
    tokenizer = make_tokenizer(CHATML)
    model = ScriptedGenerator(tokenizer, ["four", "  no, <5>\n", "", "end"])
    agent = make_agent(model, choose_renderer(tokenizer, chat_template=True).renderer)
    async with SessionServer() as server:
        session = server.open(agent)
        talk = ByPreviousId(session, RESPONSES) if api is None else Conversation(session, api)
        said = [await talk.ask(text) for text in ("2 + 2 =", "sure?", "well", "bye")]
    assert said == ["four", "  no, <5>\n", "", "end"]
    assert session.counts.num_ours == 0 + 1 + 2 + 3
    assert agent.counts["episode/num_rewritten_histories"] == 0
    assert [request.after for request in model.requests] == [None, 0, 1, 2]
    for before, after in zip(model.paths, model.paths[1:], strict=False):
        assert after[: len(before)] == before
    assert [sum(numbers) for numbers in talk.num_tokens] == [len(path) for path in model.paths]


GET = {"type": "object", "properties": {"x": {"type": "integer"}}}
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


def forced(api: Api, name: str | None) -> dict[str, Any]:
    """A request that has one of two tools called."""
    tools = [api.tool(name=one, parameters=GET) for one in ("get_value", "set_value")]
    return {"messages": [{"role": "user", "content": "set x"}], "tools": tools, **api.forcing(name)}


@pytest.mark.parametrize("api", APIS.values(), ids=APIS)
@pytest.mark.parametrize("name", [None, "set_value"])
@pytest.mark.parametrize("family", OPENINGS)
async def test_a_forced_call_is_begun_by_given_tokens_and_sampled_to_its_end(
    family: str, name: str | None, api: Api
) -> None:
    any_opening, opening, rest = OPENINGS[family]
    if name is None:
        rest = opening.removeprefix(any_opening) + rest
        opening = any_opening
    tokenizer = family_tokenizer(family)
    model = ScriptedGenerator(tokenizer, [rest, "done"])
    agent = make_agent(model, FamilyRenderer(tokenizer, family))
    async with SessionServer() as server:
        session = server.open(agent)
        got = await api.ask(session, **forced(api, name))
        if api is MESSAGES:
            async with anthropic_client(session) as client:
                counted = await client.messages.count_tokens(model="m", **forced(api, name))
            assert counted.input_tokens == api.usage(got)[0]
    assert api.calls(got) == [("set_value", {"x": 1})]
    if api is CHAT:
        assert got.choices[0].finish_reason == "tool_calls"
    given = model.requests[0].given_ids.tolist()
    assert tokenizer.decode(given).endswith(opening)
    assert model.ids == given + model.ids[len(given) :]
    # What was given counts as prompt, and what counts as sampled is what the generator has sampled.
    assert api.usage(got) == (len(given), len(model.ids) - len(given))
    # The next turn follows all of it.
    turn = agent.turns[0]
    result = {"role": "tool", "tool_call_id": "call_0", "content": "ok"}
    await agent.respond([*turn.messages, result], turn.tools)
    assert model.requests[1].after == 0 and agent.counts["episode/num_rewritten_histories"] == 0
    assert model.paths[1][: len(model.paths[0])] == model.paths[0]
    first, second = (tokenizer.decode(path).count("set_value") for path in model.paths)
    assert first == second


@pytest.mark.parametrize("kind", [PlainRenderer, TemplateRenderer])
async def test_a_call_is_not_forced_where_the_format_has_none(kind: Any) -> None:
    tokenizer = make_tokenizer(CHATML)
    model = ScriptedGenerator(tokenizer, ["x"])
    agent = make_agent(model, kind(tokenizer))
    async with SessionServer() as server:
        with pytest.raises(openai.BadRequestError, match="leave the choice of tools") as caught:
            await CHAT.ask(server.open(agent), **forced(CHAT, None))
        assert caught.value.param == "tool_choice"
    assert not model.requests


async def test_tokens_are_counted_as_a_turn_would_have_them() -> None:
    tokenizer = make_tokenizer(CHATML)
    # Text that the tokenizer would cut otherwise if it were tokenized again.
    model = ScriptedGenerator(tokenizer, ["four", "  no, <5>\n"])
    agent = make_agent(model, choose_renderer(tokenizer, chat_template=True).renderer)
    async with SessionServer() as server:
        chat = Conversation(server.open(agent), MESSAGES)
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
    assert len(model.requests) == 2 and not agent.counts.total()


# ---- agents that bring their own loop


async def test_an_agent_of_another_thread() -> None:
    """A session is opened, waited for and closed on a loop that is not the server's."""
    started, stop = threading.Event(), threading.Event()
    servers: list[SessionServer] = []

    async def serve() -> None:
        async with SessionServer() as server:
            servers.append(server)
            started.set()
            while not stop.is_set():
                await asyncio.sleep(0.005)

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    try:
        started.wait()
        session = servers[0].open(ScriptedAgent([say("hello")]))
        async with openai_client(session) as client:
            asked = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
            got = await client.chat.completions.create(**asked)
            assert got.choices[0].message.content == "hello"
            session.close()
            assert await session.finished() == ()
            with pytest.raises(openai.APIStatusError, match="this session is closed"):
                await client.chat.completions.create(**asked)
    finally:
        stop.set()
        thread.join()
