"""Whether a run can be resumed with the ledger in its folder, and what it then loses."""

from collections.abc import Iterator
from pathlib import Path

from forgeasync.buffer import LostSteps
from forgeasync.ledger.account import Contradiction
from forgeasync.ledger.lines import CheckpointedBuffer, Resumed
from forgeasync.ledger.reading import LedgerReading, LedgerUnreadable, read_ledger
from forgeasync.schema import ConfigError, Problem, raise_if_any

FIELD = "--resume"


def check_ledger(file: Path, resumed: CheckpointedBuffer, *, checkpoint: Path) -> LostSteps | None:
    """Check the ledger against itself and the checkpoint; what the run loses that goes on from there.

    None: there is no ledger. A run may go on without one.

    Raises:
        ConfigError: something contradicts.
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
