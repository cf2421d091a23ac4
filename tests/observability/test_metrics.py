"""Metrics: what a key means, and how a step's numbers reach metrics.jsonl and TensorBoard."""

import re
from pathlib import Path

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from forgeasync.files import read_json_lines
from forgeasync.observability import (
    METRICS,
    REQUIRED_KEYS,
    HeldOutScores,
    MetricsWriter,
    definition_of,
    markdown,
    undefined,
)
from tests.support.disks import Disk, install
from tests.support.step_records import TRAINER, make_held_out, make_step

# --- definitions ---


REPOSITORY = Path(__file__).parents[2]


def test_the_page_is_what_the_definitions_say() -> None:
    written = (REPOSITORY / "docs" / "metrics.md").read_text(encoding="utf-8")
    assert written == markdown(), "docs/metrics.md is out of date: run `make docs`"


def test_every_key_is_defined_once_in_a_sentence_of_its_own() -> None:
    assert len({one.key for one in METRICS}) == len(METRICS)
    for metric in METRICS:
        first = metric.meaning.split()[0]
        assert metric.meaning.endswith(".") and not first.islower(), metric
        assert first not in ("And", "The", "Of", "Likewise"), f"{metric.key} leans on the row above it"


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("reward/mean", "reward/mean"),
        ("reward/format", "reward/<part>"),
        ("eval/reward/format", "eval/reward/<part>"),
        ("eval/hard/reward/format", "eval/<set>/reward/<part>"),
        ("eval/hard.v2/accuracy", "eval/<set>/accuracy"),
        ("routing/disagreement_share_layer_03", "routing/disagreement_share_layer_<i>"),
        ("correction/weight_max", "correction/weight_max"),
        ("correction/masked_share", "correction/<name>"),
        ("reward/", None),
        ("reward/a/b", None),
        ("eval/hard/speed", None),
        ("xloss", None),
        ("buffer/num_of_my_own", None),
    ],
)
def test_keys_find_their_definition(key: str, expected: str | None) -> None:
    found = definition_of(key)
    assert (None if found is None else found.key) == expected
    assert undefined([key]) == ([key] if expected is None else [])


def test_keys_in_the_code_are_defined() -> None:
    """Keys that only some run writes too; whole runs are checked where they are tested."""
    prefixes = {metric.key.partition("/")[0] for metric in METRICS if "/" in metric.key}
    literal = re.compile(rf'"((?:{"|".join(sorted(prefixes))})/[a-z_]+)"')
    found = {
        key
        for room in ("forgeasync", "apps")
        for file in (REPOSITORY / room).rglob("*.py")
        for key in literal.findall(file.read_text(encoding="utf-8"))
    }
    assert len(found) > 100
    # Counted on the way to a mean, and taken out again.
    assert undefined(found - {"mismatch/num_fresh"}) == []


# --- a step ---


def test_step_metrics_by_hand() -> None:
    metrics = make_step().to_dict()
    assert {key for key in metrics if not key.startswith("dropped/")} == REQUIRED_KEYS
    metrics = make_step(accuracy=0.25).to_dict()
    assert undefined(metrics) == []

    expected = {
        "eval/score_mean": 0.25 + 0.75 / 4,
        "reward/std": np.sqrt(3) / 4,
        # Trained on version 4: 1 token of version 3, 4 tokens of version 2, 11 of version 4.
        "off_policy/age_mean": (1 * 1 + 4 * 2) / 16,
        "off_policy/age_max": 2,
        "response/length_mean": 4.0,
        "response/length_min": 2,
        "response/length_max": 6,
        "response/truncated_share": 0.25,
        "dropped/too_old": 3,
    }
    assert {key: metrics[key] for key in expected} == pytest.approx(expected)


def test_an_evaluation_without_any_score_has_no_accuracy() -> None:
    nothing = HeldOutScores(num_correct=0, score_sum=0.0, num_scored=0, num_unscored=8)
    assert nothing.metrics() == {"eval/num_unscored": 8}
    assert "none of 8 responses" in str(nothing)


# --- metrics.jsonl ---


def test_missing_key_is_an_error_and_writes_nothing(tmp_path: Path) -> None:
    metrics = make_step().to_dict()
    del metrics["loss"], metrics["time/elapsed_s"]
    with MetricsWriter(tmp_path / "m.jsonl", tensorboard_dir=None) as writer:
        with pytest.raises(KeyError, match="loss, time/elapsed_s"):
            writer.write(metrics)
    assert read_json_lines(tmp_path / "m.jsonl") == []


def test_nonfinite_values_become_null_and_are_counted(tmp_path: Path) -> None:
    broken = {**TRAINER, "loss": float("nan"), "grad_norm": float("inf")}
    with MetricsWriter(tmp_path / "m.jsonl", tensorboard_dir=None) as writer:
        writer.write(make_step(trainer=broken).to_dict())
        writer.write(make_step().to_dict())
    first, second = read_json_lines(tmp_path / "m.jsonl")
    assert first["loss"] is None and first["grad_norm"] is None
    assert first["metrics/num_nonfinite"] == 2
    assert second["loss"] == 0.5 and second["metrics/num_nonfinite"] == 0


def test_lines_that_a_full_disk_refuses_come_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.jsonl"
    disk = Disk(10_000)
    install(monkeypatch, disk)
    with MetricsWriter(path, tensorboard_dir=None) as writer:
        writer.write(make_step(step=1).to_dict())
        whole = path.read_bytes()
        disk.room = len(whole) + 10
        for step in (2, 3):
            writer.write(make_step(step=step).to_dict())
            refusal = writer.lines.flush()
            assert refusal is not None and refusal.path == str(path) and "No space" in refusal.reason
            assert path.read_bytes() == whole, "no half of a line"
        disk.room = 100_000
        assert writer.lines.flush() is None
        assert [line["step"] for line in read_json_lines(path)] == [1, 2, 3]
        disk.room = path.stat().st_size
        writer.write(make_step(step=4).to_dict())
        with pytest.raises(OSError, match=r"m\.jsonl lacks its last \d+ bytes: No space left"):
            writer.close()


# --- TensorBoard ---


def test_tensorboard_gets_every_key(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path / "m.jsonl", tensorboard_dir=tmp_path / "tb") as writer:
        writer.write(make_step(accuracy=0.5).to_dict())
        # Read before close: a killed run keeps its events as well.
        events = EventAccumulator(str(tmp_path / "tb")).Reload()
        assert set(events.Tags()["scalars"]) == set(read_json_lines(tmp_path / "m.jsonl")[0])
    (event,) = events.Scalars("eval/accuracy")
    assert (event.step, event.value) == (5, 0.5)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_full_disk_under_tensorboard_does_not_end_the_run(tmp_path: Path) -> None:
    """Its files are written by a thread of their own, whose error comes with a later value."""
    said: list[str] = []
    folder = tmp_path / "tb"
    with MetricsWriter(tmp_path / "m.jsonl", tensorboard_dir=folder, say=said.append) as writer:
        writer.write(make_step(step=1).to_dict())
        (events,) = folder.iterdir()
        events.unlink()
        events.symlink_to("/dev/full")
        for step in (2, 3, 4):
            writer.write(make_step(step=step).to_dict())
    lines = read_json_lines(tmp_path / "m.jsonl")
    # The second line could not be written, and was written to another file, with the third.
    assert [line["metrics/num_tensorboard_errors"] for line in lines] == [0, 1, 0, 0]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    (message,) = said
    assert str(folder) in message and "No space left on device" in message and "written later" in message
    events.unlink()
    written = EventAccumulator(str(folder)).Reload().Scalars("loss")
    assert [event.step for event in written] == [2, 3, 4]


def test_a_folder_that_tensorboard_cannot_use_does_not_end_the_run(tmp_path: Path) -> None:
    said: list[str] = []
    (tmp_path / "tb").touch()
    with MetricsWriter(tmp_path / "m.jsonl", tensorboard_dir=tmp_path / "tb", say=said.append) as writer:
        writer.write_initial_evaluation(make_held_out(accuracy=0.5), eval_s=1.0)
        writer.write(make_step().to_dict())
    lines = read_json_lines(tmp_path / "m.jsonl")
    assert [line["metrics/num_tensorboard_errors"] for line in lines] == [1, 2]
    assert len(said) == 1
