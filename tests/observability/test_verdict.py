"""What bounds a run, by its measured times, and what to do about it."""

import dataclasses

import pytest

from forgeasync.observability import MeasuredSteps, bound_words, verdict_lines

MEASURED = MeasuredSteps(
    num_steps=20,
    step_s=2.0,
    trained_tokens_per_s=1000.0,
    wait_share=0.6,
    train_share=0.2,
    publish_share=0.1,
    busy_share=0.9,
)


@pytest.mark.parametrize(
    ("changes", "begin"),
    [
        ({}, "generators bound the run: training waited for batches 60% of the time"),
        ({"busy_share": None}, "generation bounds the run: training waited for batches 60%"),
        ({"busy_share": 0.2}, "generators do not bound the run, nor does training: training waited"),
        ({"wait_share": 0.1, "train_share": 0.7}, "training bounds the run: it took 70% of the time"),
        ({"wait_share": 0.1, "publish_share": 0.5}, "publishing bounds the run: training waited for it 50%"),
        (
            {"wait_share": 0.1, "train_share": 0.1, "disk_share": 0.62},
            "the disk bounds the run: training waited for it 62% of the time (last 20 steps); make room",
        ),
        (
            {"wait_share": 0.1, "controller_share": 0.3},
            "the controller bounds the run: its rows, reports and lines took 30% of the time",
        ),
        (
            {"wait_share": 0.1, "checkpoint_share": 0.4},
            "checkpoints bound the run: training waited for them 40% of the time",
        ),
        # It lasts three times as long as all else.
        ({"eval_share": 3.0}, "evaluations bound the run: training waited for them 75% of the time"),
        # Of 0.7 nobody knows what they were.
        ({"wait_share": 0.15, "train_share": 0.05}, "generators bound the run: training waited for"),
        (
            {"wait_share": 0.05, "train_share": 0.05, "disk_share": 0.2},
            "the disk bounds the run: training waited for it 20%",
        ),
    ],
)
def test_what_takes_most_of_the_time_bounds_the_run(changes: dict[str, float | None], begin: str) -> None:
    words = bound_words(dataclasses.replace(MEASURED, **changes))
    assert words.startswith(begin) and "last 20 steps" in words
    _, advice = words.split(";", 1)
    assert advice.strip(), "a person can act on it"


def test_it_says_how_to_find_out_what_would_help() -> None:
    _, how = verdict_lines(MEASURED)
    assert "python -m apps.profile" in how
    assert "too few steps" in verdict_lines(None)[0]
