"""The lines of tokens.jsonl, by hand."""

import json
from pathlib import Path

import numpy as np
import pytest

from forgeasync.models import character_tokenizer
from forgeasync.observability import NUM_NONFINITE, TokenLines
from forgeasync.rollouts import (
    BranchKey,
    BranchValues,
    RolloutKey,
    TokenPieces,
    TokenReport,
    TokenValues,
    WorstToken,
)

TOKENIZER = character_tokenizer(chat_template=False).backend_tokenizer


def ids(text: str) -> np.ndarray:
    return np.array(TOKENIZER.encode(text).ids, np.int32)


def values(text: str, *, decisions: list[list[int]] | None = None) -> TokenValues:
    """Of the first and the third of three tokens; the third has a log-probability that is no number."""
    return TokenValues(
        positions_N=np.array([0, 2], np.int32),
        token_ids_N=ids(text)[[0, 2]],
        logprobs_N=np.array([-1.0, np.nan], np.float32),
        behavior_logprobs_N=np.array([-1.25, -2.0], np.float32),
        ratios_N=np.array([1.23456789, np.inf], np.float32),
        advantages_N=np.array([0.1, 0.1], np.float32),
        entropies_N=np.array([0.0001234567, 2.0], np.float32),
        versions_N=np.array([3, 4], np.int32),
        num_kept_N=np.array([0, 7], np.int32),
        decisions_MN=None if decisions is None else np.array(decisions, np.uint8),
    )


def key(episode: int, branch: int) -> BranchKey:
    return BranchKey(rollout=RolloutKey(group_id=5, episode=episode, agent=0), branch=branch)


def branch(episode: int, number: int, text: str) -> BranchValues:
    decisions = [[0, 1], [2, 2]] if number == 0 else None
    return BranchValues(
        key=key(episode, number),
        prompt_ids_P=ids("?"),
        response_ids_T=ids(text),
        values=values(text, decisions=decisions),
    )


REPORT = TokenReport(
    branches=(branch(0, 0, "abc"), branch(0, 1, "xyz"), branch(2, 0, "<b>")),
    worst=(WorstToken(key=key(1, 0), values=values("def", decisions=[[2, 0]]).take(np.array([0]))),),
)


def lines_of(folder: Path, pieces: TokenPieces | None) -> list[dict[str, object]]:
    writer = TokenLines(folder / "tokens.jsonl", pieces)
    assert writer.prepare(7, REPORT) == {NUM_NONFINITE: 9}
    writer.write()
    writer.write()
    writer.close()
    return [json.loads(line) for line in (folder / "tokens.jsonl").read_text().splitlines()]


def test_a_line_for_each_rollout_and_one_for_the_worst(tmp_path: Path) -> None:
    first, second, worst = lines_of(tmp_path, TokenPieces(TOKENIZER))
    assert [(one["step"], one.get("episode")) for one in (first, second, worst)] == [
        (7, 0),
        (7, 2),
        (7, None),
    ]
    expected = {
        "branch": 0,
        "num_tokens": 3,
        "pieces": ["a", "b", "c"],
        "positions": [0, 2],
        "logprob": [-1.0, None],
        "behavior": [-1.25, -2.0],
        "mismatch": [0.25, None],
        "ratio": [1.2346, None],
        "advantage": [0.1, 0.1],
        "entropy": [0.00012346, 2.0],
        "version": [3, 4],
        "kept": [0, 7],
        "disagreement": ["-0", "11"],
    }
    assert isinstance(first["branches"], list) and isinstance(second["branches"], list)
    assert first["branches"][0] == expected
    other = {"branch": 1, "pieces": ["x", "y", "z"], "disagreement": None}
    assert first["branches"][1] == expected | other
    assert [one["pieces"] for one in second["branches"]] == [["<", "b", ">"]]
    assert worst["worst"] == [
        {
            "group_id": 5,
            "episode": 1,
            "agent": 0,
            "branch": 0,
            "position": 0,
            "piece": "d",
            "logprob": -1.0,
            "behavior": -1.25,
            "mismatch": 0.25,
            "ratio": 1.2346,
            "advantage": 0.1,
            "entropy": 0.00012346,
            "version": 3,
            "kept": 0,
            "disagreement": ["1"],
        }
    ]


def test_without_texts_nothing_that_was_said_is_there(tmp_path: Path) -> None:
    lines = lines_of(tmp_path, None)
    told = json.dumps(lines)
    for text in ("abc", "xyz", "token_ids"):
        assert text not in told
    assert json.loads(told)[0]["branches"][0]["pieces"] is None
    assert json.loads(told)[2]["worst"][0]["piece"] is None


def test_what_a_disk_refuses_is_written_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = TokenLines(tmp_path / "tokens.jsonl", None)

    def refuse(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.pwrite", refuse)
        writer.prepare(1, REPORT)
        writer.write()
        refusal = writer.lines.flush()
        assert refusal is not None and refusal.path.endswith("tokens.jsonl")
    assert writer.lines.flush() is None
    assert len((tmp_path / "tokens.jsonl").read_text().splitlines()) == 3
    writer.close()
