"""Prints the memory plan of a config: python -m forgeasync.planning.memory --config FILE [key=value ...]"""

import argparse
import sys

from rich.console import Console
from rich.table import Table

from forgeasync.config import RunConfig, load_config, resolve
from forgeasync.models import check_config, read_model_facts
from forgeasync.planning.memory.plan import NOTE, memory_plan, memory_rows
from forgeasync.schema import EXIT_REFUSED, ConfigError, raise_if_any

COLUMNS = 160
"""Width of the table, also in a pipe."""


def memory_table(config: RunConfig) -> Table:
    """The plan of a config.

    Raises:
        ConfigError: the config is wrong, or does not fit its model.
    """
    facts = read_model_facts(config.model.path)
    raise_if_any(check_config(config, facts))
    table = Table(
        title=f"memory of {config.name}", title_justify="left", caption=NOTE, caption_justify="left"
    )
    table.add_column("", no_wrap=True)
    table.add_column("size", justify="right", no_wrap=True)
    table.add_column("what that is")
    for section in memory_plan(resolve(config, facts), facts):
        for row in memory_rows(section):
            table.add_row(*row)
        table.add_section()
    return table


def main() -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m forgeasync.planning.memory", description="Memory by rank."
    )
    parser.add_argument(
        "--config", action="append", required=True, metavar="FILE", help="YAML file of the run"
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="replaces values of the files")
    arguments = parser.parse_intermixed_args()
    try:
        table = memory_table(load_config(arguments.config, arguments.overrides))
    except ConfigError as error:
        print(f"refused:\n{error}", file=sys.stderr)
        return EXIT_REFUSED
    Console(width=COLUMNS).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
