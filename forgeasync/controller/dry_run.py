"""What ``--dry-run`` shows: the plan of a run whose config has been checked."""

from rich.console import Console

from forgeasync.config.model_facts import model_config_file
from forgeasync.config.schema import RunConfig
from forgeasync.controller.preparation import check_plan

REPORT_COLUMNS = 120
"""Width of the table, also in a pipe."""


def show_plan(config: RunConfig) -> None:
    """Check the config and print what it would start; needs no GPU and starts nothing."""
    # Builds the model on the meta device, which only a dry run has to wait for.
    from forgeasync.launch.render import render_launch
    from forgeasync.planning.report import dry_run_report

    facts, looked_at = check_plan(config)
    shape_from = model_config_file(config.model.path)
    report = dry_run_report(config, facts, shape_from=shape_from, looked_at=looked_at)
    Console(width=REPORT_COLUMNS).print(report)
    if (spec := render_launch(config)) is not None:
        print(f"\nwith launcher {config.launcher.kind}:\n{spec}")
