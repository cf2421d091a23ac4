"""The board at the bottom of a wide terminal: how a run is doing, from its newest metrics, in a few lines.

It is shown above the bars by the same ``rich.live`` display, which draws it once a second from a thread of
its own: what it reads is replaced as a whole.
"""

import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta

from rich.console import Console, RenderableType
from rich.progress import Progress, ProgressColumn
from rich.text import Text

from forgeasync.faults import Role

MIN_COLUMNS = 72
MIN_LINES = 20
"""On a smaller terminal the board would leave too little room for what scrolls above it."""

LABEL_WIDTH = 11

Numbers = Mapping[str, float | int]
"""Metrics under their names in metrics.jsonl."""

MEMORY = ("trainer", "generator", "scorer", "controller", "trainer_gpu", "generator_gpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class BoardLine:
    """A line of the board."""

    label: str
    words: str
    is_alarm: bool = False


def board_lines(metrics: Numbers, *, max_steps: int, left_s: float | None, age_s: float) -> list[BoardLine]:
    """Return the lines of the board; those of which nothing is known yet are left out.

    ``left_s`` is the estimate of the time left, ``age_s`` the time since the last step.
    """
    number = _Numbers(metrics)
    step = BoardLine(
        label="step",
        words=_joined(
            number("step", f"{{:.0f}} of {max_steps}"),
            number("time/step_s", "took {:.1f} s"),
            f"made {_time(age_s)} ago",
            None if left_s is None else f"{_time(left_s)} left",
        ),
    )
    memory = BoardLine(
        label="memory",
        words=_joined(
            *(number(f"memory/{role}_gib", role.replace("_", " ") + " {:.1f} GiB") for role in MEMORY)
        ),
    )
    lines = (step, *_training_lines(number), *_health_lines(metrics, number), memory)
    return [line for line in lines if line.words]


def _training_lines(number: "_Numbers") -> tuple[BoardLine, ...]:
    learning = _joined(
        number("reward/mean", "reward {:.3f}"), number("eval/accuracy", "held-out accuracy {:.3f}")
    )
    rates = _joined(
        number("throughput/train_tokens_per_s", "{:,.0f} tokens/s trained"),
        number("throughput/generated_tokens_per_s", "{:,.0f} tokens/s sampled"),
    )
    ages = _joined(
        number("off_policy/age_mean", "mean {:.2f} versions"), number("off_policy/age_max", "at most {:.0f}")
    )
    waits = _joined(
        # At most one of the two is 1.
        number("load/trainer_waits", "sampling and scoring bound the run", is_shown=bool),
        number("load/generators_wait", "the trainer bounds the run", is_shown=bool),
        number("load/trainer_wait_share", "trainer {:.0%} of the step for its batch"),
        number("buffer/num_complete", "{:.0f} groups wait for it"),
        number("buffer/num_in_flight", "{:.0f} under way"),
    )
    words = {"learning": learning, "rates": rates, "ages": ages, "waits": waits}
    return tuple(BoardLine(label=label, words=of_label) for label, of_label in words.items())


def _health_lines(metrics: Numbers, number: "_Numbers") -> tuple[BoardLine, BoardLine]:
    num_noticed = sum(metrics.get(f"faults/detected_{role}", 0) for role in Role)
    num_open = round(num_noticed - sum(metrics.get(f"faults/recovered_{role}", 0) for role in Role))
    generators = BoardLine(
        label="generators",
        words=_joined(
            number("generator/num_healthy", "{:.0f} healthy"),
            number("generator/num_suspect", "{:.0f} suspect", is_shown=bool),
            number("generator/num_starting", "{:.0f} starting", is_shown=bool),
        ),
        is_alarm=metrics.get("generator/num_healthy", 1) == 0,
    )
    faults = BoardLine(
        label="faults",
        words=_joined(
            f"{num_noticed:.0f} noticed",
            f"{num_open} open" if num_open else None,
            number("stall/num_found", "{:.0f} times without progress", is_shown=bool),
        ),
        is_alarm=num_open > 0,
    )
    return generators, faults


class _Numbers:
    """Metrics in words."""

    def __init__(self, metrics: Numbers) -> None:
        self._metrics = metrics

    def __call__(
        self, key: str, form: str, *, is_shown: Callable[[float], bool] = lambda value: True
    ) -> str | None:
        """A metric in words; None if it is not there."""
        value = self._metrics.get(key)
        if value is None or not is_shown(value):
            return None
        # Also as a percentage.
        return form.format(value) if math.isfinite(100.0 * value) else f"{key} is no number"


def _joined(*parts: str | None) -> str:
    return "   ".join(part for part in parts if part is not None)


def _time(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds))) if seconds >= 60 else f"{seconds:.0f} s"


class Board:
    """What the board shows now."""

    def __init__(self, max_steps: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_steps = max_steps
        self._clock = clock
        self._metrics: Numbers = {}
        self._left_s: float | None = None
        self._stepped_s: float | None = None

    def now(self, metrics: Numbers) -> None:
        """Take in the newest values of some metrics."""
        self._metrics = {**self._metrics, **metrics}

    def stepped(self, left_s: float) -> None:
        """A step was made, whose metrics are known; ``left_s`` is the estimate of the time left."""
        self._left_s, self._stepped_s = left_s, self._clock()

    def lines(self) -> list[BoardLine]:
        """Return the lines of this moment; none before the first step."""
        if self._stepped_s is None or self._left_s is None:
            return []
        age_s = self._clock() - self._stepped_s
        return board_lines(
            self._metrics, max_steps=self._max_steps, left_s=max(0.0, self._left_s - age_s), age_s=age_s
        )


class BoardProgress(Progress):
    """Bars with the board above them, where the terminal has room for it."""

    def __init__(
        self, board: Board, size: Callable[[], tuple[int, int]], *columns: ProgressColumn, console: Console
    ) -> None:
        """``size`` says how many columns and lines the terminal has."""
        self._board = board
        self._size = size
        super().__init__(
            *columns,
            console=console,
            # Once a second moves the clock; more would only take time from the processes that compute.
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
