"""Changes the number of generators of a run in progress, or exports a version that a run has published.

    python -m apps.control RUN generators=N
    python -m apps.control RUN export --version N

RUN is the run's folder. Additional generators get groups once they have the newest weights. Surplus
generators finish their groups before they end. The app prints the run's answer.

With ``export`` it writes version N, with the bits that the generators got, to ``checkpoints/version-N``. The
run needs ``weights.archive: true``, and may have ended.

Exit code: 0 if the run accepts the change, or the version is written; otherwise 1.
"""

import argparse
import sys
from pathlib import Path

from forgeasync.controller import Refused, ask, export_version, parse_change
from forgeasync.observability import exit_with
from forgeasync.schema import ConfigError


def control(run: Path, change: str, version: int | None) -> str:
    """Make the change, or the export; return what to print.

    Raises:
        ValueError: it is refused.
        TimeoutError: the run does not answer.
    """
    if (change == "export") is (version is None):
        raise Refused("--version: must be given with export, and only then")
    if version is not None:
        return f"version {version} is in {export_version(run, version)}"
    answer = ask(run, parse_change(change))
    if not answer.is_accepted:
        raise Refused(answer.words)
    return f"accepted: {answer.words}"


def main() -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m apps.control", description="Change a run in progress.")
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of the run")
    parser.add_argument("change", metavar="generators=N|export", help="number of generators, or export")
    parser.add_argument("--version", type=int, metavar="N", help="version to export")
    arguments = parser.parse_args()
    try:
        print(control(arguments.run, arguments.change, arguments.version))
    except (ConfigError, OSError, Refused, TimeoutError) as problem:
        print(f"refused: {problem}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    exit_with(main)
