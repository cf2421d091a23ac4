"""What a person sees of a run: start-up messages, one line per step and, on a terminal, a progress bar.

In a pipe or a file there are plain lines only. Times are passed in; only the bar's running clock is rich's.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Self, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

MAX_COLUMNS = 110
"""Longest line of a step, in characters; what the loop waited for is cut to fit."""
SEPARATOR = "  "


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLine:
    """The few numbers of a step that are worth a glance.

    ``mismatch`` is the mean absolute difference of logprobs in nats; ages count versions; ``elapsed_s`` runs
    from the start of the first step; ``waited_for`` is a short phrase such as ``batch 1.2s`` or ``train``.
    """

    step: int
    elapsed_s: float
    reward_mean: float
    eval_accuracy: float | None
    train_tokens_per_s: float
    age_mean: float
    age_max: int
    mismatch: float
    response_length_mean: float
    waited_for: str

    @classmethod
    def from_metrics(cls, metrics: Mapping[str, float | int], *, waited_for: str) -> "StepLine":
        """Take the numbers from a step's metrics, under the keys of ``forgeasync.observability.metrics``."""
        return cls(
            step=int(metrics["step"]),
            elapsed_s=metrics["time/elapsed_s"],
            reward_mean=metrics["reward/mean"],
            eval_accuracy=metrics.get("eval/accuracy"),
            train_tokens_per_s=metrics["throughput/train_tokens_per_s"],
            age_mean=metrics["off_policy/age_mean"],
            age_max=int(metrics["off_policy/age_max"]),
            mismatch=metrics["mismatch/logprob_abs_mean"],
            response_length_mean=metrics["response/length_mean"],
            waited_for=waited_for,
        )

    def format(self, max_steps: int) -> str:
        """One line of aligned columns, at most ``MAX_COLUMNS`` long."""
        evaluation = "" if self.eval_accuracy is None else f"eval {self.eval_accuracy:.3f}"
        columns = (
            f"step {self.step:{len(str(max_steps))}d}/{max_steps}",
            f"reward {self.reward_mean:6.3f}",
            f"{evaluation:10}",
            f"{_with_unit(self.train_tokens_per_s):>6} tok/s",
            f"age {self.age_mean:4.1f}/{self.age_max:<2d}",
            f"mismatch {self.mismatch:5.0e}",
            f"len {self.response_length_mean:5.0f}",
            self.waited_for,
        )
        line = SEPARATOR.join(columns)
        return line if len(line) <= MAX_COLUMNS else line[: MAX_COLUMNS - 1] + "…"


def _with_unit(value: float) -> str:
    if value < 1e4:
        return f"{value:.0f}"
    return f"{value / 1e3:.1f}k" if value < 1e6 else f"{value / 1e6:.1f}M"


class StepConsole:
    """Prints messages and step lines; shows the bar from ``start`` (or ``with``) until ``stop``."""

    def __init__(self, max_steps: int, *, stream: TextIO | None = None) -> None:
        """``stream`` defaults to the present standard output."""
        self._max_steps = max_steps
        self._stream = sys.stdout if stream is None else stream
        console = Console(file=self._stream)
        self._bar: Progress | None = None
        # Asked of the stream itself: rich takes a pipe for a terminal when FORCE_COLOR is set.
        if self._stream.isatty() and console.is_interactive:
            self._bar = _progress_bar(console)
            self._task = self._bar.add_task("training", total=max_steps, remaining="-:--:--")

    def start(self) -> None:
        """Show the bar; does nothing in a pipe."""
        if self._bar is not None:
            self._bar.start()

    def message(self, text: str) -> None:
        """Print ``text``, without any escape codes that it may hold, above the bar."""
        plain = Text.from_ansi(text).plain
        if self._bar is None:
            self._stream.write(plain + "\n")
            self._stream.flush()
        else:
            # No wrapping: a narrow terminal breaks the line itself, and a copied line stays whole.
            self._bar.console.print(plain, markup=False, highlight=False, soft_wrap=True)

    def step(self, line: StepLine) -> None:
        """Print one step's line and move the bar."""
        self.message(line.format(self._max_steps))
        if self._bar is not None:
            remaining_s = line.elapsed_s / line.step * (self._max_steps - line.step)
            remaining = str(timedelta(seconds=round(remaining_s)))
            self._bar.update(self._task, completed=line.step, remaining=remaining)

    def stop(self) -> None:
        """Take the bar away and give the cursor back; a second call does nothing."""
        if self._bar is not None:
            self._bar.stop()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()


def _progress_bar(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("ETA {task.fields[remaining]}"),
        console=console,
        # Once a second moves the clock; more would only take time from the processes that compute.
        refresh_per_second=1,
        transient=True,
    )
