"""Agents that bring their own loop: every turn that they hand back is the turn that was sampled."""

import asyncio
import threading
from typing import Any

import openai
import pytest

from forgeasync.environments import BrokenToolCall, SessionServer, Turn
from tests.support.openai_loop import run_tool_loop
from tests.support.sessions import WEATHER, Asking, ScriptedAgent, call, openai_client, say, serving

SCHEMAS = [{"type": "function", "function": {"name": "weather", "parameters": WEATHER}}]
CITIES = {"Oslo": "rain", "Rome": "sun"}

TURNS = [
    say("First Oslo.", reasoning="Which first?", tool_calls=(call("call_0", city="Oslo"),)),
    say("", reasoning="Now both.", tool_calls=(call("call_0", city="Rome"), call("call_1", city="Paris"))),
    say("", tool_calls=(call("call_0", name="invented", x="1"),)),
    say("Rome."),
]


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_loop_over_four_turns(stream: bool) -> None:
    async def test() -> None:
        agent = ScriptedAgent(TURNS)
        async with serving(agent) as (_, session):
            answer = await run_tool_loop(
                session.base_url,
                session.api_key,
                "Where is the sun?",
                {"weather": lambda city: CITIES[city]},
                SCHEMAS,
                stream=stream,
            )
        assert answer == "Rome."
        assert len(agent.calls) == 4
        for number, asking in enumerate(agent.calls):
            ours = [message for message in asking.messages if message["role"] == "assistant"]
            assert ours == [turn.message for turn in TURNS[:number]]
            # What is new comes after all that was there.
            if number:
                before = agent.calls[number - 1].messages
                assert asking.messages[: len(before)] == before
        results = [message["content"] for message in agent.calls[3].messages if message["role"] == "tool"]
        assert results == ["rain", "sun", "error: KeyError('Paris')", "error: KeyError('invented')"]
        assert (session.counts.num_ours, session.counts.num_rewritten) == (6, 0)

    asyncio.run(test())


def test_sub_agents_overlap_in_one_session() -> None:
    """Twenty conversations at once, each of three turns, keep apart."""

    def answer(asking: Asking) -> Turn:
        said = [message for message in asking.messages if message["role"] == "assistant"]
        name = asking.messages[0]["content"]
        broken = BrokenToolCall(text="<tool_call>", problem="cut off")
        return say(f"{name}.{len(said)}", reasoning=f"r{asking.number}", broken_tool_calls=(broken,))

    async def sub_agent(client: openai.AsyncOpenAI, name: str) -> list[str]:
        messages: list[Any] = [{"role": "user", "content": name}]
        for _ in range(3):
            got = await client.chat.completions.create(model="m", messages=messages)
            text = got.choices[0].message.content
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "go on"}]
        return [message["content"] for message in messages[1::2]]

    async def test() -> None:
        agent = ScriptedAgent(answer=answer)
        async with serving(agent) as (_, session), openai_client(session) as client:
            names = [f"agent {index % 10}" for index in range(20)]  # Two of each name.
            got = await asyncio.gather(*(sub_agent(client, name) for name in names))
        for name, texts in zip(names, got, strict=True):
            assert texts == [f"{name}.{index}\n<tool_call>" for index in range(3)]
        assert len(agent.calls) == 60
        assert (session.counts.num_ours, session.counts.num_rewritten) == (60, 0)
        for asking in agent.calls:
            for message in asking.messages[1::2]:
                # The turn's own message: without the text of the broken call, with its thoughts.
                assert "<tool_call>" not in message["content"]
                assert message["reasoning_content"].startswith("r")
        # Sub-agents of one name are told the same, and drop the thoughts that set their turns apart. Each
        # goes on from turns of one conversation, and no turn is gone on from twice.
        later = [asking.messages for asking in agent.calls if len(asking.messages) > 1]
        last = [int(messages[-2]["reasoning_content"][1:]) for messages in later]
        assert len(set(last)) == len(last) == 40
        for number, messages in zip(last, later, strict=True):
            assert agent.calls[number - 1].messages == messages[:-2]

    asyncio.run(test())


def test_an_agent_of_another_thread() -> None:
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

        async def test() -> None:
            session = servers[0].open(ScriptedAgent([say("hello")]))
            async with openai_client(session) as client:
                asked = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
                got = await client.chat.completions.create(**asked)
                assert got.choices[0].message.content == "hello"
                session.close()
                assert await session.finished() == ()
                with pytest.raises(openai.APIStatusError, match="this session is closed"):
                    await client.chat.completions.create(**asked)

        asyncio.run(test())
    finally:
        stop.set()
        thread.join()
