"""Compares a ledger with the metrics of its run, which are counted and written independently of it."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from forgeasync.buffer import DropReason, Update
from forgeasync.ledger.account import TrainedStep
from forgeasync.ledger.book import Book

NUM_EVENTS = "ledger/num_events"
NUM_SKIPPED = "trainer/num_skipped_steps"


class MetricsContradiction(ValueError):
    """A line of the metrics and the ledger contradict each other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsLine:
    """A line of metrics.jsonl."""

    number: int
    values: Mapping[str, object]

    def count(self, key: str) -> int:
        """Return a value that must be a whole number."""
        value = self.values.get(key)
        if isinstance(value, float) and value.is_integer():
            return int(value)
        if not isinstance(value, int) or isinstance(value, bool):
            raise MetricsContradiction(f"metrics.jsonl line {self.number}: {key} is {value!r}, not a count")
        return value


def read_metrics(file: Path) -> list[MetricsLine]:
    """Read the lines of metrics.jsonl that are whole.

    Raises:
        MetricsContradiction: a line is no object of JSON.
    """
    lines = []
    for number, text in enumerate(file.read_bytes().splitlines(keepends=True), start=1):
        if not text.endswith(b"\n"):
            # The run was killed as it wrote this line.
            break
        try:
            values = json.loads(text)
        except ValueError as error:
            raise MetricsContradiction(f"metrics.jsonl line {number} cannot be read: {error}") from None
        if not isinstance(values, dict):
            raise MetricsContradiction(f"metrics.jsonl line {number} is no object")
        lines.append(MetricsLine(number=number, values=values))
    return lines


def compare_with_metrics(book: Book, lines: Sequence[MetricsLine]) -> int:
    """Compare every step; returns the number of steps that both know.

    The ledger reaches the disk first, so it may be ahead: by the steps after the last line of a run that did
    not end, and by the last step that a run made before it was interrupted and resumed.

    Raises:
        MetricsContradiction: what the first contradiction is.
    """
    known = _by_step(book, lines)
    losses, in_ledger, in_metrics = iter([*book.losses, None]), Counter[DropReason](), Counter[DropReason]()
    loss = next(losses)
    num_compared, num_skipped, life = 0, 0, 0
    for one, following in zip(book.steps, [*book.steps[1:], None], strict=True):
        if one.life != life:
            # The controller's counts begin at 0 whenever it is started.
            life, num_skipped = one.life, 0
            in_ledger.clear()
            in_metrics.clear()
        num_skipped += one.update is Update.SKIPPED
        if (line := known.get(one.step)) is None:
            _check_may_lack(book, one, following, last=max(known, default=0))
            continue
        num_events = line.count(NUM_EVENTS)
        if num_events < one.line or (following is not None and num_events >= following.line):
            raise MetricsContradiction(
                f"metrics.jsonl line {line.number}: step {one.step} was recorded after line {num_events} of "
                f"the ledger, but it was trained in line {one.line}"
                + ("" if following is None else f" and step {following.step} in line {following.line}")
            )
        while loss is not None and loss[0] <= num_events:
            # The last ones of a life that was interrupted never reached its metrics.
            in_ledger[loss[1]] += loss[0] > one.life
            loss = next(losses)
        for reason in DropReason:
            in_metrics[reason] += line.count(f"dropped/{reason}")
            if in_metrics[reason] != in_ledger[reason]:
                raise MetricsContradiction(
                    f"metrics.jsonl line {line.number}: by step {one.step} the metrics count "
                    f"{in_metrics[reason]} groups dropped as {reason}, the ledger {in_ledger[reason]} "
                    f"(from line {one.life} to line {num_events})"
                )
        if line.count(NUM_SKIPPED) != num_skipped:
            raise MetricsContradiction(
                f"metrics.jsonl line {line.number}: by step {one.step} the metrics count "
                f"{line.count(NUM_SKIPPED)} skipped steps, the ledger {num_skipped} since line {one.life}"
            )
        num_compared += 1
    return num_compared


def _by_step(book: Book, lines: Sequence[MetricsLine]) -> dict[int, MetricsLine]:
    """Return the lines of steps that the ledger can know, after looking whether it does."""
    assert book.opened is not None
    trained = {one.step for one in book.steps}
    known: dict[int, MetricsLine] = {}
    for line in lines:
        step = line.count("step")
        if step <= book.opened.step:
            continue
        if step in known:
            raise MetricsContradiction(
                f"metrics.jsonl line {line.number} is of step {step}, as line {known[step].number} is"
            )
        if step not in trained:
            raise MetricsContradiction(
                f"metrics.jsonl line {line.number} is of step {step}, which is not trained by the ledger"
            )
        known[step] = line
    return known


def _check_may_lack(book: Book, step: TrainedStep, following: TrainedStep | None, *, last: int) -> None:
    """Check whether metrics may have no line of a step."""
    is_last_of_life = following is not None and following.life != step.life
    if not is_last_of_life and (book.is_ended or step.step < last):
        raise MetricsContradiction(
            f"metrics.jsonl has no line of step {step.step}, which was trained in line {step.line} of the "
            "ledger"
        )
