"""Proves from a run's files that every prompt has exactly one end.

    python -m apps.verify RUN [--json]

RUN is the folder of a run, or a ledger. The app reads ledger.jsonl, checks every line against the earlier
lines, and compares the result with metrics.jsonl, if present. It prints the number of prompts submitted and
how they ended, which attempts were repeated, and what each resumption undid. ``--json`` prints the same as
one JSON object (docs/ledger.md). You can use it while a run is in progress.

Exit code: 0 if there is no contradiction; 1 with the first contradiction; 2 if no ledger can be read.
"""

import argparse
import json
import sys
from pathlib import Path

from forgeasync.buffer import LedgerUnreadable, verify
from forgeasync.observability import RunDir, exit_with
from forgeasync.schema import EXIT_REFUSED


def main() -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m apps.verify", description="Prove that no prompt was lost or trained twice."
    )
    parser.add_argument("run", metavar="RUN", type=Path, help="folder of a run, or a ledger")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    is_file = arguments.run.is_file()
    run_dir = RunDir(path=arguments.run.parent if is_file else arguments.run)
    try:
        verdict = verify(arguments.run if is_file else run_dir.ledger, run_dir.metrics)
    except LedgerUnreadable as error:
        print(f"refused: {error}", file=sys.stderr)
        return EXIT_REFUSED
    print(json.dumps(verdict.as_json()) if arguments.json else "\n".join(verdict.lines()))
    return 0 if verdict.contradiction is None else 1


if __name__ == "__main__":
    exit_with(main)
