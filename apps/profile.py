"""Measures how long the parts of a run take on this machine.

    python -m apps.profile --config FILE [--config FILE ...] [key.path=value ...] [--out FILE]

Starts the run's own procs and times each part while the others have nothing to do: decode steps by number of
sequences and length of context, prompts, optimizer steps by packing, publishing, fetching and swapping
weights, scoring, episodes. Nothing is trained that stays. The profile is JSON (docs/simulation.md).
"""

import argparse
import sys
from datetime import datetime
from pathlib import Path

from rich.console import Console

from forgeasync.config.load import load_config
from forgeasync.config.run import RunConfig
from forgeasync.controller.cli import REPORT_COLUMNS, config_parser, exit_code
from forgeasync.controller.host_checks import open_hosts
from forgeasync.controller.leftovers import take_over
from forgeasync.controller.preparation import Prepared, prepare
from forgeasync.controller.resume import open_files
from forgeasync.controller.starting import open_procs, start_roles
from forgeasync.controller.stopping import run_main
from forgeasync.observability.console import StepConsole
from forgeasync.observability.logs import configure_controller_logging, separate_native_output
from forgeasync.observability.run_dir import RUNS_FOLDER
from forgeasync.profile.profile_file import write_profile
from forgeasync.profiling.measuring import check_profiled, measure
from forgeasync.profiling.tables import profile_table
from forgeasync.schema.problems import Problem, raise_if_any


async def profile(prepared: Prepared, out: Path) -> None:
    """Start every proc, time the parts, stop every proc, write the profile."""
    config = prepared.config
    run_dir = open_files(config, None).run_dir
    separate_native_output(run_dir.log("controller"))
    configure_controller_logging(run_dir.log("controller"))
    with StepConsole(1) as console:
        console.message(f"logs are in {run_dir.path}")
        fleet = open_procs(config, run_dir, console)
        try:
            async with fleet.naming_deaths():
                await open_hosts(config, prepared.facts, fleet, tell=console.message)
                roles = await start_roles(config, prepared, fleet, console, run_dir)
                measured = await measure(prepared, roles, fleet.listing.entries, run_dir.logs, console)
        finally:
            console.phase("ending all procs")
            await fleet.close()
            console.end_phase()
    write_profile(measured, out)
    Console(width=REPORT_COLUMNS).print(profile_table(measured))
    print(f"wrote {out}")


def with_own_folder(config: RunConfig, now: datetime) -> RunConfig:
    """Return the config with a folder for the profile's own procs: it takes no run's."""
    folder = RUNS_FOLDER / f"profile-{config.name}-{now:%Y%m%d-%H%M%S}"
    return config.model_copy(update={"run_dir": str(folder)})


def read_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = config_parser("Measures how long the parts of a run take on this machine.")
    parser.add_argument("--out", type=Path, metavar="FILE", help="default: in a new folder in runs/")
    return parser.parse_intermixed_args()


def main() -> int:
    """Run the command line; returns the exit code."""
    arguments = read_arguments()

    def run() -> None:
        config = with_own_folder(load_config(arguments.config, arguments.overrides), datetime.now())
        check_profiled(config)
        out = Path(config.run_dir or ".") / "profile.json" if arguments.out is None else arguments.out
        if arguments.out is not None and not out.parent.is_dir():
            remedy = "its folder does not exist; must be a file in a folder that does"
            raise_if_any([Problem(field="--out", value=str(out), remedy=remedy)])
        for line in take_over(config):
            print(line)
        prepared = prepare(config)
        run_main(profile(prepared, out))

    return exit_code(run)


if __name__ == "__main__":
    sys.exit(main())
