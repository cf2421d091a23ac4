"""The tables of a rehearsal: what was changed before it, and what it exercised after it."""

from collections.abc import Sequence

from rich.table import Table

from forgeasync.rehearsal.draft import Change
from forgeasync.rehearsal.outcome import Finding, Verdict


def changes_table(name: str, changes: Sequence[Change]) -> Table:
    """Every change of the config and the model, with its reason."""
    table = _table(f"rehearsal of {name}: what is different; everything else is as in the config")
    for column in ("", "run", "rehearsal", "why"):
        table.add_column(column, overflow="fold")
    for change in changes:
        table.add_row(change.field, change.before, change.after, change.why)
    return table


def findings_table(name: str, found: Sequence[Finding], changes: Sequence[Change]) -> Table:
    """What was exercised, what failed, and what was not exercised: by measurement, then by change."""
    table = _table(f"rehearsal of {name}: what was exercised")
    for column in ("part", "", "measured"):
        table.add_column(column, overflow="fold")
    for verdict in (Verdict.FAILED, Verdict.EXERCISED, Verdict.NOT_EXERCISED):
        for finding in found:
            if finding.verdict is verdict:
                table.add_row(finding.part, verdict.value, finding.measured)
        table.add_section()
    for change in changes:
        if change.untried is not None:
            table.add_row(change.field, Verdict.NOT_EXERCISED.value, change.untried)
    return table


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left")
