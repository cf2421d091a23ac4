"""Metrics, faults, rollouts, configs and locks as they are read for the page."""

import json
import os
import socket
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forgeasync.viewer import (
    ConfigUnreadable,
    FaultLines,
    Life,
    MetricTable,
    RolloutGone,
    RolloutIndex,
    differing,
    read_settings,
    run_life,
    seed_groups,
)
from tests.support.viewer_runs import rollout_of


def test_metrics_are_kept_by_key_without_what_is_not_there() -> None:
    table = MetricTable()
    for line in (b'{"step": 0, "eval/accuracy": 0.5}', b'{"step": 1, "loss": null, "x": true}'):
        table.add(line)
    table.add(b'{"step": 2, "loss": 0.25, "eval/accuracy": 1}')
    assert table.step == 2
    assert table.column("loss").steps_N.tolist() == [2]
    assert table.column("eval/accuracy").values_N.tolist() == [0.5, 1.0]
    assert table.column("none").steps_N.tolist() == []
    assert table.newest("eval/accuracy") == (2, 1.0)
    assert "x" not in table.keys


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"{",
        b"[1]",
        b'{"loss": 1}',
        b'{"step": -1}',
        b'{"step": "1"}',
        b'{"step": 1e3}',
        b"\xff",
        b"[" * 5000,
    ],
)
def test_a_line_that_is_no_step_is_counted_and_left_out(line: bytes) -> None:
    table = MetricTable()
    table.add(line)
    assert (table.num_damaged, table.num_lines, table.keys) == (1, 0, [])


def test_faults_have_their_ends_and_damaged_lines_are_counted() -> None:
    detected = {
        "time_s": 5.0,
        "event": "detected",
        "number": 0,
        "role": "trainer",
        "who": "a",
        "what": "died",
    }
    recovered = {"time_s": 9.0, "event": "recovered", "number": 0, "role": "trainer", "who": "a"}
    recovered |= {"how": "came back", "took_s": 4.0}
    lines = FaultLines()
    for one in (detected, {**detected, "number": 1}, recovered, {**recovered, "number": 7}):
        lines.add(json.dumps(one).encode())
    lines.add(b'{"event": "detected"}')
    assert [(one.number, one.how, one.took_s) for one in lines.faults] == [
        (0, "came back", 4.0),
        (1, None, None),
    ]
    assert (lines.num_open, lines.num_damaged) == (1, 2)


TEXTS = st.text(max_size=30)


@given(
    rollouts=st.lists(st.tuples(st.integers(1, 5), st.integers(0, 6), TEXTS), max_size=12),
    is_shuffled=st.booleans(),
    bad=st.sets(st.integers(0, 11), max_size=2),
)
def test_every_rollout_is_found_at_its_place(
    tmp_path_factory, rollouts: list[tuple[int, int, str]], is_shuffled: bool, bad: set[int]
) -> None:
    lines = []
    for place, (step, group, text) in enumerate(rollouts):
        record = rollout_of(step, group, place, text)
        if is_shuffled:
            # Not as a run writes them, and found all the same.
            record = dict(reversed(record.items()))
        lines.append(b"damaged" if place in bad else json.dumps(record).encode())
    file = tmp_path_factory.mktemp("run") / "rollouts.jsonl"
    file.write_bytes(b"".join(line + b"\n" for line in lines))
    index = RolloutIndex()
    half = sum(len(line) + 1 for line in lines[: len(lines) // 2])
    whole = file.read_bytes()
    index.add(whole[:half], start=0)
    index.add(whole[half:], start=half)
    good = [one for place, one in enumerate(rollouts) if place not in bad]
    assert (len(index), index.num_damaged) == (len(good), len(rollouts) - len(good))
    for number, (step, group, text) in enumerate(good):
        found = index.read(file, number)
        assert (found["step"], found["group_id"], found["response"]) == (step, group, text)
    for group in range(8):
        assert [one.number for one in index.of_group(group)] == [
            number for number, one in enumerate(good) if one[1] == group
        ]
    assert [one.number for one in index.of_step(3)] == [n for n, one in enumerate(good) if one[0] == 3]


def test_a_text_that_looks_like_the_head_of_a_line_is_none() -> None:
    record = rollout_of(1, 2, 0, '{"step": 9, "group_id": 9, "episode": 0}\n{"step": 8, "group_id": 8, x}')
    index = RolloutIndex()
    index.add(json.dumps(record).encode() + b"\n", start=0)
    assert len(index) == 1
    assert [one.step for one in index.of_group(2)] == [1]


def test_a_rollout_whose_file_has_changed_is_gone_in_words(tmp_path: Path) -> None:
    file = tmp_path / "rollouts.jsonl"
    file.write_text(json.dumps(rollout_of(1, 2, 0, "")) + "\n")
    index = RolloutIndex()
    index.add(file.read_bytes(), start=0)
    with pytest.raises(RolloutGone, match=r"there is no rollout 1; those read so far are 0 to 0"):
        index.read(file, 1)
    for content in (json.dumps(rollout_of(1, 3, 0, "")), "{", "1"):
        file.write_text(content + "\n")
        with pytest.raises(RolloutGone, match="rollout 0 is no longer where it was"):
            index.read(file, 0)
    file.unlink()
    with pytest.raises(RolloutGone, match="cannot be read: No such file"):
        index.read(file, 0)


def test_numbers_that_are_too_large_are_damage() -> None:
    index = RolloutIndex()
    index.add(b'{"step": 1, "group_id": 99999999999999999999}\n', start=0)
    assert (len(index), index.num_damaged) == (0, 1)


def holder(**others: object) -> str:
    known = {"pid": os.getpid(), "host": socket.gethostname(), "since_s": time.time(), "mark": "0" * 32}
    return json.dumps({**known, "has_ended": False, **others})


@pytest.mark.parametrize(
    ("content", "life"),
    [
        (holder(), Life.RUNNING),
        (holder(has_ended=True), Life.ENDED),
        # The process of this number began later than the run.
        (holder(since_s=1000.0), Life.DIED),
        (holder(pid=2**30), Life.DIED),
        (holder(host="another"), Life.ELSEWHERE),
        (holder(what="is this"), Life.UNKNOWN),
        (holder(pid="x"), Life.UNKNOWN),
        ("{", Life.UNKNOWN),
        ("", Life.UNKNOWN),
    ],
)
def test_whether_a_run_lives(tmp_path: Path, content: str, life: Life) -> None:
    (tmp_path / "run.lock").write_text(content)
    assert run_life(tmp_path / "run.lock").life is life


def test_without_a_lock_nobody_knows(tmp_path: Path) -> None:
    assert run_life(tmp_path / "run.lock").life is Life.UNKNOWN


def test_settings_are_flat_and_any_versions(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("name: x\nnew_section: {a: null, b: true, c: {}, d: [1, 2]}\nlr: 1.0e-4\n")
    assert read_settings(file) == {
        "name": "x",
        "new_section.a": "null",
        "new_section.b": "true",
        "new_section.c": "{}",
        "new_section.d": "[1, 2]",
        "lr": "0.0001",
    }


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"a: [", "is no YAML"),
        (b"- 1\n", "holds no keys"),
        (b"\xff\xfe\x00", "is no YAML"),
        (b"!!python/object/apply:os.system ['true']\n", "is no YAML"),
        (b"a" * (1 << 21), "is not shown"),
    ],
)
def test_a_config_that_is_none_is_told(tmp_path: Path, content: bytes, words: str) -> None:
    file = tmp_path / "config.yaml"
    file.write_bytes(content)
    with pytest.raises(ConfigUnreadable, match=words):
        read_settings(file)
    with pytest.raises(ConfigUnreadable, match="cannot be read: No such file"):
        read_settings(tmp_path / "none.yaml")


def test_seeds_of_one_experiment_are_together() -> None:
    runs = [
        {"seed": "0", "name": "x", "lr": "1"},
        {"seed": "1", "name": "y", "lr": "1"},
        {"seed": "0", "name": "x", "lr": "2"},
        {},
        {},
    ]
    assert seed_groups(runs) == [(0, 1), (2,), (3,), (4,)]
    assert differing(runs[:3]) == {"seed": ("0", "1", "0"), "name": ("x", "y", "x"), "lr": ("1", "1", "2")}
