"""What the viewer reads of tokens.jsonl and answers; the page is in test_page.py."""

import json
from pathlib import Path

import pytest

from forgeasync.rollouts import RolloutKey
from forgeasync.viewer import MAX_TOKENS, Answers, NotThere, RunReader, TokenIndex, TokensGone
from tests.support.viewer_runs import tokens_of, worst_of, write_run

PIECES: list[object] = ["2", "+", "2", {"special": "<end>"}]
# Groups 2 and 3 are of step 2; rollout 5 is group 2, episode 1.
WORST = worst_of(2, [(2, 1, 3), (9, 0, 0), (2, 1, 1)], "x")


def make(folder: Path, *lines: object) -> Path:
    run = write_run(folder / "run", num_steps=3)
    (run / "tokens.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run


def answers_of(run: Path) -> Answers:
    reader = RunReader(run)
    reader.read_all()
    return Answers([reader])


def test_values_lie_with_their_tokens(tmp_path: Path) -> None:
    answers = answers_of(make(tmp_path, tokens_of(1, 0, 0, ["no"]), tokens_of(2, 2, 1, PIECES), WORST))
    answer = answers.tokens(0, 5, branch=0, skip=0)
    assert answer["problem"] is None
    assert answer["pieces"] == PIECES
    assert answer["is_trained"] == [None, True, True, True]
    values = answer["values"]
    assert isinstance(values, dict)
    assert values["mismatch"] == [None, -0.25, None, 0.25]
    assert values["version"] == [None, 1, 1, 1] and values["kept"] == [None, 0, 1, 2]
    assert (answer["num_layers"], answer["disagreement"]) == (2, [None, "01", "01", "01"])
    assert answer["worst"] == [[3, 1], [1, 3]]
    assert (answer["num_branches"], answer["num_tokens"]) == (1, 4)


def test_the_worst_lead_to_the_rollouts_that_were_written(tmp_path: Path) -> None:
    answers = answers_of(make(tmp_path, WORST))
    answer = answers.worst(0, 2)
    worst = answer["worst"]
    assert answer["problem"] is None and isinstance(worst, list)
    assert [one["rollout"] for one in worst] == [5, None, 5]
    assert [one["position"] for one in worst] == [3, 0, 1]


def test_a_long_response_comes_in_pages(tmp_path: Path) -> None:
    num_tokens = 2 * MAX_TOKENS + 7
    answers = answers_of(make(tmp_path, tokens_of(2, 2, 1, [str(one) for one in range(num_tokens)])))
    seen, skip = [], 0
    while skip < num_tokens:
        answer = answers.tokens(0, 5, branch=0, skip=skip)
        pieces, values = answer["pieces"], answer["values"]
        assert isinstance(pieces, list) and isinstance(values, dict) and len(pieces) <= MAX_TOKENS
        for index, piece in enumerate(pieces):
            if int(piece) > 2:
                assert values["mismatch"][index] == 0.25 * (int(piece) - 2)
        seen += pieces
        skip += MAX_TOKENS
    assert seen == [str(one) for one in range(num_tokens)]
    assert answers.tokens(0, 5, branch=0, skip=10 * num_tokens)["pieces"] == []


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    run = write_run(tmp_path / "old", num_steps=2)
    old = answers_of(run)
    for answer in (old.tokens(0, 0, branch=0, skip=0), old.worst(0, 1)):
        assert "the run has no tokens.jsonl" in str(answer["problem"])
    with pytest.raises(NotThere, match="there is no rollout 99"):
        old.tokens(0, 99, branch=0, skip=0)
    answers = answers_of(make(tmp_path, tokens_of(2, 2, 1, PIECES)))
    assert answers.tokens(0, 0, branch=0, skip=0)["problem"] == "tokens.jsonl has no values of this rollout"
    assert answers.worst(0, 2)["problem"] == "tokens.jsonl has no values of step 2"
    assert answers.tokens(0, 5, branch=1, skip=0)["problem"] == "branch = 1; must be 0 to 0"
    # The worst tokens are the last line of a step: values of tokens may be there before.
    assert answers.tokens(0, 5, branch=0, skip=0)["worst"] == []


@pytest.mark.parametrize(
    "damage",
    [
        {"step": 2, "group_id": 2, "episode": 1, "agent": 0, "branches": 1},
        {"step": 2, "group_id": 2, "episode": 1, "agent": 0, "branches": [{}]},
        {"step": 2, "group_id": 2, "episode": 1, "agent": 0, "branches": [1]},
        tokens_of(2, 2, 1, PIECES) | {"branches": [{"num_tokens": 4, "positions": [0], "pieces": 3}]},
    ],
)
def test_damage_is_said(tmp_path: Path, damage: dict[str, object]) -> None:
    answer = answers_of(make(tmp_path, damage)).tokens(0, 5, branch=0, skip=0)
    assert "damaged" in str(answer["problem"])


def test_of_lines_that_come_twice_the_newer_one_counts_and_others_are_counted(tmp_path: Path) -> None:
    first, second = tokens_of(2, 2, 1, ["old"]), tokens_of(2, 2, 1, ["new"])
    lines = [json.dumps(one).encode() for one in (first, WORST, second)]
    data = b"\n".join([lines[0], b"no line at all", *lines[1:], lines[0][:-1], b""])
    file = tmp_path / "tokens.jsonl"
    file.write_bytes(data)
    index = TokenIndex()
    cut = len(lines[0]) + 1
    index.add(data[:cut], start=0)
    index.add(data[cut:], start=cut)
    assert index.num_damaged == 2
    key = RolloutKey(group_id=2, episode=1, agent=0)
    assert index.read_rollout(file, 2, key)["branches"][0]["pieces"] == ["new"]
    assert len(index.read_worst(file, 2)) == 3
    file.write_bytes(b"x" * len(data))
    with pytest.raises(TokensGone, match="no longer where they were"):
        index.read_worst(file, 2)


def test_a_file_that_was_cut_is_read_anew(tmp_path: Path) -> None:
    run = make(tmp_path, tokens_of(2, 2, 1, PIECES), WORST)
    reader = RunReader(run)
    reader.read_all()
    (run / "tokens.jsonl").write_text(json.dumps(worst_of(1, [(0, 0, 0)], "y")) + "\n")
    reader.read_all()
    assert Answers([reader]).worst(0, 2)["problem"] == "tokens.jsonl has no values of step 2"
    assert len(reader.tokens.read_worst(run / "tokens.jsonl", 1)) == 1
