"""Changes the number of generators of a run in progress.

    python -m apps.control RUN generators=N

RUN is the run's folder. Additional generators get groups once they have the newest weights. Surplus
generators finish their groups before they end. The app prints the run's answer.

Exit code: 0 if the run accepts the change; 1 if it refuses or does not answer, or if there is no such run.
"""

import argparse
import sys
from pathlib import Path

from forgeasync.controller import Refused, ask, parse_change


def main() -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m apps.control", description="Changes a run in progress.")
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of the run")
    parser.add_argument("change", metavar="generators=N", help="how many generators are given groups")
    arguments = parser.parse_args()
    try:
        answer = ask(arguments.run, parse_change(arguments.change))
    except (Refused, TimeoutError) as problem:
        print(f"refused: {problem}", file=sys.stderr)
        return 1
    if not answer.is_accepted:
        print(f"refused: {answer.words}", file=sys.stderr)
        return 1
    print(f"accepted: {answer.words}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
