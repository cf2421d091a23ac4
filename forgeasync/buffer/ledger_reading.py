"""Reads ledgers, and verifies them: in themselves, against a checkpoint, and against the run's metrics."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from forgeasync.buffer.ledger_lines import (
    FORMAT,
    START,
    AnyEvent,
    BadLine,
    CheckpointedBuffer,
    LedgerPosition,
    Opened,
    Resumed,
    decode_line,
    position_after,
)
from forgeasync.buffer.ledger_state import ENDS, Contradiction, LedgerState, Place, Resumption, TrainedStep
from forgeasync.buffer.prompts import DropReason, Update
from forgeasync.buffer.restoring import LostSteps
from forgeasync.files import read_json_lines
from forgeasync.schema import ConfigError, Problem, raise_if_any

FIELD = "--resume"
NUM_EVENTS = "ledger/num_events"
NUM_SKIPPED = "trainer/num_skipped_steps"


class LedgerUnreadable(ValueError):
    """The ledger does not exist, has no readable line, or has another format."""


class LedgerLines:
    """Decoder of the lines of one ledger, in order. Keep the instance to follow a ledger being written."""

    def __init__(self, name: str) -> None:
        """``name`` is the file's name in error messages."""
        self.position = START
        """Position after the last line that was read or skipped."""
        self._name = name

    def read(self, line: bytes) -> AnyEvent:
        """Return the event of the next line. ``line`` has no newline.

        Raises:
            BadLine: This is not the line that was written there. To continue after it, call ``skip``.
            LedgerUnreadable: The first line states another format.
        """
        event, position = decode_line(line, self.position)
        if position.num_lines == 1 and isinstance(event, Opened) and event.format != FORMAT:
            raise LedgerUnreadable(
                f"{self._name} has format {event.format}; this version of forgeasync reads {FORMAT}"
            )
        self.position = position
        return event

    def skip(self, line: bytes) -> None:
        """Continue after a bad line, with the number and checksum that it states.

        If it states none, the next line is bad too, because its checksum includes this line's.
        """
        unknown = LedgerPosition(num_lines=self.position.num_lines + 1, checksum=0)
        self.position = position_after(line) or unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerReading:
    """Content of a ledger up to its first contradiction."""

    book: LedgerState
    position: LedgerPosition
    """Position after the last line that was read."""
    contradiction: Contradiction | None
    """First contradiction, if any. Lines after it were not read."""
    num_torn_bytes: int
    """Length of the incomplete last line that a killed process left; 0 if there is none."""
    checksum_at: int | None
    """Checksum of the requested line; None if the reading did not reach it."""


def read_ledger(file: Path, *, line: int = 0) -> LedgerReading:
    """Read a whole ledger, up to its first contradiction.

    ``line`` is the number of the line whose checksum is returned as ``checksum_at``.

    Raises:
        LedgerUnreadable: The file cannot be read, has no complete line, or has another format.
    """
    book, decoder = LedgerState(), LedgerLines(str(file))
    contradiction, num_torn_bytes, checksum_at = None, 0, None
    try:
        with file.open("rb") as lines:
            for text in lines:
                if not text.endswith(b"\n"):
                    num_torn_bytes = len(text)
                    break
                try:
                    book.apply(decoder.read(text[:-1]))
                except BadLine as error:
                    contradiction = Contradiction(decoder.position.num_lines + 1, str(error))
                    break
                except Contradiction as error:
                    contradiction = error
                    break
                if decoder.position.num_lines == line:
                    checksum_at = decoder.position.checksum
    except OSError as error:
        raise LedgerUnreadable(f"{file} cannot be read: {error.strerror}") from None
    if decoder.position == START and contradiction is None:
        what = f"has only the beginning of a line ({num_torn_bytes} bytes)" if num_torn_bytes else "is empty"
        raise LedgerUnreadable(f"{file} {what}")
    return LedgerReading(
        book=book,
        position=decoder.position,
        contradiction=contradiction,
        num_torn_bytes=num_torn_bytes,
        checksum_at=checksum_at,
    )


def check_ledger(file: Path, resumed: CheckpointedBuffer, *, checkpoint: Path) -> LostSteps | None:
    """Check a ledger in itself and against a checkpoint, before a run is resumed.

    Args:
        file: The ledger. A run may have none.
        resumed: The buffer's part of the checkpoint.
        checkpoint: Folder of the checkpoint, for error messages.

    Returns:
        The steps and attempts that the resumed run loses; None without a ledger.

    Raises:
        ConfigError: The ledger cannot be read, or there is a contradiction.
    """
    if not file.exists():
        return None
    value = str(checkpoint)
    try:
        reading = read_ledger(file, line=resumed.ledger.num_lines)
    except LedgerUnreadable as error:
        remedy = f"needs the ledger up to line {resumed.ledger.num_lines}, but {error}"
        raise ConfigError([Problem(field=FIELD, value=value, remedy=remedy)]) from None
    lost = reading.book.lost_after(resumed.snapshot.trainer_version)
    remedies = _contradictions(file, reading, resumed)
    raise_if_any(Problem(field=FIELD, value=value, remedy=remedy) for remedy in remedies)
    return lost


def _contradictions(file: Path, reading: LedgerReading, resumed: CheckpointedBuffer) -> Iterator[str]:
    at, snapshot = resumed.ledger, resumed.snapshot
    if reading.contradiction is not None:
        yield f"the ledger contradicts itself: {file}, {reading.contradiction}"
        return
    if reading.checksum_at != at.checksum:
        found = (
            f"has {reading.position.num_lines} lines"
            if reading.checksum_at is None
            else f"has {reading.checksum_at:08x} there"
        )
        yield (
            f"is not of the run that {file} is the ledger of: in the checkpoint line {at.num_lines} has the "
            f"checksum {at.checksum:08x}, the ledger {found}"
        )
        return
    book = reading.book
    event = Resumed(
        step=snapshot.trainer_version,
        line=at.num_lines,
        groups_per_step=book.totals.groups_per_step,
    )
    try:
        book.apply(event)
    except Contradiction as error:
        yield f"contradicts the ledger: {file}, {error}"
        return
    waiting = (*snapshot.started, *snapshot.complete, *snapshot.pending)
    for what, saved, now in (
        ("number of submitted prompts", snapshot.num_submitted, book.totals.num_submitted),
        ("next group", snapshot.next_group_id, book.totals.next_group),
        (
            "prompts that have not ended, with attempts",
            {one.submission_id: one.attempt for one in sorted(waiting, key=lambda one: one.submission_id)},
            book.open_prompts,
        ),
    ):
        if saved != now:
            yield f"contradicts the ledger: {what}: {saved} in the checkpoint, {now} in {file}"


class _MetricsContradiction(ValueError):
    """A line of metrics.jsonl contradicts the ledger, or cannot be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _MetricsLine:
    """A line of metrics.jsonl, with its number from 1."""

    number: int
    values: Mapping[str, object]

    def count(self, key: str) -> int:
        """Return the value of ``key``, which must be an integer."""
        value = self.values.get(key)
        if isinstance(value, float) and value.is_integer():
            return int(value)
        if not isinstance(value, int) or isinstance(value, bool):
            raise _MetricsContradiction(f"metrics.jsonl line {self.number}: {key} is {value!r}, not a count")
        return value


def _read_metrics(file: Path) -> list[_MetricsLine]:
    """Read the complete lines of metrics.jsonl.

    Raises:
        _MetricsContradiction: A line is not a JSON object.
    """
    try:
        records = read_json_lines(file)
    except ValueError as error:
        raise _MetricsContradiction(str(error)) from None
    return [_MetricsLine(number=number, values=values) for number, values in enumerate(records, start=1)]


def _compare_with_metrics(book: LedgerState, lines: Sequence[_MetricsLine]) -> int:
    """Compare every step of a ledger with the metrics, which are counted and written independently.

    The ledger is written first, so it may have steps that the metrics lack: those after the last metrics of a
    run that did not end, and the last step before an interruption from which the run was resumed.

    Returns:
        The number of steps that both have.

    Raises:
        _MetricsContradiction: The first contradiction.
    """
    known = _by_step(book, lines)
    losses, in_ledger, in_metrics = iter([*book.losses, None]), Counter[DropReason](), Counter[DropReason]()
    loss = next(losses)
    num_compared, num_skipped, life = 0, 0, 0
    for one, following in zip(book.steps, [*book.steps[1:], None], strict=True):
        if one.life != life:
            # The controller's counters start at 0 with each of its processes.
            life, num_skipped = one.life, 0
            in_ledger.clear()
            in_metrics.clear()
        num_skipped += one.update is Update.SKIPPED
        if (line := known.get(one.step)) is None:
            _check_may_lack(book, one, following, last=max(known, default=0))
            continue
        num_events = line.count(NUM_EVENTS)
        if num_events < one.line or (following is not None and num_events >= following.line):
            raise _MetricsContradiction(
                f"metrics.jsonl line {line.number}: step {one.step} was recorded after line {num_events} of "
                f"the ledger, but it was trained in line {one.line}"
                + ("" if following is None else f" and step {following.step} in line {following.line}")
            )
        while loss is not None and loss[0] <= num_events:
            # The last drops of an interrupted controller are not in its metrics.
            in_ledger[loss[1]] += loss[0] > one.life
            loss = next(losses)
        for reason in DropReason:
            in_metrics[reason] += line.count(f"dropped/{reason}")
            if in_metrics[reason] != in_ledger[reason]:
                raise _MetricsContradiction(
                    f"metrics.jsonl line {line.number}: by step {one.step} the metrics count "
                    f"{in_metrics[reason]} groups dropped as {reason}, the ledger {in_ledger[reason]} "
                    f"(from line {one.life} to line {num_events})"
                )
        if line.count(NUM_SKIPPED) != num_skipped:
            raise _MetricsContradiction(
                f"metrics.jsonl line {line.number}: by step {one.step} the metrics count "
                f"{line.count(NUM_SKIPPED)} skipped steps, the ledger {num_skipped} since line {one.life}"
            )
        num_compared += 1
    return num_compared


def _by_step(book: LedgerState, lines: Sequence[_MetricsLine]) -> dict[int, _MetricsLine]:
    """Return the metrics of steps after the ledger's beginning, by step. The ledger must have each step."""
    assert book.opened is not None
    trained = {one.step for one in book.steps}
    known: dict[int, _MetricsLine] = {}
    for line in lines:
        step = line.count("step")
        if step <= book.opened.step:
            continue
        if step in known:
            raise _MetricsContradiction(
                f"metrics.jsonl line {line.number} is of step {step}, as line {known[step].number} is"
            )
        if step not in trained:
            raise _MetricsContradiction(
                f"metrics.jsonl line {line.number} is of step {step}, which the ledger has not trained"
            )
        known[step] = line
    return known


def _check_may_lack(
    book: LedgerState, step: TrainedStep, following: TrainedStep | None, *, last: int
) -> None:
    """Raise ``_MetricsContradiction`` unless the metrics may lack the step.

    ``following`` is the next step of the ledger, ``last`` the last step of the metrics.
    """
    is_last_of_life = following is not None and following.life != step.life
    if not is_last_of_life and (book.is_ended or step.step < last):
        raise _MetricsContradiction(
            f"metrics.jsonl has no line of step {step.step}, which was trained in line {step.line} of the "
            "ledger"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerVerdict:
    """Result of verifying a ledger, including against the run's metrics if there are any."""

    file: Path
    reading: LedgerReading
    num_compared_steps: int | None
    """Number of steps that the metrics have too; None without metrics or with a contradiction."""
    contradiction: str | None
    """First contradiction, if any."""

    def as_json(self) -> dict[str, object]:
        """Return the verdict as JSON types. With a contradiction, the counts cover the lines before it."""
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
            "ended_before_ledger": _num_before(self.reading),
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
        """Return the verdict as lines of text."""
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
            ("attempts", totals.num_attempts, f"{totals.num_reissued} prompts again after a lost group"),
            ("restarts", totals.num_restarted, "groups in flight at a checkpoint that was resumed from"),
            ("restored", totals.num_restored, "groups restored from disk"),
        ]
        if before := _num_before(self.reading):
            rows.insert(1, ("  before this ledger", before, ""))
        said = [
            f"{self.file}: {name}{self.reading.position.num_lines} lines, {state} after step {totals.step}",
            *(f"  {what:<22}{number:>9}  {words}".rstrip() for what, number, words in rows),
            *map(_resumption, book.resumptions),
        ]
        if self.reading.num_torn_bytes:
            said.append(f"  the last line is incomplete: {self.reading.num_torn_bytes} bytes")
        if self.contradiction is not None:
            return [*said, f"contradiction: {self.contradiction}"]
        compared = (
            "no metrics.jsonl to compare with"
            if self.num_compared_steps is None
            else f"metrics.jsonl agrees in {self.num_compared_steps} steps"
        )
        proved = "every prompt has exactly one end" if book.is_ended else "no prompt has more than one end"
        return [*said, f"{proved}; {compared}"]


def verify(file: Path, metrics: Path) -> LedgerVerdict:
    """Read a ledger, and compare it with the metrics if the file ``metrics`` exists.

    Raises:
        LedgerUnreadable: The ledger does not exist, has no readable line, or has another format.
    """
    num_compared, contradiction = None, None
    try:
        # Read the metrics first. A run in progress writes its ledger first, so the ledger then has each step.
        lines = _read_metrics(metrics) if metrics.is_file() else None
        reading = read_ledger(file)
        if reading.contradiction is None and lines is not None:
            num_compared = _compare_with_metrics(reading.book, lines)
    except _MetricsContradiction as error:
        contradiction = str(error)
        reading = read_ledger(file)
    if reading.contradiction is not None:
        contradiction = str(reading.contradiction)
    return LedgerVerdict(
        file=file, reading=reading, num_compared_steps=num_compared, contradiction=contradiction
    )


def _num_before(reading: LedgerReading) -> int:
    """Return the number of prompts that had ended before the ledger began."""
    opened = reading.book.opened
    return 0 if opened is None else opened.num_submitted - len(opened.waiting)


def _ranges(numbers: Sequence[int]) -> str:
    """Format ascending numbers as ranges: 3-5, 9."""
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
        yield f"{'step' if len(one.undone_steps) == 1 else 'steps'} {_ranges(one.undone_steps)} undone"
    if one.untrained_prompts:
        yield f"training undone: prompts {_ranges(one.untrained_prompts)}"
    others = sorted(set(one.undone_prompts) - set(one.untrained_prompts))
    if others:
        yield f"other ends undone: prompts {_ranges(others)}"
    if one.num_steps_again:
        yield f"{one.num_steps_again} of them repeated with the same groups"
    if one.restarted_prompts:
        yield f"restarted: prompts {_ranges(one.restarted_prompts)}"
