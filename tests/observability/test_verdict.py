"""What a run says last: what bounded it, how held-out accuracy went, and its curves."""

import dataclasses
import json
import shlex
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forgeasync.observability import (
    KEYS,
    NUM_GENERATORS,
    WINDOW_STEPS,
    MeasuredSteps,
    MeasuredWindow,
    MetricsWriter,
    RunDir,
    closing_lines,
    num_steps_ahead,
    plot,
    steady_steps,
    verdict_lines,
)
from tests.support.step_records import NOW, make_config, make_held_out, make_step

# --- means over the newest steps ---


def line(step: int, elapsed_s: float, **changed: float) -> dict[str, float]:
    """A step that waits 1 s for a batch and trains for 2 s; one generator, always busy."""
    found = {
        "step": step,
        "time/elapsed_s": elapsed_s,
        "time/eval_s": 0.0,
        "time/wait_for_batch_s": 1.0,
        "time/train_s": 2.0,
        "time/publish_weights_s": 0.5,
        "generator/busy_s": elapsed_s,
        NUM_GENERATORS: 1.0,
        "time/controller_s": 0.25,
        "time/wait_for_disk_s": 1.0,
    }
    return found | changed


def measured(
    lines: list[dict[str, float]], *, num_left_out: int = 0, last_step: int = 10**6
) -> MeasuredSteps | None:
    window = MeasuredWindow(num_left_out=num_left_out, last_step=last_step)
    for one in lines:
        window.add(one)
    return window.measured()


def test_shares_and_rates_are_of_the_time_without_evaluations() -> None:
    third = line(3, 25.0, **{"time/eval_s": 10.0, "generator/busy_s": 20.0, "time/checkpoint_s": 0.5})
    found = measured([line(1, 5.0), line(2, 10.0), third])
    assert found is not None and found.num_steps == 2
    assert found.step_s == pytest.approx(5.0), "10 s were an evaluation's"
    shares = {"wait": 0.2, "train": 0.4, "publish": 0.1, "controller": 0.05, "disk": 0.2}
    assert found.shares == pytest.approx(shares | {"checkpoint": 0.05, "eval": 1.0})
    assert found.busy_share == pytest.approx(15.0 / 20.0), "evaluations keep generators busy too"


def test_busy_time_is_that_of_all_generators_and_unknown_without_their_number() -> None:
    two = [line(step, 5.0 * step, **{NUM_GENERATORS: 2.0}) for step in (1, 2)]
    found = measured(two)
    assert found is not None and found.busy_share == pytest.approx(0.5)
    found = measured([{key: one[key] for key in KEYS} for one in two])
    assert found is not None and found.busy_share is None and found.step_s == 5.0


def test_the_last_steps_of_a_run_are_left_out_as_it_has_ever_less_to_sample() -> None:
    fast_last = [line(1, 5.0), line(2, 10.0), line(3, 15.0), line(4, 15.1), line(5, 15.2)]
    found = measured(fast_last, last_step=3)
    assert found is not None and (found.num_steps, found.step_s) == (2, 5.0)
    window = MeasuredWindow.of_run(30, num_steps_ahead=3)
    for step in range(1, 31):
        window.add(line(step, 5.0 * min(step, 27) + 0.1 * max(0, step - 27)))
    found = window.measured()
    assert found is not None and (found.num_steps, found.step_s) == (17, pytest.approx(5.0))


def test_a_short_run_keeps_half_of_its_steps() -> None:
    for num_steps in range(1, 40):
        for num_first in range(num_steps):
            for num_ahead in range(40):
                steady = steady_steps(num_steps, num_first=num_first, num_ahead=num_ahead)
                assert steady.start >= num_first and num_steps - steady.stop <= num_ahead
                num_between = steady.stop - num_first
                assert 2 * num_between >= num_steps - num_first
                num_waves = num_between // (num_ahead + 1)
                assert len(steady) == (num_waves * (num_ahead + 1) if num_waves else num_between)


def test_how_far_a_run_samples_ahead() -> None:
    ahead = [(4, None, 4), (4, 72, 3), (4, 73, 4), (0, 72, 0)]
    for k, max_groups, expected in ahead:
        found = num_steps_ahead(max_off_policy_steps=k, max_groups=max_groups, groups_per_step=24)
        assert found == expected


def test_a_start_in_between_begins_anew() -> None:
    """The clock of a resumed run goes on; its generators' busy time begins at 0."""
    before = [line(step, 5.0 * step) for step in (1, 2, 3)]
    after = [line(4, 500.0, **{"generator/busy_s": 1.0}), line(5, 504.0, **{"generator/busy_s": 5.0})]
    found = measured([*before, *after])
    assert found is not None and (found.num_steps, found.step_s) == (1, 4.0)
    # A step that is made again.
    assert measured([*before, line(3, 16.0)]) is None


@given(st.lists(st.floats(0.1, 100.0), min_size=2, max_size=3 * WINDOW_STEPS), st.integers(0, 5))
def test_the_mean_is_that_of_the_newest_steps(seconds: list[float], num_left_out: int) -> None:
    elapsed, lines = 0.0, []
    for step, one in enumerate(seconds, 1):
        elapsed += one
        lines.append(line(step, elapsed))
    found = measured(lines, num_left_out=num_left_out)
    counted = seconds[max(1, num_left_out) :][-WINDOW_STEPS:]
    if not counted:
        assert found is None
    else:
        assert found is not None and found.num_steps == len(counted)
        assert found.step_s == pytest.approx(sum(counted) / len(counted))


# --- the verdict ---


MEASURED = MeasuredSteps(
    num_steps=20,
    step_s=2.0,
    shares=dict.fromkeys(("controller", "disk", "checkpoint", "eval"), 0.0)
    | {"wait": 0.6, "train": 0.2, "publish": 0.1},
    busy_share=0.9,
)


@pytest.mark.parametrize(
    ("busy_share", "shares", "begin"),
    [
        (0.9, {}, "generators bound the run: training waited for batches 60% of the time"),
        (None, {}, "generation bounds the run: training waited for batches 60%"),
        (0.2, {}, "generators do not bound the run, nor does training: training waited"),
        (0.9, {"wait": 0.1, "train": 0.7}, "training bounds the run: it took 70% of the time"),
        (0.9, {"wait": 0.1, "publish": 0.5}, "publishing bounds the run: training waited for it 50%"),
        (0.9, {"wait": 0.1, "disk": 0.62}, "the disk bounds the run: training waited for it 62%"),
        (
            0.9,
            {"wait": 0.1, "controller": 0.3},
            "the controller bounds the run: its rows, reports and",
        ),
        (0.9, {"wait": 0.1, "checkpoint": 0.4}, "checkpoints bound the run: training waited for them"),
        # It lasts three times as long as all else.
        (0.9, {"eval": 3.0}, "evaluations bound the run: training waited for them 75% of the time"),
        # Of 0.7 nobody knows what they were.
        (0.9, {"wait": 0.15, "train": 0.05}, "generators bound the run: training waited for"),
        (0.9, {"wait": 0.05, "train": 0.05, "disk": 0.2}, "the disk bounds the run: training"),
    ],
)
def test_what_takes_most_of_the_time_bounds_the_run(
    busy_share: float | None, shares: dict[str, float], begin: str
) -> None:
    found = dataclasses.replace(MEASURED, busy_share=busy_share, shares={**MEASURED.shares, **shares})
    words, how = verdict_lines(found)
    assert words.startswith(begin) and "last 20 steps" in words
    _, advice = words.split(";", 1)
    assert advice.strip(), "a person can act on it"
    assert "python -m apps.profile" in how


def test_a_few_steps_say_nothing_of_what_bounds_a_run() -> None:
    assert "too few steps" in verdict_lines(None)[0]


# --- held-out accuracy and curves ---


def write_run(folder: Path) -> Path:
    run_dir = RunDir.create(make_config(folder), "", NOW)
    with MetricsWriter(run_dir.metrics, tensorboard_dir=None) as writer:
        writer.write_initial_evaluation(make_held_out(accuracy=0.1), eval_s=1.0)
        for step in range(1, 5):
            accuracy = 0.1 * step if step % 2 == 0 else None
            writer.write(make_step(step=step, elapsed_s=30.0 * step, accuracy=accuracy))
    return folder


def test_plot_reads_what_the_writer_wrote(tmp_path: Path) -> None:
    run = plot.read_run(write_run(tmp_path / "sync"))
    assert run.name == "sync"
    assert run.accuracy.steps_N.tolist() == [0, 2, 4]
    assert run.accuracy.minutes_N.tolist() == [0.0, 1.0, 2.0]
    assert run.reward.steps_N.tolist() == [1, 2, 3, 4]


def test_plot_of_nothing_ends_with_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["plot", str(tmp_path), "--out", str(tmp_path / "x.png")])
    with pytest.raises(SystemExit):
        plot.main()
    assert str(tmp_path / "metrics.jsonl") in capsys.readouterr().err


def test_moving_average_looks_back_only() -> None:
    averaged = plot.moving_average(np.array([1.0, 3.0, 5.0, 7.0]), 2)
    assert averaged.tolist() == [1.0, 2.0, 4.0, 6.0]


def test_the_last_words_say_how_accuracy_went(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path / "a run")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "python"))
    monkeypatch.chdir(tmp_path)
    run_dir, its_weights = RunDir(path=Path("a run")), Path("its weights")
    reached, bound, *following = closing_lines(run_dir, its_weights, MEASURED, has_profile=True)
    episodes = closing_lines(run_dir, its_weights, MEASURED, has_profile=False)[-1]
    assert episodes == "  read episodes:    bin/python -m apps.show 'a run'"
    accuracy, weights = reached.split("; ")
    assert accuracy == "held-out accuracy went from 10.0% to 40.0% in 4 steps, which took 2.0 minutes"
    assert weights == "weights: its weights"
    assert bound == verdict_lines(MEASURED)[0]
    view, curves, profile = (shlex.split(one.partition(": ")[2]) for one in following)
    assert view == ["bin/python", "-m", "apps.view", "a run"]
    assert profile[2:] == ["apps.profile", "--run", "a run", "--out", "profile.json"]
    # The link is not the environment that has our packages: the same arguments, run as a test runs them.
    monkeypatch.setattr(sys, "argv", curves[2:])
    plot.main()
    image = (tmp_path / "a run" / "learning.png").read_bytes()
    assert image.startswith(b"\x89PNG\r\n\x1a\n") and len(image) > 10_000


@pytest.mark.parametrize(
    ("accuracies", "words"),
    [
        ([None, None], "accuracy is unknown"),
        ([0.25, None], "accuracy was 25.0% at step 0, and measured only then"),
        ([None, 0.25], "accuracy was 25.0% at step 1, and measured only then"),
        ([0.5, 0.5], "from 50.0% to 50.0% in 1 step,"),
    ],
)
def test_the_last_words_where_little_was_measured(
    tmp_path: Path, accuracies: list[float | None], words: str
) -> None:
    with (tmp_path / "metrics.jsonl").open("w") as file:
        for step, one in enumerate(accuracies):
            line = {"step": step, "time/elapsed_s": 60.0 * step, "eval/accuracy": one}
            file.write(json.dumps(line) + "\n")
    assert words in closing_lines(RunDir(path=tmp_path), tmp_path, None, has_profile=True)[0]
