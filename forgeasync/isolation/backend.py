"""The interface of sandbox backends: protocols, result types and errors."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Protocol


class KilledBy(StrEnum):
    """Why a call was killed before its command exited by itself."""

    DEADLINE = "deadline"
    MEMORY = "memory"
    """The processes of the sandbox together used more than ``memory_mib``; all of them were killed."""
    PROCESSES = "processes"
    """The sandbox had more than ``max_processes`` processes despite the kernel's limit; all of them were
    killed."""
    TAMPERING = "tampering"
    """Code in the sandbox killed or stopped the supervisor or a call's watcher; all processes of the sandbox
    were killed. If the supervisor was hit, the sandbox has ended, and further calls raise
    ``SandboxClosed``."""
    ANOTHER_CALL = "another_call"
    """Another call caused all processes of the sandbox to be killed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecResult:
    """Result of a command."""

    exit_code: int
    """Exit code as in ``subprocess``: -N if signal N ended the command, -9 if the call was killed, 127 if the
    program does not exist."""
    stdout: str
    """First ``output_kib`` of standard output; bytes that are not UTF-8 are replaced."""
    stderr: str
    """First ``output_kib`` of standard error, decoded like ``stdout``."""
    timed_out: bool
    num_stdout_bytes_cut: int
    """Number of bytes written beyond those in ``stdout``."""
    num_stderr_bytes_cut: int
    duration_s: float
    """Wall time in seconds, from the start of the command until all processes that it started were gone."""
    killed_by: KilledBy | None
    """Reason why the call was killed; None if the command exited by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShellResult(ExecResult):
    """Result of a command in a shell session."""

    session_ended: bool
    """True if the shell was killed or has exited; further runs raise ``SessionEnded``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonResult:
    """Result of a piece of code in a Python session."""

    stdout: str
    stderr: str
    value: str | None
    """``repr`` of the last line's value; None if that line is not an expression or its value is None. At most
    ``output_kib`` and 128 KiB."""
    traceback: str
    """Traceback of the exception as Python prints it; empty if none was raised."""
    timed_out: bool
    num_stdout_bytes_cut: int
    num_stderr_bytes_cut: int
    num_report_bytes_cut: int
    """Number of bytes cut from ``value`` and ``traceback`` together."""
    duration_s: float
    killed_by: KilledBy | None
    session_ended: bool
    """True if the interpreter was killed or has exited; further runs raise ``SessionEnded``."""
    exit_code: int | None
    """Exit code of the interpreter; None if it still runs."""


class SandboxError(RuntimeError):
    """Raised when a sandbox cannot do what was requested; the message has the reason."""


class SandboxUnavailable(SandboxError):
    """Raised when a sandbox cannot be started on this machine."""


class SandboxClosed(SandboxError):
    """Raised when the sandbox was closed, has not been entered, or has died as a whole."""


class SessionEnded(SandboxError):
    """Raised when a session's process is gone: killed, past its deadline, or exited by itself."""


class FileTooLarge(SandboxError):
    """Raised when a file in a sandbox has more bytes than the caller allows."""


class Shell(Protocol):
    """Shell session: working directory, variables and background processes persist between runs."""

    async def run(self, command: str, *, timeout_s: float) -> ShellResult:
        """Run a command. After ``timeout_s`` seconds the shell and all processes that it started are killed.

        Raises:
            SessionEnded: the shell was already gone.
        """
        ...

    async def close(self) -> None:
        """Kill the shell and all processes that it started."""
        ...


class PythonSession(Protocol):
    """Python interpreter session: variables persist between runs."""

    async def run(self, code: str, *, timeout_s: float) -> PythonResult:
        """Run code. After ``timeout_s`` seconds the interpreter and all processes that it started are killed.

        Raises:
            SessionEnded: the interpreter was already gone.
        """
        ...

    async def close(self) -> None:
        """Kill the interpreter and all processes that it started."""
        ...


class SandboxBackend(ABC):
    """Base class of the implementations of one sandbox; derive from it to add your own isolation.

    Example, where ``vendor`` is the client library of a cloud provider:

        class CloudBox(fa.SandboxBackend):
            def __init__(self, region: str) -> None:
                self._region = region

            async def start(self, workspace: Path | None) -> None:
                self._sandbox = await vendor.create(self._region, upload=workspace)

            async def exec(self, command: list[str], *, timeout_s: float) -> fa.ExecResult: ...
            async def read(self, path: str, *, max_bytes: int) -> bytes: ...
            async def write(self, path: str, data: bytes) -> None: ...
            async def close(self) -> None:
                await self._sandbox.delete()

    To use it, set ``sandbox: {kind: python, factory: my_package.CloudBox, options: {region: north}}``.

    Relative paths start at the workspace. A deadline must kill every process that the call started, output
    must be bounded while it is read, and every method must support cancellation. Methods raise
    ``SandboxError`` for what the sandbox cannot do, and FileNotFoundError for a missing file.
    """

    @abstractmethod
    async def start(self, workspace: Path | None) -> None:
        """Start the sandbox and copy the folder ``workspace`` into it. After an error nothing remains."""

    @abstractmethod
    async def exec(self, command: list[str], *, timeout_s: float) -> ExecResult:
        """Run a program with its arguments; processes that it leaves running are killed when it exits.

        After ``timeout_s`` seconds the program and all processes that it started are killed.
        """

    @abstractmethod
    async def read(self, path: str, *, max_bytes: int) -> bytes:
        """Return a file's content.

        Raises:
            FileTooLarge: the file has more than ``max_bytes``.
        """

    @abstractmethod
    async def write(self, path: str, data: bytes) -> None:
        """Write a file; creates missing parent folders."""

    @abstractmethod
    async def close(self) -> None:
        """End the sandbox and everything in it. Can be called again, and after ``start`` has failed."""

    async def shell(self) -> Shell:
        """Start a shell session.

        Raises:
            SandboxError: This backend has none. Override the method to offer them.
        """
        raise SandboxError(f"{type(self).__name__} has no shell sessions")

    async def python(self) -> PythonSession:
        """Start a Python session.

        Raises:
            SandboxError: This backend has none. Override the method to offer them.
        """
        raise SandboxError(f"{type(self).__name__} has no Python sessions")
