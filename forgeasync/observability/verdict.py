"""What bounds a run, by means over its newest steps: for the last lines of a run and for ``apps.view``."""

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

WINDOW_STEPS = 50
"""Newest steps that are measured."""

KEYS = (
    "step",
    "time/elapsed_s",
    "time/step_s",
    "time/eval_s",
    "time/wait_for_batch_s",
    "time/train_s",
    "time/publish_weights_s",
    "throughput/train_tokens_per_s",
    "generator/busy_s",
)
"""Metrics that every step's line has to have."""

NUM_GENERATORS = "generator/num_healthy"

OTHER_KEYS = (NUM_GENERATORS, "time/controller_s", "time/wait_for_disk_s", "time/checkpoint_s")
"""Metrics that are read where a line has them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredSteps:
    """Means over some steps, without what training waited for evaluations."""

    num_steps: int
    step_s: float
    """Seconds from one step's end to the next one's."""
    trained_tokens_per_s: float
    """Response tokens."""
    wait_share: float
    """Share of the time in which training waited for a batch."""
    train_share: float
    publish_share: float
    """Share of the time in which training waited to publish."""
    busy_share: float | None
    """Share of the generators' time with a request; evaluations are part of it. None: no line says how many
    generators there were."""
    controller_share: float = 0.0
    """Share of the time that the controller itself took: rows, reports, lines."""
    disk_share: float = 0.0
    """Share of the time in which training waited for a disk."""
    checkpoint_share: float = 0.0
    """Share of the time in which training waited until a checkpoint was begun."""
    eval_share: float = 0.0
    """What training waited for evaluations, as a share of the time without it: more than 1 where evaluations
    take longer than all else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    seconds: float
    eval_s: float
    num_tokens: float
    wait_s: float
    train_s: float
    publish_s: float
    controller_s: float
    disk_s: float
    checkpoint_s: float
    busy_s: float
    generators_s: float
    """Seconds of all healthy generators together; 0: it is not known how many there were."""


def num_first_steps(max_steps: int) -> int:
    """Return how many steps at the start of a run are left out: its first third, at most 10."""
    return min(max_steps // 3, 10)


def num_steps_ahead(*, max_off_policy_steps: int, max_groups: int | None, groups_per_step: int) -> int:
    """Return for how many steps a run may have groups in flight besides those of the step that is trained.

    ``max_groups`` is the buffer's depth bound. As many steps at the end of a run have less and less to
    sample, and are faster than the others.
    """
    if max_groups is None:
        return max_off_policy_steps
    return min(max_off_policy_steps, math.ceil(max_groups / groups_per_step))


def steady_steps(num_steps: int, *, num_first: int, num_ahead: int) -> range:
    """Return the steps of a run that means are over, counted from 0: neither its first nor its last ones.

    At least ``num_first`` steps are left out at the start, and ``num_ahead`` at the end, but at most half of
    what is left: a short run has some steps too. Groups that begin together may end together, and a run then
    goes in waves of ``num_ahead`` + 1 steps, of which one waits for most of the time. Where there is a whole
    wave, there are only whole ones.
    """
    assert 0 <= num_first < max(1, num_steps)
    end = num_steps - min(num_ahead, (num_steps - num_first) // 2)
    num_beyond = (end - num_first) % (num_ahead + 1)
    return range(num_first + num_beyond if end - num_first > num_ahead else num_first, end)


class MeasuredWindow:
    """The newest steps of a run, but for the first ones after its start and the last ones before its end.

    A run that was started again begins anew here: its generators had nothing to do meanwhile.
    """

    def __init__(self, *, num_left_out: int, last_step: int) -> None:
        """Leave out the first ``num_left_out`` steps after the start, at least the one that a later one is
        timed from, and all after the run's ``last_step``."""
        self.num_left_out = num_left_out
        self.last_step = last_step
        self._num_seen = 0
        self._steps: deque[_Step] = deque(maxlen=WINDOW_STEPS)
        self._before: Mapping[str, float] | None = None

    @classmethod
    def of_run(cls, max_steps: int, *, num_steps_ahead: int) -> "MeasuredWindow":
        """The window of a run of ``max_steps`` steps."""
        num_first = num_first_steps(max_steps)
        steady = steady_steps(max_steps, num_first=num_first, num_ahead=num_steps_ahead)
        return cls(num_left_out=num_first, last_step=steady.stop)

    def add(self, metrics: Mapping[str, float]) -> None:
        """Take the line of the next step; it has all of ``KEYS``."""
        before, self._before = self._before, dict(metrics)
        # The generators' busy time begins at 0 whenever the command starts.
        if before is not None and not (
            metrics["step"] == before["step"] + 1
            and metrics["time/elapsed_s"] > before["time/elapsed_s"]
            and metrics["generator/busy_s"] >= before["generator/busy_s"]
        ):
            before = None
        if before is None:
            self._num_seen = 0
            self._steps.clear()
        self._num_seen += 1
        if before is not None and self._num_seen > self.num_left_out and metrics["step"] <= self.last_step:
            self._steps.append(_step(before, metrics))

    def measured(self) -> MeasuredSteps | None:
        """Return the means; None before there is a step to measure."""
        seconds = sum(one.seconds - one.eval_s for one in self._steps)
        if seconds <= 0.0:
            return None
        generators_s = sum(one.generators_s for one in self._steps)
        busy_s = sum(one.busy_s for one in self._steps if one.generators_s)
        return MeasuredSteps(
            num_steps=len(self._steps),
            step_s=seconds / len(self._steps),
            trained_tokens_per_s=sum(one.num_tokens for one in self._steps) / seconds,
            wait_share=sum(one.wait_s for one in self._steps) / seconds,
            train_share=sum(one.train_s for one in self._steps) / seconds,
            publish_share=sum(one.publish_s for one in self._steps) / seconds,
            busy_share=min(1.0, busy_s / generators_s) if generators_s else None,
            controller_share=sum(one.controller_s for one in self._steps) / seconds,
            disk_share=sum(one.disk_s for one in self._steps) / seconds,
            checkpoint_share=sum(one.checkpoint_s for one in self._steps) / seconds,
            eval_share=sum(one.eval_s for one in self._steps) / seconds,
        )


def _step(before: Mapping[str, float], metrics: Mapping[str, float]) -> _Step:
    seconds = metrics["time/elapsed_s"] - before["time/elapsed_s"]
    return _Step(
        seconds=seconds,
        eval_s=min(seconds, metrics["time/eval_s"]),
        num_tokens=metrics["throughput/train_tokens_per_s"] * metrics["time/step_s"],
        wait_s=metrics["time/wait_for_batch_s"],
        train_s=metrics["time/train_s"],
        publish_s=metrics["time/publish_weights_s"],
        controller_s=metrics.get("time/controller_s", 0.0),
        disk_s=metrics.get("time/wait_for_disk_s", 0.0),
        checkpoint_s=metrics.get("time/checkpoint_s", 0.0),
        busy_s=metrics["generator/busy_s"] - before["generator/busy_s"],
        generators_s=seconds * metrics[NUM_GENERATORS] if NUM_GENERATORS in metrics else 0.0,
    )


BUSY = 0.5
"""Generators that have a request for less than this share of the time do not bound a run by themselves."""

HOW_TO_SIMULATE = (
    "to see what would speed this run up: python -m apps.profile with the run's --config measures how long "
    "its parts take, and simulates changes"
)


def verdict_lines(measured: MeasuredSteps | None) -> list[str]:
    """Return what bounds a run, what to do about it, and how to find out what else would help."""
    return [bound_words(measured), HOW_TO_SIMULATE]


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
