"""Whether a run can be resumed with the ledger in its folder."""

from collections.abc import Iterator
from pathlib import Path

from forgeasync.ledger.account import Contradiction
from forgeasync.ledger.lines import CheckpointedBuffer, Resumed
from forgeasync.ledger.reading import LedgerUnreadable, read_ledger
from forgeasync.schema.problems import Problem

FIELD = "--resume"


def check_ledger(file: Path, resumed: CheckpointedBuffer, *, checkpoint: Path) -> Iterator[Problem]:
    """Find what in the ledger contradicts itself or the checkpoint. A run may go on without a ledger."""
    if not file.exists():
        return
    at, snapshot = resumed.ledger, resumed.snapshot

    def problem(remedy: str) -> Problem:
        return Problem(field=FIELD, value=str(checkpoint), remedy=f"{remedy}")

    try:
        reading = read_ledger(file, line=at.num_lines)
    except LedgerUnreadable as error:
        yield problem(f"needs the ledger up to line {at.num_lines}, but {error}")
        return
    if reading.contradiction is not None:
        yield problem(f"the ledger contradicts itself: {file}, {reading.contradiction}")
        return
    if reading.checksum_at != at.checksum:
        found = (
            f"has {reading.position.num_lines} lines"
            if reading.checksum_at is None
            else f"has {reading.checksum_at:08x} there"
        )
        yield problem(
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
        yield problem(f"contradicts the ledger: {file}, {error}")
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
            yield problem(f"contradicts the ledger: {what}: {saved} in the checkpoint, {now} in {file}")
