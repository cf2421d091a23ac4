"""What bounds a run and what would help, in words: at the end of a run and in ``apps.view``."""

from forgeasync.prediction.measured import MeasuredSteps
from forgeasync.prediction.record import HOW_TO_PREDICT, Prediction, PredictionRecord

BUSY = 0.5
"""Generators that have a request for less than this share of the time do not bound a run by themselves."""

LEAST_SPLIT_GAIN = 0.1
"""A split that trains on this share of tokens a second more than the run's own is named."""


def verdict_lines(measured: MeasuredSteps | None, record: PredictionRecord | None) -> list[str]:
    """Return what bounds a run; with a prediction also how that compares, and what changes would bring."""
    lines = [bound_words(measured)]
    if record is None:
        return [*lines, f"what changes would bring is not known: {HOW_TO_PREDICT}"]
    if measured is not None:
        lines.append(compared(measured, record))
    newest = record.newest
    since = f" (lengths of the groups up to step {newest.after_step})" if newest.after_step else ""
    if newest.changes is None:
        lines.append("what changes would bring has not been simulated yet")
    else:
        lines.append(f"predicted{since}: {newest.changes.verdict}")
        others = [one.words for one in newest.changes.changes if one.words not in newest.changes.verdict]
        lines += [f"  with {words}" for words in others]
    if (words := split_words(newest)) is not None:
        lines.append(words)
    return lines


def compared(measured: MeasuredSteps, record: PredictionRecord) -> str:
    """Return predicted against measured times in one line."""
    run = record.start.run
    return (
        f"predicted / measured (last {measured.num_steps} steps): "
        f"{run.step_s:.3g} / {measured.step_s:.3g} s a step, "
        f"{run.trained_tokens_per_s:,.0f} / {measured.trained_tokens_per_s:,.0f} tokens/s trained, "
        f"trainer waits {run.trainer_idle_share:.0%} / {measured.wait_share:.0%}"
    )


def split_words(prediction: Prediction) -> str | None:
    """Name the fastest split if it is faster than the run's own by ``LEAST_SPLIT_GAIN``; else None."""
    split = prediction.split
    if split is None or split.tokens_per_s <= (1.0 + LEAST_SPLIT_GAIN) * split.own_tokens_per_s:
        return None
    return (
        f"another split of the same GPUs would be faster: {split.overrides}: "
        f"{split.own_tokens_per_s:,.0f} -> {split.tokens_per_s:,.0f} tokens/s trained"
    )


def bound_words(measured: MeasuredSteps | None) -> str:
    """Say what bounds a run, by its own times, and what can be done about it.

    It is what took longest of all that was measured. What is left of the time is never named: nobody can act
    on it.
    """
    if measured is None:
        return "what bounds the run is not known: there are too few steps"
    over = f"(last {measured.num_steps} steps)"
    others = (
        (
            measured.train_share,
            "training bounds the run: it took",
            "give the trainer more processes (trainer.parallel), or train on fewer tokens a step",
        ),
        (
            measured.publish_share,
            "publishing bounds the run: training waited for it",
            "use a faster weights.transport, or weights.delta",
        ),
        (
            measured.controller_share,
            "the controller bounds the run: its rows, reports and lines took",
            "give its host idle cores, or write fewer rollouts (logging.rollouts_per_step)",
        ),
        (
            measured.disk_share,
            "the disk bounds the run: training waited for it",
            "make room on the disk of run_dir, or put run_dir on a faster one",
        ),
        (
            measured.checkpoint_share,
            "checkpoints bound the run: training waited for them",
            "write fewer (checkpoint.every_steps), or to a faster disk (checkpoint.folder)",
        ),
        (
            measured.eval_share,
            "evaluations bound the run: training waited for them",
            "evaluate beside training (evaluation.mode), or less often (evaluation.every_steps)",
        ),
    )
    share, begin, advice = max(others, key=lambda one: one[0])
    if share > measured.wait_share:
        # The time of an evaluation is no part of the time that shares are of.
        of_all = share / (1.0 + share) if share == measured.eval_share else share
        return f"{begin} {of_all:.0%} of the time {over}; {advice}"
    waited = f"training waited for batches {measured.wait_share:.0%} of the time {over}"
    more = "add generators (generator.num_replicas), or sample shorter responses"
    if measured.busy_share is None:
        return f"generation bounds the run: {waited}; {more}"
    if measured.busy_share >= BUSY:
        return f"generators bound the run: {waited}, and they were busy for {measured.busy_share:.0%}; {more}"
    return (
        f"generators do not bound the run, nor does training: {waited}, and generators had a request for "
        f"only {measured.busy_share:.0%}; scores, episodes, new weights or the limits of the buffer do: add "
        "scorers (scorer.num_replicas) or workers (episodes.num_workers), or let more groups wait "
        "(max_off_policy_steps, buffer.max_groups)"
    )


class SplitAdvice:
    """Tells of a faster split once, until another one is the fastest or none is."""

    def __init__(self) -> None:
        self._told: str | None = None
        self.num_told = 0

    def news(self, prediction: Prediction) -> str | None:
        """Return what to say of the newest prediction; None if that has been said."""
        if prediction.split is None:
            return None
        words = split_words(prediction)
        fastest = None if words is None else prediction.split.overrides
        if fastest == self._told:
            return None
        self._told = fastest
        if words is None:
            return "the run's own split of its GPUs is as fast as any again"
        self.num_told += 1
        return words
