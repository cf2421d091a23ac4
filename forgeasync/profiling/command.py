"""Starts a run's procs to be timed, and writes their profile."""

from datetime import datetime
from pathlib import Path

from rich.console import Console

from forgeasync.config.run import RunConfig
from forgeasync.controller.cli import REPORT_COLUMNS
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
from forgeasync.profiling.tables import profile_table, what_if_table
from forgeasync.schema.problems import Problem, raise_if_any
from forgeasync.simulation.shape import of_config
from forgeasync.simulation.what_if import what_if

NUM_STEPS = 30
"""Most steps that are simulated for what changes would bring."""


def profile_config(config: RunConfig, out: Path | None) -> None:
    """Measure a profile of the config on this machine and write it; null: into a folder in runs/.

    Prints it, and what the simulator says of the run with single changes.

    Raises:
        ConfigError: the config cannot be profiled, or ``out`` not written.
        NotProfiled: something that has to be timed did not work.
    """
    if out is not None and not out.parent.is_dir():
        remedy = "its folder does not exist; must be a file in a folder that does"
        raise_if_any([Problem(field="--out", value=str(out), remedy=remedy)])
    folder = RUNS_FOLDER / f"profile-{config.name}-{datetime.now():%Y%m%d-%H%M%S}"
    # The profile that the config names for its runs may be the one that is measured here.
    config = config.model_copy(update={"run_dir": str(folder), "prediction": None})
    check_profiled(config)
    for line in take_over(config):
        print(line)
    run_main(_profile(prepare(config), folder / "profile.json" if out is None else out))


async def _profile(prepared: Prepared, out: Path) -> None:
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
    tables = Console(width=REPORT_COLUMNS)
    tables.print(profile_table(measured))
    run = of_config(config, prepared.facts, measured, num_steps=min(config.max_steps, NUM_STEPS))
    found = what_if(run, measured)
    tables.print(what_if_table(found))
    print(found.verdict)
    print(f"wrote {out}")
