"""The seam between boxes and what isolates them."""

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Protocol

from forgeasync.environments.sandboxes.results import ExecResult, PythonResult, SandboxError, ShellResult


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
