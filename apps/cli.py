"""The command line that all apps share: arguments in, exit code out.

Exit codes: 0 done, 2 the config was refused (before any process started), 1 the run failed, 130 Ctrl-C,
143 SIGTERM. The last two come after cleaning up, also where that failed.
"""

import argparse
import asyncio
import contextlib
import re
import signal
import sys
import traceback
from collections.abc import Callable

from monarch.actor import shutdown_context

from apps.stopping import install_handlers, received_signal
from forgeasync.actors.deadline import DeadlineExceeded
from forgeasync.config.load import load_config
from forgeasync.config.problems import ConfigError
from forgeasync.config.schema import RunConfig

_FRAME = re.compile(r'File "(.+)", line (\d+), in (.+)')

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
        print(f"refused:\n{error}", file=sys.stderr)
        return EXIT_REFUSED
    except (KeyboardInterrupt, asyncio.CancelledError):
        received = received_signal() or signal.SIGINT
        print(_with_closing_words(f"interrupted by {received.name}"), file=sys.stderr)
        return EXIT_SIGNAL + received
    except BaseException as error:
        cause = root_cause(error)
        traceback.print_exception(cause)
        # A deadline's own name says nothing that the message does not: people know the standard one.
        kind = TimeoutError if isinstance(cause, DeadlineExceeded) else type(cause)
        print(_with_closing_words(f"failed: {kind.__name__}: {last_words(cause)}"), file=sys.stderr)
        received = received_signal()
        return EXIT_FAILED if received is None else EXIT_SIGNAL + received
    return 0


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


def root_cause(error: BaseException) -> BaseException:
    """The first real error inside exception groups: the one that ended the other loops."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def last_words(error: BaseException) -> str:
    """One line: a short message whole, of a long one (an actor's remote traceback) its last line.

    An error without a message is named by the place that it comes from.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return f"no message, {_place(error)}"
    last = " ".join(lines) if len(lines) <= 3 else lines[-1]
    # Python's own last line of a remote error without a message is "AssertionError" and nothing more.
    is_bare = len(lines) > 3 and last.rstrip(": ").replace(".", "").isidentifier()
    return f"{last} {_remote_place(lines)}" if is_bare else last


def _place(error: BaseException) -> str:
    """The innermost frame that an error passed."""
    frames = traceback.extract_tb(error.__traceback__)
    return f"in {frames[-1].name} at {frames[-1].filename}:{frames[-1].lineno}" if frames else "never raised"


def _remote_place(lines: list[str]) -> str:
    """The same of a traceback as text."""
    frames = [match.groups() for line in lines if (match := _FRAME.match(line))]
    return "".join(f"in {name} at {file}:{number}" for file, number, name in frames[-1:])


def run_app(main: Callable[[RunConfig], None], *, description: str) -> int:
    """Load the config that the arguments name and run ``main`` on it."""
    arguments = parse_arguments(description)
    return exit_code(lambda: main(load_config(arguments.config, arguments.overrides)))
