"""What a ledger proves, for people and for programs."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from forgeasync.ledger.account import ENDS, Place, Resumption
from forgeasync.ledger.metrics_check import MetricsContradiction, compare_with_metrics, read_metrics
from forgeasync.ledger.reading import LedgerReading, read_ledger


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A ledger that was read, and compared with the run's metrics where there are any."""

    file: Path
    reading: LedgerReading
    num_compared_steps: int | None
    """Steps that the metrics know too; None: there are no metrics, or the ledger contradicts itself."""
    contradiction: str | None
    """The first one."""

    def as_json(self) -> dict[str, object]:
        """Return the verdict as JSON's types. With a contradiction, numbers are those of the lines before."""
        book = self.reading.book
        totals = book.totals
        ends: dict[str, object] = {place.value: totals.num_ended[place] for place in ENDS}
        ends[Place.DROPPED] = {reason.value: num for reason, num in sorted(totals.num_dropped.items())}
        return {
            "ledger": str(self.file),
            "contradiction": self.contradiction,
            "line": None if self.reading.contradiction is None else self.reading.contradiction.line,
            "num_lines": self.reading.position.num_lines,
            "num_torn_bytes": self.reading.num_torn_bytes,
            "is_ended": book.is_ended,
            "begins_after_step": 0 if book.opened is None else book.opened.step,
            "step": totals.step,
            "submitted": totals.num_submitted,
            "ended_before_ledger": num_before(self.reading),
            "ends": ends,
            "open": len(book.open_prompts),
            "attempts": totals.num_attempts,
            "reissued": totals.num_reissued,
            "restarted": totals.num_restarted,
            "restored": totals.num_restored,
            "lost_groups": {reason.value: num for reason, num in sorted(totals.num_lost.items())},
            "resumptions": [
                {
                    "line": one.line,
                    "after_step": one.step,
                    "from_line": one.from_line,
                    "undone_steps": one.undone_steps,
                    "untrained_prompts": one.untrained_prompts,
                    "undone_prompts": one.undone_prompts,
                    "restarted_prompts": one.restarted_prompts,
                    "steps_again": one.num_steps_again,
                }
                for one in book.resumptions
            ],
            "compared_steps": self.num_compared_steps,
        }

    def lines(self) -> list[str]:
        """Return the verdict as a table in words."""
        book = self.reading.book
        totals = book.totals
        name = "" if book.opened is None else f"run {book.opened.run}, "
        state = "ended" if book.is_ended else "has not ended"
        dropped = ", ".join(f"{reason} {num}" for reason, num in sorted(totals.num_dropped.items()))
        rows = [
            ("prompts submitted", totals.num_submitted, ""),
            *((f"  {place}", totals.num_ended[place], "") for place in ENDS if place is not Place.DROPPED),
            (f"  {Place.DROPPED}", totals.num_ended[Place.DROPPED], dropped),
            ("  open", len(book.open_prompts), "wait for the run to be resumed" if book.open_prompts else ""),
            ("attempts", totals.num_attempts, f"{totals.num_reissued} prompts came again for a lost group"),
            ("restarts", totals.num_restarted, "groups under way at a checkpoint that was resumed from"),
            ("restored", totals.num_restored, "groups that came back from the disk"),
        ]
        if before := num_before(self.reading):
            rows.insert(1, ("  before this ledger", before, ""))
        said = [
            f"{self.file}: {name}{self.reading.position.num_lines} lines, {state} after step {totals.step}",
            *(f"  {what:<22}{number:>9}  {words}".rstrip() for what, number, words in rows),
            *map(_resumption, book.resumptions),
        ]
        if self.reading.num_torn_bytes:
            said.append(f"  the last line was not written to its end: {self.reading.num_torn_bytes} bytes")
        if self.contradiction is not None:
            return [*said, f"contradiction: {self.contradiction}"]
        compared = (
            "no metrics.jsonl to compare with"
            if self.num_compared_steps is None
            else f"metrics.jsonl agrees in {self.num_compared_steps} steps"
        )
        proved = "every prompt has exactly one end" if book.is_ended else "no prompt has more than one end"
        return [*said, f"{proved}; {compared}"]


def verify(file: Path, metrics: Path) -> Verdict:
    """Read a ledger and compare it with the metrics, if there are any.

    Raises:
        LedgerUnreadable: there is no ledger, or nothing can be read of it.
    """
    num_compared, contradiction = None, None
    try:
        # Before the ledger: a run that goes on writes its ledger first.
        lines = read_metrics(metrics) if metrics.is_file() else None
        reading = read_ledger(file)
        if reading.contradiction is None and lines is not None:
            num_compared = compare_with_metrics(reading.book, lines)
    except MetricsContradiction as error:
        contradiction = str(error)
        reading = read_ledger(file)
    if reading.contradiction is not None:
        contradiction = str(reading.contradiction)
    return Verdict(file=file, reading=reading, num_compared_steps=num_compared, contradiction=contradiction)


def num_before(reading: LedgerReading) -> int:
    """Prompts that had ended before the ledger began."""
    opened = reading.book.opened
    return 0 if opened is None else opened.num_submitted - len(opened.waiting)


def ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers with what follows each other drawn together: 3-5, 9."""
    parts: list[tuple[int, int]] = []
    for number in numbers:
        if parts and parts[-1][1] == number - 1:
            parts[-1] = (parts[-1][0], number)
        else:
            parts.append((number, number))
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)


def _resumption(one: Resumption) -> str:
    return f"  resumed after step {one.step} (line {one.line}): " + "; ".join(_undone(one))


def _undone(one: Resumption) -> Iterable[str]:
    if not one.undone_steps:
        yield "no step undone"
    else:
        yield f"{'step' if len(one.undone_steps) == 1 else 'steps'} {ranges(one.undone_steps)} undone"
    if one.untrained_prompts:
        yield f"no longer trained: prompts {ranges(one.untrained_prompts)}"
    others = sorted(set(one.undone_prompts) - set(one.untrained_prompts))
    if others:
        yield f"other ends undone: prompts {ranges(others)}"
    if one.num_steps_again:
        yield f"{one.num_steps_again} of them made again with the same groups"
    if one.restarted_prompts:
        yield f"restarted: prompts {ranges(one.restarted_prompts)}"
