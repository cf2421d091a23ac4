"""Whole folders of runs: what is read, what is said of them, and what is wrong with some."""

import json
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forgeasync.buffer import Opened
from forgeasync.plugins.viewer import RunReader, status_lines, status_of
from tests.support.ledgers import ledger_text
from tests.support.viewer_runs import STEP_S, asked, metrics_of, read, write_run

FILES = ("metrics.jsonl", "ledger.jsonl", "rollouts.jsonl", "faults.jsonl")

TRAINER = {"number": 0, "role": "trainer", "who": "rank 0"}
SCORER = {"number": 1, "role": "scorer", "who": "the scorer"}
FAULTS = (
    {"time_s": 5.0, "event": "detected", **TRAINER, "what": "died"},
    {"time_s": 6.0, "event": "recovered", **TRAINER, "how": "came back", "took_s": 1.0},
    {"time_s": 7.0, "event": "detected", **SCORER, "what": "died"},
)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    folder = write_run(tmp_path_factory.mktemp("runs") / "made", num_steps=6, is_ended=False)
    (folder / "faults.jsonl").write_text("".join(json.dumps(one) + "\n" for one in FAULTS))
    return folder


def facts(reader: RunReader) -> tuple[object, ...]:
    """Everything that was read, to be compared."""
    metrics = {key: reader.metrics.by_step(key) for key in reader.metrics.keys}
    rollouts = [reader.rollouts.find(step=step) for step in range(9)]
    return metrics, list(reader.groups), reader.faults.faults, rollouts


@settings(max_examples=30)
@given(shares=st.lists(st.tuples(*[st.floats(0, 1)] * len(FILES)), min_size=1, max_size=3))
def test_any_cut_of_the_files_is_a_beginning_that_goes_on(
    tmp_path_factory, run: Path, shares: list[tuple[float, ...]]
) -> None:
    folder = tmp_path_factory.mktemp("cut")
    shutil.copy(run / "config.yaml", folder)
    reader = RunReader(folder)
    contents = [(run / name).read_bytes() for name in FILES]
    sizes = [
        [round(share * len(content)) for content, share in zip(contents, one, strict=True)] for one in shares
    ]
    growing = [list(map(max, zip(*sizes[: place + 1], strict=True))) for place in range(len(sizes))]
    for now in growing:
        for name, content, size in zip(FILES, contents, now, strict=True):
            with (folder / name).open("ab") as file:
                file.write(content[file.tell() : size])
        reader.read_all()
        assert reader.problems == []
        assert reader.metrics.num_lines == contents[0][: now[0]].count(b"\n")
        assert reader.groups.num_lines == contents[1][: now[1]].count(b"\n")
        assert len(reader.rollouts) == contents[2][: now[2]].count(b"\n")
        assert facts(reader) == facts(read(folder))
        assert json.dumps(status_of(reader))


def test_nothing_in_the_folder_is_touched(run: Path) -> None:
    def seen() -> list[tuple[str, int, bytes]]:
        return sorted((one.name, one.stat().st_mtime_ns, one.read_bytes()) for one in run.iterdir())

    before = seen()
    status_lines(status_of(read(run)))
    assert seen() == before


def test_the_status_says_how_far_it_is_and_how_long_it_takes(run: Path) -> None:
    reader = read(run)
    assert (reader.problems, reader.metrics.num_lines, len(reader.rollouts)) == ([], 6, 24)
    assert all(one["unread"] == 0 for one in reader.progress)
    status = status_of(reader)
    assert (status["step"], status["max_steps"], status["recent_step_s"]) == (6, 12, STEP_S)
    assert (status["num_faults"], status["num_open_faults"]) == (2, 1)
    assert status["groups"] == {"sampling": 2, "trained": 12}
    assert status["metrics"]["policy_version"] == {"value": 6, "step": 6}
    # A made run has every metric that this version defines.
    assert len(status["metrics"]) == 14
    # Nobody knows whether it goes on.
    assert (status["life"], status["left_s"]) == ("unknown", None)


@pytest.fixture
def folder(run: Path, tmp_path: Path) -> Path:
    """A copy of the run, to be changed."""
    return Path(shutil.copytree(run, tmp_path / "copy"))


def test_a_verdict_leaves_out_the_last_steps_of_a_run_that_samples_ahead(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "made", num_steps=30)
    lines = [metrics_of(step) | {"generator/busy_s": 2 * STEP_S * step} for step in range(1, 31)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with (folder / "config.yaml").open("a") as file:
        file.write("max_off_policy_steps: 8\nbuffer: {max_groups: 72}\nalgorithm: {groups_per_step: 24}\n")
    assert "(last 17 steps)" in status_of(read(folder))["verdict"][0]


def test_times_of_lines_are_those_of_the_steps_around_them(run: Path) -> None:
    reader = read(run)

    def times(group: int) -> dict[str, float | None]:
        _, answer = asked([reader], f"/api/group?group={group}")
        return {one["what"]: one["about_s"] for one in answer["histories"][0]["events"]}

    # Two groups are trained by each step.
    assert [times(group)["trained"] for group in (0, 2, 10)] == [STEP_S, 2 * STEP_S, 6 * STEP_S]
    assert 3 * STEP_S < times(6)["sampled"] < times(6)["scored"] < 4 * STEP_S
    # The groups of the next step have started; no step is behind them.
    assert times(12)["submitted"] < 6 * STEP_S


def test_what_another_version_has_written_is_said(folder: Path) -> None:
    other = Opened(format=9, run="x", seed=0, groups_per_step=1)
    (folder / "ledger.jsonl").write_bytes(ledger_text([other]))
    reader = read(folder)
    assert len(reader.groups) == 0
    (problem,) = reader.problems
    assert problem == "ledger.jsonl has format 9; this version of forgeasync reads 1; groups are not shown"


def test_damage_is_counted_file_by_file_and_the_rest_is_shown(folder: Path) -> None:
    for name in FILES:
        lines = (folder / name).read_bytes().splitlines(keepends=True)
        (folder / name).write_bytes(b"".join([*lines[:2], b"{dam\xffaged\n", *lines[2:]]))
    (folder / "config.yaml").write_text("a: [")
    reader = read(folder)
    assert len(reader.problems) == 6
    assert "config.yaml is not YAML (ParserError)" in reader.problems
    for name in ("metrics.jsonl", "rollouts.jsonl", "faults.jsonl"):
        assert f"{name}: 1 damaged lines were left out" in reader.problems
    assert (reader.metrics.num_lines, len(reader.rollouts), len(reader.faults.faults)) == (6, 24, 2)
    assert status_of(reader)["groups"]["trained"] == 12
    assert any("note: metrics.jsonl: 1 damaged" in line for line in status_lines(status_of(reader)))


def test_the_words_of_a_run_reach_no_terminal_as_they_are(folder: Path) -> None:
    (folder / "run.log").write_text("done\x1b[2J\x1b]52;c;x\x07\n")
    text = "\n".join(status_lines(status_of(read(folder))))
    assert "\x1b" not in text and "\\x1b[2J" in text
