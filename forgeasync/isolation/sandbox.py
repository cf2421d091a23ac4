"""``fa.Sandbox``, which runs untrusted code, and the choice of its backend."""

import asyncio
import concurrent.futures
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from forgeasync.config import Bubblewrap, Docker, Podman, PythonSandbox, SandboxSection, UnsafeSubprocess
from forgeasync.isolation.backend import (
    ExecResult,
    PythonSession,
    SandboxBackend,
    SandboxClosed,
    SandboxError,
    SandboxUnavailable,
    Shell,
)
from forgeasync.isolation.bubblewrap import BubblewrapBackend
from forgeasync.isolation.containers import ContainerBackend
from forgeasync.isolation.supervised import UnsafeBackend
from forgeasync.schema import MAX_SECONDS, Problem, load_code

MAX_READ_BYTES = 64 * 2**20
MAX_COMMAND_BYTES = 100_000
"""Maximum length of one argument of a command. The kernel allows 128 KiB."""
_DEFAULT = Bubblewrap()
_TRIAL_LIMIT_S = 30.0
_TRIAL_TEXT = "ready"
_OTHERS = (
    "sandbox.kind: docker and podman use containers instead; unsafe isolates nothing, for code that you trust"
)


class Sandbox:
    """Runs commands isolated from the host and with limited resources.

        async with fa.Sandbox(fa.Bubblewrap(memory_mib=512)) as sandbox:
            await sandbox.write("answer.py", b"print(6 * 7)")
            result = await sandbox.exec(["python3", "answer.py"], timeout_s=5)
            assert result.stdout == "42\\n"

    Commands start in ``/work``, the workspace; ``/work``, ``/tmp`` and ``/dev/shm`` are writable. Files
    persist until the sandbox is closed. Processes that a command leaves running are killed when it exits; in
    a session (``shell``, ``python``), background processes live until the session ends. Calls and sessions of
    a sandbox may run concurrently, all on the event loop that entered it; other sandboxes may use other
    loops. A cancelled call is killed.

    docs/sandboxes.md says how far these rules hold with Docker, Podman, ``unsafe`` and your own backends.
    """

    def __init__(self, section: SandboxSection = _DEFAULT, *, workspace: str | Path | None = None) -> None:
        """Configure a sandbox; entering it starts it.

        ``section`` is the config's ``sandbox`` section. ``workspace`` is a folder whose content is copied
        into the sandbox's workspace.
        """
        self._section = section
        self._workspace = None if workspace is None else Path(workspace)
        self._backend: SandboxBackend | None = None

    async def __aenter__(self) -> Self:
        """Start the sandbox.

        Raises:
            SandboxUnavailable: the sandbox cannot be started here; the message has the reason and a remedy.
            SandboxClosed: the sandbox has been entered before.
        """
        if self._backend is not None:
            raise SandboxClosed("a sandbox can be entered once; make another Sandbox")
        self._backend = build_backend(self._section)
        await self._backend.start(self._workspace)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        await self.close()

    async def exec(self, command: str | Sequence[str], *, timeout_s: float) -> ExecResult:
        """Run a command: a string for ``sh -c``, or a program with its arguments.

        After ``timeout_s`` seconds, the command and all processes that it started are killed. Standard input
        is empty.

        Raises:
            ValueError: the command is empty, has a zero byte or an argument that is too long, or
                ``timeout_s`` is not positive.
            SandboxClosed: the sandbox is closed.
            SandboxError: the sandbox has no room for another process.
        """
        arguments = ["sh", "-c", command] if isinstance(command, str) else list(command)
        _check_arguments(arguments)
        return await self._open_backend.exec(arguments, timeout_s=_check_seconds(timeout_s))

    async def read(self, path: str, *, max_bytes: int = MAX_READ_BYTES) -> bytes:
        """Return the content of a file.

        Links are resolved inside the sandbox, so they never lead to a file of the host.

        Raises:
            FileNotFoundError: the file does not exist.
            FileTooLarge: the file has more than ``max_bytes``.
            SandboxError: the path is not a regular file, or the sandbox may not read it.
        """
        return await self._open_backend.read(_check_path(path), max_bytes=max_bytes)

    async def write(self, path: str, data: bytes) -> None:
        """Write a file; creates missing parent folders.

        Raises:
            SandboxError: the sandbox may not write there, or has no space left.
        """
        await self._open_backend.write(_check_path(path), data)

    async def shell(self) -> Shell:
        """Start a shell session: directory, variables and background processes persist between runs.

        Raises:
            SandboxError: the sandbox cannot start one.
        """
        return await self._open_backend.shell()

    async def python(self) -> PythonSession:
        """Start a Python session: variables persist between runs, and a run returns the last line's value.

        Raises:
            SandboxError: the sandbox cannot start one.
        """
        return await self._open_backend.python()

    async def close(self) -> None:
        """End the sandbox with all its processes and files. Can be called again."""
        if self._backend is not None:
            await self._backend.close()

    @property
    def _open_backend(self) -> SandboxBackend:
        if self._backend is None:
            raise SandboxClosed("the sandbox has not been entered: async with fa.Sandbox() as sandbox")
        return self._backend


def _check_arguments(arguments: list[str]) -> None:
    if not arguments or not all(isinstance(one, str) for one in arguments):
        raise ValueError("command must be text, or a list of texts that begins with the program")
    for one in arguments:
        if "\0" in one or len(one.encode("utf-8", "surrogateescape")) > MAX_COMMAND_BYTES:
            raise ValueError(
                f"command has an argument with a zero byte or more than {MAX_COMMAND_BYTES} bytes; write it "
                "to a file of the sandbox and run that"
            )


def _check_seconds(timeout_s: float) -> float:
    if not (math.isfinite(timeout_s) and 0 < timeout_s <= MAX_SECONDS):
        raise ValueError(f"timeout_s = {timeout_s}: must be above 0 and at most {MAX_SECONDS:.0f} seconds")
    return float(timeout_s)


def _check_path(path: str) -> str:
    if not path or "\0" in path:
        raise ValueError(f"path = {path!r}: must be the path of a file, without zero bytes")
    return path


def build_backend(section: SandboxSection) -> SandboxBackend:
    """Return the backend of a ``sandbox`` section, not started.

    Raises:
        SandboxUnavailable: the user's own class does not exist, cannot be called or is not a backend.
    """
    match section:
        case Bubblewrap():
            return BubblewrapBackend(section)
        case Docker() | Podman():
            return ContainerBackend(section)
        case UnsafeSubprocess():
            return UnsafeBackend(section)
        case PythonSandbox():
            return _build_own(section)


def _build_own(section: PythonSandbox) -> SandboxBackend:
    try:
        built = load_code(section)(**section.options)
    except Exception as error:
        # Every exception of the user's class is reported to the user.
        raise SandboxUnavailable(f"{section.factory}: {error}") from error
    if not isinstance(built, SandboxBackend):
        raise SandboxUnavailable(
            f"{section.factory} made a {type(built).__name__}; must be derived from forgeasync.SandboxBackend"
        )
    return built


def check_sandbox(section: SandboxSection) -> Iterator[Problem]:
    """Start a sandbox, run a command in it and end it; yields at most one problem, with a remedy.

    Blocks while the sandbox starts. Imports and runs the user's code if the backend is the user's own.
    """
    # In a separate thread, because the caller's thread may run an event loop.
    with concurrent.futures.ThreadPoolExecutor(max_workers=1) as thread:
        problem = thread.submit(lambda: asyncio.run(_try(section))).result()
    if problem is not None:
        if isinstance(section, PythonSandbox):
            yield Problem(field="sandbox.factory", value=section.factory, remedy=problem)
        else:
            yield Problem(field="sandbox.kind", value=section.kind, remedy=problem)


async def _try(section: SandboxSection) -> str | None:
    backend: SandboxBackend | None = None
    try:
        backend = build_backend(section)
        await backend.start(None)
        result = await backend.exec(["sh", "-c", f"printf {_TRIAL_TEXT}"], timeout_s=_TRIAL_LIMIT_S)
        if result.stdout != _TRIAL_TEXT:
            text = (result.stderr or result.stdout).strip()[:300]
            return f"a sandbox runs no commands here (exit code {result.exit_code}): {text}"
    except SandboxError as error:
        return str(error) if isinstance(section, PythonSandbox) else f"no sandbox starts: {error}; {_OTHERS}"
    except Exception as error:
        if not isinstance(section, PythonSandbox):
            raise
        # Every exception of the user's backend is reported to the user.
        return f"raised {type(error).__name__}: {error} in a trial"
    finally:
        if backend is not None:
            await backend.close()
    return None


def sandbox_warning(section: SandboxSection) -> str | None:
    """Return the warning that a run shows in red about its sandbox; None if there is none."""
    if isinstance(section, UnsafeSubprocess):
        return (
            "sandbox.kind: unsafe isolates nothing. What the model writes runs as plain processes of this "
            "user: it can read, change, delete and send everything that this user can."
        )
    return None
