"""What a failure says in one line."""

import contextlib
import re
import sys
import traceback

_FRAME = re.compile(r'File "(.+)", line (\d+), in (.+)')


def say_on_stderr(text: str) -> None:
    """Print a line to stderr, which may be closed, or a file on a disk that is full: that ends no run."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def root_cause(error: BaseException) -> BaseException:
    """The first real error inside exception groups: the one that ended the other loops."""
    return real_errors(error)[0]


def real_errors(error: BaseException) -> list[BaseException]:
    """All errors inside exception groups, or the error itself."""
    if isinstance(error, BaseExceptionGroup):
        return [real for part in error.exceptions for real in real_errors(part)]
    return [error]


def failure_line(error: BaseException) -> str:
    """``failed: <kind>: <last words>``, never without words."""
    cause = root_cause(error)
    # People know a deadline's standard name; its own says nothing that the message does not.
    kind = TimeoutError if isinstance(cause, TimeoutError) else type(cause)
    return f"failed: {kind.__name__}: {last_words(cause)}"


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
