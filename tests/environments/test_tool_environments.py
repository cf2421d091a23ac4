"""The environments that come with the package: Python in a box, MCP servers, and how answers are compared."""

import asyncio
import dataclasses
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from forgeasync.config import (
    AnswerCheck,
    Bubblewrap,
    Ending,
    EnvironmentSection,
    UnsafeSubprocess,
)
from forgeasync.environments import (
    EpisodeInterrupted,
    ToolCall,
    ToolError,
    Turn,
    TurnRequest,
    build_environment,
    check_environment,
    score_answer,
)
from forgeasync.environments.tool_environments import MAX_READ_CHARACTERS
from forgeasync.rollouts import NO_ANSWER, EpisodeId, FinishReason, SampledTurn, Score, ToolStatus
from forgeasync.testing import HandTime, ScriptedAgent, ScriptedGenerator, scripted_turn
from tests.support.buffer_world import make_task
from tests.support.chat import make_tokenizer
from tests.support.config_samples import minimal_config
from tests.support.episodes import make_episodes


def value(text: str, answer: str, **section: Any) -> float | None:
    """The score of a text; None where it states no answer."""
    task = dataclasses.replace(make_task(3), answer=answer)
    score = score_answer(AnswerCheck.model_validate(section), task, text)
    assert score.is_correct == (score.value == 1.0)
    return None if score == NO_ANSWER else score.value


@pytest.mark.parametrize(
    ("text", "answer", "section", "worth"),
    [
        (" 15\n", "15", {}, 1.0),
        ("15.0", "15", {}, 0.0),
        ("#1 no, #15", "15", {"prefix": "#"}, 1.0),
        ("15", "15", {"prefix": "#"}, None),
        ("It is 15.", "15", {}, 0.0),
        ("It is 15.", "15", {"part": "last_number"}, 1.0),
        ("It is 1,234,567.", "1234567", {"part": "last_number"}, 1.0),
        ("8 - 9 = -1", "-1", {"part": "last_number"}, 1.0),
        ("So x-3, or (8)-9", "9", {"part": "last_number"}, 1.0),
        ("1, 2, 3", "3", {"part": "last_number"}, 1.0),
        ("It is -4.50, $\\boxed{12}$", "12", {"part": "last_number"}, 1.0),
        ("no idea", "15", {"part": "last_number"}, None),
        ("15.00", "15", {"match": "number"}, 1.0),
        ("1,200.50", "1200.5", {"match": "number"}, 1.0),
        ("-0", "0", {"match": "number"}, 1.0),
        (".5", "0.5", {"match": "number"}, 1.0),
        ("0.1000000000000000000001", "0.1", {"match": "number"}, 0.0),
        ("2**64", "2", {"match": "number"}, 0.0),
        ("1e3", "1000", {"match": "number"}, 0.0),
        ("nan", "1", {"match": "number"}, 0.0),
        ("10**10**10", "1", {"match": "number"}, 0.0),
        ("", "1", {"match": "number"}, 0.0),
        ("١٥", "15", {"match": "number"}, 0.0),
        ("so 7 + 8 = 15.0", "15", {"match": "number", "part": "last_number"}, 1.0),
        ("x" * MAX_READ_CHARACTERS + "#15", "15", {"prefix": "#"}, 1.0),
        ("#15" + "x" * MAX_READ_CHARACTERS, "15", {"prefix": "#"}, None),
    ],
)
def test_answers(text: str, answer: str, section: dict[str, Any], worth: float | None) -> None:
    assert value(text, answer, **section) == worth


def test_a_task_without_a_number_cannot_be_compared_by_numbers() -> None:
    with pytest.raises(ValueError, match="answer 'Paris', which is not a number"):
        value("1", "Paris", match="number")


@pytest.mark.parametrize("piece", ["1", "1,", "-", "1,111", ".", " -1"])
def test_hostile_texts_take_time_in_proportion(piece: str) -> None:
    text = piece * (2 * MAX_READ_CHARACTERS)
    start_s = time.process_time()
    value(text, "15", match="number", part="last_number")
    # A quadratic search would take minutes.
    assert time.process_time() - start_s < 5.0


REPOSITORY = Path(__file__).resolve().parents[2]
TASK = dataclasses.replace(make_task(3), prompt="7+8=", answer="15")
SERVER = {
    "kind": "stdio",
    "command": [sys.executable, "-m", "tests.support.mcp_server"],
    "env": {"PYTHONPATH": str(REPOSITORY)},
}
PLAIN = {"call_prefix": "[", "call_suffix": "]", "result_suffix": ";", "error_text": "?"}


def section_of(**keys: Any) -> EnvironmentSection:
    adapter: TypeAdapter[EnvironmentSection] = TypeAdapter(EnvironmentSection)
    return adapter.validate_python(keys)


def python(number: int, code: object) -> ToolCall:
    return ToolCall(id=f"call_{number}", name="python", arguments={"code": code})


def run(
    section: EnvironmentSection,
    *turns: Turn | str,
    tool_limit_s: float = 300.0,
    run_on: Callable[..., Any] = asyncio.run,
) -> tuple[Score, ScriptedAgent]:
    agent = ScriptedAgent(*turns, tool_limit_s=tool_limit_s)
    return run_on(build_environment(section).rollout(TASK, agent)), agent


def told(agent: ScriptedAgent) -> list[str]:
    """What the tools have said, in order."""
    return [message["content"] for message in agent.heard[-1] if message["role"] == "tool"]


@pytest.mark.processes
def test_python_keeps_its_variables_and_tells_of_errors() -> None:
    options = {"system_prompt": "Use Python.", "answer": {"prefix": "Answer:"}, "max_result_characters": 1000}
    score, agent = run(
        section_of(kind="python_tool", **options),
        scripted_turn("", python(0, "a = 7\nprint('so')\na + 8")),
        scripted_turn("", python(1, "a + 1"), python(2, 5)),
        scripted_turn("", python(3, "1 / 0")),
        scripted_turn("", python(4, "import sys; sys.exit(3)")),
        scripted_turn("", python(5, "a"), python(6, "print('x' * 5000)")),
        "Answer: 15",
    )
    assert (score.value, score.is_correct, dict(score.penalties)) == (1.0, True, {"failed_calls": 4.0})
    assert [message["role"] for message in agent.heard[0]] == ["system", "user"]
    first, second, wrong, raised, left, new, cut = told(agent)
    assert (first, second) == ("so\n15", "8")
    assert "one argument, 'code'" in wrong
    assert raised.splitlines()[-1] == "ZeroDivisionError: division by zero"
    assert left == "The interpreter has ended with exit code 3; its variables are gone."
    assert "NameError" in new
    assert cut == "x" * 1000 + "\n[4000 more characters were cut]"
    of_status = {ToolStatus.OK: 2, ToolStatus.BAD_ARGUMENTS: 1, ToolStatus.FAILED: 3, ToolStatus.CUT: 1}
    assert agent.tool_calls == of_status
    assert agent.tools[0][0].name == "python"


@pytest.mark.processes
@pytest.mark.parametrize(
    ("limit_s", "told_first"),
    [(0.2, ""), pytest.param(20.0, "begun\n", marks=pytest.mark.exhaustive)],
    ids=["soon", "after_it_printed"],
)
def test_python_that_takes_too_long_is_ended_and_what_it_printed_is_told(
    limit_s: float, told_first: str
) -> None:
    code = "print('begun', flush=True)\nwhile True: pass"
    # Of the two deadlines the box's own comes first, however late: by this clock no time passes.
    section, clock = section_of(kind="python_tool"), HandTime()
    score, agent = run(
        section, scripted_turn("", python(0, code)), "14", tool_limit_s=limit_s, run_on=clock.run
    )
    assert score.value == 0.0
    (late,) = told(agent)
    assert late.startswith(told_first)
    assert late.endswith("The interpreter was killed (deadline); its variables are gone.")
    assert agent.tool_calls == {ToolStatus.TIMEOUT: 1}


@pytest.mark.processes
def test_code_that_ends_its_own_sandbox_is_no_fault_of_the_infrastructure() -> None:
    kill = (
        "import os, signal, time\n"
        "others = {int(name) for name in os.listdir('/proc') if name.isdigit()} - {1, os.getpid()}\n"
        "for pid in others: os.kill(pid, signal.SIGKILL)\n"
        "time.sleep(60)"
    )
    with pytest.raises(ToolError, match="the model's code has ended its sandbox"):
        run(
            section_of(kind="python_tool"),
            scripted_turn("", python(0, kill)),
            scripted_turn("", python(1, "1")),
            "15",
        )


@pytest.mark.processes
async def test_without_a_sandbox_the_episode_is_interrupted() -> None:
    section = section_of(kind="python_tool")
    environment = build_environment(section, Bubblewrap(program="/no/such/bwrap"))
    with pytest.raises(EpisodeInterrupted, match="a sandbox cannot be started"):
        await environment.rollout(TASK, ScriptedAgent("15"))
    (problem,) = check_environment(section, Bubblewrap(program="/no/such/bwrap"))
    assert problem.field == "sandbox.kind"


@pytest.mark.processes
async def test_a_model_without_a_chat_template_calls_python_in_plain_text() -> None:
    tokenizer = make_tokenizer(None, newline=False)
    # The generator cuts a turn's text where a text of ``stop`` begins.
    model = ScriptedGenerator(tokenizer, ["so [7+8", "[7+", "#15"])
    section = section_of(kind="python_tool", answer={"prefix": "#"}, plain_calls=PLAIN)
    episodes = make_episodes(build_environment(section), tokenizer=tokenizer)

    async def sample(episode: EpisodeId, request: TurnRequest) -> SampledTurn | None:
        return await model(request)

    outcome = await episodes.run(
        TASK, EpisodeId(group_id=1, index=0), max_turn_tokens=50, sample=sample, keeps_record=True
    )
    assert outcome.ending is Ending.COMPLETED
    (agent,) = outcome.agents
    assert agent.score is not None and agent.score.value == 1.0
    assert +outcome.counts == {"episode/num_tool_calls_ok": 1, "episode/num_tool_calls_failed": 1}
    assert [request.stop for request in model.requests] == [("]",)] * 3
    assert tokenizer.decode(model.ids) == "7+8=so [7+8<|im_end|>15;[7+<|im_end|>?;#15<|im_end|>"


@pytest.mark.processes
def test_half_a_plain_call_is_told() -> None:
    section = section_of(kind="python_tool", plain_calls=PLAIN | {"error_text": None})
    half = dataclasses.replace(scripted_turn("[7+"), finish_reason=FinishReason.LENGTH)
    score, agent = run(section, half, "15")
    assert agent.heard[1][-1] == {"role": "user", "content": "it was cut off before ']';"}
    assert agent.tool_calls == {ToolStatus.UNREADABLE: 1}
    assert score.penalties == {"failed_calls": 1.0}
    assert agent.tools == [(), ()]


@pytest.mark.processes
def test_tools_of_a_server_lead_to_an_answer() -> None:
    section = section_of(kind="mcp", servers={"tests": SERVER}, answer={"match": "number"}, max_rounds=1)
    add = ToolCall(id="call_0", name="add", arguments={"a": 7, "b": 8})
    score, agent = run(section, scripted_turn("", add), "15.0")
    assert (score.value, told(agent)) == (1.0, ["15"])
    score, agent = run(section, scripted_turn("", add), scripted_turn("15", add))
    assert (score.value, agent.tool_calls) == (1.0, {ToolStatus.OK: 1})


@pytest.mark.processes
def test_a_server_that_cannot_be_used_is_found_before_the_run() -> None:
    wrong = SERVER | {"command": [sys.executable, "-c", "raise SystemExit('no licence')"]}
    section = section_of(kind="mcp", servers={"good": SERVER, "wrong": wrong}, start_s=60.0)
    (problem,) = check_environment(section)
    assert problem.field == "environment.servers.wrong"
    assert "exit code 1: no licence" in problem.remedy


def test_sections_survive_being_written() -> None:
    for environment in (
        "{kind: python_tool, plain_calls: {call_prefix: '[', call_suffix: ']'}}",
        "{kind: mcp, servers: {a: {kind: stdio, command: [x, y]}, b: {kind: http, url: 'http://h/mcp'}}}",
        "{kind: coding}",
    ):
        config = minimal_config(f"environment={environment}", "sandbox=unsafe")
        assert config.sandbox == UnsafeSubprocess()
        again = type(config).model_validate(config.model_dump(mode="json"))
        assert again == config
