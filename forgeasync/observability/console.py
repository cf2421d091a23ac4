"""Console output of a run: messages, named phases, one line per step and, on a terminal, progress bars.

If the terminal is large enough, a board above the bars shows the state of the run in a few lines, from its
newest metrics. Pipes and files only get plain lines. Callers pass in all times, except those of the running
clocks of board and bars.
"""

import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Self, TextIO

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, ProgressColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from forgeasync.observability.fault_log import Role

Numbers = Mapping[str, float | int]
"""Metrics by their names in metrics.jsonl."""

COLUMNS = 80
"""Maximum length in characters of a step's line in a pipe or a file."""

MAX_COLUMNS = 170
"""Maximum length in characters of a step's line on a wide terminal, with room for optimizer metrics."""

LINES = 24
"""Assumed height of a terminal that does not report it, in lines."""

MIN_COLUMNS = 72
"""Minimum width of a terminal with a board, in characters."""
MIN_LINES = 20
"""Minimum height of a terminal with a board, in lines. Messages need the room above it."""

SEPARATOR = "  "

WAITED_WIDTH = 18

LABEL_WIDTH = 11

MEMORY = ("trainer", "generator", "scorer", "controller", "trainer_gpu", "generator_gpu")


# --- the line of a step ---


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLine:
    """Line with the most important metrics of a step."""

    metrics: Numbers
    waited_for: str
    """Short phrase for what the step waited for, such as ``batch 1.2s`` or ``train``."""

    def format(self, max_steps: int, num_columns: int = COLUMNS) -> str:
        """Return one line of aligned columns, at most ``num_columns`` long.

        If the line is too long, the least important columns are left out. Ages are in versions, the mismatch
        is the mean absolute difference of log-probabilities in nats, and the entropy is in nats per token.
        """
        metrics = self.metrics
        accuracy = metrics.get("eval/accuracy")
        evaluation = "" if accuracy is None else f"eval {accuracy:.3f}"
        age_mean, age_max = metrics["off_policy/age_mean"], metrics["off_policy/age_max"]
        optimizer = (
            (8, "loss", "loss", "9.3g"),
            (9, "entropy", "policy/entropy", "6.3f"),
            (10, "grad", "grad_norm", "8.3g"),
            (11, "lr", "learning_rate", "7.1e"),
        )
        # In the order of the line, each with its rank: columns with higher numbers are left out first.
        columns = (
            (0, f"step {int(metrics['step']):{len(str(max_steps))}d}/{max_steps}"),
            (1, f"reward {metrics['reward/mean']:6.3f}"),
            (2, f"{evaluation:10}"),
            (3, f"{_with_unit(metrics['throughput/train_tokens_per_s']):>5} tok/s"),
            (5, f"age {age_mean:3.1f}/{int(age_max)}"),
            (4, f"mismatch {metrics['mismatch/logprob_abs_mean']:5.0e}"),
            (7, f"len {metrics['response/length_mean']:5.0f}"),
            *(
                (worth, f"{name} {metrics[key]:{form}}")
                for worth, name, key, form in optimizer
                if key in metrics
            ),
            (6, f"{_cut(self.waited_for, WAITED_WIDTH):{WAITED_WIDTH}}"),
        )
        shown: set[int] = set()
        left = num_columns + len(SEPARATOR)
        for worth, text in sorted(columns):
            # The step is always shown, even if it is cut.
            if (width := len(text) + len(SEPARATOR)) <= left or not worth:
                shown.add(worth)
                left -= width
        line = SEPARATOR.join(text for worth, text in columns if worth in shown)
        return _cut(line.rstrip(), num_columns)


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


def _with_unit(value: float) -> str:
    if value < 1e4:
        return f"{value:.0f}"
    if value < 1e5:
        return f"{value / 1e3:.1f}k"
    return f"{value / 1e3:.0f}k" if value < 1e6 else f"{value / 1e6:.1f}M"


# --- the board ---


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressLine:
    """One line of the board. Lines with ``is_alarm`` are red."""

    label: str
    words: str
    is_alarm: bool = False


def progress_lines(
    metrics: Numbers, *, max_steps: int, left_s: float | None, age_s: float
) -> list[ProgressLine]:
    """Return the lines of the board, except those without any metric yet.

    ``left_s`` is the estimated time left, ``age_s`` the time since the last step, both in seconds.
    """

    def number(key: str, form: str, *, is_shown: Callable[[float], bool] = lambda value: True) -> str:
        """Return a metric formatted by ``form``; an empty text if it is missing or not to be shown."""
        value = metrics.get(key)
        if value is None or not is_shown(value):
            return ""
        # The factor is for percentages, which must be finite too.
        return form.format(value) if math.isfinite(100.0 * value) else f"{key} is not a number"

    num_noticed = sum(metrics.get(f"faults/detected_{role}", 0) for role in Role)
    num_open = round(num_noticed - sum(metrics.get(f"faults/recovered_{role}", 0) for role in Role))
    alarms = {"generators": metrics.get("generator/num_healthy", 1) == 0, "faults": num_open > 0}
    parts = {
        "step": (
            number("step", f"{{:.0f}} of {max_steps}"),
            number("time/step_s", "took {:.1f} s"),
            f"made {_time(age_s)} ago",
            "" if left_s is None else f"{_time(left_s)} left",
        ),
        "learning": (
            number("reward/mean", "reward {:.3f}"),
            number("eval/accuracy", "held-out accuracy {:.3f}"),
        ),
        "rates": (
            number("throughput/train_tokens_per_s", "{:,.0f} tokens/s trained"),
            number("throughput/generated_tokens_per_s", "{:,.0f} tokens/s sampled"),
        ),
        "ages": (
            number("off_policy/age_mean", "mean {:.2f} versions"),
            number("off_policy/age_max", "at most {:.0f}"),
        ),
        "waits": (
            # At most one of the first two metrics is 1.
            number("load/trainer_waits", "sampling and scoring bound the run", is_shown=bool),
            number("load/generators_wait", "the trainer bounds the run", is_shown=bool),
            number("load/trainer_wait_share", "trainer {:.0%} of the step for its batch"),
            number("buffer/num_complete", "{:.0f} groups wait for it"),
            number("buffer/num_in_flight", "{:.0f} in flight"),
        ),
        "generators": (
            number("generator/num_healthy", "{:.0f} healthy"),
            number("generator/num_starting", "{:.0f} starting", is_shown=bool),
        ),
        "faults": (
            f"{num_noticed:.0f} noticed",
            f"{num_open} open" if num_open else "",
            number("stall/num_found", "{:.0f} times without progress", is_shown=bool),
        ),
        "memory": (
            *(number(f"memory/{role}_gib", role.replace("_", " ") + " {:.1f} GiB") for role in MEMORY),
        ),
    }
    words = {label: "   ".join(filter(None, some)) for label, some in parts.items()}
    return [
        ProgressLine(label=label, words=said, is_alarm=alarms.get(label, False))
        for label, said in words.items()
        if said
    ]


def _time(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds))) if seconds >= 60 else f"{seconds:.0f} s"


class ProgressDisplay:
    """Current content of the board.

    A thread of rich draws it once a second, so attributes are replaced as a whole and never modified.
    """

    def __init__(self, max_steps: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_steps = max_steps
        self._clock = clock
        self._metrics: Numbers = {}
        self._stepped: tuple[float, float] | None = None
        """Estimated time left at the last step, and the clock's time of that step, both in seconds."""

    def now(self, metrics: Numbers) -> None:
        """Update the values of some metrics."""
        self._metrics = {**self._metrics, **metrics}

    def stepped(self, left_s: float) -> None:
        """Record that a step was made, with the estimated time left in seconds."""
        self._stepped = left_s, self._clock()

    def lines(self) -> list[ProgressLine]:
        """Return the current lines; none before the first step."""
        if self._stepped is None:
            return []
        left_s, stepped_s = self._stepped
        age_s = self._clock() - stepped_s
        return progress_lines(
            self._metrics, max_steps=self._max_steps, left_s=max(0.0, left_s - age_s), age_s=age_s
        )


class _BoardProgress(Progress):
    """Progress bars, with the board above them if the terminal is large enough."""

    def __init__(
        self,
        board: ProgressDisplay,
        size: Callable[[], tuple[int, int]],
        *columns: ProgressColumn,
        console: Console,
    ) -> None:
        """``size`` returns the number of columns and lines of the terminal."""
        self._board = board
        self._size = size
        super().__init__(
            *columns,
            console=console,
            # Once a second is enough for the clocks. More would take CPU time from the other processes.
            refresh_per_second=1,
            transient=True,
        )

    def get_renderables(self) -> Iterable[RenderableType]:
        """See ``rich.progress.Progress``."""
        num_columns, num_lines = self._size()
        if num_columns >= MIN_COLUMNS and num_lines >= MIN_LINES:
            for line in self._board.lines():
                words = Text(f"{line.label:{LABEL_WIDTH}}", style="bold", no_wrap=True, overflow="ellipsis")
                words.append(line.words, style="bold red" if line.is_alarm else "not bold")
                words.truncate(num_columns, overflow="ellipsis")
                yield words
        yield from super().get_renderables()


# --- the console ---


class StepConsole:
    """Prints messages, phases and step lines. Shows the bars from ``start`` (or ``with``) until ``stop``."""

    def __init__(
        self,
        max_steps: int,
        *,
        stream: TextIO | None = None,
        log: Callable[[str], None] | None = None,
    ) -> None:
        """Create a console, without showing bars yet.

        Args:
            max_steps: Number of steps of the run.
            stream: Output stream, by default the current standard output.
            log: Function that also gets every line.
        """
        self._max_steps = max_steps
        self._stream = sys.stdout if stream is None else stream
        self._log = log
        self._begun: tuple[int, float] | None = None
        """Last step before those of this process, and the run's clock at its end."""
        console = Console(file=self._stream)
        self._board = ProgressDisplay(max_steps)
        self._bars: Progress | None = None
        self._is_gone = False
        self._phase: TaskID | None = None
        self._training: TaskID | None = None
        # Not rich's own check alone, which takes a pipe for a terminal if FORCE_COLOR is set.
        if self._stream.isatty() and console.is_interactive:
            self._bars = _BoardProgress(
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
        """Show the bars. Does nothing in a pipe."""
        with self._showing():
            if self._bars is not None:
                self._bars.start()

    def alarm(self, text: str) -> None:
        """Print ``text`` as ``message`` does, in red if the terminal has colors."""
        self.message(text, style="bold red")

    def message(self, text: str, *, style: str = "") -> None:
        """Print ``text`` above the bars, after removing escape codes."""
        plain = Text.from_ansi(text).plain
        if self._log is not None:
            self._log(plain)
        with self._showing():
            if self._bars is not None:
                # No wrapping by rich: the terminal wraps long lines itself, and copied lines stay whole.
                self._bars.console.print(
                    plain, markup=False, highlight=False, soft_wrap=True, style=style or None
                )
            elif not self._is_gone:
                self._stream.write(plain + "\n")
                self._stream.flush()

    @contextmanager
    def _showing(self) -> Iterator[None]:
        """Ignore errors of the body if the terminal or the reader of a pipe is gone.

        From then on, only the log gets lines.
        """
        try:
            yield
        except OSError as error:
            self._is_gone = True
            bars, self._bars = self._bars, None
            if bars is not None:
                with suppress(OSError):
                    bars.stop()
            if self._log is not None:
                self._log(f"the console has been closed: {error}")

    def phase(self, text: str, *, num_parts: int | None = None) -> None:
        """Print the name of a phase that begins, and show a bar with its time and its finished parts."""
        self.message(text)
        if self._bars is not None:
            self.end_phase()
            count = "" if num_parts is None else f"0/{num_parts}"
            self._phase = self._bars.add_task(text, total=num_parts, count=count, remaining="")

    def part_done(self) -> None:
        """Record that one more part of the phase is done."""
        with self._showing():
            if self._bars is not None and self._phase is not None:
                self._bars.advance(self._phase)
                (task,) = (task for task in self._bars.tasks if task.id == self._phase)
                if task.total is not None:
                    self._bars.update(self._phase, count=f"{task.completed:.0f}/{task.total:.0f}")

    def end_phase(self) -> None:
        """Remove the bar of the phase, if there is one."""
        with self._showing():
            if self._bars is not None and self._phase is not None:
                self._bars.remove_task(self._phase)
                self._phase = None

    def now(self, metrics: Numbers) -> None:
        """Update values of metrics on the board. Has no visible effect in a pipe."""
        self._board.now(metrics)

    def step(self, line: StepLine) -> None:
        """Print the line of a step, and advance the bar."""
        self.message(line.format(self._max_steps, self._num_columns()))
        step = int(line.metrics["step"])
        with self._showing():
            if self._bars is None:
                return
            left_s = self._left_s(step, line.metrics)
            self._board.stepped(left_s)
            if self._training is None:
                # Before the first step there is no progress to show.
                self._training = self._bars.add_task(
                    "training", total=self._max_steps, count="", remaining=""
                )
            self._bars.update(
                self._training,
                completed=step,
                count=f"{step}/{self._max_steps}",
                remaining=f"ETA {timedelta(seconds=round(left_s))}",
            )

    def _left_s(self, step: int, metrics: Numbers) -> float:
        """Return the estimated seconds until the last step, at the mean pace of this process."""
        elapsed_s = metrics["time/elapsed_s"]
        if self._begun is None:
            self._begun = step - 1, elapsed_s - metrics["time/step_s"]
        before, begun_s = self._begun
        return (elapsed_s - begun_s) / (step - before) * (self._max_steps - step)

    def _num_columns(self) -> int:
        return COLUMNS if self._bars is None else min(MAX_COLUMNS, self._size()[0])

    def _size(self) -> tuple[int, int]:
        """Return the number of columns and lines of the terminal."""
        # rich queries the standard descriptors, which refer to a log file in the controller. A terminal that
        # does not know its size reports 0.
        try:
            size = os.get_terminal_size(self._stream.fileno())
        except OSError:
            return COLUMNS, LINES  # the terminal is gone
        return size.columns or COLUMNS, size.lines or LINES

    def stop(self) -> None:
        """Remove the bars and restore the cursor. A second call does nothing."""
        with self._showing():
            if self._bars is not None:
                self._bars.stop()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()
