"""The command line that all apps share: arguments in, exit code out.

Exit codes: 0 done, 2 the config was refused (before any process started), 1 the run failed, 130 Ctrl-C,
143 SIGTERM. The last two come after cleaning up, also where that failed.
"""

import argparse
import asyncio
import contextlib
import signal
import sys
import traceback
from collections.abc import Callable

from monarch.actor import shutdown_context
from rich.console import Console

from forgeasync.config import RunConfig, load_config
from forgeasync.controller.leftovers import end_own_run
from forgeasync.controller.preparation import check_plan, gpu_memory_bytes
from forgeasync.controller.stopping import install_handlers, received_signal
from forgeasync.controller.supervisor_beat import start_beating
from forgeasync.models import model_config_file
from forgeasync.observability import failure_line, release_claims, root_cause
from forgeasync.planning import GPU_GIB
from forgeasync.schema import EXIT_FAILED, EXIT_REFUSED, EXIT_SIGNAL, ConfigError

_closing_words: list[str] = []
"""Text of the last line besides the reason."""


def config_parser(description: str) -> argparse.ArgumentParser:
    """Return a parser of ``--config FILE [--config FILE ...] [key.path=value ...]``, for further options."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(
        "--config",
        action="append",
        required=True,
        metavar="FILE",
        help="YAML file of the run; given again, each file is merged over the ones before it",
    )
    parser.add_argument("overrides", nargs="*", metavar="key.path=value", help="replaces values of the files")
    return parser


def parse_arguments(
    description: str,
    *,
    dry_run: bool = False,
    resume: bool = False,
    rehearse: bool = False,
    supervise: bool = False,
) -> argparse.Namespace:
    """Parse ``--config FILE [--config FILE ...] [key.path=value ...]`` and the app's further options."""
    parser = config_parser(description)
    # argparse of Python 3.11 cannot print the usage of an empty group.
    modes = parser.add_mutually_exclusive_group() if dry_run or resume or rehearse else parser
    if dry_run:
        modes.add_argument("--dry-run", action="store_true", help="check and print the plan, start nothing")
        parser.add_argument(
            "--gpu-gib",
            type=_positive,
            metavar="N",
            help=f"memory of a GPU that --dry-run plans for; default: this machine's, or {GPU_GIB:g}",
        )
    if resume:
        modes.add_argument(
            "--resume",
            metavar="latest|FOLDER",
            help="continue the run in run_dir from its newest checkpoint, or from the checkpoint in a folder",
        )
    if rehearse:
        modes.add_argument(
            "--rehearse",
            action="store_true",
            help="run the config's own topology with a tiny model for three steps, on this machine",
        )
        parser.add_argument(
            "--hosts",
            action="store_true",
            help="with --rehearse: on the hosts and GPUs that the config names, with nothing left out",
        )
    if supervise:
        parser.add_argument(
            "--supervise",
            action="store_true",
            help="start the run again from its newest checkpoint whenever it dies, in whatever way",
        )
    arguments = parser.parse_intermixed_args()
    if supervise and arguments.supervise and (arguments.dry_run or arguments.rehearse):
        parser.error("--supervise: needs a run; leave --dry-run and --rehearse away")
    if rehearse and arguments.hosts and not arguments.rehearse:
        parser.error("--hosts: needs --rehearse; a run always uses the hosts that its config names")
    return arguments


def _positive(text: str) -> float:
    number = float(text)
    if not 0.0 < number < 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} is no size in GiB; must be greater than 0")
    return number


def exit_code(run: Callable[[], None]) -> int:
    """Run an app and turn how it ended into an exit code, with the reason as the last lines on stderr."""
    install_handlers()
    start_beating()
    try:
        try:
            run()
        finally:
            _leave_monarch()
            try:
                end_own_run()
            finally:
                release_claims()
    except ConfigError as error:
        _say(f"refused:\n{error}")
        return EXIT_REFUSED
    except (KeyboardInterrupt, asyncio.CancelledError):
        received = received_signal() or signal.SIGINT
        _say(_with_closing_words(f"interrupted by {received.name}"))
        return EXIT_SIGNAL + received
    except BaseException as error:
        _say("".join(traceback.format_exception(root_cause(error))).rstrip())
        _say(_with_closing_words(failure_line(error)))
        stop = received_signal()
        return EXIT_FAILED if stop is None else EXIT_SIGNAL + stop
    return 0


def _say(text: str) -> None:
    """Print to stderr; if stderr is closed, the exit code alone has to tell."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def add_closing_words(words: str) -> None:
    """Add ``words``, such as where results are, to the last line if the app fails or is interrupted."""
    _closing_words.append(words)


def _with_closing_words(reason: str) -> str:
    return "; ".join([reason, *_closing_words])


def _leave_monarch() -> None:
    """Shut Monarch's client down now: at the interpreter's exit it would print after the last words."""
    # If a host is lost, this would wait for ever.
    with contextlib.suppress(TimeoutError):
        shutdown_context(host_timeout=0.3).get(timeout=1.0)


def run_app(main: Callable[[RunConfig], None], *, description: str) -> int:
    """Load the config that the arguments name and run ``main`` on it."""
    arguments = parse_arguments(description)
    return exit_code(lambda: main(load_config(arguments.config, arguments.overrides)))


REPORT_COLUMNS = 120
"""Width of the table, in a pipe too."""


def show_plan(config: RunConfig, *, gpu_gib: float | None = None) -> None:
    """Check the config and print what it would start; needs no GPU and starts nothing.

    ``gpu_gib`` is the memory of a GPU that the run is planned for; None: this machine's, or ``GPU_GIB``.
    """
    # Imported here: it builds the model on the meta device, which only a dry run should wait for.
    from forgeasync.launch import render_launch
    from forgeasync.planning import dry_run_report, request_warnings, with_host_requests

    facts, looked_at = check_plan(config)
    shape_from = model_config_file(config.model.path)
    gpu_bytes = gpu_memory_bytes() if gpu_gib is None else round(gpu_gib * 2**30)
    report = dry_run_report(config, facts, shape_from=shape_from, looked_at=looked_at, gpu_bytes=gpu_bytes)
    Console(width=REPORT_COLUMNS).print(report)
    for warning in request_warnings(config, facts):
        print(f"warning: {warning}")
    if (spec := render_launch(with_host_requests(config, facts))) is not None:
        print(f"\nwith launcher {config.launcher.kind}:\n{spec}")
