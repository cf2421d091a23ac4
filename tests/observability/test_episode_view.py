"""What people see of episodes; texts of models reach no terminal as they are."""

import json
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from apps.show import shown
from forgeasync.observability import NoEpisodes, episode_lines, table, visible

TOOL_CALL = {"id": "c", "type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
MESSAGES: list[dict[str, Any]] = [
    {"role": "user", "content": "add 2 and 2"},
    {
        "role": "assistant",
        "content": "",
        "reasoning_content": "a tool",
        "tool_calls": [TOOL_CALL],
        "first_version": 3,
        "version": 4,
        "num_tokens": 12,
        "finish_reason": "stop",
    },
    {"role": "tool", "name": "add", "content": "4"},
    {"role": "assistant", "content": "four\x1b[2J\x1b]52;c;aGk=\x07", "version": 4, "num_tokens": 2},
]
SCORE = {"value": 0.5, "is_correct": True, "parts": {"tests": 0.5}}
AGENT: dict[str, Any] = {"name": "agent", "score": SCORE, "num_turns": 2, "branches": [MESSAGES]}
LOST = {"ending": "infrastructure", "problem": "worker 3 is gone"}
RECORD: dict[str, Any] = {
    "task_id": "t7",
    "ending": "completed",
    "problem": None,
    "artifacts": ["artifacts/3-1-1/patch.diff"],
    "agents": [AGENT],
    "num_cut_bytes": 1200,
    "attempts": [LOST, {"ending": "completed", "problem": None}],
}
ROLLOUT: dict[str, Any] = {
    "step": 5,
    "group_id": 3,
    "episode": 1,
    "agent": 0,
    "task_id": "t7",
    "prompt": "add 2 and 2",
    "response": "four",
    "answer": "4",
    "reward": 0.5,
    "is_correct": True,
    "parts": {"tests": 0.5},
    "penalties": {},
    "version_spans": [[3, 0, 5], [4, 5, 14]],
    "response_tokens": 14,
    "finish_reason": "stop",
    "episode_record": RECORD,
}
EVALUATED: dict[str, Any] = {
    "set": "held_out",
    "problem": 2,
    "sample": 1,
    "task_id": "t9",
    "prompt": "?",
    "answer": "1",
    "ending": "timeout",
    "num_turns": 3,
    "versions": [0, 0],
    "reward": None,
    "is_correct": None,
    "unscored": "the episode took longer",
    "episode_record": None,
}


def told(*agents: dict[str, Any], width: int = 80, **changed: object) -> list[str]:
    """The lines about an episode with these agents and another record otherwise."""
    record = {**RECORD, "agents": agents or [AGENT]}
    return episode_lines({**ROLLOUT, "episode_record": record, **changed}, width=width)


def write(run: Path, *episodes: dict[str, Any]) -> None:
    (run / "rollouts.jsonl").write_text("".join(json.dumps(one) + "\n" for one in episodes))


def test_the_table_has_a_line_for_each(tmp_path: Path) -> None:
    heading, first, second = table([ROLLOUT, EVALUATED])
    assert heading.split() == ["number", "where", "task", "ending", "reward", "correct", "turns", "versions"]
    assert first.split() == "0 step 5 group 3 episode 1 t7 completed 0.5 yes 2 3-4".split()
    assert second.split() == "1 held_out problem 2 sample 1 t9 timeout (unscored) - - 3 0".split()
    write(tmp_path, ROLLOUT, {**ROLLOUT, "episode_record": None})
    assert shown(tmp_path, None, as_json=False)[2].split()[-5:] == ["stop", "0.5", "yes", "1", "3-4"]


def test_one_episode_is_told_whole() -> None:
    text = "\n".join(told())
    for words in (
        "step 5 group 3 episode 1",
        "--- assistant, versions 3 to 4, 12 tokens, ended by stop ---",
        "(reasoning)\na tool\n(says)",
        'calls add({"a": 2})',
        "--- tool, add ---",
        "four\\x1b[2J\\x1b]52;c;aGk=\\x07",
        "1,200 bytes of these messages were not kept",
        "attempts  infrastructure, completed",
        "problem   worker 3 is gone",
        "reward    0.5, correct, tests 0.5",
        "kept      artifacts/3-1-1/patch.diff",
    ):
        assert words in text, words
    assert "\x1b" not in text
    unscored = "\n".join(episode_lines(EVALUATED, width=80))
    assert "unscored  the episode took longer" in unscored and "reward" not in unscored


def test_what_is_empty_takes_no_line() -> None:
    """A task without an answer, and a turn that only calls a tool; a turn without anything has its line."""
    call = {"function": {"name": "submit", "arguments": {}}}
    silent = {"role": "assistant", "content": ""}
    lines = told({**AGENT, "branches": [[silent | {"tool_calls": [call]}, silent]]}, answer="")
    assert not any(line.startswith("answer") for line in lines)
    first, second = (number for number, line in enumerate(lines) if line.startswith("--- assistant"))
    assert lines[first + 1] == "calls submit({})" and lines[second + 1 : second + 3] == ["", ""]


def test_many_parts_of_a_score_fit_the_width() -> None:
    parts = {f"part_{number}": 1.0 for number in range(20)}
    lines = told(width=60, parts=parts)
    assert max(map(len, lines)) <= 60 and "part_19 1" in " ".join(lines)


def test_agents_and_branches_are_told_apart() -> None:
    judge = {**AGENT, "name": "judge", "score": None, "branches": [MESSAGES] * 2}
    text = "\n".join(told(AGENT, judge))
    assert "=== agent agent ===" in text and "=== agent judge, branch 2 of 2 ===" in text
    assert "score of judge: none" in text and "score of agent: 0.5, correct, tests 0.5" in text
    assert "agent 0" in table([{**ROLLOUT, "episode_record": {**RECORD, "agents": [AGENT, judge]}}])[1]


@given(st.text(alphabet=st.characters(), max_size=200), st.integers(40, 120))
def test_no_text_drives_a_terminal(text: str, width: int) -> None:
    """Wherever it stands; and nothing visible is lost."""
    message = {"role": "user", "name": text, "content": text, "reasoning_content": text}
    record = {
        **RECORD,
        "agents": [{**AGENT, "branches": [[message]]}],
        "problem": text,
        "artifacts": [text],
        "attempts": [{"ending": "completed", "problem": text}],
    }
    episode = {**ROLLOUT, "task_id": text, "answer": text, "episode_record": record, "parts": {text: 1.0}}
    lines = [*episode_lines(episode, width=width), *table([episode])]
    for line in lines:
        assert not {unicodedata.category(one) for one in line} & {"Cc", "Cf", "Cs", "Zl", "Zp"}
    content = "".join(episode_lines({**episode, "task_id": ""}, width=width))
    assert visible(text).replace("\n", "") in content


@given(st.text(alphabet="ab 中文\t", max_size=300))
def test_lines_fit_the_width(text: str) -> None:
    episode = {**ROLLOUT, "episode_record": None, "response": text}
    assert all(cell_len(line) <= 60 for line in episode_lines(episode, width=60))


def test_a_line_that_is_being_written_is_left_out(tmp_path: Path) -> None:
    write(tmp_path)
    (line,) = shown(tmp_path, None, as_json=False)
    assert line.endswith("has no episodes")
    write(tmp_path, ROLLOUT)
    with (tmp_path / "rollouts.jsonl").open("a") as file:
        file.write('{"step": 6, "gro')
    assert len(shown(tmp_path, None, as_json=False)) == 2
    (line,) = shown(tmp_path, -1, as_json=True)
    assert json.loads(line) == ROLLOUT and "\x1b" not in line


@pytest.mark.parametrize(
    ("content", "number", "words"),
    [
        (None, None, "has neither rollouts.jsonl nor episodes.jsonl"),
        ("no json\n", None, "line 1: not JSON"),
        ("[]\n", None, "line 1: not a JSON object"),
        ("{}\n", 1, "NUMBER = 1; the episodes of .* are 0 to 0"),
        ("", 0, "none: it is empty"),
    ],
)
def test_what_cannot_be_shown_is_said(
    tmp_path: Path, content: str | None, number: int | None, words: str
) -> None:
    if content is not None:
        (tmp_path / "rollouts.jsonl").write_text(content)
    with pytest.raises(NoEpisodes, match=words):
        shown(tmp_path, number, as_json=False)
    with pytest.raises(NoEpisodes, match="is not a folder"):
        shown(tmp_path / "nothing", None, as_json=False)
