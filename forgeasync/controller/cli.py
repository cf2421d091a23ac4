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

from forgeasync.config.load import load_config
from forgeasync.config.problems import ConfigError
from forgeasync.config.schema import RunConfig
from forgeasync.controller.stopping import install_handlers, received_signal
from forgeasync.observability.failures import failure_line, root_cause

_closing_words: list[str] = []
"""What the last line says besides the reason."""

EXIT_REFUSED = 2
EXIT_FAILED = 1
EXIT_SIGNAL = 128
"""Plus the number of the signal that the app was told to stop with."""


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
    install_handlers()
    try:
        try:
            run()
        finally:
            _leave_monarch()
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
        received = received_signal()
        return EXIT_FAILED if received is None else EXIT_SIGNAL + received
    return 0


def _say(text: str) -> None:
    """Print to stderr; where nobody reads that any more, the exit code has to do."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def add_closing_words(words: str) -> None:
    """Have the last line say ``words`` too, if the app fails or is interrupted: where its results are."""
    _closing_words.append(words)


def _with_closing_words(reason: str) -> str:
    return "; ".join([reason, *_closing_words])


def _leave_monarch() -> None:
    """Shut Monarch's client down now: at the interpreter's exit it would print after the last words."""
    # Where a host is lost, it waits in vain.
    with contextlib.suppress(TimeoutError):
        shutdown_context(host_timeout=0.3).get(timeout=1.0)


def run_app(main: Callable[[RunConfig], None], *, description: str) -> int:
    """Load the config that the arguments name and run ``main`` on it."""
    arguments = parse_arguments(description)
    return exit_code(lambda: main(load_config(arguments.config, arguments.overrides)))
