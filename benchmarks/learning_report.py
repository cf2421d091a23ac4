"""Computes learning curves from the metrics of runs: figures of runs and variants, tables, a plot."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate, cycle
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from forgeasync.files import read_json_lines

NUM_LAST_STEPS = 20
"""Number of steps at the end of a run over which its reward is averaged."""

CLIP_SHARE = "objective/clipped_share"
EFFECTIVE_SHARE = "correction/effective_sample_share"

COLORS = ("#000000", "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9")
"""Color-blind safe palette of Okabe and Ito, without yellow, which is too light on white."""
LINES = ("-", "--", "-.", (0, (1, 1)), (0, (5, 1, 1, 1, 1, 1)))


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """Figures of one run; None if its metrics lack them."""

    seed: int
    accuracy_by_step: dict[int, float]
    """Held-out accuracy by step of evaluation; step 0 is before training."""
    steps: list[int]
    minutes: list[float]
    """Minutes from the start of the first step to the end of each step, including evaluations."""
    tokens: list[float]
    """Response tokens trained on by the end of each step, without those of evaluations and dropped groups."""
    last_reward: float
    """Mean reward of the last ``NUM_LAST_STEPS`` steps."""
    steps_per_s: float
    """Steps per second, excluding evaluations."""
    age_mean: float
    age_max: float
    clip_share: float | None
    effective_sample_share: float | None
    num_dropped: int
    """Number of dropped groups."""

    def minutes_at(self, step: int) -> float:
        """Return the minutes until the end of a step and its evaluation; 0 before training."""
        return self.minutes[self.steps.index(step)] if step else 0.0

    def tokens_at(self, step: int) -> float:
        """Return the number of response tokens trained on by the end of a step; 0 before training."""
        return self.tokens[self.steps.index(step)] if step else 0.0

    @property
    def accuracy(self) -> float:
        """Held-out accuracy in the last evaluation."""
        return self.accuracy_by_step[max(self.accuracy_by_step)]


def run_result(run_dir: Path, seed: int) -> RunResult:
    """Return the figures in a complete run's metrics.jsonl."""
    lines = read_json_lines(run_dir / "metrics.jsonl")
    steps = [line for line in lines if line["step"] > 0]
    rewards = [line["reward/mean"] for line in steps]
    trained_s = sum(line["time/step_s"] - line["time/eval_s"] for line in steps)
    return RunResult(
        seed=seed,
        accuracy_by_step={line["step"]: line["eval/accuracy"] for line in lines if "eval/accuracy" in line},
        steps=[line["step"] for line in steps],
        minutes=[line["time/elapsed_s"] / 60.0 for line in steps],
        tokens=list(
            accumulate(line["throughput/train_tokens_per_s"] * line["time/step_s"] for line in steps)
        ),
        last_reward=statistics.fmean(rewards[-NUM_LAST_STEPS:]),
        steps_per_s=len(steps) / trained_s,
        age_mean=statistics.fmean(line["off_policy/age_mean"] for line in steps),
        age_max=max(line["off_policy/age_max"] for line in steps),
        clip_share=_mean_of(steps, CLIP_SHARE),
        effective_sample_share=_mean_of(steps, EFFECTIVE_SHARE),
        num_dropped=sum(count for line in steps for key, count in line.items() if key.startswith("dropped/")),
    )


def _mean_of(steps: Sequence[dict[str, Any]], key: str) -> float | None:
    values = [line[key] for line in steps if key in line and line[key] is not None]
    return statistics.fmean(values) if values else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Figures of a variant: means over seeds, except ``age_max`` and the ends of the range."""

    accuracy: float
    accuracy_low: float
    accuracy_high: float
    last_reward: float
    steps_per_s: float
    age_mean: float
    age_max: float
    clip_share: float | None
    effective_sample_share: float | None
    num_dropped: float


@dataclass(frozen=True, slots=True, kw_only=True)
class VariantResult:
    """All runs of a variant and their summary."""

    name: str
    runs: list[RunResult]
    summary: Summary

    def accuracy_range(self, step: int) -> tuple[float, float]:
        """Return the lowest and highest held-out accuracy over seeds after ``step``."""
        values = [run.accuracy_by_step[step] for run in self.runs]
        return min(values), max(values)


def variant_result(name: str, runs: list[RunResult]) -> VariantResult:
    """Return the summary of a variant's runs."""
    accuracies = [run.accuracy for run in runs]
    summary = Summary(
        accuracy=statistics.fmean(accuracies),
        accuracy_low=min(accuracies),
        accuracy_high=max(accuracies),
        last_reward=statistics.fmean(run.last_reward for run in runs),
        steps_per_s=statistics.fmean(run.steps_per_s for run in runs),
        age_mean=statistics.fmean(run.age_mean for run in runs),
        age_max=max(run.age_max for run in runs),
        clip_share=_mean_of_known([run.clip_share for run in runs]),
        effective_sample_share=_mean_of_known([run.effective_sample_share for run in runs]),
        num_dropped=statistics.fmean(run.num_dropped for run in runs),
    )
    return VariantResult(name=name, runs=runs, summary=summary)


def _mean_of_known(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def markdown_table(results: Sequence[VariantResult]) -> str:
    """Return a Markdown table with a row for every variant."""
    columns: dict[str, Callable[[VariantResult], str]] = {
        "variant": lambda one: one.name,
        "seeds": lambda one: str(len(one.runs)),
        "held-out accuracy (range)": lambda one: (
            f"{one.summary.accuracy:.3f} ({one.summary.accuracy_low:.3f} to {one.summary.accuracy_high:.3f})"
        ),
        f"reward, last {NUM_LAST_STEPS} steps": lambda one: f"{one.summary.last_reward:.3f}",
        "steps/s": lambda one: f"{one.summary.steps_per_s:.3f}",
        "age mean / max": lambda one: f"{one.summary.age_mean:.2f} / {one.summary.age_max:.0f}",
        "clipped": lambda one: _share(one.summary.clip_share),
        "effective samples": lambda one: _share(one.summary.effective_sample_share),
        "dropped groups": lambda one: f"{one.summary.num_dropped:.0f}",
    }
    rows = [
        list(columns),
        ["---", *["---:"] * (len(columns) - 1)],
        *([cell(one) for cell in columns.values()] for one in results),
    ]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def accuracy_table(results: Sequence[VariantResult]) -> str:
    """Return a Markdown table with each variant's accuracy (mean and range over seeds) and sampled tokens.

    The columns are the steps after which all runs evaluated.
    """
    steps = _common_steps(results)
    rows = [
        ["held-out accuracy after", *(f"{step} steps" for step in steps)],
        ["---", *["---:"] * len(steps)],
        *([one.name, *(_accuracy_cell(one, step) for step in steps)] for one in results),
    ]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _accuracy_cell(one: VariantResult, step: int) -> str:
    low, high = one.accuracy_range(step)
    mean = statistics.fmean(run.accuracy_by_step[step] for run in one.runs)
    tokens = statistics.fmean(run.tokens_at(step) for run in one.runs)
    return f"{mean:.1%} ({low:.1%} to {high:.1%}; {tokens / 1000:.0f}k tokens)"


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.2%}"


def accuracy_lines(results: Sequence[VariantResult]) -> list[str]:
    """Return each variant's range at every common step, and the variants whose range misses the first's."""
    return ["held-out accuracy at equal steps, lowest to highest over seeds:"] + [
        _accuracy_line(results, step) for step in _common_steps(results)
    ]


def _common_steps(results: Sequence[VariantResult]) -> list[int]:
    """Return the steps after which all runs evaluated."""
    runs = [run for one in results for run in one.runs]
    return sorted(set.intersection(*(set(run.accuracy_by_step) for run in runs)))


def _accuracy_line(results: Sequence[VariantResult], step: int) -> str:
    ranges = {one.name: one.accuracy_range(step) for one in results}
    (first, (first_low, first_high)), *others = ranges.items()
    apart = [name for name, (low, high) in others if low > first_high or high < first_low]
    shown = "  ".join(f"{name} {low:.3f} to {high:.3f}" for name, (low, high) in ranges.items())
    verdict = f"apart from {first}: {', '.join(apart)}" if apart else f"all overlap with {first}"
    return f"step {step:4d}:  {shown}" + (f"  ({verdict})" if others else "")


class Against(StrEnum):
    """X-axis of the plot; the values are the labels."""

    STEPS = "optimizer steps"
    MINUTES = "minutes of training, evaluations included"
    TOKENS = "response tokens sampled and trained on"

    def at(self, run: RunResult, step: int) -> float:
        """Return the x-coordinate of a step of a run."""
        match self:
            case Against.STEPS:
                return step
            case Against.MINUTES:
                return run.minutes_at(step)
            case Against.TOKENS:
                return run.tokens_at(step)


def plot_variants(
    results: Sequence[VariantResult],
    out: Path,
    against: tuple[Against, Against] = (Against.STEPS, Against.MINUTES),
) -> None:
    """Plot held-out accuracy (mean and range over seeds) against each of two x-axes, as PNG.

    The reward of batches is not plotted, because it is that of older policies.
    """
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, 2, sharey=True)
    for one, color, line in zip(results, cycle(COLORS), cycle(LINES), strict=False):
        steps = _common_steps([one])
        for axis, what in zip(axes, against, strict=True):
            x = [statistics.fmean(what.at(run, step) for run in one.runs) for step in steps]
            _draw(axis, one, x, steps, color=color, line=line)
    axes[0].set_ylabel("held-out accuracy of the current policy")
    for axis, what in zip(axes, against, strict=True):
        axis.set_xlabel(what.value)
        axis.grid(alpha=0.25, linewidth=0.6)
        axis.spines[["top", "right"]].set_visible(False)
        axis.set_xlim(left=0.0)
    axes[0].legend(frameon=False)
    figure.savefig(out, dpi=150, format="png")


def _draw(
    axis: Axes, one: VariantResult, x: Sequence[float], steps: Sequence[int], *, color: str, line: Any
) -> None:
    lows, highs = zip(*(one.accuracy_range(step) for step in steps), strict=True)
    means = [statistics.fmean(run.accuracy_by_step[step] for run in one.runs) for step in steps]
    axis.fill_between(x, lows, highs, color=color, alpha=0.15, linewidth=0)
    axis.plot(x, means, color=color, linestyle=line, linewidth=1.8, marker="o", markersize=3, label=one.name)
