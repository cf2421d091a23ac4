"""Turns from a server of others, by the unmodified openai SDK over a real connection."""

import asyncio
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from forgeasync.config import Ending, EpisodesSection, SamplingSection
from forgeasync.environments import (
    Agent,
    ContextFull,
    EndpointAgent,
    EndpointModel,
    EndpointTurns,
    Environment,
    EpisodeInterrupted,
    EpisodeOver,
    ToolSpec,
    TooManyTurns,
)
from forgeasync.rollouts import EpisodeId, EpisodeOutcome, FinishReason, Score, Task
from forgeasync.testing import HandClock
from tests.support.buffer_world import make_task
from tests.support.chat_server import ChatServer, Reply, call, completion, error, serving
from tests.support.episodes import make_episodes

SAMPLING = SamplingSection(temperature=0.5, top_p=0.9, max_response_tokens=50, stop=("END",))
ADD = ToolSpec(name="add", description="adds", parameters={"type": "object", "properties": {}})


def make_agent(server: ChatServer, **changes: Any) -> EndpointAgent:
    endpoint = EndpointModel(base_url=server.url, model="served", max_retries=changes.pop("max_retries", 0))
    settings = {"endpoint": endpoint, "sampling": SAMPLING, "limit_s": 300.0, "max_turns": 10}
    return EndpointAgent(**(settings | changes))


def ask(agent: EndpointAgent, *arguments: Any, **keywords: Any) -> Any:
    async def go() -> Any:
        try:
            return await agent.respond(*arguments, **keywords)
        finally:
            await agent.leave()

    return asyncio.run(go())


def test_a_turn_is_what_the_server_says() -> None:
    with serving(lambda body: completion("four", reasoning_content="2 and 2")) as server:
        turn = ask(make_agent(server), "2 + 2 =", [ADD], max_tokens=9, stop=("STOP",))
    (request,) = server.requests
    assert request == {
        "model": "served",
        "messages": [{"role": "user", "content": "2 + 2 ="}],
        "temperature": 0.5,
        "top_p": 0.9,
        "max_tokens": 9,
        "stop": ["END", "STOP"],
        "tools": [ADD.message_form],
    }
    assert (turn.text, turn.reasoning) == ("four", "2 and 2")
    assert (turn.num_prompt_tokens, turn.num_tokens, turn.finish_reason) == (7, 3, FinishReason.STOP)


@pytest.mark.parametrize(
    ("reason", "stop_reason", "expected"),
    [
        ("length", None, (FinishReason.LENGTH, None)),
        ("tool_calls", None, (FinishReason.STOP, None)),
        # vLLM names the text in ``stop_reason``, where a token's number can stand too; others say nothing.
        ("stop", None, (FinishReason.STOP, None)),
        ("stop", "END", (FinishReason.STOP, "END")),
        ("stop", "\n", (FinishReason.STOP, None)),
        ("stop", 151645, (FinishReason.STOP, None)),
    ],
)
def test_what_ended_a_turn(
    reason: str, stop_reason: object, expected: tuple[FinishReason, str | None]
) -> None:
    reply = completion("x", finish_reason=reason)
    if stop_reason is not None:
        reply["choices"][0]["stop_reason"] = stop_reason
    with serving(lambda body: reply) as server:
        turn = ask(make_agent(server), "?")
    assert (turn.finish_reason, turn.stop_text) == expected
    assert server.requests[0]["max_tokens"] == 50 and "tools" not in server.requests[0]


def test_calls_that_cannot_be_read_are_told_apart() -> None:
    calls = [
        call("add", '{"a": 1}'),
        call("add", '{"a": '),
        call("add", "[1, 2]", number=2),
        call("", "{}", number=3),
        call("now", "", number=4),
        call("deep", "[" * 100_000, number=5),
        call("deep", '{"a":' * 129 + "1" + "}" * 129, number=6),
    ]
    with serving(lambda body: completion(None, tool_calls=calls, finish_reason="tool_calls")) as server:
        agent = make_agent(server)
        turn = ask(agent, "?", [ADD])
    assert [(one.id, one.name, one.arguments) for one in turn.tool_calls] == [
        ("c0", "add", {"a": 1}),
        ("c4", "now", {}),
    ]
    problems = [one.problem for one in turn.broken_tool_calls]
    deep = "arguments of deep are nested deeper than 128"
    words = ["are not JSON", "must be an object", "a named function", deep, deep]
    assert all(one in problem for one, problem in zip(words, problems, strict=True)), problems
    assert agent.counts["episode/num_faulty_tool_calls"] == 5
    assert turn.text == "" and [one["id"] for one in turn.message["tool_calls"]] == ["c0", "c4"]


@pytest.mark.parametrize(
    ("message", "code"),
    [
        ("too long", "context_length_exceeded"),
        ("This model's maximum context length is 160 tokens. However, your prompt contains 161.", None),
        ("the request exceeds the available context size", None),
    ],
)
def test_a_full_context_is_said_to_be_full(message: str, code: str | None) -> None:
    with serving(lambda body: error(400, message, code)) as server:
        agent = make_agent(server)
        with pytest.raises(ContextFull, match=message[:20]):
            ask(agent, "?")
    assert agent.has_hit_length and agent.num_turns == 0


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (error(503, "busy"), "InternalServerError: .*busy"),
        (error(401, "bad key"), "AuthenticationError: .*bad key"),
        (error(400, "unknown parameter top_p"), "BadRequestError: .*unknown parameter"),
        (completion("x", usage=None), "without a usage"),
        ({**completion("x"), "choices": []}, "without a choice"),
        (completion("x", finish_reason="content_filter"), "finish_reason 'content_filter'"),
    ],
)
def test_what_the_endpoint_does_is_nobodys_score(reply: Reply, words: str) -> None:
    with serving(lambda body: reply) as server:
        agent = make_agent(server)
        with pytest.raises(EpisodeInterrupted, match=words):
            ask(agent, "?")
    assert agent.num_turns == 0


def test_an_endpoint_that_hangs_is_left() -> None:
    left = threading.Event()

    def slow(body: Mapping[str, Any]) -> Reply:
        left.wait()
        return completion("late")

    with serving(slow) as server:
        with pytest.raises(EpisodeInterrupted, match=r"longer than timeouts\.generate_s = 0\.2 s"):
            ask(make_agent(server, limit_s=0.2, max_retries=9), "?")
        left.set()


def test_the_key_is_read_by_name_and_sent_to_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "of somebody else")
    monkeypatch.setenv("MY_KEY", "secret")
    with serving(lambda body: completion("x")) as server:
        ask(make_agent(server), "?")
        with_key = EndpointModel(base_url=server.url, model="served", api_key_variable="MY_KEY")
        ask(make_agent(server, endpoint=with_key), "?")
        assert server.keys == ["Bearer none", "Bearer secret"]
        monkeypatch.delenv("MY_KEY")
        with pytest.raises(ValueError, match="variable MY_KEY is not set"):
            ask(make_agent(server, endpoint=with_key), "?")


async def test_conversations_are_recorded_with_their_branches() -> None:
    texts = iter(["one", "two", "other", "three"])
    with serving(lambda body: completion(next(texts), usage=(7, 3))) as server:
        agent = make_agent(server, max_turns=4)
        asked = [{"role": "user", "content": "a"}]
        first = await agent.respond(asked)
        messages = [*asked, first.message, {"role": "user", "content": "b"}]
        second = await agent.respond(messages)
        await agent.respond([*asked, {"role": "assistant", "content": "ONE"}, messages[2]])
        await agent.respond([*messages, second.message, {"role": "tool", "content": "c"}])
        with pytest.raises(TooManyTurns):
            await agent.respond("d")
        agent.close()
        with pytest.raises(EpisodeOver):
            await agent.respond("d")
        await agent.leave()
    assert (agent.num_turns, agent.has_hit_max_turns) == (4, True)
    assert agent.counts["episode/num_rewritten_histories"] == 1
    rewritten, whole = agent.branches()
    assert [one["content"] for one in rewritten] == ["a", "ONE", "b", "other"]
    assert [one["content"] for one in whole] == ["a", "one", "b", "two", "c", "three"]
    assert ["num_tokens" in one for one in whole] == [False, True] * 3
    assert ["num_tokens" in one for one in rewritten] == [False, False, False, True]


async def test_calls_are_sent_back_as_text() -> None:
    replies = iter([completion(None, tool_calls=[call("add", '{"a": "ä"}')]), completion("done")])
    with serving(lambda body: next(replies)) as server:
        agent = make_agent(server)
        asked = [{"role": "user", "content": "a"}]
        turn = await agent.respond(asked, [ADD])
        result = {"role": "tool", "tool_call_id": "c0", "content": "3"}
        await agent.respond([*asked, {**turn.message, "reasoning_content": "hm"}, result], [ADD])
        await agent.leave()
    sent = server.requests[1]["messages"][1]
    assert sent["tool_calls"] == [call("add", '{"a": "ä"}')] and "reasoning_content" not in sent


class KeepsWhatItSays(Environment):
    async def rollout(self, task: Task, agent: Agent) -> Score:
        turn = await agent.respond(task.prompt)
        agent.keep("said.txt", turn.text)
        return Score(value=1.0, is_correct=turn.text == "four")


async def run_episode(
    server: ChatServer, folder: Path, *, now_s: Callable[[], float] = time.perf_counter
) -> EpisodeOutcome:
    episodes = make_episodes(KeepsWhatItSays(), now_s=now_s)
    endpoint = EndpointModel(base_url=server.url, model="served", max_retries=0)
    return await episodes.run(
        make_task(3),
        EpisodeId(group_id=-2, index=0),
        max_turn_tokens=10,
        sample=EndpointTurns(endpoint=endpoint, sampling=SAMPLING, limit_s=300.0),
        keeps_record=True,
        artifacts_folder=folder / "artifacts",
    )


async def test_an_environment_runs_unchanged_against_an_endpoint(tmp_path: Path) -> None:
    """The server takes longer than the environment may between two turns: turns do not count as its time."""
    clock, loop, step_s = HandClock(), asyncio.get_running_loop(), EpisodesSection().step_s

    def slow(body: Mapping[str, Any]) -> Reply:
        # The episode's loop has been told before this that a turn has begun.
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop).result()
        clock.advance(step_s + 1.0)
        return completion("four")

    with serving(slow) as server:
        outcome = await run_episode(server, tmp_path, now_s=clock)
    assert outcome.ending is Ending.COMPLETED and outcome.agents[0].score == Score(1.0, True)
    assert outcome.versions is None
    assert outcome.sampling_s == outcome.episode_s == step_s + 1.0
    assert outcome.record is not None
    (branch,) = outcome.record["agents"][0]["branches"]
    assert [one["content"] for one in branch] == [make_task(3).prompt, "four"]
    assert outcome.record["artifacts"] == ["artifacts/evaluation_2-0-0/said.txt"]
    assert (tmp_path / "artifacts/evaluation_2-0-0/said.txt").read_text() == "four"
