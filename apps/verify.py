"""Proves from a run's files alone that every prompt has exactly one end.

    python -m apps.verify RUN [--json]

RUN is the folder of a run, or a ledger. Reads ledger.jsonl, checks every line against those before it, and
compares the result with metrics.jsonl, if that is there. Prints how many prompts were submitted and how they
ended, what came again, and what each resumption has undone; ``--json`` prints the same as one JSON object
(docs/ledger.md). Works while a run goes on.

Exit code: 0 if nothing contradicts anything; 1 with the first contradiction; 2 if there is no ledger to read.
"""

import argparse
import json
import sys
from pathlib import Path

from forgeasync.buffer import LedgerUnreadable, verify
from forgeasync.observability import RunDir
from forgeasync.schema import EXIT_REFUSED


def main() -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(description="Proves that every prompt of a run has exactly one end.")
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
    # A terminal may know less than UTF-8, and names of tasks have everything.
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]  # not declared by TextIO
    print(json.dumps(verdict.as_json()) if arguments.json else "\n".join(verdict.lines()))
    return 0 if verdict.contradiction is None else 1


if __name__ == "__main__":
    sys.exit(main())
