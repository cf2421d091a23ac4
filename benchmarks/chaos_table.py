"""Sums up several runs of ``benchmarks/chaos.py``, as tables in Markdown: by role, then by kind.

    python benchmarks/chaos_table.py FOLDER [FOLDER ...]

Each FOLDER is what ``--out`` named. Runs that have failed count too, and are named with the reason.
"""

import json
import sys
from pathlib import Path

from chaos_faults import Injected, Kind, Moment
from chaos_injector import read_lines
from chaos_match import Match, match
from chaos_report import Row, rows


def matches_of(folder: Path) -> list[Match]:
    """Return the faults of a run, from its witness and its faults.jsonl alone."""
    injected = [
        Injected(**{**line, "kind": Kind(line["kind"]), "moment": Moment(line["moment"])})
        for line in read_lines(folder / "witness.jsonl")
    ]
    return match(injected, read_lines(folder / "run" / "faults.jsonl"))[0]


def seconds(value: float | None) -> str:
    """Write seconds, or that there are none."""
    return "-" if value is None else f"{value:.1f}"


def line_of(row: Row) -> str:
    """Write a row of the table."""
    moments = ", ".join(f"{name} {num}" for name, num in sorted(row.moments.items()))
    times = [
        f"{seconds(low)} / {seconds(high)}"
        for low, high in (
            (row.detection_p50_s, row.detection_p95_s),
            (row.recovery_p50_s, row.recovery_p95_s),
        )
    ]
    counts = (row.num_injected, row.num_expected, row.num_detected, row.num_recovered)
    return f"| {row.role} | {row.kind} | {' | '.join(map(str, (*counts, *times)))} | {moments} |"


def main() -> int:
    """Run the command line; returns the exit code."""
    folders = [Path(name) for name in sys.argv[1:]]
    if not folders:
        print(__doc__)
        return 2
    matches = [one for folder in folders for one in matches_of(folder)]
    for by_kind in (False, True):
        print(
            "| role | kind | injected | to notice | detected | recovered | detection s, p50 / p95 | "
            "recovery s, p50 / p95 | moments |"
        )
        print("|---|---|---|---|---|---|---|---|---|")
        for row in rows(matches, by_kind=by_kind):
            print(line_of(row))
        print()
    for folder in folders:
        file = folder / "chaos.json"
        result = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        share = result.get("effective_share")
        words = "has no chaos.json" if not result else result["difference"] or "nothing was lost"
        print(f"{folder}: {words}" + ("" if share is None else f"; ETTR {share:.3f}"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
