"""Held-out accuracy and training reward of several runs, over minutes and over steps.

python -m forgeasync.observability.plot RUN_DIR [RUN_DIR ...] --out FILE.png
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from forgeasync.files import read_json_lines

ACCURACY = "eval/accuracy"
REWARD = "reward/mean"
SMOOTHING_SHARE = 0.05
"""Width of the moving average of the reward, as a share of the run's steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One metric of one run. Shape suffix: N recorded values."""

    steps_N: np.ndarray
    minutes_N: np.ndarray
    values_N: np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCurves:
    """Curves of one run."""

    name: str
    accuracy: Curve
    reward: Curve


def read_run(run_dir: Path) -> RunCurves:
    """Read the curves of a run from its metrics.jsonl.

    Raises:
        FileNotFoundError: The run has no metrics.jsonl.
        ValueError: No step was recorded, or a line is not a JSON object.
    """
    path = run_dir / "metrics.jsonl"
    records = read_json_lines(path)
    if not records:
        raise ValueError(f"{path} holds no steps yet")
    return RunCurves(
        name=run_dir.resolve().name, accuracy=_curve(records, ACCURACY), reward=_curve(records, REWARD)
    )


def _curve(records: Sequence[dict[str, Any]], key: str) -> Curve:
    # A line may lack the key (no evaluation) or have null (not a finite value). Neither is a point.
    points = [
        (record["step"], record["time/elapsed_s"], record[key])
        for record in records
        if record.get(key) is not None
    ]
    points_N3 = np.array(points, dtype=np.float64).reshape(-1, 3)
    return Curve(steps_N=points_N3[:, 0], minutes_N=points_N3[:, 1] / 60.0, values_N=points_N3[:, 2])


def moving_average(values_N: np.ndarray, width: int) -> np.ndarray:
    """Return the mean of the last ``width`` values at every point, or of fewer at the start."""
    sums = np.concatenate([[0.0], np.cumsum(values_N)])
    ends = np.arange(1, len(values_N) + 1)
    starts = np.maximum(0, ends - width)
    return (sums[ends] - sums[starts]) / (ends - starts)


def plot_runs(runs: Sequence[RunCurves], out: Path) -> None:
    """Write a PNG with four panels, accuracy and reward over minutes and steps, to ``out``."""
    figure = Figure(figsize=(11, 7), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, 2, sharex="col", sharey="row")
    for index, run in enumerate(runs):
        color = f"C{index}"
        accuracy, reward = run.accuracy, run.reward
        width = max(1, round(SMOOTHING_SHARE * len(reward.values_N)))
        smooth_N = moving_average(reward.values_N, width)
        for column in range(2):
            above, below = axes[:, column]
            x_N = accuracy.steps_N if column else accuracy.minutes_N
            above.plot(
                x_N, accuracy.values_N, color=color, marker="o", markersize=4, linewidth=1.8, label=run.name
            )
            x_N = reward.steps_N if column else reward.minutes_N
            below.plot(x_N, reward.values_N, color=color, linewidth=0.8, alpha=0.3)
            below.plot(x_N, smooth_N, color=color, linewidth=1.8)
    axes[0, 0].set_ylabel("held-out accuracy")
    axes[1, 0].set_ylabel("training reward")
    axes[1, 0].set_xlabel("minutes of training")
    axes[1, 1].set_xlabel("optimizer steps")
    for axis in axes.flat:
        axis.grid(alpha=0.25, linewidth=0.6)
        axis.spines[["top", "right"]].set_visible(False)
        axis.set_xlim(left=0.0)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=min(3, len(runs)), frameon=False)
    figure.savefig(out, dpi=150, format="png")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m forgeasync.observability.plot", description=__doc__)
    parser.add_argument("run_dirs", nargs="+", type=Path, metavar="RUN_DIR")
    parser.add_argument("--out", required=True, type=Path, metavar="FILE.png")
    arguments = parser.parse_args()
    try:
        runs = [read_run(run_dir) for run_dir in arguments.run_dirs]
    except (FileNotFoundError, ValueError) as error:
        parser.error(str(error))
    plot_runs(runs, arguments.out)


if __name__ == "__main__":
    main()
