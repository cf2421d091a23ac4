"""What a run records: its folder, metrics.jsonl, TensorBoard events and rollouts.jsonl."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from forgeasync.observability import (
    REQUIRED_KEYS,
    HeldOutScores,
    MetricsWriter,
    RolloutWriter,
    RunDir,
    check_folder,
    check_run_dir,
)
from forgeasync.observability import metrics as metrics_module
from forgeasync.rollouts import Group
from forgeasync.schema import ConfigError
from tests.support.disks import Disk, install
from tests.support.step_records import (
    NOW,
    TRAINER,
    make_config,
    make_groups,
    make_held_out,
    make_step,
)


def read_lines(path: Path) -> list[dict[str, object]]:
    text = path.read_text(encoding="utf-8")
    assert text == "" or text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


# --- run folder ---


def test_run_dir_holds_the_config_and_every_promised_place(tmp_path: Path) -> None:
    run_dir = RunDir.create(make_config(tmp_path / "a" / "b"), "name: sums\n", NOW)
    assert run_dir.path == tmp_path / "a" / "b"
    assert run_dir.config.read_text() == "name: sums\n"
    assert run_dir.metrics.read_text() == run_dir.rollouts.read_text() == ""
    assert {entry.name for entry in run_dir.path.iterdir() if entry.is_dir()} == {
        "checkpoints",
        "logs",
        "tensorboard",
    }


def test_run_dir_is_named_after_the_run_and_its_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert RunDir.create(make_config(), "", NOW).path == Path("runs/sums-20300102-030405")


def test_run_dir_refuses_a_folder_with_a_run_and_leaves_it_alone(tmp_path: Path) -> None:
    first = RunDir.create(make_config(tmp_path), "first", NOW)
    with pytest.raises(ConfigError, match="run_dir"):
        RunDir.create(make_config(tmp_path), "second", NOW)
    assert first.config.read_text() == "first"


def refusals(run_dir: Path, *, is_resumed: bool = False) -> list[str]:
    return [str(problem) for problem in check_run_dir(make_config(run_dir), is_resumed=is_resumed)]


def test_folders_that_cannot_be_a_runs_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    for is_resumed in (False, True):
        assert refusals(file, is_resumed=is_resumed) == [f"run_dir = {str(file)!r}: is a file; name a folder"]
        (below,) = refusals(file / "a" / "b", is_resumed=is_resumed)
        assert f"lies below {file}, which is a file" in below
    with pytest.raises(ConfigError, match="is a file"):
        RunDir.create(make_config(file), "", NOW)
    with pytest.raises(ConfigError, match="which is a file"):
        RunDir.reopen(file / "a")
    assert refusals(tmp_path / "new" / "er") == refusals(tmp_path) == []


def test_folders_that_are_not_writable_are_refused(tmp_path: Path) -> None:
    # Nobody may write there, not even root.
    assert "/proc/1, where it would be made, is not writable" in refusals(Path("/proc/1/run"))[0]
    assert "it is not writable" in refusals(Path("/proc/1"))[0]
    problem = next(check_folder("checkpoint.folder", Path("/proc/1/x")))
    assert problem.field == "checkpoint.folder"


@pytest.mark.parametrize(
    ("lines", "has_trained"),
    [
        ("", False),
        ('{"step": 0, "eval/accuracy": 0.5}\n', False),
        ('{"step": 0}\n{"step": 1}\n', True),
        ("{}\n", True),
        ("x", True),
    ],
)
def test_only_what_trained_keeps_the_next_start_out(tmp_path: Path, lines: str, has_trained: bool) -> None:
    first = RunDir.create(make_config(tmp_path), "first", NOW)
    first.metrics.write_text(lines)
    first.log("trainer").write_text("why it failed")
    first.ledger.write_text("of the first")
    assert bool(refusals(tmp_path)) == has_trained
    if has_trained:
        assert "already holds a run" in refusals(tmp_path)[0]
        assert refusals(tmp_path, is_resumed=True) == []
        assert first.put_start_aside() == []
        return
    moved = first.put_start_aside()
    assert set(moved) == {
        "metrics.cut-1.jsonl", "rollouts.cut-1.jsonl", "ledger.cut-1.jsonl", "config.cut-1.yaml",
        "logs.cut-1", "tensorboard.cut-1",
    }  # fmt: skip
    second = RunDir.create(make_config(tmp_path), "second", NOW)
    assert second.config.read_text() == "second" and second.metrics.read_text() == ""
    assert (tmp_path / "config.cut-1.yaml").read_text() == "first"
    assert (tmp_path / "logs.cut-1" / "trainer.log").read_text() == "why it failed"
    assert (tmp_path / "metrics.cut-1.jsonl").read_text() == lines


def test_a_ledger_alone_makes_room_too(tmp_path: Path) -> None:
    first = RunDir(path=tmp_path)
    first.ledger.write_text("of the first")
    assert first.put_start_aside() == ["ledger.cut-1.jsonl"] and not first.ledger.exists()


def test_a_checkpoint_keeps_the_next_start_out(tmp_path: Path) -> None:
    run_dir = RunDir.create(make_config(tmp_path), "", NOW)
    (run_dir.checkpoints / "final").mkdir()
    assert "already holds a run" in refusals(tmp_path)[0]


HOLD = """
import sys
from pathlib import Path
from forgeasync.observability.run_dir import RunDir
RunDir(path=Path(sys.argv[1])).claim()
print("held", flush=True)
sys.stdin.read()
"""


def test_the_folder_of_a_live_run_is_left_alone(tmp_path: Path) -> None:
    """Its first step may be minutes away: until then only the claim tells it from a failed start."""
    (tmp_path / "metrics.jsonl").touch()
    other = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert other.stdin is not None and other.stdout is not None
    try:
        assert other.stdout.readline() == b"held\n"
        run_dir = RunDir(path=tmp_path)
        who = rf"goes on at this moment \(process {other.pid} on {socket.gethostname()}, since 20\d\d-"
        with pytest.raises(ConfigError, match=who):
            run_dir.put_start_aside()
        with pytest.raises(ConfigError, match=who):
            RunDir.reopen(tmp_path)
        assert sorted(file.name for file in tmp_path.iterdir()) == ["metrics.jsonl", "run.lock"]
    finally:
        other.kill()
        other.wait()
    # It is gone, however it ended.
    assert run_dir.put_start_aside() == ["metrics.cut-1.jsonl"]


# --- metrics ---


def test_step_metrics_by_hand() -> None:
    metrics = make_step().to_dict()
    assert REQUIRED_KEYS <= metrics.keys()
    assert "eval/accuracy" not in metrics
    metrics = make_step(accuracy=0.25).to_dict()
    assert metrics["eval/accuracy"] == 0.25
    assert metrics["eval/score_mean"] == 0.25 + 0.75 / 4
    assert metrics["eval/num_unscored"] == 24

    expected = {
        "reward/mean": 0.25,
        "reward/std": np.sqrt(3) / 4,
        "throughput/train_tokens_per_s": 8.0,
        "throughput/generated_tokens_per_s": 20.0,
        # Trained on version 4: 1 token of version 3, 4 tokens of version 2, 11 of version 4.
        "off_policy/age_mean": (1 * 1 + 4 * 2) / 16,
        "off_policy/age_max": 2,
        "response/length_mean": 4.0,
        "response/length_min": 2,
        "response/length_max": 6,
        "response/truncated_share": 0.25,
        "dropped/too_old": 3,
        "loss": 0.5,
    }
    assert {key: metrics[key] for key in expected} == pytest.approx(expected)


def test_an_evaluation_without_any_score_has_no_accuracy() -> None:
    nothing = HeldOutScores(num_correct=0, score_sum=0.0, num_scored=0, num_unscored=8)
    assert nothing.metrics() == {"eval/num_unscored": 8}
    assert "none of 8 responses" in str(nothing)


def test_unscored_group_is_refused() -> None:
    group = make_groups()[0]
    unscored = Group(group_id=9, draw_id=9, task=group.task, rollouts=group.rollouts)
    with pytest.raises(ValueError, match="group 9"):
        metrics_module._reward_metrics([unscored])


def test_each_line_is_on_disk_before_close(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    writer = MetricsWriter(path, tensorboard_dir=None)
    writer.write_initial_evaluation(make_held_out(accuracy=0.125), eval_s=3.0)
    assert read_lines(path) == [
        {
            "step": 0,
            "policy_version": 0,
            "eval/accuracy": 0.125,
            "eval/score_mean": 0.125 + 0.875 / 4,
            "eval/num_unscored": 24,
            "time/eval_s": 3.0,
            "time/elapsed_s": 0.0,
            "metrics/num_nonfinite": 0,
            "metrics/num_tensorboard_errors": 0,
        }
    ]
    for step in (1, 2):
        writer.write(make_step(step=step).to_dict())
        assert [line["step"] for line in read_lines(path)] == list(range(step + 1))
    writer.close()
    writer.close()


def test_missing_key_is_an_error_and_writes_nothing(tmp_path: Path) -> None:
    metrics = make_step().to_dict()
    del metrics["loss"], metrics["time/elapsed_s"]
    with MetricsWriter(tmp_path / "m.jsonl", tensorboard_dir=None) as writer:
        with pytest.raises(KeyError, match="loss, time/elapsed_s"):
            writer.write(metrics)
    assert read_lines(tmp_path / "m.jsonl") == []


def test_nonfinite_values_become_null_and_are_counted(tmp_path: Path) -> None:
    broken = {**TRAINER, "loss": float("nan"), "grad_norm": float("inf")}
    with MetricsWriter(tmp_path / "m.jsonl", tensorboard_dir=None) as writer:
        writer.write(make_step(trainer=broken).to_dict())
        writer.write(make_step().to_dict())
    first, second = read_lines(tmp_path / "m.jsonl")
    assert first["loss"] is None and first["grad_norm"] is None
    assert first["metrics/num_nonfinite"] == 2
    assert second["loss"] == 0.5 and second["metrics/num_nonfinite"] == 0


def test_tensorboard_gets_every_key(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path / "m.jsonl", tensorboard_dir=tmp_path / "tb") as writer:
        writer.write(make_step(accuracy=0.5).to_dict())
        # Read before close: a killed run keeps its events as well.
        events = EventAccumulator(str(tmp_path / "tb")).Reload()
        assert set(events.Tags()["scalars"]) == set(read_lines(tmp_path / "m.jsonl")[0])
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
    lines = read_lines(tmp_path / "m.jsonl")
    # The second line could not be written, and was written to another file, with the third.
    assert [line["metrics/num_tensorboard_errors"] for line in lines] == [0, 1, 0, 0]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    (message,) = said
    assert str(folder) in message and "No space left on device" in message and "written later" in message
    events.unlink()
    written = EventAccumulator(str(folder)).Reload().Scalars("loss")
    assert [event.step for event in written] == [2, 3, 4]


def test_lines_that_a_full_disk_refuses_are_written_when_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "m.jsonl"
    disk = Disk(10_000)
    install(monkeypatch, disk)
    with MetricsWriter(path, tensorboard_dir=None) as writer:
        writer.write(make_step(step=1).to_dict())
        disk.room = path.stat().st_size + 10
        for step in (2, 3):
            writer.write(make_step(step=step).to_dict())
            refusal = writer.lines.flush()
            assert refusal is not None and refusal.path == str(path) and "No space" in refusal.reason
            assert [line["step"] for line in read_lines(path)] == [1], "no half of a line"
        disk.room = 100_000
        assert writer.lines.flush() is None
        assert [line["step"] for line in read_lines(path)] == [1, 2, 3]
        disk.room = path.stat().st_size
        writer.write(make_step(step=4).to_dict())
        with pytest.raises(OSError, match=r"m\.jsonl lacks its last \d+ bytes: No space left"):
            writer.close()


def test_a_folder_that_tensorboard_cannot_use_does_not_end_the_run(tmp_path: Path) -> None:
    said: list[str] = []
    (tmp_path / "tb").touch()
    with MetricsWriter(tmp_path / "m.jsonl", tensorboard_dir=tmp_path / "tb", say=said.append) as writer:
        writer.write_initial_evaluation(make_held_out(accuracy=0.5), eval_s=1.0)
        writer.write(make_step().to_dict())
    lines = read_lines(tmp_path / "m.jsonl")
    assert [line["metrics/num_tensorboard_errors"] for line in lines] == [1, 2]
    assert len(said) == 1


# --- rollouts ---


def test_rollouts_are_recorded_with_text_and_versions(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    with RolloutWriter(path, per_step=100) as writer:
        writer.write(5, make_groups())
        lines = read_lines(path)
    assert len(lines) == 4
    assert lines[1] == {
        "step": 5,
        "group_id": 7,
        "episode": 0,
        "agent": 0,
        "task_id": "t0",
        "prompt": "0 + 1 =",
        "response": "response of 4 tokens\nzwölf",
        "answer": "1",
        "reward": 0.0,
        "version_spans": [[3, 0, 1], [4, 1, 4]],
        "prompt_tokens": 5,
        "response_tokens": 4,
        "finish_reason": "stop",
    }
    assert lines[3]["finish_reason"] == "length"


def test_picked_rollouts_depend_on_the_step_alone(tmp_path: Path) -> None:
    texts = []
    for name in ("a", "b"):
        with RolloutWriter(tmp_path / name, per_step=2) as writer:
            for step in range(8):
                writer.write(step, make_groups())
        texts.append((tmp_path / name).read_text())
    assert texts[0] == texts[1]
    lines = read_lines(tmp_path / "a")
    assert [line["step"] for line in lines] == [step for step in range(8) for _ in range(2)]
    assert len({(line["group_id"], line["response"]) for line in lines}) > 2


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("", "is no folder of its own; name one"),
        (".", "is no folder of its own; name one"),
        ("~/runs/x", "is not expanded; write the path out"),
        ("/tmp/" + 300 * "x", "File name too long"),
        ("/tmp/a\0b", "has a NUL in it"),
    ],
)
def test_paths_that_are_no_folders_are_refused(path: str, words: str) -> None:
    (problem,) = check_folder("run_dir", Path(path))
    assert words in str(problem)
