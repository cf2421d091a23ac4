"""Episodes in environments of a real OpenEnv server, and what the server does when it goes wrong."""

import asyncio
import threading
import time
from collections.abc import Iterator

import psutil
import pytest

from forgeasync.config import Ending, OpenEnvServer
from forgeasync.environments import BrokenToolCall, ToolCall, build_environment, check_environment
from forgeasync.rollouts import ToolStatus
from forgeasync.testing import ScriptedAgent, scripted_turn
from tests.support.adapters.episodes import run_episodes, task
from tests.support.adapters.servers import Server, free_port, openenv_server

pytestmark = pytest.mark.exhaustive

TEXT = {"kind": "text", "field": "message"}


def section_for(server: Server, game: str, **more: object) -> OpenEnvServer:
    given = {"kind": "openenv", "url": f"ws://127.0.0.1:{server.port}/{game}/ws"}
    return OpenEnvServer.model_validate(given | more)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with openenv_server() as server:
        yield server


def words_section(server: Server, *, game: str = "words", **more: object) -> OpenEnvServer:
    return section_for(server, game, **({"action": TEXT, "observation_field": "echo"} | more))


def test_every_turn_is_a_step_until_the_environment_says_so(server: Server) -> None:
    """Sixteen episodes at once, of which the server takes eight; all are of the task's seed."""
    section = words_section(server, open_s=100.0)
    assert not list(check_environment(section))
    outcomes, models = run_episodes(
        build_environment(section),
        [task(prompt="go")] * 16,
        ["7", "no", "7", "never said"],
        limit_s=200.0,
    )
    assert [outcome.ending for outcome in outcomes] == [Ending.COMPLETED] * 16, outcomes[0].problem
    for outcome, model in zip(outcomes, models, strict=True):
        agent = outcome.agents[0]
        assert (agent.score.value, agent.score.is_correct, agent.num_turns) == (2.0, True, 3)
        assert [request.after for request in model.requests] == [None, 0, 1], "turns are appended as tokens"
        (branch,) = outcome.record["agents"][0]["branches"]
        assert [one["content"] for one in branch] == [
            "go\n\nsay 7", "7", "you said 7", "no", "you said no", "7"
        ]  # fmt: skip


def test_what_the_score_and_the_first_message_are_made_of(server: Server) -> None:
    section = words_section(server, reward="last", opening="observation", observation_field=None)
    (outcome,), _ = run_episodes(build_environment(section), [task()], ["7", "7", "no"])
    assert outcome.agents[0].score.value == 0.0
    (branch,) = outcome.record["agents"][0]["branches"]
    assert branch[0]["content"] == '{"echo": "say 7", "num_left": 3}', "metadata are not for the model"
    section = words_section(server, opening="prompt", system_prompt="Say numbers.", max_rounds=1)
    (outcome,), _ = run_episodes(build_environment(section), [task(prompt="go")], ["7"])
    assert outcome.agents[0].score.value == 1.0, "the rounds end before the environment does"
    (branch,) = outcome.record["agents"][0]["branches"]
    assert [one["content"] for one in branch] == ["Say numbers.", "go", "7"]


@pytest.mark.parametrize(
    ("text", "ending", "problem"),
    [
        ("raise", Ending.ENVIRONMENT_CRASH, "EXECUTION_ERROR: 'no such word'"),
        # As null: OpenEnv writes NaN so.
        ("nan", Ending.ENVIRONMENT_CRASH, "no step had a reward that is a number"),
        ("flood", Ending.INFRASTRUCTURE, "exceeds limit 16777216"),
    ],
)
def test_what_goes_wrong_in_a_step(server: Server, text: str, ending: Ending, problem: str) -> None:
    (outcome,), _ = run_episodes(build_environment(words_section(server)), [task()], [text])
    assert outcome.ending is ending and problem in outcome.problem
    (outcome,), _ = run_episodes(build_environment(words_section(server)), [task()], ["7"] * 3)
    assert outcome.ending is Ending.COMPLETED, "the server goes on"


def test_a_step_that_hangs_is_cut_off_by_our_deadline(server: Server) -> None:
    (outcome,), _ = run_episodes(
        build_environment(words_section(server)), [task()], ["7", "hang"], section={"step_s": 2.0}
    )
    assert outcome.ending is Ending.TIMEOUT and "episodes.step_s" in outcome.problem


def test_the_server_finds_us_alive_while_the_model_takes_a_long_turn(server: Server) -> None:
    """It hangs up on clients that do not answer its pings for half a second."""
    (outcome,), _ = run_episodes(
        build_environment(words_section(server)),
        [task()],
        ["7"] * 3,
        before_turn=lambda number: time.sleep(2.5 if number == 1 else 0.0),
    )
    assert outcome.ending is Ending.COMPLETED, outcome.problem


def test_fields_that_the_server_does_not_have_are_found_before_the_run(server: Server) -> None:
    section = words_section(server, action={"kind": "text", "field": "mesage"}, observation_field="reply")
    first, second = check_environment(section)
    assert first.field == "environment.action.field" and "message, metadata" in first.remedy
    assert second.field == "environment.observation_field" and "echo" in second.remedy
    (outcome,), _ = run_episodes(build_environment(section), [task()], ["7"])
    assert outcome.ending is Ending.ENVIRONMENT_CRASH
    assert "environment.observation_field = 'reply', but the observation has echo" in outcome.problem
    elsewhere = OpenEnvServer(kind="openenv", url=f"ws://127.0.0.1:{free_port()}/ws", open_s=2.0)
    (problem,) = check_environment(elsewhere)
    assert problem.field == "environment.url" and "start the OpenEnv server there first" in problem.remedy
    (problem,) = check_environment(words_section(server, action={"kind": "tools"}))
    assert problem.field == "environment.url" and "message: Field required" in problem.remedy


def test_a_server_without_a_free_session_is_waited_for(server: Server) -> None:
    # The server takes one at a time.
    section = words_section(server, game="single", open_s=3.0)
    (first, second), _ = run_episodes(
        build_environment(section),
        [task()] * 2,
        ["7"] * 3,
        before_turn=lambda number: time.sleep(2.0),
    )
    assert sorted([first.ending, second.ending]) == [Ending.COMPLETED, Ending.INFRASTRUCTURE]
    problem = first.problem or second.problem
    assert "had no free session for 3 s" in problem and "max_concurrent_envs" in problem


def test_actions_by_the_schema_of_the_server(server: Server) -> None:
    section = section_for(server, "sums", observation_field="total", opening="prompt")
    assert not list(check_environment(section))
    agent = ScriptedAgent(
        scripted_turn("", ToolCall(id="a", name="step", arguments={"amount": 4})),
        scripted_turn(
            "",
            ToolCall(id="b", name="step", arguments={"amount": 40}),
            ToolCall(id="c", name="leap", arguments={}),
            broken=[BrokenToolCall(text="{", problem="it was cut off")],
        ),
        scripted_turn(
            "",
            ToolCall(id="d", name="step", arguments={"amount": -3, "sign": "minus"}),
            ToolCall(id="e", name="step", arguments={"amount": 1}),
        ),
    )
    score = asyncio.run(build_environment(section).rollout(task(), agent))
    assert score.value == pytest.approx(-0.25 + 1.0) and not score.is_correct
    assert score.penalties == {"failed_calls": 3.0, "unused_calls": 1.0}
    (tool,) = agent.tools[0]
    assert tool.name == "step" and tool.description == "Add a number to the sum."
    assert set(tool.parameters["properties"]) == {"amount", "sign"}
    assert tool.parameters["properties"]["sign"]["enum"] == ["plus", "minus"]
    told = [one["content"] for one in agent.heard[-1] if one["role"] in ("tool", "user")][1:]
    assert told[0] == "4"
    assert "amount: Input should be less than or equal to 9" in told[1]
    assert told[2] == "Error: there is no tool 'leap'; tools: step"
    assert told[3] == "Error: a tool call cannot be read: it was cut off"
    assert agent.tool_calls == {
        ToolStatus.OK: 2,
        ToolStatus.BAD_ARGUMENTS: 1,
        ToolStatus.UNKNOWN_TOOL: 1,
        ToolStatus.UNREADABLE: 1,
    }


def test_the_mcp_tools_of_an_environment(server: Server) -> None:
    section = section_for(server, "tools", action={"kind": "tools"})
    assert not list(check_environment(section))
    environment = build_environment(section)
    agent = ScriptedAgent(
        scripted_turn("", ToolCall(id="a", name="add", arguments={"a": 1, "b": 2})),
        scripted_turn("", ToolCall(id="b", name="add", arguments={"a": -1, "b": 2})),
        scripted_turn("", ToolCall(id="c", name="add", arguments={"a": 3, "b": 4})),
    )
    score = asyncio.run(environment.rollout(task(), agent))
    stopping = ScriptedAgent(
        scripted_turn("", ToolCall(id="a", name="add", arguments={"a": 1, "b": 2})), "I stop"
    )
    stopped = asyncio.run(environment.rollout(task(), stopping))
    assert (score.value, score.is_correct) == (1.0, True)
    assert score.penalties == {"failed_calls": 1.0, "unused_calls": 0.0}
    (tool,) = agent.tools[0]
    assert tool.name == "add" and tool.description == "Add two numbers."
    assert set(tool.parameters["properties"]) == {"a", "b"}
    results = [one["content"] for one in agent.heard[-1] if one["role"] == "tool"]
    assert results[0] == "3" and "a is below zero" in results[1]
    assert (stopped.value, stopped.is_correct) == (0.0, False)


def test_no_threads_or_connections_are_left(server: Server) -> None:
    """What a run of episodes leaves would be there once for every run. Other threads may begin meanwhile."""
    environment = build_environment(words_section(server))
    run_episodes(environment, [task()] * 4, ["7"] * 3)
    before, num_files = set(threading.enumerate()), psutil.Process().num_fds()
    num_runs = 5
    for _ in range(num_runs):
        run_episodes(environment, [task()] * 4, ["7"] * 3)
    left = [thread.name for thread in threading.enumerate() if thread not in before]
    assert len(left) < num_runs, left
    assert psutil.Process().num_fds() < num_files + num_runs


def test_a_server_that_dies_is_lost_and_the_next_episode_reaches_its_successor(server: Server) -> None:
    environment = build_environment(words_section(server))
    (outcome,), _ = run_episodes(environment, [task()], ["7", "die"])
    assert outcome.ending is Ending.INFRASTRUCTURE
    assert "has closed the connection (code 1006)" in outcome.problem
    (outcome,), _ = run_episodes(environment, [task()], ["7"])
    assert outcome.ending is Ending.INFRASTRUCTURE and "cannot be reached" in outcome.problem
    server.start()
    (outcome,), _ = run_episodes(environment, [task()], ["7"] * 3)
    assert outcome.ending is Ending.COMPLETED, outcome.problem
