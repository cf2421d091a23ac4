"""Calls of tools: every one gets an answer in time, whatever the model wrote and the tool does."""

import asyncio
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from forgeasync.config import Ending
from forgeasync.environments import (
    BrokenToolCall,
    EpisodeInterrupted,
    Tool,
    Toolbox,
    ToolCall,
    ToolError,
    ToolFailed,
    ToolResult,
    ToolRun,
    num_stuck_calls,
    run_tools,
)
from forgeasync.observability import EndedEpisodes
from forgeasync.processes import is_running
from forgeasync.rollouts import AgentOutcome, EpisodeOutcome, ToolStatus
from forgeasync.testing import HandTime, ScriptedAgent, scripted_turn

SLEEPS = [sys.executable, "-c", "import time; time.sleep(600)"]
STARTS_ANOTHER = [
    sys.executable,
    "-c",
    "import subprocess, sys; print(subprocess.Popen(sys.argv[1:]).pid, flush=True); input()",
    *SLEEPS,
]


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def call(name: str, number: int = 0, **arguments: Any) -> ToolCall:
    return ToolCall(id=f"call_{number}", name=name, arguments=arguments)


def run(
    function: Callable[..., object], *, limit_s: float = 300.0, max_characters: int = 1000, **arguments: Any
) -> ToolResult:
    toolbox = Toolbox([Tool.from_function(function)], max_characters=max_characters)
    return asyncio.run(toolbox.call(call(function.__name__, **arguments), limit_s=limit_s))


def test_results_are_text_or_json() -> None:
    def give(kind: str) -> object:
        """Give something."""
        return {"text": "a\nb", "none": None, "list": [1, {"é": 2.5}], "odd": {"where": threading}}[kind]

    assert run(give, kind="text").content == "a\nb"
    assert run(give, kind="none").content == ""
    assert run(give, kind="list").content == '[1,{"é":2.5}]'
    assert "module 'threading'" in run(give, kind="odd").content


async def test_what_the_model_does_wrong_is_told() -> None:
    toolbox = Toolbox([Tool.from_function(add)])
    unknown = await toolbox.call(call("subtract" * 1000), limit_s=1.0)
    assert unknown.status is ToolStatus.UNKNOWN_TOOL
    assert "there is no tool 'subtract" in unknown.content and "tools: add" in unknown.content
    assert len(unknown.content) < 300
    wrong = await toolbox.call(call("add", a="2", c=1), limit_s=1.0)
    assert wrong.status is ToolStatus.BAD_ARGUMENTS
    assert all(word in wrong.content for word in ("'a'", "'b' is missing", "no argument 'c'"))


class Named(Exception):
    pass


def raises(kind: str) -> str:
    """Raise."""
    errors: dict[str, BaseException] = {
        "own": Named("no such\nrow"),
        "failed": ToolFailed("the shop is closed"),
        "exit": SystemExit(3),
        "stop": StopIteration(),
        "cancelled": asyncio.CancelledError(),
    }
    raise errors[kind]


async def raises_later(kind: str) -> str:
    """Raise."""
    await asyncio.sleep(0)
    return raises(kind)


@pytest.mark.parametrize("function", [raises, raises_later])
def test_what_a_tool_raises_is_told_without_a_traceback(function: Callable[[str], object]) -> None:
    results = {kind: run(function, kind=kind) for kind in ("own", "failed", "exit", "stop", "cancelled")}
    assert {result.status for result in results.values()} == {ToolStatus.FAILED}
    assert results["own"].content == "Named: no such\nrow"
    assert results["failed"].content == "the shop is closed"
    assert results["exit"].content == "SystemExit: 3"
    assert "Traceback" not in "".join(result.content for result in results.values())


@pytest.mark.parametrize("error", [EpisodeInterrupted("gone"), ToolError("broken")])
def test_a_tool_can_end_the_episode(error: Exception) -> None:
    def ends() -> None:
        """End the episode."""
        raise error

    with pytest.raises(type(error), match=str(error)):
        run(ends)


def test_what_a_tool_says_is_cut_and_told() -> None:
    def flood(num: int) -> str:
        """Say much."""
        return "x" * num

    def fails(num: int) -> str:
        """Fail with many words."""
        raise ToolFailed("y" * num)

    cut = run(flood, max_characters=100, num=5000)
    assert (cut.status, cut.num_cut_characters) == (ToolStatus.CUT, 4900)
    assert cut.content == "x" * 100 + "\n[4900 more characters were cut]"
    assert run(flood, max_characters=100, num=100).status is ToolStatus.OK
    failed = run(fails, max_characters=100, num=5000)
    assert failed.status is ToolStatus.FAILED
    assert len(failed.content) < 150 and failed.num_cut_characters > 4800


async def cut_off(
    clock: HandTime, function: Callable[..., object], has_begun: Callable[[], bool], *, limit_s: float
) -> ToolResult:
    """A call during which time passes until its end, from where it has begun what it does."""
    toolbox = Toolbox([Tool.from_function(function)])
    result = asyncio.ensure_future(toolbox.call(call(function.__name__), limit_s=limit_s))
    await clock.stand_until(has_begun)
    await clock.pass_until(result.done)
    return await result


def _wait_gone(pids: list[int]) -> None:
    while any(is_running(pid) for pid in pids):
        time.sleep(0.001)


@pytest.mark.parametrize("is_async", [False, True])
async def test_a_call_that_takes_too_long_ends_with_all_that_it_started(
    is_async: bool, hand_time: HandTime
) -> None:
    pids: list[int] = []

    def start() -> str:
        """Start a process that starts another."""
        process = subprocess.Popen(STARTS_ANOTHER, stdout=subprocess.PIPE, stdin=subprocess.PIPE)
        assert process.stdout is not None
        pids.extend([process.pid, int(process.stdout.readline())])
        if not is_async:
            process.wait()
        return "never"

    async def start_later() -> str:
        """Start a process that starts another."""
        start()
        await asyncio.sleep(600.0)
        return "never"

    function = start_later if is_async else start
    result = await cut_off(hand_time, function, lambda: len(pids) == 2, limit_s=2.0)
    assert (result.status, result.content) == (ToolStatus.TIMEOUT, "Error: the call took longer than 2 s")
    _wait_gone(pids)


async def test_processes_of_other_calls_live_on_as_long_as_these(hand_time: HandTime) -> None:
    pids: list[int] = []

    async def wait() -> None:
        """Start a process and wait for ever."""
        pids.append(subprocess.Popen(SLEEPS).pid)
        await asyncio.sleep(600.0)

    async def work() -> str:
        """Start a process after the other call has begun, and use it after that one was cut off."""
        process = subprocess.Popen("cat", stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        pids.append(process.pid)
        await cut_off.wait()
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(b"alive\n")
        process.stdin.flush()
        return process.stdout.readline().decode()

    cut_off = asyncio.Event()
    toolbox = Toolbox([Tool.from_function(wait), Tool.from_function(work)])
    waiting = asyncio.ensure_future(toolbox.call(call("wait"), limit_s=1.0))
    await hand_time.stand_until(lambda: len(pids) == 1)
    working = asyncio.ensure_future(toolbox.call(call("work"), limit_s=300.0))
    await hand_time.stand_until(lambda: len(pids) == 2)
    await hand_time.pass_until(waiting.done)
    cut_off.set()
    late, worked = await waiting, await working
    assert (late.status, worked.content) == (ToolStatus.TIMEOUT, "alive\n")
    assert len(pids) == 2
    _wait_gone(pids)


def ended(*calls_s: float, **calls: int) -> EpisodeOutcome:
    return EpisodeOutcome(
        ending=Ending.COMPLETED,
        agents=(AgentOutcome(score=None, num_turns=1),),
        episode_s=1.0,
        sampling_s=0.5,
        counts=Counter({f"episode/num_tool_calls_{status}": num for status, num in calls.items()}),
        tool_calls_s=calls_s,
    )


def test_calls_are_counted_by_what_came_of_them() -> None:
    episodes = EndedEpisodes()
    assert episodes.metrics()["episode/num_tool_calls_ok"] == 0
    for num in (2, 3):
        episodes.add([ended(ok=num, timeout=1)])
    metrics = episodes.metrics()
    assert metrics["episode/num_tool_calls_ok"] == 5
    assert metrics["episode/num_tool_calls_timeout"] == 2
    assert metrics["episode/num_tool_calls_server_lost"] == 0
    assert not any(key.startswith("episode/tool_call_") for key in metrics), "no call has taken any time"


def test_how_long_calls_took_is_of_the_last_step() -> None:
    episodes = EndedEpisodes()
    for calls_s in ((), (0.1, 0.2, 0.3), (4.0,)):
        episodes.add([ended(*calls_s)])
    metrics = episodes.metrics()
    # Between the second and the third of 0.1, 0.2, 0.3, 4: half of the way, and 0.85 of the next one.
    assert metrics["episode/tool_call_p50_s"] == pytest.approx(0.25)
    assert metrics["episode/tool_call_p95_s"] == pytest.approx(0.3 + 0.85 * 3.7)
    assert metrics["episode/tool_call_max_s"] == 4.0
    episodes.end_step()
    assert "episode/tool_call_p50_s" not in episodes.metrics()


async def test_a_call_that_nothing_ends_is_counted(hand_time: HandTime) -> None:
    free = threading.Event()

    def block() -> None:
        """Wait in C."""
        began.set()
        free.wait()

    began = threading.Event()
    try:
        result = await cut_off(hand_time, block, began.is_set, limit_s=0.1)
        assert result.status is ToolStatus.TIMEOUT
        assert num_stuck_calls() == 1
    finally:
        free.set()
    while num_stuck_calls():
        time.sleep(0.001)


async def test_an_episode_that_is_cancelled_ends_its_tools() -> None:
    began, pids = threading.Event(), []

    def start() -> None:
        """Start a process."""
        process = subprocess.Popen(SLEEPS)
        pids.append(process.pid)
        began.set()
        process.wait()

    running = asyncio.ensure_future(Toolbox([Tool.from_function(start)]).call(call("start"), limit_s=300.0))
    await asyncio.to_thread(began.wait)
    running.cancel()
    await asyncio.wait([running])
    _wait_gone(pids)


def test_two_tools_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="two tools are called 'add'"):
        Toolbox([Tool.from_function(add), Tool.from_function(add)])


def converse(agent: ScriptedAgent, *functions: Callable[..., object], max_rounds: int = 5) -> ToolRun:
    toolbox = Toolbox([Tool.from_function(one) for one in functions])
    return asyncio.run(run_tools(agent, "2 + 3 =", toolbox, max_rounds=max_rounds))


def test_the_loop_answers_all_calls_of_a_turn_in_order() -> None:
    answered = threading.Event()

    def slow() -> str:
        """Answer last, and block until then."""
        answered.wait()
        return "slow"

    async def quick() -> str:
        """Answer first."""
        answered.set()
        return "quick"

    half = BrokenToolCall(text="{", problem="the call is cut off")
    agent = ScriptedAgent(
        scripted_turn("both", call("slow", 0), call("quick", 1), call("none", 2), broken=[half]), "done"
    )
    result = converse(agent, slow, quick)
    assert result.is_finished and result.turn.text == "done"
    first, second = agent.heard
    assert second[: len(first)] == first
    assert [message["content"] for message in second[2:5]] == [
        "slow",
        "quick",
        "Error: there is no tool 'none'; tools: slow, quick",
    ]
    assert [message["tool_call_id"] for message in second[2:5]] == ["call_0", "call_1", "call_2"]
    assert second[5] == {"role": "user", "content": "Error: a tool call cannot be read: the call is cut off"}
    assert result.messages[-1]["content"] == "done"
    assert agent.tool_calls == {ToolStatus.OK: 2, ToolStatus.UNKNOWN_TOOL: 1, ToolStatus.UNREADABLE: 1}
    assert len(agent.tool_calls_s) == 2, "the third call was of no tool"
    assert all(took_s > 0.0 for took_s in agent.tool_calls_s)
    assert (result.num_broken_calls, result.num_failed_calls) == (1, 2)
    assert [spec.name for spec in agent.tools[0]] == ["slow", "quick"]


def test_the_loop_ends_after_its_rounds() -> None:
    agent = ScriptedAgent(*(scripted_turn("", call("add", number, a=1, b=1)) for number in range(9)))
    result = converse(agent, add, max_rounds=3)
    assert len(agent.heard) == 4
    assert not result.is_finished
    assert agent.tool_calls == {ToolStatus.OK: 3}


def test_a_call_in_a_turn_has_the_agents_limit_and_a_loop_without_end_is_ended() -> None:
    def spin() -> None:
        """Never return."""
        while True:
            pass

    agent = ScriptedAgent(scripted_turn("", call("spin")), "late", tool_limit_s=0.1)
    assert converse(agent, spin).results[0].status is ToolStatus.TIMEOUT
    while num_stuck_calls():
        time.sleep(0.001)
