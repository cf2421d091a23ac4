"""Metrics, faults, rollouts, configs and locks, as they are read for the page."""

import json
import os
import socket
import time
from pathlib import Path

import pytest

from forgeasync.plugins.viewer import NotFound, status_of
from tests.support.viewer_runs import asked, read, rollout_of


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run that has written nothing yet."""
    (tmp_path / "metrics.jsonl").touch()
    (tmp_path / "config.yaml").write_text("max_steps: 2\n")
    return tmp_path


def test_metrics_are_kept_by_key_without_null_and_flags(folder: Path) -> None:
    lines = '{"step": 0, "eval/accuracy": 0.5}\n{"step": 1, "loss": null, "x": true}\n'
    (folder / "metrics.jsonl").write_text(lines + '{"step": 2, "loss": 0.25, "eval/accuracy": 1}\n')
    metrics = read(folder).metrics
    assert metrics.step == 2
    assert metrics.by_step("loss") == {2: 0.25}
    assert metrics.tail("eval/accuracy", 9) == [(0, 0.5), (2, 1.0)]
    assert metrics.tail("none", 9) == []
    assert metrics.newest("eval/accuracy") == (2, 1.0)
    assert "x" not in metrics.keys


def test_faults_have_their_ends_and_damaged_lines_are_counted(folder: Path) -> None:
    fault = {"number": 0, "role": "trainer", "who": "a"}
    detected = {"time_s": 5.0, "event": "detected", **fault, "what": "died"}
    recovered = {"time_s": 9.0, "event": "recovered", **fault, "how": "came back", "took_s": 4.0}
    lines = [json.dumps(one) for one in (detected, detected | {"number": 1}, recovered)]
    lines += [json.dumps(recovered | {"number": 7}), '{"event": "detected"}']
    (folder / "faults.jsonl").write_text("".join(line + "\n" for line in lines))
    reader = read(folder)
    _, answer = asked([reader], "/api/faults")
    ends = [(one["number"], one["how"], one["took_s"]) for one in answer["faults"]]
    assert ends == [(0, "came back", 4.0), (1, None, None)]
    assert status_of(reader)["num_open_faults"] == 1
    assert reader.problems == ["faults.jsonl: 2 damaged lines were left out"]


def test_rollouts_are_found_by_step_and_group(folder: Path) -> None:
    places = [(1, 4), (1, 5), (2, 4), (2, 6)]
    lines = [json.dumps(rollout_of(step, group, 0, f"{step} {group} é")) for step, group in places]
    (folder / "rollouts.jsonl").write_text("\n".join([*lines[:2], "damaged", *lines[2:]]) + "\n")
    index = read(folder).rollouts
    assert (len(index), index.num_damaged) == (4, 1)
    assert [index.read(number)["response"] for number in range(4)] == [f"{s} {g} é" for s, g in places]
    assert (index.find(group=4), index.find(step=2), index.find(step=3)) == ([0, 2], [2, 3], [])


def test_a_text_like_the_head_of_a_line_is_none_and_too_large_a_number_is_damage(folder: Path) -> None:
    record = rollout_of(1, 2, 0, '{"step": 9, "group_id": 9, "episode": 0}\n{"step": 8, "group_id": 8, x}')
    large = '{"step": 1, "group_id": 99999999999999999999}'
    (folder / "rollouts.jsonl").write_text(json.dumps(record) + "\n" + large + "\n")
    index = read(folder).rollouts
    assert (len(index), index.num_damaged) == (1, 1)
    assert index.find(group=2) == index.find(step=1) == [0]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (json.dumps(rollout_of(1, 3, 0, "")), "has changed"),
        ("1", "has changed"),
        (None, "cannot be read: No such file"),
    ],
)
def test_a_rollout_of_a_changed_file_is_gone(folder: Path, content: str | None, words: str) -> None:
    file = folder / "rollouts.jsonl"
    file.write_text(json.dumps(rollout_of(1, 2, 0, "")) + "\n")
    rollouts = read(folder).rollouts
    file.unlink() if content is None else file.write_text(content + "\n")
    with pytest.raises(NotFound, match=rf"rollout 0 is gone: rollouts\.jsonl {words}"):
        rollouts.read(0)


def holder(**others: object) -> str:
    known = {"pid": os.getpid(), "host": socket.gethostname(), "since_s": time.time(), "mark": "0" * 32}
    return json.dumps({**known, "has_ended": False, **others})


@pytest.mark.parametrize(
    ("content", "life"),
    [
        (holder(), "running"),
        (holder(has_ended=True), "ended"),
        # The process of this number began later than the run.
        (holder(since_s=1000.0), "died"),
        (holder(pid=2**30), "died"),
        (holder(host="another"), "elsewhere"),
        (holder(what="is this"), "unknown"),
        ("", "unknown"),
    ],
)
def test_whether_a_run_lives(folder: Path, content: str, life: str) -> None:
    (folder / "run.lock").write_text(content)
    assert status_of(read(folder))["life"] == life


def test_settings_are_flat_and_of_any_version(folder: Path) -> None:
    text = "name: x\nnew_section: {a: null, b: true, c: {}, d: [1, 2]}\nlr: 1.0e-4\n"
    (folder / "config.yaml").write_text(text)
    section = {"a": "null", "b": "true", "c": "{}", "d": "[1, 2]"}
    flat = {f"new_section.{key}": value for key, value in section.items()}
    assert read(folder).settings == {"name": "x", **flat, "lr": "0.0001"}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"a: [", "is not YAML"),
        (b"- 1\n", "holds no keys"),
        (b"!!python/object/apply:os.system ['true']\n", "is not YAML"),
        (b"a" * (1 << 21), "is not shown"),
        (None, "cannot be read: No such file"),
    ],
)
def test_a_config_that_is_none_is_told(folder: Path, content: bytes | None, words: str) -> None:
    file = folder / "config.yaml"
    file.unlink() if content is None else file.write_bytes(content)
    reader = read(folder)
    (problem,) = reader.problems
    assert words in problem and problem.startswith("config.yaml ")
    assert reader.settings == {}
