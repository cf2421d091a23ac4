"""Closing report of a run: its held-out accuracy, its bottleneck, and the commands to look further.

The bottleneck is determined from means over the newest steps. ``apps.view`` shows it during the run.
"""

import math
import os
import shlex
import sys
from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from forgeasync.files import read_json_lines
from forgeasync.observability.run_dir import RunDir

Metrics = Mapping[str, float]
"""A line of metrics.jsonl."""

WINDOW_STEPS = 50
"""Maximum number of newest steps to average over."""

KEYS = (
    "step",
    "time/elapsed_s",
    "time/eval_s",
    "time/wait_for_batch_s",
    "time/train_s",
    "time/publish_weights_s",
    "generator/busy_s",
)
"""Metrics that the line of every step must have."""

NUM_GENERATORS = "generator/num_healthy"
"""Metric with the number of healthy generators."""

OTHER_KEYS = (NUM_GENERATORS, "time/controller_s", "time/wait_for_disk_s", "time/checkpoint_s")
"""Metrics that are used if a line has them."""

_ACTIVITIES = {
    "train": (
        "time/train_s",
        "training bounds the run: it took",
        "give the trainer more processes (trainer.parallel), or train on fewer tokens a step",
    ),
    "publish": (
        "time/publish_weights_s",
        "publishing bounds the run: training waited for it",
        "use a faster weights.transport",
    ),
    "controller": (
        "time/controller_s",
        "the controller bounds the run: its rows, reports and lines took",
        "give its host idle cores, or write fewer rollouts (logging.rollouts_per_step)",
    ),
    "disk": (
        "time/wait_for_disk_s",
        "the disk bounds the run: training waited for it",
        "make room on the disk of run_dir, or put run_dir on a faster one",
    ),
    "checkpoint": (
        "time/checkpoint_s",
        "checkpoints bound the run: training waited for them",
        "write fewer (checkpoint.every_steps), or to a faster disk (checkpoint.folder)",
    ),
    "eval": (
        "time/eval_s",
        "evaluations bound the run: training waited for them",
        "evaluate beside training (evaluation.mode), or less often (evaluation.every_steps)",
    ),
}
"""Metric of each activity that can take a step's time, what a report says if it takes most, and advice."""

ACCURACY = "eval/accuracy"
UNSCORED = "eval/num_unscored"

PLOT = "learning.png"
"""File name of the plot in the run's folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredSteps:
    """Means over some steps. Times and shares exclude the time that training waited for evaluations."""

    num_steps: int
    step_s: float
    """Seconds from the end of one step to that of the next."""
    shares: Mapping[str, float]
    """Share of the time that training waited for batches ("wait"), and of each of ``_ACTIVITIES``.

    That of evaluations is relative to all other time, and may be above 1.
    """
    busy_share: float | None
    """Share of the generators' time in which they had a request, including those of evaluations.

    None if the number of generators is unknown.
    """


def num_first_steps(max_steps: int) -> int:
    """Return the number of steps to leave out at the start of a run: its first third, at most 10."""
    return min(max_steps // 3, 10)


def num_steps_ahead(*, max_off_policy_steps: int, max_groups: int | None, groups_per_step: int) -> int:
    """Return the number of steps, beyond the current one, for which a run may have groups in flight.

    ``max_groups`` limits the groups in the buffer. At the end of a run, this number of steps have fewer and
    fewer groups to sample, and are faster than the others.
    """
    if max_groups is None:
        return max_off_policy_steps
    return min(max_off_policy_steps, math.ceil(max_groups / groups_per_step))


def steady_steps(num_steps: int, *, num_first: int, num_ahead: int) -> range:
    """Return the steps of a run, counted from 0, to average over: neither its first nor its last ones.

    Leaves out at least ``num_first`` steps at the start and ``num_ahead`` steps at the end. At the end it
    leaves out at most half of the remaining ones, so that a short run has steps too. If groups that start
    together also end together, a run proceeds in waves of ``num_ahead`` + 1 steps, one of which waits for
    most of the time. So if the remaining steps have at least one whole wave, the range consists of whole
    waves.
    """
    assert 0 <= num_first < max(1, num_steps)
    end = num_steps - min(num_ahead, (num_steps - num_first) // 2)
    num_beyond = (end - num_first) % (num_ahead + 1)
    return range(num_first + num_beyond if end - num_first > num_ahead else num_first, end)


class MeasuredWindow:
    """Newest steps of a run, without the first ones after its start and the last ones before its end.

    The window is emptied when a run is resumed, because generators had nothing to do in between.
    """

    def __init__(self, *, num_left_out: int, last_step: int) -> None:
        """Create an empty window.

        Args:
            num_left_out: Number of steps after a start to leave out. The first one is always left out,
                because a step is timed from the end of the one before.
            last_step: Last step to include.
        """
        self.num_left_out = num_left_out
        self.last_step = last_step
        self._num_seen = 0
        self._steps: deque[dict[str, float]] = deque(maxlen=WINDOW_STEPS)
        self._before: Metrics | None = None

    @classmethod
    def of_run(cls, max_steps: int, *, num_steps_ahead: int) -> "MeasuredWindow":
        """Create the window for a run of ``max_steps`` steps. See ``num_steps_ahead``."""
        num_first = num_first_steps(max_steps)
        steady = steady_steps(max_steps, num_first=num_first, num_ahead=num_steps_ahead)
        return cls(num_left_out=num_first, last_step=steady.stop)

    def add(self, metrics: Metrics) -> None:
        """Add the line of the next step, which must have all of ``KEYS``."""
        before, self._before = self._before, dict(metrics)
        # The generators' busy time restarts at 0 whenever the command starts.
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
            self._steps.append(_seconds(before, metrics))

    def measured(self) -> MeasuredSteps | None:
        """Return the means; None if the window has no step."""
        total: defaultdict[str, float] = defaultdict(float)
        for step in self._steps:
            for name, value in step.items():
                total[name] += value
        seconds = total["seconds"] - total["eval"]
        if seconds <= 0.0:
            return None
        return MeasuredSteps(
            num_steps=len(self._steps),
            step_s=seconds / len(self._steps),
            shares={name: total[name] / seconds for name in ("wait", *_ACTIVITIES)},
            busy_share=min(1.0, total["busy"] / total["generators"]) if total["generators"] else None,
        )


def _seconds(before: Metrics, metrics: Metrics) -> dict[str, float]:
    """Return the seconds of a step by activity.

    Generators' seconds are sums over all generators. They are left out if the line lacks the number of
    healthy generators.
    """
    seconds = metrics["time/elapsed_s"] - before["time/elapsed_s"]
    found = {name: metrics.get(key, 0.0) for name, (key, _, _) in _ACTIVITIES.items()}
    found["eval"] = min(seconds, found["eval"])
    found |= {"seconds": seconds, "wait": metrics["time/wait_for_batch_s"]}
    if num_generators := metrics.get(NUM_GENERATORS):
        found["generators"] = seconds * num_generators
        found["busy"] = metrics["generator/busy_s"] - before["generator/busy_s"]
    return found


BUSY = 0.5
"""Busy share below which generators are not the bottleneck by themselves."""

HOW_TO_SIMULATE = (
    "to see what would speed this run up: python -m apps.profile --run RUN_DIR --out profile.json (not for "
    "runs with an environment or teachers)"
)


def verdict_lines(measured: MeasuredSteps | None) -> list[str]:
    """Return a line with the bottleneck and its remedy, and one with how to find further improvements."""
    return [describe_bottleneck(measured), HOW_TO_SIMULATE]


def describe_bottleneck(measured: MeasuredSteps | None) -> str:
    """Return a sentence that names the bottleneck of a run and its remedy.

    The bottleneck is the measured activity that took longest. Unmeasured time is never named, because there
    is no remedy for it.
    """
    if measured is None:
        return "there are too few steps to tell what bounds the run"
    over = f"(last {measured.num_steps} steps)"
    slowest = max(_ACTIVITIES, key=lambda name: measured.shares[name])
    share, wait_share = measured.shares[slowest], measured.shares["wait"]
    if share > wait_share:
        # Shares are relative to the time without evaluations.
        of_all = share / (1.0 + share) if slowest == "eval" else share
        _, begin, advice = _ACTIVITIES[slowest]
        return f"{begin} {of_all:.0%} of the time {over}; {advice}"
    waited = f"training waited for batches {wait_share:.0%} of the time {over}"
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


def closing_lines(
    run_dir: RunDir, weights: Path, measured: MeasuredSteps | None, *, has_profile: bool
) -> list[str]:
    """Return lines for people: what the run reached, what bounded it, and commands to run next.

    ``weights`` is the folder of the last weights, ``has_profile`` whether apps.profile accepts the run.

    Raises:
        FileNotFoundError: The run has no metrics.jsonl.
    """
    run, python = str(run_dir.path), [_own_python(), "-m"]
    view = shlex.join([*python, "apps.view", run])
    profile = shlex.join([*python, "apps.profile", "--run", run, "--out", "profile.json"])
    show = shlex.join([*python, "apps.show", run])
    plot = shlex.join([*python, "forgeasync.observability.plot", run, "--out", str(run_dir.path / PLOT)])
    return [
        f"{_held_out_sentence(run_dir.metrics)}; weights: {weights}",
        describe_bottleneck(measured),
        f"  browse it:        {view}",
        f"  plot its curves:  {plot}",
        f"  find bottlenecks: {profile}" if has_profile else f"  read episodes:    {show}",
    ]


def _held_out_sentence(metrics: Path) -> str:
    """Return a sentence on held-out accuracy from the first evaluation of the whole run to the last one."""
    lines = read_json_lines(metrics)
    # A line lacks the key if its step was not evaluated, or if no response was scored.
    evaluated = [line for line in lines if line.get(ACCURACY) is not None]
    if not evaluated:
        num_unscored = [line[UNSCORED] for line in lines if UNSCORED in line]
        if num_unscored and not any(num_unscored):
            return "there were no held-out problems"
        return "held-out accuracy is unknown: no response to a held-out problem was scored"
    first, last = evaluated[0], evaluated[-1]
    if first is last:
        return f"held-out accuracy was {first[ACCURACY]:.1%} at step {first['step']}, and measured only then"
    num_steps = last["step"] - first["step"]
    steps = "step" if num_steps == 1 else "steps"
    minutes = (last["time/elapsed_s"] - first["time/elapsed_s"]) / 60
    return (
        f"held-out accuracy went from {first[ACCURACY]:.1%} to {last[ACCURACY]:.1%} in {num_steps} {steps}, "
        f"which took {minutes:.1f} minutes"
    )


def _own_python() -> str:
    """Return the path of this Python interpreter, relative if it is below the working directory."""
    python, here = Path(sys.executable), Path.cwd()
    return os.path.relpath(python, here) if python.is_relative_to(here) else str(python)
