"""Shows runs in a browser: groups, rollouts, tokens, processes, faults, configs.

    python -m apps.view RUN [RUN ...] [--port N]
    python -m apps.view RUN [RUN ...] --status [--json] [--no-traces]
    python -m apps.view RUN --perfetto FILE
    python -m apps.view --demo

RUN is the folder of a run that is in progress, has ended or was killed. The app serves a page at
http://127.0.0.1:8420/ to browsers on this machine, and only reads the folders (docs/viewer.md). ``--status``
prints the status of the runs instead; with ``--json`` as one JSON object per run and line. ``--no-traces``
skips the traces of processes and their checks. ``--perfetto`` writes a file for ui.perfetto.dev or
chrome://tracing. ``--demo`` adds a small recorded run. For curves, use ``tensorboard --logdir RUN``.

Exit code: 0; 1 if the file cannot be written; 2 with the reason if a folder is not that of a run or the port
is in use.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from forgeasync.observability import exit_with
from forgeasync.plugins.viewer import (
    DEMO_RUN,
    NoRun,
    PortInUse,
    RunReader,
    serve_until_stopped,
    status_lines,
    status_of,
    write_trace,
)
from forgeasync.schema import EXIT_FAILED, EXIT_REFUSED

DEFAULT_PORT = 8420


def main(given: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m apps.view", description="Show runs in a browser.")
    parser.add_argument("runs", metavar="RUN", type=Path, nargs="*", help="folder of a run")
    parser.add_argument("--demo", action="store_true", help="show a recorded run")
    parser.add_argument("--port", type=_port, default=DEFAULT_PORT, help="port; 0: any free one")
    parser.add_argument("--status", action="store_true", help="print the state of the runs, and exit")
    parser.add_argument("--json", action="store_true", help="with --status: print one JSON line per run")
    parser.add_argument(
        "--no-traces", action="store_true", help="with --status: do not read the traces of processes"
    )
    parser.add_argument("--perfetto", metavar="FILE", type=Path, help="write a Chrome trace, and exit")
    arguments = parser.parse_args(given)
    folders = [*arguments.runs, *([DEMO_RUN] if arguments.demo else [])]
    if not folders:
        parser.error("name the folder of a RUN, or take --demo")
    if arguments.json and not arguments.status:
        parser.error("--json goes with --status")
    if arguments.perfetto is not None and (len(folders) > 1 or arguments.status):
        parser.error("--perfetto takes one RUN, and no --status")
    if arguments.no_traces and not arguments.status:
        parser.error("--no-traces goes with --status")
    is_page = not arguments.status and arguments.perfetto is None
    try:
        with_traces = not arguments.no_traces
        runs = [RunReader(path, with_rollouts=is_page, with_traces=with_traces) for path in folders]
        if is_page:
            serve_until_stopped(runs, arguments.port, lambda address: print(address, flush=True))
            return 0
    except (NoRun, PortInUse) as error:
        print(f"refused: {error}", file=sys.stderr)
        return EXIT_REFUSED
    for run in runs:
        run.read_all()
    if arguments.perfetto is not None:
        return _write_trace(runs[0], arguments.perfetto)
    for run in runs:
        status = status_of(run)
        print(msgspec.json.encode(status).decode() if arguments.json else "\n".join(status_lines(status)))
    return 0


def _write_trace(run: RunReader, file: Path) -> int:
    try:
        num_events = write_trace(run, file)
    except OSError as error:
        print(f"{file} cannot be written: {error.strerror}", file=sys.stderr)
        return EXIT_FAILED
    print(f"{file}: {num_events} events")
    for problem in run.problems:
        print(f"note: {problem}", file=sys.stderr)
    return 0


def _port(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 6 and int(text) < 65536):
        raise argparse.ArgumentTypeError(f"{text!r} is not a port; must be a whole number from 0 to 65535")
    return int(text)


if __name__ == "__main__":
    exit_with(main)
