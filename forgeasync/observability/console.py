"""What a person sees of a run: messages, phases by name, one line per step and, on a terminal, progress bars.

A terminal with room for it has a board above the bars (``forgeasync.observability.board``). In a pipe or a
file there are plain lines only. Times are passed in; only the running clocks of board and bars are their own.
"""

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Self, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from forgeasync.observability.board import Board, BoardProgress

COLUMNS = 80
"""Longest line of a step in a pipe or a file, in characters."""

LINES = 24
"""Height of a terminal that does not know it."""

MAX_COLUMNS = 170
"""The same on a wide terminal, where there is room for what the optimizer does."""

SEPARATOR = "  "

WAITED_WIDTH = 18


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLine:
    """The few numbers of a step that are worth a glance.

    ``mismatch`` is the mean absolute difference of logprobs in nats; ages count versions; ``elapsed_s`` runs
    from the start of the first step, ``step_s`` is this step's with its evaluation, ``eval_s``;
    ``waited_for`` is a short phrase such as ``batch 1.2s`` or ``train``;
    ``entropy`` is in nats a token. What is None is not shown.
    """

    step: int
    elapsed_s: float
    step_s: float
    eval_s: float
    reward_mean: float
    eval_accuracy: float | None
    train_tokens_per_s: float
    age_mean: float
    age_max: int
    mismatch: float
    response_length_mean: float
    waited_for: str
    loss: float | None
    grad_norm: float | None
    learning_rate: float | None
    entropy: float | None

    @classmethod
    def from_metrics(cls, metrics: Mapping[str, float | int], *, waited_for: str) -> "StepLine":
        """Take the numbers from a step's metrics, under their keys in metrics.jsonl."""
        return cls(
            step=int(metrics["step"]),
            elapsed_s=metrics["time/elapsed_s"],
            step_s=metrics["time/step_s"],
            eval_s=metrics["time/eval_s"],
            reward_mean=metrics["reward/mean"],
            eval_accuracy=metrics.get("eval/accuracy"),
            train_tokens_per_s=metrics["throughput/train_tokens_per_s"],
            age_mean=metrics["off_policy/age_mean"],
            age_max=int(metrics["off_policy/age_max"]),
            mismatch=metrics["mismatch/logprob_abs_mean"],
            response_length_mean=metrics["response/length_mean"],
            waited_for=waited_for,
            loss=metrics["loss"],
            grad_norm=metrics["grad_norm"],
            learning_rate=metrics.get("learning_rate"),
            entropy=metrics.get("policy/entropy"),
        )

    def format(self, max_steps: int, num_columns: int = COLUMNS) -> str:
        """One line of aligned columns, at most ``num_columns`` long: what fits of them, by their worth."""
        evaluation = "" if self.eval_accuracy is None else f"eval {self.eval_accuracy:.3f}"
        # In the order of the line, each with its worth: the smaller the number, the longer it stays.
        columns = (
            (0, f"step {self.step:{len(str(max_steps))}d}/{max_steps}"),
            (1, f"reward {self.reward_mean:6.3f}"),
            (2, f"{evaluation:10}"),
            (3, f"{_with_unit(self.train_tokens_per_s):>5} tok/s"),
            (5, f"age {self.age_mean:3.1f}/{self.age_max}"),
            (4, f"mismatch {self.mismatch:5.0e}"),
            (7, f"len {self.response_length_mean:5.0f}"),
            *self._optimizer_columns(),
            (6, f"{_cut(self.waited_for, WAITED_WIDTH):{WAITED_WIDTH}}"),
        )
        shown: set[int] = set()
        left = num_columns + len(SEPARATOR)
        for worth, text in sorted(columns):
            # The step is shown in any case, be it cut.
            if (width := len(text) + len(SEPARATOR)) <= left or not worth:
                shown.add(worth)
                left -= width
        line = SEPARATOR.join(text for worth, text in columns if worth in shown)
        return _cut(line.rstrip(), num_columns)

    def _optimizer_columns(self) -> list[tuple[int, str]]:
        values = (
            (8, "loss", self.loss, "9.3g"),
            (9, "entropy", self.entropy, "6.3f"),
            (10, "grad", self.grad_norm, "8.3g"),
            (11, "lr", self.learning_rate, "7.1e"),
        )
        return [(worth, f"{name} {value:{form}}") for worth, name, value, form in values if value is not None]


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


def _with_unit(value: float) -> str:
    if value < 1e4:
        return f"{value:.0f}"
    if value < 1e5:
        return f"{value / 1e3:.1f}k"
    return f"{value / 1e3:.0f}k" if value < 1e6 else f"{value / 1e6:.1f}M"


class StepConsole:
    """Prints messages, phases and step lines; shows the bars from ``start`` (or ``with``) until ``stop``."""

    def __init__(
        self,
        max_steps: int,
        *,
        eval_every_steps: int | None = None,
        stream: TextIO | None = None,
        log: Callable[[str], None] | None = None,
    ) -> None:
        """``stream`` defaults to the present standard output; ``log`` gets every line too.

        Without ``eval_every_steps`` the run evaluates nothing.
        """
        self._max_steps = max_steps
        self._stream = sys.stdout if stream is None else stream
        self._log = log
        self._remaining = RemainingTime(max_steps, eval_every_steps)
        console = Console(file=self._stream)
        self._board = Board(max_steps)
        self._bars: Progress | None = None
        self._is_gone = False
        self._phase: TaskID | None = None
        self._training: TaskID | None = None
        # Asked of the stream itself: rich takes a pipe for a terminal when FORCE_COLOR is set.
        if self._stream.isatty() and console.is_interactive:
            self._bars = BoardProgress(
                self._board,
                self._size,
                TextColumn("{task.description}"),
                BarColumn(bar_width=20),
                TextColumn("{task.fields[count]}"),
                TimeElapsedColumn(),
                TextColumn("{task.fields[remaining]}"),
                console=console,
            )

    def start(self) -> None:
        """Show the bars; does nothing in a pipe."""
        with self._showing():
            if self._bars is not None:
                self._bars.start()

    def alarm(self, text: str) -> None:
        """Print ``text`` as ``message`` does, in red where there are colours."""
        self.message(text, style="bold red")

    def message(self, text: str, *, style: str = "") -> None:
        """Print ``text``, without any escape codes that it may hold, above the bars."""
        plain = Text.from_ansi(text).plain
        if self._log is not None:
            self._log(plain)
        with self._showing():
            if self._bars is not None:
                # No wrapping: a narrow terminal breaks the line itself, and a copied line stays whole.
                self._bars.console.print(
                    plain, markup=False, highlight=False, soft_wrap=True, style=style or None
                )
            elif not self._is_gone:
                self._stream.write(plain + "\n")
                self._stream.flush()

    @contextmanager
    def _showing(self) -> Iterator[None]:
        """A terminal or a pipe's reader that is gone ends no run: from then on only the log gets lines."""
        try:
            yield
        except OSError as error:
            self._is_gone = True
            bars, self._bars = self._bars, None
            if bars is not None:
                with suppress(OSError):
                    bars.stop()
            if self._log is not None:
                self._log(f"nobody reads the console any more: {error}")

    def phase(self, text: str, *, num_parts: int | None = None) -> None:
        """Say what begins now; a bar shows how long it has gone on, and how many of its parts are done."""
        self.message(text)
        if self._bars is not None:
            self.end_phase()
            count = "" if num_parts is None else f"0/{num_parts}"
            self._phase = self._bars.add_task(text, total=num_parts, count=count, remaining="")

    def part_done(self) -> None:
        """One more part of the phase."""
        with self._showing():
            if self._bars is not None and self._phase is not None:
                self._bars.advance(self._phase)
                (task,) = (task for task in self._bars.tasks if task.id == self._phase)
                if task.total is not None:
                    self._bars.update(self._phase, count=f"{task.completed:.0f}/{task.total:.0f}")

    def end_phase(self) -> None:
        """The phase is over; what comes next needs no name."""
        with self._showing():
            if self._bars is not None and self._phase is not None:
                self._bars.remove_task(self._phase)
                self._phase = None

    def now(self, metrics: Mapping[str, float | int]) -> None:
        """Show the newest values of metrics on the board; nothing in a pipe."""
        self._board.now(metrics)

    def step(self, line: StepLine) -> None:
        """Print one step's line and move the bar; what ``now`` is told is of this step."""
        self.message(line.format(self._max_steps, self._num_columns()))
        self._remaining.add(line.step, elapsed_s=line.elapsed_s, step_s=line.step_s, eval_s=line.eval_s)
        with self._showing():
            if self._bars is None:
                return
            left_s = self._remaining.estimate_s()
            self._board.stepped(left_s)
            if self._training is None:
                # Before the first step there is no progress to show.
                self._training = self._bars.add_task(
                    "training", total=self._max_steps, count="", remaining=""
                )
            self._bars.update(
                self._training,
                completed=line.step,
                count=f"{line.step}/{self._max_steps}",
                remaining=f"ETA {timedelta(seconds=round(left_s))}",
            )

    def _num_columns(self) -> int:
        return COLUMNS if self._bars is None else min(MAX_COLUMNS, self._size()[0])

    def _size(self) -> tuple[int, int]:
        """Columns and lines of the terminal."""
        # rich asks the standard descriptors, which are a log file's in the controller. A terminal that does
        # not know its size says 0.
        try:
            size = os.get_terminal_size(self._stream.fileno())
        except OSError:
            return COLUMNS, LINES  # the terminal is gone
        return size.columns or COLUMNS, size.lines or LINES

    def evaluated(self, eval_s: float) -> None:
        """The evaluation before the first step took so long: the ones to come count as much."""
        self._remaining.add_evaluation(eval_s)

    def stop(self) -> None:
        """Take the bars away and give the cursor back; a second call does nothing."""
        with self._showing():
            if self._bars is not None:
                self._bars.stop()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()


class RemainingTime:
    """Estimates from the steps that this process has made; a run that was resumed begins anew."""

    def __init__(self, max_steps: int, eval_every_steps: int | None) -> None:
        """Evaluations come every ``eval_every_steps`` steps and after the last; None: there are none."""
        self._max_steps = max_steps
        self._eval_every_steps = eval_every_steps
        self._step = 0
        self._elapsed_s: float | None = None
        self._num_steps = 0
        self._steps_s = 0.0
        self._num_evals = 0
        self._evals_s = 0.0

    def add(self, step: int, *, elapsed_s: float, step_s: float, eval_s: float) -> None:
        """A step was made at ``elapsed_s`` of the run's clock; its ``eval_s`` is 0 without an evaluation."""
        if self._elapsed_s is None:
            # The clock of a resumed run has also counted its set-up.
            self._elapsed_s = 0.0 if step == 1 else elapsed_s - step_s
        # By the clock, not by the sum of steps: what lies between them takes time too.
        self._steps_s += elapsed_s - self._elapsed_s - eval_s
        self._num_steps += 1
        self._elapsed_s = elapsed_s
        self._step = step
        if eval_s > 0.0:
            self._evals_s += eval_s
            self._num_evals += 1

    def add_evaluation(self, eval_s: float) -> None:
        """An evaluation outside of a step: the one before the first."""
        self._evals_s += eval_s
        self._num_evals += 1

    def estimate_s(self) -> float:
        """Seconds until the last step has been made and evaluated; there has been one step at least."""
        steps_s = self._steps_s / self._num_steps * (self._max_steps - self._step)
        if not self._num_evals:
            return steps_s
        return steps_s + self._evals_s / self._num_evals * self._num_evals_left()

    def _num_evals_left(self) -> int:
        if self._eval_every_steps is None:
            return 0
        num_evals = self._max_steps // self._eval_every_steps - self._step // self._eval_every_steps
        is_last_extra = self._max_steps % self._eval_every_steps != 0 and self._step < self._max_steps
        return num_evals + is_last_extra
