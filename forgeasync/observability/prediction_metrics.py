"""Metrics of what was predicted of a run, and how it compares."""

from forgeasync.observability.metric import Metric, Topic

_WHEN = "runs with a `prediction` section"
_READY = f"{_WHEN}, once it is simulated"
_REFITTED = f"{_WHEN}, once lengths were fitted anew"

PREDICTION = Topic(
    heading="Prediction",
    metrics=(
        Metric(
            key="prediction/step_s",
            meaning="Seconds a step that were predicted with the profile's lengths, without evaluations.",
            when=_READY,
        ),
        Metric(
            key="prediction/tokens_per_s",
            meaning="Response tokens trained on per second, predicted in the same way.",
            when=_READY,
        ),
        Metric(
            key="prediction/step_ratio",
            meaning="Measured seconds a step, over `prediction/step_s`. Measured are the newest 50 steps, "
            "without the first ones after the command started (a third of the run, at most 10) and without "
            "what training waited for evaluations.",
            when=f"{_READY}, after these first steps",
        ),
        Metric(
            key="prediction/tokens_ratio",
            meaning="Response tokens trained on per second, measured in the same way, over "
            "`prediction/tokens_per_s`.",
            when=f"{_READY}, after these first steps",
        ),
        Metric(
            key="prediction/refitted_at_step",
            meaning="Newest step of those whose groups the newest prediction has its lengths from.",
            when=_REFITTED,
        ),
        Metric(
            key="prediction/refitted_step_s",
            meaning="Seconds a step that the newest prediction says.",
            when=_REFITTED,
        ),
        Metric(
            key="prediction/refitted_tokens_per_s",
            meaning="Response tokens trained on per second that the newest prediction says.",
            when=_REFITTED,
        ),
        Metric(
            key="prediction/num_faster_splits",
            meaning="How often so far another split of the same GPUs was told that would train on over 10 % "
            "more tokens a second.",
            when=_WHEN,
        ),
        Metric(
            key="prediction/num_added_replicas",
            meaning="Replicas of the generator that the run has added by itself so far, each since it was "
            "predicted to save a tenth of a step.",
            when=_WHEN,
        ),
        Metric(
            key="prediction/num_failures",
            meaning="Simulations so far that failed or took too long, and predictions that could not be "
            "written.",
            when=_WHEN,
        ),
    ),
    note="`prediction.json` of the run has all that was predicted (docs/simulation.md).",
)
