"""What an evaluation outside of a run leaves: its folder, its summary and its table.

runs/evaluate-<name>-<time>/
    config.yaml      the config as it was evaluated
    summary.json     every figure with its confidence interval
    episodes.jsonl   every response or episode, in the order in which they ended
    artifacts/       files that episodes have kept
    logs/            output of the processes
"""

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from rich.console import Console
from rich.table import Table

from forgeasync.actors import HeldOutRollout
from forgeasync.observability import Estimate, JsonLines, ProblemScores, SetSummary
from forgeasync.rollouts import Score, Task

METHODS = {
    "accuracy": "mean over problems of the share of correct responses; Wilson interval, 95 percent, of the "
    "effective number of problems",
    "pass_at": "unbiased estimator of Chen et al. 2021 (arXiv:2107.03374); the same interval",
    "score": "mean over problems of the mean score; percentile bootstrap over problems, 95 percent",
}
"""How the figures of summary.json are made."""

COLUMNS = 120
"""Width of the table, in a pipe too."""


@dataclass(slots=True)
class EvaluationFolder:
    """The files of one evaluation. A context manager: episodes are complete when it ends."""

    path: Path
    _lines: JsonLines = field(init=False)

    @classmethod
    def create(cls, path: Path, config_yaml: str) -> "EvaluationFolder":
        """Make the folder, which is empty or not there."""
        folder = cls(path)
        folder.logs.mkdir(parents=True, exist_ok=True)
        (path / "config.yaml").write_text(config_yaml, encoding="utf-8")
        return folder

    @property
    def logs(self) -> Path:
        """Folder for the output of processes."""
        return self.path / "logs"

    @property
    def artifacts(self) -> Path:
        """Folder for files that episodes keep."""
        return self.path / "artifacts"

    @property
    def episodes(self) -> Path:
        """File with every response or episode."""
        return self.path / "episodes.jsonl"

    def log(self, process: str) -> Path:
        """Return the log file of a process."""
        return self.logs / f"{process}.log"

    def write(self, name: str, problem: int, sample: int, task: Task, rollout: HeldOutRollout) -> None:
        """Add what came of one sample of a problem of the set ``name``."""
        place = {"set": name, "problem": problem, "sample": sample}
        self._lines.append(place | rollout_record(task, rollout))

    def write_summary(
        self,
        what: str,
        summaries: Mapping[str, SetSummary],
        *,
        wall_s: float,
        warnings: Sequence[str],
    ) -> None:
        """Write all figures."""
        record = {
            "evaluated": what,
            "wall_s": wall_s,
            "warnings": list(warnings),
            "methods": METHODS,
            "sets": {name: one.record for name, one in summaries.items()},
        }
        (self.path / "summary.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")

    def __enter__(self) -> Self:
        self._lines = JsonLines(self.episodes)
        return self

    def __exit__(self, *exception: object) -> None:
        self._lines.close()


def rollout_record(task: Task, rollout: HeldOutRollout) -> dict[str, Any]:
    """Return a rollout as JSON values."""
    result, versions = rollout.result, rollout.versions
    record: dict[str, Any] = {
        "task_id": task.task_id,
        "source": task.source,
        "prompt": task.prompt,
        "answer": task.answer,
        "ending": None if rollout.ending is None else rollout.ending.value,
        "num_turns": rollout.num_turns,
        "versions": None if versions is None else [versions.first, versions.last],
        "reward": None,
        "is_correct": None,
        "unscored": None,
    }
    if isinstance(result, Score):
        record |= {
            "reward": result.value,
            "is_correct": result.is_correct,
            "parts": dict(result.parts),
            "penalties": dict(result.penalties),
        }
    else:
        record["unscored"] = result.reason
    return record | {"episode_record": rollout.record}


def problem_scores(rollouts: Sequence[HeldOutRollout], num_problems: int) -> list[ProblemScores]:
    """Gather the scores of each problem; ``rollouts`` has all problems of one sample after the other."""
    problems = []
    for problem in range(num_problems):
        of_problem = [one.result for one in rollouts[problem::num_problems]]
        scores = [one for one in of_problem if isinstance(one, Score)]
        problems.append(
            ProblemScores(
                num_correct=sum(one.is_correct for one in scores),
                values=tuple(one.value for one in scores),
            )
        )
    return problems


def summary_table(summaries: Mapping[str, SetSummary]) -> str:
    """Return the figures of all sets as a table, with intervals of 95 percent in brackets."""
    table = Table(title="95 percent confidence intervals over problems")
    for column in ("set", "problems", "samples", "unscored", "figure", "value"):
        table.add_column(column, justify="left" if column in ("set", "figure", "value") else "right")
    for name, one in summaries.items():
        figures: list[tuple[str, Estimate | None]] = [("accuracy", one.accuracy), ("mean score", one.score)]
        figures += [(f"pass@{k}", estimate) for k, estimate in one.pass_at.items() if k > 1]
        for number, (figure, estimate) in enumerate(figures):
            counts = (name, str(one.num_problems), str(one.num_samples), str(one.num_unscored))
            shown = counts if number == 0 else ("",) * 4
            words = "none was scored" if estimate is None else str(estimate)
            if estimate is not None and estimate.num_problems < one.num_problems:
                words += f" of {estimate.num_problems} problems"
            table.add_row(*shown, figure, words)
    stream = io.StringIO()
    Console(file=stream, width=COLUMNS).print(table)
    return stream.getvalue().rstrip()
