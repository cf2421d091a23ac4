"""What the viewer reads of tokens.jsonl and answers; the page is in test_page.py."""

import json
from pathlib import Path
from typing import Any

import pytest

from forgeasync.plugins.viewer import RunReader
from tests.support.viewer_runs import asked, read, tokens_of, worst_of, write_run

PIECES: list[object] = ["2", "+", "2", {"special": "<end>"}]
# Groups 2 and 3 are of step 2; rollout 5 is group 2, episode 1.
WORST = worst_of(2, [(2, 1, 3), (9, 0, 0), (2, 1, 1)], "x")


def make(folder: Path, *lines: object) -> RunReader:
    run = write_run(folder / "run", num_steps=3)
    (run / "tokens.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return read(run)


def tokens(run: RunReader, number: int = 5, branch: int = 0, skip: int = 0) -> dict[str, Any]:
    status, answer = asked([run], f"/api/tokens?number={number}&branch={branch}&skip={skip}")
    assert status == 200
    return answer


def worst(run: RunReader, step: int) -> dict[str, Any]:
    return asked([run], f"/api/worst?step={step}")[1]


def test_values_lie_with_their_tokens(tmp_path: Path) -> None:
    answer = tokens(make(tmp_path, tokens_of(1, 0, 0, ["no"]), tokens_of(2, 2, 1, PIECES), WORST))
    assert answer["problem"] is None
    assert answer["pieces"] == PIECES
    assert answer["is_trained"] == [None, True, True, True]
    values = answer["values"]
    assert values["mismatch"] == [None, -0.25, None, 0.25]
    assert values["version"] == [None, 1, 1, 1] and values["kept"] == [None, 0, 1, 2]
    assert (answer["num_layers"], answer["disagreement"]) == (2, [None, "01", "01", "01"])
    assert answer["worst"] == [[3, 1], [1, 3]]
    assert (answer["num_branches"], answer["num_tokens"]) == (1, 4)


def test_the_worst_lead_to_the_rollouts_that_were_written(tmp_path: Path) -> None:
    answer = worst(make(tmp_path, WORST), 2)
    assert answer["problem"] is None
    assert [one["rollout"] for one in answer["worst"]] == [5, None, 5]
    assert [one["position"] for one in answer["worst"]] == [3, 0, 1]


def test_a_long_response_comes_in_pages(tmp_path: Path) -> None:
    num_tokens = 4007
    run = make(tmp_path, tokens_of(2, 2, 1, [str(one) for one in range(num_tokens)]))
    seen: list[str] = []
    while len(seen) < num_tokens:
        answer = tokens(run, skip=len(seen))
        pieces, values = answer["pieces"], answer["values"]
        assert 0 < len(pieces) <= answer["page_size"] == 2000
        for index, piece in enumerate(pieces):
            if int(piece) > 2:
                assert values["mismatch"][index] == 0.25 * (int(piece) - 2)
        seen += pieces
    assert seen == [str(one) for one in range(num_tokens)]
    assert tokens(run, skip=10 * num_tokens)["pieces"] == []


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    old = read(write_run(tmp_path / "old", num_steps=2))
    for answer in (tokens(old, number=0), worst(old, 1)):
        assert "the run has no tokens.jsonl" in answer["problem"]
    status, answer = asked([old], "/api/tokens?number=99")
    assert status == 404 and "there is no rollout 99" in answer["error"]
    run = make(tmp_path, tokens_of(2, 2, 1, PIECES))
    assert tokens(run, number=0)["problem"] == "tokens.jsonl has no values of this rollout"
    assert worst(run, 2)["problem"] == "tokens.jsonl has no values of step 2"
    assert tokens(run, branch=1)["problem"] == "branch = 1; must be 0 to 0"
    # The worst tokens are the last line of a step: values of tokens can be there before.
    assert tokens(run)["worst"] == []


@pytest.mark.parametrize("branches", [1, [{}], [1], [{"num_tokens": 4, "positions": [0], "pieces": 3}]])
def test_damage_is_said(tmp_path: Path, branches: object) -> None:
    line = tokens_of(2, 2, 1, PIECES) | {"branches": branches}
    assert "damaged" in tokens(make(tmp_path, line))["problem"]


def test_of_lines_that_come_twice_the_newer_one_counts_and_damaged_ones_are_counted(tmp_path: Path) -> None:
    first, second = tokens_of(2, 2, 1, ["old"]), tokens_of(2, 2, 1, ["new"])
    run = make(tmp_path, first)
    assert tokens(run)["pieces"] == ["old"]
    lines = [json.dumps(one).encode() for one in (WORST, second)]
    with run.run_dir.tokens.open("ab") as file:
        file.write(b"".join(line + b"\n" for line in (b"no line at all", *lines, lines[1][:-1])))
    run.read_all()
    assert run.problems == ["tokens.jsonl: 2 damaged lines were left out"]
    assert tokens(run)["pieces"] == ["new"]
    assert len(worst(run, 2)["worst"]) == 3
