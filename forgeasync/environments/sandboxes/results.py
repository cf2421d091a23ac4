"""What calls of a box return and raise."""

from dataclasses import dataclass
from enum import StrEnum


class KilledBy(StrEnum):
    """Why a call was ended before its command ended by itself."""

    DEADLINE = "deadline"
    MEMORY = "memory"
    """The processes of the box together took more than ``memory_mib``; all of them were killed."""
    PROCESSES = "processes"
    """There were more than ``max_processes``, past the kernel's own limit; all of them were killed."""
    TAMPERING = "tampering"
    """The box's code killed or stopped what watches over its calls. All its processes were killed; if it was
    the supervisor, the box has ended, and further calls raise ``SandboxClosed``."""
    ANOTHER_CALL = "another_call"
    """All processes of the box were killed because of another call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecResult:
    """What a command did."""

    exit_code: int
    """As of ``subprocess``: -N if signal N ended the command; -9 if it was killed, 127 if there is no such
    program."""
    stdout: str
    """Its beginning, up to ``output_kib``; bytes that are not UTF-8 are replaced."""
    stderr: str
    timed_out: bool
    num_stdout_bytes_cut: int
    """Bytes that were written beyond what ``stdout`` holds."""
    num_stderr_bytes_cut: int
    duration_s: float
    """Wall time in the box, from the start of the command until everything that it had started was gone."""
    killed_by: KilledBy | None
    """None if the command ended by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShellResult(ExecResult):
    """What a command did in a shell session."""

    session_ended: bool
    """The shell is gone: killed, or left by ``exit``. Further runs raise ``SessionEnded``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonResult:
    """What a piece of code did in a Python session."""

    stdout: str
    stderr: str
    value: str | None
    """``repr`` of the last line, if that is an expression and not None; up to ``output_kib``."""
    traceback: str
    """What was raised, as Python prints it; empty if nothing was."""
    timed_out: bool
    num_stdout_bytes_cut: int
    num_stderr_bytes_cut: int
    num_report_bytes_cut: int
    """Bytes that ``value`` and ``traceback`` lack."""
    duration_s: float
    killed_by: KilledBy | None
    session_ended: bool
    """The interpreter is gone: killed, or ended by the code. Further runs raise ``SessionEnded``."""
    exit_code: int | None
    """The interpreter's exit code if it is gone, else None."""


class SandboxError(RuntimeError):
    """A box could not do what it was asked for; the text says why."""


class SandboxUnavailable(SandboxError):
    """A box cannot be started here."""


class SandboxClosed(SandboxError):
    """The box was closed, has not been entered, or has died as a whole."""


class SessionEnded(SandboxError):
    """The session's process is gone: a deadline passed, it was killed, or it ended by itself."""


class FileTooLarge(SandboxError):
    """A file of a box has more bytes than the caller takes."""
