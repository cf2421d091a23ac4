"""Starts a run's procs to be timed, and writes their profile."""

import os
import time
from datetime import datetime
from pathlib import Path

import psutil
from rich.console import Console

from forgeasync.config import RunConfig, resolve
from forgeasync.controller import (
    REPORT_COLUMNS,
    Prepared,
    open_files,
    open_hosts,
    open_procs,
    prepare,
    run_main,
    start_roles,
    take_over,
)
from forgeasync.observability import (
    RUNS_FOLDER,
    StepConsole,
    configure_controller_logging,
    separate_native_output,
)
from forgeasync.profile import partial_of, write_profile
from forgeasync.profiling.loop_times import MakeLoops, short_run_of, time_loops
from forgeasync.profiling.measuring import check_profiled, measure
from forgeasync.profiling.tables import profile_table, what_if_table
from forgeasync.schema import Problem, raise_if_any
from forgeasync.simulation import of_config, what_if

NUM_STEPS = 30
"""Most steps that are simulated for what changes would bring."""


def profile_config(config: RunConfig, out: Path | None, make_loops: MakeLoops) -> None:
    """Measure a profile of the config on this machine and write it; None: into a folder in runs/.

    Prints it, and what the simulator says of the run with single changes. ``make_loops`` makes the loops of
    the run, which make a few steps first.

    Raises:
        ConfigError: the config cannot be profiled, or ``out`` not written.
        NotProfiled: something that has to be timed did not work.
    """
    if out is not None and (remedy := _why_not_written(out)) is not None:
        raise_if_any([Problem(field="--out", value=str(out), remedy=remedy)])
    folder = RUNS_FOLDER / f"profile-{config.name}-{datetime.now():%Y%m%d-%H%M%S}"
    # The profile that the config names for its runs may be the one that is measured here.
    config = config.model_copy(update={"run_dir": str(folder)})
    check_profiled(config)
    for line in take_over(config):
        print(line)
    prepared = prepare(short_run_of(config))
    run_main(_profile(prepared, config, folder / "profile.json" if out is None else out, make_loops))


def _why_not_written(out: Path) -> str | None:
    """Return what is wrong with the name of a file to be written; None: nothing."""
    # Path.is_dir raises for names that are too long.
    if not os.path.isdir(out.parent):
        return "its folder does not exist; must be a file in a folder that does"
    if os.path.isdir(out):
        return "is a folder; must be a file"
    partial = partial_of(out)
    try:
        partial.touch()
        partial.unlink()
    except OSError as error:
        return f"cannot be written: {error.strerror}; must be a file in a folder that can be written"
    return None


async def _profile(prepared: Prepared, wanted: RunConfig, out: Path, make_loops: MakeLoops) -> None:
    """Start every proc, make a few steps, time the parts, stop every proc, write the profile.

    ``wanted`` is the config of the run that the profile is for.
    """
    config = prepared.config
    files = open_files(config, None)
    run_dir = files.run_dir
    separate_native_output(run_dir.log("controller"))
    configure_controller_logging(run_dir.log("controller"))
    with StepConsole(config.max_steps) as console:
        console.message(f"logs are in {run_dir.path}")
        fleet = open_procs(config, run_dir, console)
        try:
            async with fleet.naming_deaths():
                await open_hosts(config, prepared.facts, fleet, tell=console.message)
                roles = await start_roles(config, prepared, fleet, console, run_dir)
                start_s = time.time() - psutil.Process().create_time()
                loops = await time_loops(prepared, roles, fleet, files, console, make_loops)
                measured = await measure(
                    prepared,
                    roles,
                    fleet.listing.entries,
                    run_dir.logs,
                    console,
                    loops=loops,
                    start_s=start_s,
                )
        finally:
            console.phase("ending all procs")
            await fleet.close()
            console.end_phase()
    write_profile(measured, out)
    tables = Console(width=REPORT_COLUMNS)
    tables.print(profile_table(measured))
    wanted = resolve(wanted, prepared.facts)
    run = of_config(wanted, prepared.facts, measured, num_steps=min(wanted.max_steps, NUM_STEPS))
    found = what_if(run, measured)
    tables.print(what_if_table(found))
    print(found.verdict)
    print(f"wrote {out}")
