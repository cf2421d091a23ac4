"""The tools of a coding task, and the config that asks for one."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import forgeasync as fa
from forgeasync.environments import BrokenToolCall, Turn, build_environment
from forgeasync.rollouts import ToolStatus
from forgeasync.testing import ScriptedAgent, scripted_turn
from tests.support.config_samples import minimal_config
from tests.support.repositories import calls, task_of

CaptureSpec = Callable[[str], dict[str, Any]]


def config_of(*overrides: str) -> Any:
    source = "data.source={kind: coding, path: tasks.jsonl}"
    return minimal_config(source, "data.chat_template=true", "environment={kind: coding}", *overrides)


@pytest.fixture
def told(folder: Path, record: CaptureSpec) -> Callable[..., list[tuple[str, str]]]:
    """Run calls in one episode; returns what the model was told, each with the status that was counted."""

    def run(*turns: Turn, tool_limit_s: float = 300.0) -> list[tuple[str, str]]:
        config = config_of("environment.max_result_characters=300")
        environment = build_environment(config.environment, fa.Bubblewrap())
        agent = ScriptedAgent(*turns, scripted_turn("done"), tool_limit_s=tool_limit_s)
        asyncio.run(environment.rollout(task_of(record("unittest"), folder), agent))
        assert agent.kept.keys() == {"changes.patch", "tests.log"}
        assert agent.heard[0][0]["role"] == "system" and len(agent.tools[0]) == 5
        answers = [message["content"] for message in agent.heard[-1] if message["role"] in ("tool", "user")]
        return [*answers[1:], agent.tool_calls]

    return run


def test_files_are_seen_changed_and_written(told) -> None:
    *answers, counts = told(
        calls(("view", {"path": "shop/prices.py", "start": 2, "end": 3})),
        calls(
            ("write", {"path": "shop/new/a.txt", "content": "one\r\ntwo"}),
            ("edit", {"path": "shop/new/a.txt", "old": "two", "new": "2\n"}),
            ("view", {"path": "shop/new/a.txt"}),
        ),
    )
    assert answers[0] == "     2\t    result = 0\n     3\t    for number in numbers[1:]:\n[lines 2 to 3 of 5]"
    assert answers[1:3] == ["shop/new/a.txt was written", "shop/new/a.txt was changed"]
    assert answers[3] == "     1\tone\r\n     2\t2\n[lines 1 to 2 of 2]"
    assert counts == {ToolStatus.OK: 4}


def test_wrong_calls_are_told(told) -> None:
    prices = "shop/prices.py"
    often = {"path": prices, "old": "number", "new": "x"}
    wrong = [
        ("edit", often, f": old occurs 4 times in {prices}; must occur exactly once"),
        ("edit", {"path": prices, "old": "", "new": "x"}, ": old is empty; must be the text to replace"),
        ("edit", {"path": "none.py", "old": "a", "new": "x"}, ": none.py: there is no such file in the "),
        ("view", {"path": "shop"}, ": shop: is a folder"),
        ("view", {"path": prices, "start": 9}, f": lines 9 to end: {prices} has 5 lines"),
        ("write", {"path": "/usr/bin/x", "content": ""}, ": /usr/bin/x could not be written"),
        ("write", {"path": "big", "content": "x" * (2**20 + 1)}, ": the file would have 1048577 bytes"),
        ("write", {"path": "half", "content": "\ud800"}, ""),
        ("look", {}, ": there is no tool 'look'; tools: run, view, edit, write, submit"),
    ]
    broken = scripted_turn("", broken=[BrokenToolCall(text="{", problem="it ends early")])
    *answers, unreadable, counts = told(*(calls((name, given)) for name, given, _ in wrong), broken)
    for answer, (_, _, begin) in zip(answers, wrong, strict=True):
        assert answer.startswith("Error" + begin)
    assert unreadable.startswith("Error: a tool call cannot be read: it ends early")
    assert sum(counts.values()) == 10 and counts[ToolStatus.UNREADABLE] == 1 and ToolStatus.OK not in counts


def test_commands_share_a_shell_until_it_ends(told) -> None:
    commands = [
        *("cd shop; x=5; echo out; echo err >&2; false", "pwd; echo $x", "sleep 60 & exit 3", "pwd"),
        "head -c 1000 /dev/zero | tr '\\0' x",
    ]
    *answers, counts = told(*(calls(("run", {"command": one})) for one in commands))
    ended = "; the shell has ended, and the next command begins with a new one]"
    assert answers[:2] == ["out\nerr\n[exit code 1]", "/work/shop\n5\n[exit code 0]"]
    assert answers[2:4] == [f"[exit code 3{ended}", "/work\n[exit code 0]"]
    assert answers[4].startswith("x" * 300) and counts == {ToolStatus.OK: 4, ToolStatus.CUT: 1}
    killed, _ = told(calls(("run", {"command": "trap '' TERM INT; sleep 60"})), tool_limit_s=0.2)
    assert killed == f"[killed after 0.2 s{ended}"
