"""What the doubles of ``forgeasync.testing`` do and refuse; tests/examples/test_pages.py runs their page."""

import asyncio

import pytest

import forgeasync as fa
from forgeasync.testing import (
    HandClock,
    ScriptedAgent,
    ScriptEnded,
    VirtualTime,
    run_episode,
    scripted_turn,
)

TASK = fa.Task(task_id="0", prompt="1 + 3 =", answer="4", source_index=0, source="sums")


async def test_a_script_that_is_too_short_says_so() -> None:
    agent = ScriptedAgent("5")
    await agent.respond("a")
    with pytest.raises(ScriptEnded, match="the script has 1 turns, and one more was requested"):
        await agent.respond("b")


async def test_an_agent_refuses_what_the_agent_of_a_run_refuses() -> None:
    with pytest.raises(ValueError, match="role"):
        await ScriptedAgent("5").respond([{"content": "a"}])
    with pytest.raises(NotImplementedError, match="no URL"):
        ScriptedAgent().api_key  # noqa: B018


def test_an_episode_of_an_environment_that_raises_has_an_ending_and_a_problem() -> None:
    class Raises(fa.Environment):
        async def rollout(self, task: fa.Task, agent: fa.Agent) -> fa.Score:
            await agent.respond(task.prompt)
            raise KeyError("gone")

    with pytest.raises(ScriptEnded):
        run_episode(Raises(), TASK)
    outcome = run_episode(Raises(), TASK, "5")
    assert outcome.ending == "environment_crash" and "gone" in (outcome.problem or "")
    assert outcome.agents[0].score is None and outcome.num_turns == 1


def test_turns_call_tools() -> None:
    turn = scripted_turn("so", fa.ToolCall(id="a", name="add", arguments={"a": 1}))
    assert turn.text == "so" and turn.tool_calls[0].name == "add"


def test_sleeps_of_virtual_time_end_at_once_and_count() -> None:
    time = VirtualTime()

    async def wait() -> float:
        await asyncio.sleep(3600.0)
        return asyncio.get_running_loop().time()

    assert time.run(wait()) == time.now_s() == 3600.0
    clock = HandClock()
    clock.advance(2.0)
    assert clock() == 2.0
