"""What is said of a run: what bounds it, how it compares, what would help, and when another split is told."""

import dataclasses

import pytest

from forgeasync.prediction import (
    MeasuredSteps,
    PredictedChange,
    PredictedChanges,
    PredictedRun,
    PredictedSplit,
    Prediction,
    PredictionRecord,
    SplitAdvice,
    bound_words,
    verdict_lines,
)

MEASURED = MeasuredSteps(
    num_steps=20,
    step_s=2.0,
    trained_tokens_per_s=1000.0,
    wait_share=0.6,
    train_share=0.2,
    publish_share=0.1,
    busy_share=0.9,
)

RUN = PredictedRun(
    step_s=1.34,
    trained_tokens_per_s=1200.0,
    trainer_idle_share=0.5,
    generators_idle_share=0.1,
    mean_age=1.0,
)

CHANGES = PredictedChanges(
    verdict="generators bound; one more replica: 1.34 -> 1.05 s a step",
    changes=(
        PredictedChange(name="one more replica", before_s=1.34, after_s=1.05),
        PredictedChange(name="one more scorer", before_s=1.34, after_s=1.33),
    ),
)


def split(overrides: str, tokens_per_s: float) -> Prediction:
    found = PredictedSplit(overrides=overrides, own_tokens_per_s=1000.0, tokens_per_s=tokens_per_s)
    return Prediction(after_step=0, num_replicas=1, run=RUN, split=found)


def record(newest: Prediction) -> PredictionRecord:
    start = Prediction(after_step=0, num_replicas=1, run=RUN)
    return PredictionRecord(profile="p.json", profile_of="measured", start=start, newest=newest)


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


def test_without_a_profile_it_says_how_to_get_numbers() -> None:
    _, how = verdict_lines(MEASURED, None)
    assert "apps.profile" in how and "prediction.profile=FILE" in how
    assert "too few steps" in verdict_lines(None, None)[0]


def test_predicted_times_are_those_of_the_start_and_changes_those_of_the_newest_lengths() -> None:
    newest = Prediction(
        num_replicas=1,
        after_step=40,
        run=RUN.model_copy(update={"step_s": 9.0}),
        changes=CHANGES,
        split=split("x", 1100.0).split,
    )
    _, compared, verdict, *changes = verdict_lines(MEASURED, record(newest))
    assert "1.34 / 2 s a step" in compared and "1,200 / 1,000 tokens/s" in compared
    assert "waits 50% / 60%" in compared
    assert verdict == (
        "predicted (lengths of the groups up to step 40): generators bound; one more replica: "
        "1.34 -> 1.05 s a step"
    )
    assert changes == ["  with one more scorer: 1.34 -> 1.33 s a step"], "no word of a split 10 % faster"


def test_newer_lengths_count_once_everything_was_simulated_with_them() -> None:
    start = Prediction(after_step=0, num_replicas=1, run=RUN)
    begun = PredictionRecord(profile="p.json", profile_of="measured", start=start, newest=start)
    whole = start.model_copy(update={"changes": CHANGES, "split": split("x", 1.0).split})
    of_start = begun.with_news(whole)
    assert of_start.start == of_start.newest == whole
    newer = Prediction(after_step=20, num_replicas=1, run=RUN, changes=CHANGES)
    assert of_start.with_news(newer) == of_start
    newer = newer.model_copy(update={"split": whole.split})
    assert of_start.with_news(newer).newest == newer and of_start.with_news(newer).start == whole


def test_what_was_not_simulated_in_time_is_said() -> None:
    assert verdict_lines(MEASURED, record(Prediction(after_step=0, num_replicas=1, run=RUN)))[-1] == (
        "what changes would bring has not been simulated yet"
    )


def test_a_faster_split_is_told_once_and_again_when_another_one_is() -> None:
    advice = SplitAdvice()
    assert advice.news(Prediction(after_step=0, num_replicas=1, run=RUN)) is None
    assert advice.news(split("own", 1000.0)) is None
    told = advice.news(split("a=1", 1101.0))
    assert told is not None and "a=1: 1,000 -> 1,101 tokens/s" in told
    assert advice.news(split("a=1", 1300.0)) is None
    told = advice.news(split("a=2", 1300.0))
    assert told is not None and "a=2" in told
    told = advice.news(split("own", 1000.0))
    assert told is not None and "as fast as any again" in told
    assert advice.news(split("a=2", 1099.0)) is None
    assert advice.num_told == 2
