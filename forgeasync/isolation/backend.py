"""The seam between a box and what isolates it: the protocol of a backend, its results and its errors."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Protocol


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


class Shell(Protocol):
    """A shell whose working directory, variables and background processes last from run to run."""

    async def run(self, command: str, *, timeout_s: float) -> ShellResult:
        """Run a command. After ``timeout_s`` the shell and all that it has started are killed.

        Raises:
            SessionEnded: the shell was gone before.
        """
        ...

    async def close(self) -> None:
        """Kill the shell and all that it has started."""
        ...


class PythonSession(Protocol):
    """A Python interpreter whose variables last from run to run."""

    async def run(self, code: str, *, timeout_s: float) -> PythonResult:
        """Run code. After ``timeout_s`` the interpreter and all that it has started are killed.

        Raises:
            SessionEnded: the interpreter was gone before.
        """
        ...

    async def close(self) -> None:
        """Kill the interpreter and all that it has started."""
        ...


class SandboxBackend(ABC):
    """One box, and what isolates it; derive from it for an isolation of your own.

    Example, with ``vendor`` a client of some cloud:

        class CloudBox(fa.SandboxBackend):
            def __init__(self, region: str) -> None:
                self._region = region

            async def start(self, workspace: Path | None) -> None:
                self._box = await vendor.create(self._region, upload=workspace)

            async def exec(self, command: list[str], *, timeout_s: float) -> fa.ExecResult: ...
            async def read(self, path: str, *, max_bytes: int) -> bytes: ...
            async def write(self, path: str, data: bytes) -> None: ...
            async def close(self) -> None:
                await self._box.delete()

        sandbox: {kind: python, factory: my_package.CloudBox, options: {region: north}}

    Relative paths begin at the workspace. A deadline must end everything that the call has started, output
    must be bounded while it is read, and every method can be cancelled. Methods raise ``SandboxError`` for
    what the box cannot do, and FileNotFoundError for a file that is not there.
    """

    @abstractmethod
    async def start(self, workspace: Path | None) -> None:
        """Start the box, with a copy of the folder ``workspace`` in it. After an error nothing is left."""

    @abstractmethod
    async def exec(self, command: list[str], *, timeout_s: float) -> ExecResult:
        """Run a program with its arguments; what it leaves running ends with it."""

    @abstractmethod
    async def read(self, path: str, *, max_bytes: int) -> bytes:
        """Return a file's content; raises FileTooLarge if it has more bytes."""

    @abstractmethod
    async def write(self, path: str, data: bytes) -> None:
        """Write a file, and the folders above it where they are missing."""

    @abstractmethod
    async def close(self) -> None:
        """End the box and everything in it; may be called again, and after an error of ``start``."""

    async def shell(self) -> Shell:
        """Start a shell session."""
        raise SandboxError(f"{type(self).__name__} has no shell sessions")

    async def python(self) -> PythonSession:
        """Start a Python session."""
        raise SandboxError(f"{type(self).__name__} has no Python sessions")
