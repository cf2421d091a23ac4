"""Prints the episodes of a run or of an evaluation.

    python -m apps.show RUN [NUMBER] [--json]

Without NUMBER it prints a numbered table of all episodes that the run (rollouts.jsonl) or the evaluation
(episodes.jsonl) has written so far. With NUMBER it prints that episode with all messages, tool calls and its
score; a negative number counts from the end. ``--json`` prints one JSON object per line instead. You can use
it while a run is in progress.
"""

import argparse
import json
import shutil
import sys
from pathlib import Path

from forgeasync.observability import NoEpisodes, episode_lines, exit_with, find_file, read_episodes, table
from forgeasync.schema import EXIT_REFUSED


def main() -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m apps.show", description="Show episodes of a run or evaluation."
    )
    parser.add_argument("run", metavar="RUN", type=Path, help="folder of a run or of an evaluation")
    parser.add_argument(
        "number", metavar="NUMBER", type=int, nargs="?", help="episode to print; default: a list"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object per line")
    arguments = parser.parse_args()
    try:
        lines = shown(arguments.run, arguments.number, as_json=arguments.json)
    except NoEpisodes as error:
        print(f"refused: {error}", file=sys.stderr)
        return EXIT_REFUSED
    print("\n".join(lines))
    return 0


def shown(folder: Path, number: int | None, *, as_json: bool) -> list[str]:
    """Return the lines to print.

    Raises:
        NoEpisodes: the folder has no episodes, or none with this number.
    """
    file = find_file(folder)
    episodes = read_episodes(file)
    if number is None:
        if as_json:
            return [json.dumps(one) for one in episodes]
        return table(episodes) if episodes else [f"{file} has no episodes"]
    if not -len(episodes) <= number < len(episodes):
        what = f"0 to {len(episodes) - 1}" if episodes else "none: it is empty"
        raise NoEpisodes(f"NUMBER = {number}; the episodes of {file} are {what}")
    if as_json:
        return [json.dumps(episodes[number])]
    return episode_lines(episodes[number], width=shutil.get_terminal_size((100, 24)).columns)


if __name__ == "__main__":
    exit_with(main)
