"""Text views of episodes: a table of all, and a single one from its first message to its verdict.

Text from models and tools is untrusted. Control characters are shown as escapes, so that no text can move the
cursor, change colors or write to the clipboard.
"""

import json
import textwrap
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.cells import chop_cells

from forgeasync.files import read_json_lines

FILES = ("rollouts.jsonl", "episodes.jsonl")
"""File names of the episodes of a run, and of an evaluation outside of a run."""

MIN_WIDTH = 40
"""Minimum width in characters at which text is wrapped."""

_HIDDEN = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
"""Unicode categories that are shown as escapes.

Control, format (including right-to-left marks), surrogate, private use, unassigned, and the separators of
lines and paragraphs.
"""


class NoEpisodes(ValueError):
    """The folder has no file of episodes, or its file cannot be read."""


def visible(text: str) -> str:
    """Replace characters that a terminal could act on by escapes. Tabs become spaces; line breaks stay."""
    return "".join(
        one
        if one == "\n" or unicodedata.category(one) not in _HIDDEN
        else "    "
        if one == "\t"
        else one.encode("unicode_escape", errors="surrogatepass").decode()
        for one in text
    )


def visible_line(text: object) -> str:
    """Return ``visible`` text on one line, with line breaks as escapes."""
    return visible(str(text)).replace("\n", "\\n")


def find_file(folder: Path) -> Path:
    """Return the file with the episodes of a run or an evaluation.

    Raises:
        NoEpisodes: The folder has no such file.
    """
    for name in FILES:
        if (folder / name).is_file():
            return folder / name
    what = "is not a folder" if not folder.is_dir() else f"has neither {' nor '.join(FILES)}"
    raise NoEpisodes(f"{folder} {what}; must be the folder of a run, or of an evaluation")


def read_episodes(file: Path) -> list[dict[str, Any]]:
    """Read the episodes of a file. An incomplete last line, which may be being written, is left out.

    Raises:
        NoEpisodes: A line is not a JSON object. The message names it.
    """
    try:
        return read_json_lines(file)
    except ValueError as error:
        raise NoEpisodes(str(error)) from error


def table(episodes: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a heading and one line for each episode. The first column is the episode's index."""
    rows = [_HEADING, *(_row(number, one) for number, one in enumerate(episodes))]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADING))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]


_HEADING = ("number", "where", "task", "ending", "reward", "correct", "turns", "versions")


def _row(number: int, episode: Mapping[str, Any]) -> tuple[str, ...]:
    record = episode.get("episode_record")
    ending = episode.get("ending") or (record or {}).get("ending") or episode.get("finish_reason") or "-"
    if episode.get("unscored"):
        ending = f"{ending} (unscored)"
    correct = episode.get("is_correct")
    return (
        str(number),
        visible_line(_where(episode)),
        visible_line(episode.get("task_id", "-"))[:40],
        visible_line(ending),
        _number(episode.get("reward")),
        "-" if correct is None else "yes" if correct else "no",
        str(_num_turns(episode)),
        _versions(episode),
    )


def _where(episode: Mapping[str, Any]) -> str:
    """Return step, group and episode of a run's rollout, or set, problem and sample of an evaluation's."""
    if "set" in episode:
        return f"{episode['set']} problem {episode.get('problem')} sample {episode.get('sample')}"
    where = f"step {episode.get('step')} group {episode.get('group_id')} episode {episode.get('episode', 0)}"
    agents = (episode.get("episode_record") or {}).get("agents", ())
    return where + (f" agent {episode.get('agent')}" if len(agents) > 1 else "")


def _num_turns(episode: Mapping[str, Any]) -> int:
    record = episode.get("episode_record")
    if record is None:
        return int(episode.get("num_turns", 1))
    return sum(agent["num_turns"] for agent in record["agents"])


def _versions(episode: Mapping[str, Any]) -> str:
    if spans := episode.get("version_spans"):
        versions = [span[0] for span in spans]
    else:
        versions = episode.get("versions") or []
    if not versions:
        return "-"
    first, last = min(versions), max(versions)
    return str(first) if first == last else f"{first}-{last}"


def _number(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) else "-"


def episode_lines(episode: Mapping[str, Any], *, width: int) -> list[str]:
    """Return the lines that show an episode: its facts, all messages of all branches, and its verdict."""
    lines = [*_facts(episode, width)]
    record = episode.get("episode_record")
    if record is None:
        prompt = {"role": "user", "content": episode.get("prompt") or ""}
        answer = {
            "role": "assistant",
            "content": episode.get("response") or "",
            "num_tokens": episode.get("response_tokens"),
            "finish_reason": episode.get("finish_reason"),
        }
        return [*lines, *_branch([prompt, answer], width), *_verdict(episode, width)]
    for agent in record["agents"]:
        several = len(record["agents"]) > 1
        for number, branch in enumerate(agent["branches"], 1):
            names = [f"agent {visible_line(agent['name'])}"] if several else []
            if len(agent["branches"]) > 1:
                names.append(f"branch {number} of {len(agent['branches'])}")
            if names:
                lines += ["", _rule(", ".join(names), "=", width)]
            lines += _branch(branch, width)
        if several:
            lines += [f"score of {visible_line(agent['name'])}: {_score(agent['score'])}"]
    if record.get("num_cut_bytes"):
        lines += ["", f"{record['num_cut_bytes']:,} bytes of these messages were not kept"]
    return [*lines, *_verdict(episode, width)]


def _facts(episode: Mapping[str, Any], width: int) -> Iterator[str]:
    yield _rule(_where(episode), "=", width)
    yield f"task      {visible_line(episode.get('task_id', '-'))}"
    # Tasks such as games and coding have no reference answer.
    if episode.get("answer"):
        yield from _wrapped(f"answer    {visible_line(episode['answer'])}", width)
    yield f"versions  {_versions(episode)}"


def _branch(branch: Sequence[Mapping[str, Any]], width: int) -> list[str]:
    lines = []
    for message in branch:
        lines += ["", _rule(_message_heading(message), "-", width)]
        if reasoning := message.get("reasoning_content"):
            lines += ["(reasoning)", *_wrapped(visible(reasoning), width), "(says)"]
        calls = message.get("tool_calls") or ()
        content = message.get("content") or ""
        if content or not calls:
            lines += _wrapped(visible(content), width)
        for call in calls:
            function = call["function"]
            arguments = function["arguments"]
            text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
            name = visible_line(function["name"])
            lines += _wrapped(f"calls {name}({visible_line(text)})", width)
    return lines


def _message_heading(message: Mapping[str, Any]) -> str:
    facts = [visible_line(message.get("role", "?"))]
    if message.get("name"):
        facts.append(visible_line(message["name"]))
    first, last = message.get("first_version"), message.get("version")
    if last is not None:
        facts.append(f"version {last}" if first in (None, last) else f"versions {first} to {last}")
    if message.get("num_tokens") is not None:
        facts.append(f"{message['num_tokens']} tokens")
    if message.get("finish_reason") is not None:
        facts.append(f"ended by {visible_line(message['finish_reason'])}")
    return ", ".join(facts)


def _verdict(episode: Mapping[str, Any], width: int) -> list[str]:
    record = episode.get("episode_record") or {}
    lines = ["", _rule("verdict", "=", width)]
    if ending := record.get("ending") or episode.get("ending"):
        lines.append(f"ending    {visible_line(ending)}")
    attempts = record.get("attempts") or ()
    if len(attempts) > 1:
        lines.append(f"attempts  {', '.join(visible_line(one['ending']) for one in attempts)}")
    for problem in dict.fromkeys([one.get("problem") for one in attempts] + [record.get("problem")]):
        if problem:
            lines += _wrapped(f"problem   {visible_line(problem)}", width)
    if episode.get("unscored"):
        return [*lines, *_wrapped(f"unscored  {visible_line(episode['unscored'])}", width)]
    lines += _wrapped(f"reward    {_score({**episode, 'value': episode.get('reward')})}", width)
    for path in record.get("artifacts") or ():
        lines.append(f"kept      {visible_line(path)}")
    return lines


def _score(score: Mapping[str, Any] | None) -> str:
    if score is None:
        return "none"
    correct = score.get("is_correct")
    words = [_number(score.get("value"))]
    if correct is not None:
        words.append("correct" if correct else "not correct")
    words += [f"{visible_line(name)} {_number(value)}" for name, value in (score.get("parts") or {}).items()]
    words += [
        f"penalty {visible_line(name)} {_number(value)}"
        for name, value in (score.get("penalties") or {}).items()
    ]
    return ", ".join(words)


def _rule(text: str, mark: str, width: int) -> str:
    text = visible_line(text)[: max(width - 8, 8)]
    return f"{mark * 3} {text} {mark * max(3, width - len(text) - 5)}"


def _wrapped(text: str, width: int) -> list[str]:
    """Wrap text to lines of at most ``width`` columns, but at least ``MIN_WIDTH``."""
    lines: list[str] = []
    for line in text.split("\n"):
        wrapped = textwrap.wrap(
            line, max(width, MIN_WIDTH), drop_whitespace=False, replace_whitespace=False, expand_tabs=False
        )
        # Cut again by columns, because characters of East Asian scripts take two.
        lines += [part for one in wrapped or [""] for part in chop_cells(one, max(width, MIN_WIDTH)) or [""]]
    return lines
