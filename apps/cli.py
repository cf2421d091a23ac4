"""The command line that all apps share: arguments in, exit code out.

Exit codes: 0 done, 2 the config was refused (before any process started), 1 the run failed, 130 Ctrl-C.
"""

import argparse
import asyncio
import contextlib
import signal
import sys
import traceback
from collections.abc import Callable

from monarch.actor import shutdown_context

from forgeasync.config.load import load_config
from forgeasync.config.problems import ConfigError
from forgeasync.config.schema import RunConfig

EXIT_REFUSED = 2
EXIT_FAILED = 1
EXIT_INTERRUPTED = 130


def parse_arguments(description: str, *, dry_run: bool = False, resume: bool = False) -> argparse.Namespace:
    """``--config FILE [--config FILE ...] [key.path=value ...]``, and what else the app has."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(
        "--config",
        action="append",
        required=True,
        metavar="FILE",
        help="YAML file of the run; given again, each file is merged over the ones before it",
    )
    parser.add_argument("overrides", nargs="*", metavar="key.path=value", help="replaces values of the files")
    if dry_run:
        parser.add_argument("--dry-run", action="store_true", help="check and print the plan, start nothing")
    if resume:
        parser.add_argument(
            "--resume",
            metavar="latest|FOLDER",
            help="go on with the run in run_dir from its newest checkpoint, or from the one in a folder",
        )
    return parser.parse_intermixed_args()


def exit_code(run: Callable[[], None]) -> int:
    """Run an app and turn how it ended into an exit code, with the reason as the last lines on stderr."""
    # A shell starts background jobs with SIGINT ignored and Python keeps it so: it shall end a run anyway.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        try:
            run()
        finally:
            _leave_monarch()
    except ConfigError as error:
        print(f"refused:\n{error}", file=sys.stderr)
        return EXIT_REFUSED
    except (KeyboardInterrupt, asyncio.CancelledError):
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BaseException as error:
        cause = root_cause(error)
        traceback.print_exception(cause)
        print(f"failed: {type(cause).__name__}: {last_words(cause)}", file=sys.stderr)
        return EXIT_FAILED
    return 0


def _leave_monarch() -> None:
    """Shut Monarch's client down now: at the interpreter's exit it would print after the last words."""
    # Where a host is lost, it waits in vain.
    with contextlib.suppress(TimeoutError):
        shutdown_context(host_timeout=0.3).get(timeout=1.0)


def root_cause(error: BaseException) -> BaseException:
    """The first real error inside exception groups: the one that ended the other loops."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def last_words(error: BaseException) -> str:
    """One line: a short message whole, of a long one (an actor's remote traceback) its last line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines) if len(lines) <= 3 else lines[-1]


def run_app(main: Callable[[RunConfig], None], *, description: str) -> int:
    """Load the config that the arguments name and run ``main`` on it."""
    arguments = parse_arguments(description)
    return exit_code(lambda: main(load_config(arguments.config, arguments.overrides)))
