"""What the page asks of the runs, and what it is told: JSON's types, no HTTP."""

from collections.abc import Sequence

import numpy as np

from forgeasync.buffer import DropReason
from forgeasync.viewer.curves import Curve, curve_of, downsampled, over
from forgeasync.viewer.definitions import HEADLINES, described, glossary
from forgeasync.viewer.group_answers import (
    MAX_ROLLOUTS,
    life_answer,
    rollout_answer,
    rollout_row,
)
from forgeasync.viewer.group_lives import Fate
from forgeasync.viewer.metric_table import ELAPSED_S, Column
from forgeasync.viewer.proc_answers import lanes_answer
from forgeasync.viewer.rollout_index import RolloutGone
from forgeasync.viewer.run_clock import RunClock
from forgeasync.viewer.run_reader import RunReader
from forgeasync.viewer.settings import differing, seed_groups
from forgeasync.viewer.status import status_of
from forgeasync.viewer.token_answers import tokens_answer, worst_answer
from forgeasync.viewer.token_index import TokensGone

MAX_GROUPS = 200
"""Most groups of one page."""

Answer = dict[str, object]


class NotThere(LookupError):
    """What was asked for is not in the run; the text says so."""


class Answers:
    """Answers about runs that somebody else keeps up to date; not safe for threads."""

    def __init__(self, runs: Sequence[RunReader]) -> None:
        self._runs = runs

    @property
    def num_runs(self) -> int:
        return len(self._runs)

    def runs(self) -> Answer:
        """How every run is doing, how far its files were read, and which are seeds of one experiment."""
        return {
            "runs": [
                {
                    **status_of(run),
                    "progress": [
                        {"file": one.file, "read": one.num_read_bytes, "unread": one.num_unread_bytes}
                        for one in run.progress
                    ],
                }
                for run in self._runs
            ],
            "seed_groups": self._seed_groups(),
        }

    def metrics(self) -> Answer:
        """Every metric that any run has: its meaning, and the newest value in each run."""
        keys = dict.fromkeys(key for run in self._runs for key in run.metrics.keys)
        return {
            "headlines": [key for key in HEADLINES if key in keys],
            "metrics": [
                {**described(key), "last": [run.metrics.last.get(key) for run in self._runs]} for key in keys
            ],
        }

    def glossary(self) -> Answer:
        """Every metric that this version of forgeasync defines, by topic."""
        return {"topics": glossary()}

    def curves(self, keys: Sequence[str], *, width: int, over_time: bool, bands: bool) -> Answer:
        """Curves of some metrics with at most ``width`` points; with ``bands`` one for all seeds of a run."""
        groups = self._seed_groups() if bands else [(number,) for number in range(len(self._runs))]
        return {
            "curves": [
                {
                    **described(key),
                    "lines": [
                        line
                        for group in groups
                        if (line := self._line(key, group, width=width, over_time=over_time)) is not None
                    ],
                }
                for key in keys
            ]
        }

    def _line(self, key: str, group: Sequence[int], *, width: int, over_time: bool) -> Answer | None:
        members = [(number, self._runs[number].metrics.column(key)) for number in group]
        members = [(number, column) for number, column in members if len(column.steps_N)]
        if not members:
            return None
        curve = curve_of([column for _, column in members])
        if over_time:
            times = curve_of([self._runs[number].metrics.column(ELAPSED_S) for number, _ in members])
            steps_N = times.x_P.astype(np.int64)
            curve = over(curve, Column(steps_N=steps_N, values_N=times.mean_P))
        if not len(curve.x_P):
            return None
        return {"runs": [number for number, _ in members], **_points(downsampled(curve, width))}

    def groups(
        self,
        number: int,
        *,
        fate: Fate | None,
        reason: DropReason | None,
        step: int | None,
        skip: int,
        limit: int,
    ) -> Answer:
        """A page of a run's groups, the newest first, and how many there are."""
        run = self._runs[number]
        clock = RunClock(run.ledger.lives, run.metrics)
        rows = run.ledger.lives.rows(fate=fate, reason=reason, step=step)
        shown = rows[skip : skip + min(limit, MAX_GROUPS)]
        return {
            "num_groups": len(rows),
            "groups": [life_answer(run, clock, run.ledger.lives.at(int(row))) for row in shown],
        }

    def group(self, number: int, group: int) -> Answer:
        """One group: its lives, the other attempts at its prompt, and its rollouts.

        Raises:
            NotThere: no line that was read so far names it.
        """
        run = self._runs[number]
        lives = run.ledger.lives.of_group(group)
        rollouts = run.rollouts.of_group(group)
        if not lives and not rollouts:
            raise NotThere(f"group = {group}: no line read so far names it; groups have numbers from 0 on")
        clock = RunClock(run.ledger.lives, run.metrics)
        task = run.task_of(lives[0].prompt) if lives else None
        others = run.ledger.lives.of_prompt(lives[0].prompt) if lives else []
        return {
            "group": group,
            "source": None if task is None else task[0],
            "task_id": None if task is None else task[1],
            "lives": [life_answer(run, clock, life) for life in lives],
            "attempts": [
                {"group": one.group, "attempt": one.attempt, "fate": one.fate.word} for one in others
            ],
            "num_rollouts": len(rollouts),
            "rollouts": [rollout_row(run, place) for place in rollouts[:MAX_ROLLOUTS]],
        }

    def rollouts(self, number: int, step: int) -> Answer:
        """The rollouts of a step that were written."""
        run = self._runs[number]
        places = run.rollouts.of_step(step)
        return {
            "num_rollouts": len(places),
            "rollouts": [rollout_row(run, place) for place in places[:MAX_ROLLOUTS]],
        }

    def rollout(self, number: int, rollout: int) -> Answer:
        """One rollout with its texts.

        Raises:
            NotThere: it cannot be read.
        """
        try:
            return {"rollout": rollout_answer(self._runs[number], rollout)}
        except RolloutGone as error:
            raise NotThere(str(error)) from None

    def tokens(self, number: int, rollout: int, *, branch: int, skip: int) -> Answer:
        """Values of the tokens of a rollout, a page of them; or the problem that they have.

        Raises:
            NotThere: there is no such rollout.
        """
        try:
            answer = tokens_answer(self._runs[number], rollout, branch=branch, skip=skip)
        except TokensGone as error:
            return {"problem": str(error)}
        except RolloutGone as error:
            raise NotThere(str(error)) from None
        return {"problem": None, **answer}

    def worst(self, number: int, step: int) -> Answer:
        """The worst tokens of a step."""
        try:
            return worst_answer(self._runs[number], step)
        except RolloutGone as error:
            raise NotThere(str(error)) from None

    def faults(self, number: int) -> Answer:
        """What has failed and what came back, and the processes that the run names now."""
        run = self._runs[number]
        return {
            "faults": [
                {
                    "number": one.number,
                    "role": one.role,
                    "who": one.who,
                    "what": one.what,
                    "detected_s": one.detected_s,
                    "how": one.how,
                    "took_s": one.took_s,
                }
                for one in run.faults.faults
            ],
            "procs": run.procs(),
        }

    def lanes(self, number: int, *, first_step: int | None, last_step: int | None, width: int) -> Answer:
        """What the run's processes did, in bars: over some steps, or the whole run."""
        return lanes_answer(self._runs[number], first_step=first_step, last_step=last_step, width=width)

    def settings(self) -> Answer:
        """The configs: keys in which runs differ, and all of them."""
        settings = [run.settings for run in self._runs]
        keys = dict.fromkeys(key for one in settings for key in one)
        return {
            "differing": {key: list(values) for key, values in differing(settings).items()},
            "all": {key: [one.get(key) for one in settings] for key in keys},
        }

    def _seed_groups(self) -> list[tuple[int, ...]]:
        return seed_groups([run.settings for run in self._runs])


def _points(curve: Curve) -> Answer:
    return {
        "num_points": curve.num_points,
        "x": curve.x_P.tolist(),
        "mean": curve.mean_P.tolist(),
        "low": curve.low_P.tolist(),
        "high": curve.high_P.tolist(),
    }
