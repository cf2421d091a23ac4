"""A real agent behind a session: what a client sends adds tokens to those that were sampled, no others."""

import asyncio
from typing import Any

import pytest

from forgeasync.environments import EpisodeAgent, Session, SessionServer, TurnLimits, build_renderer
from forgeasync.testing import ScriptedGenerator
from tests.support.chat import CHATML, make_tokenizer
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
