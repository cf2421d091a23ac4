"""Backends that run calls, file access, shell sessions and Python sessions through a supervisor process.

The place where the supervisor runs determines the isolation of the calls. ``UnsafeBackend`` runs it as a
plain process of the host.
"""

import asyncio
import os
import secrets
import shlex
import shutil
import struct
import sys
import tarfile
import tempfile
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from importlib import resources
from pathlib import Path
from typing import IO, ClassVar, TypeVar

from forgeasync.config import SandboxLimits, UnsafeSubprocess
from forgeasync.isolation.backend import (
    ExecResult,
    FileTooLarge,
    PythonResult,
    PythonSession,
    SandboxBackend,
    SandboxClosed,
    SandboxError,
    SessionEnded,
    Shell,
    ShellResult,
)
from forgeasync.isolation.connection import (
    START_LIMIT_S,
    CallChannel,
    Connection,
    Ending,
    in_thread,
    receive_ending,
    text,
)
from forgeasync.isolation.inside import wire

FILE_LIMIT_S = 60.0
"""Wall time limit for reading or writing one file, or for unpacking the workspace."""

_ABSENT, _NO_FILE = 44, 45
_READ = f'[ -e "$1" ] || exit {_ABSENT}; [ -f "$1" ] || exit {_NO_FILE}; exec cat -- "$1"'
_WRITE = 'mkdir -p -- "$(dirname -- "$1")" && exec cat > "$1"'
_UNPACK = "exec tar -xf - --no-same-owner"

MIB, KIB = 2**20, 2**10
AnySession = TypeVar("AnySession", bound="Session")
_IN_MEMORY_BYTES = 2**24


class SupervisedBackend(SandboxBackend):
    """Base class of backends that run calls through a supervisor.

    Derived classes define where the supervisor is started and with which settings.
    """

    def __init__(self, limits: SandboxLimits) -> None:
        self._limits = limits
        self._connection: Connection | None = None
        self._output_bytes = limits.output_kib * KIB

    def _settings(self) -> dict[str, object]:
        """Return the settings of the supervisor that all backends share."""
        limits = self._limits
        return {
            "isolated": False,
            "memory_bytes": limits.memory_mib * MIB,
            "disk_bytes": limits.disk_mib * MIB,
            "max_files": limits.max_files,
            "max_processes": limits.max_processes,
            "max_open_files": limits.max_open_files,
            "cpu_s": limits.cpu_s,
            "folder": self._folder,
        }

    @abstractmethod
    async def _open(self) -> Connection:
        """Start the supervisor and return the connection to it."""

    @abstractmethod
    def _environment(self) -> dict[str, str]:
        """Return all environment variables of commands."""

    @property
    @abstractmethod
    def _folder(self) -> str:
        """Path of the workspace, as the supervisor sees it."""

    @property
    @abstractmethod
    def _shell(self) -> str:
        """Program of shell sessions."""

    def _wrap(self, command: Sequence[str]) -> list[str]:
        """Return the command that the supervisor starts in order to run ``command``."""
        return list(command)

    async def _after_kill(self) -> None:
        """Clean up after a killed call; by default there is nothing to do."""

    async def start(self, workspace: Path | None) -> None:
        self._connection = await self._open()
        if workspace is None:
            return
        try:
            with await in_thread(pack_workspace, workspace, self._limits) as archive:
                await self._unpack(archive)
        except BaseException:
            await self.close()
            raise

    async def _unpack(self, archive: IO[bytes]) -> None:
        ending = await self._call(
            ["sh", "-c", _UNPACK],
            timeout_s=FILE_LIMIT_S,
            output_bytes=wire.CHUNK_BYTES,
            stdin=_chunks_of(archive),
        )
        _raise_if_failed(ending, "the workspace could not be unpacked")

    async def exec(self, command: list[str], *, timeout_s: float) -> ExecResult:
        ending = await self._call(command, timeout_s=timeout_s, output_bytes=self._output_bytes)
        return ExecResult(exit_code=ending.exit_code, **ending.outcome())

    async def read(self, path: str, *, max_bytes: int) -> bytes:
        ending = await self._call(
            ["sh", "-c", _READ, "sh", path], timeout_s=FILE_LIMIT_S, output_bytes=max_bytes
        )
        if ending.exit_code == _ABSENT:
            raise FileNotFoundError(f"{path}: there is no such file in the sandbox")
        if ending.exit_code == _NO_FILE:
            raise SandboxError(f"{path}: is a folder, a pipe or a device in the sandbox, not a file")
        _raise_if_failed(ending, f"{path} could not be read")
        if ending.num_stdout_bytes_cut:
            raise FileTooLarge(f"{path} has more than {max_bytes} bytes")
        return ending.stdout

    async def write(self, path: str, data: bytes) -> None:
        ending = await self._call(
            ["sh", "-c", _WRITE, "sh", path],
            timeout_s=FILE_LIMIT_S,
            output_bytes=wire.CHUNK_BYTES,
            stdin=_parts_of(data),
        )
        _raise_if_failed(ending, f"{path} could not be written")

    async def shell(self) -> Shell:
        return await self._open_session(ShellSession, [self._shell])

    async def python(self) -> PythonSession:
        return await self._open_session(InterpreterSession, ["python3", "-u", "-c", python_program()])

    async def _open_session(self, kind: type[AnySession], command: Sequence[str]) -> AnySession:
        connection = self._require_connection()
        channel = await connection.call()
        await channel.send_object(self._request(command) | {"session": True})
        session = kind(connection, channel, output_bytes=self._output_bytes, after_kill=self._after_kill)
        await session.start()
        return session

    async def close(self) -> None:
        if self._connection is not None:
            await self._connection.close()

    def _require_connection(self) -> Connection:
        if self._connection is None or self._connection.has_ended:
            raise SandboxClosed("the sandbox has ended")
        return self._connection

    def _request(self, command: Sequence[str]) -> dict[str, object]:
        return {
            "argv": self._wrap(command),
            "env": self._environment(),
            "folder": self._folder,
        }

    async def _call(
        self,
        command: Sequence[str],
        *,
        timeout_s: float,
        output_bytes: int,
        stdin: AsyncIterator[bytes] | None = None,
    ) -> Ending:
        connection = self._require_connection()
        channel = await connection.call()
        feeding: asyncio.Task[None] | None = None
        ending: Ending | None = None
        try:
            request = self._request(command)
            request |= {"session": False, "timeout_s": timeout_s, "output_bytes": output_bytes}
            await channel.send_object(request)
            feeding = asyncio.create_task(_feed(channel, stdin))
            ending = await receive_ending(connection, channel, timeout_s=timeout_s)
            return ending
        finally:
            channel.close()
            if feeding is not None:
                feeding.cancel()
                await asyncio.wait([feeding])
            if ending is None or ending.killed_by is not None:
                await self._after_kill()


class UnsafeBackend(SupervisedBackend):
    """Sandbox backend without isolation: plain processes in a temporary folder.

    Only deadlines and the kernel's per-process limits apply.
    """

    def __init__(self, section: UnsafeSubprocess) -> None:
        super().__init__(section)
        self._section = section
        self._made: str | None = None

    @property
    def _folder(self) -> str:
        assert self._made is not None
        return self._made

    @property
    def _shell(self) -> str:
        return shutil.which("bash") or "sh"

    def _environment(self) -> dict[str, str]:
        # python3 is then the same one as in other sandboxes.
        path = os.pathsep.join([f"{sys.base_exec_prefix}/bin", os.environ.get("PATH", os.defpath)])
        own = {"PATH": path, "HOME": self._folder, "LANG": "C.UTF-8"}
        return own | self._section.env

    async def _open(self) -> Connection:
        self._made = await in_thread(tempfile.mkdtemp, prefix="forgeasync-unsafe-")
        return await Connection.open(self._settings(), limit_s=START_LIMIT_S)

    async def close(self) -> None:
        """Kill the processes and delete the folder."""
        await super().close()
        if self._made is not None:
            # Ignore errors: a command may have removed its own rights to a folder, or may still be deleting
            # it.
            await in_thread(shutil.rmtree, self._made, ignore_errors=True)


async def _feed(channel: CallChannel, stdin: AsyncIterator[bytes] | None) -> None:
    """Send a command's standard input, then an empty frame that closes it."""
    if stdin is not None:
        async for part in stdin:
            await channel.send(wire.STDIN, part)
    await channel.send(wire.STDIN, b"")


async def _parts_of(data: bytes) -> AsyncIterator[bytes]:
    for begin in range(0, len(data), wire.CHUNK_BYTES):
        yield data[begin : begin + wire.CHUNK_BYTES]


async def _chunks_of(file: IO[bytes]) -> AsyncIterator[bytes]:
    while part := await in_thread(file.read, wire.CHUNK_BYTES):
        yield part


def _raise_if_failed(ending: Ending, what: str) -> None:
    if ending.killed_by is not None:
        raise SandboxError(f"{what}: its command was killed ({ending.killed_by})")
    if ending.exit_code != 0:
        lines = text(ending.stderr).strip().splitlines() or [f"exit code {ending.exit_code}"]
        raise SandboxError(f"{what}: {lines[-1][:300]}")


def pack_workspace(folder: Path, limits: SandboxLimits) -> IO[bytes]:
    """Pack a folder into a tar archive. Symbolic links stay links, so nothing outside the folder is read.

    Raises:
        SandboxError: the path is not a folder, contains anything but files, folders and links, or exceeds
            ``limits.disk_mib`` or ``limits.max_files``.
    """
    if not folder.is_dir():
        raise SandboxError(f"workspace {folder}: must be a folder")
    left_bytes, left_files = limits.disk_mib * 2**20, limits.max_files
    archive = tempfile.SpooledTemporaryFile(max_size=_IN_MEMORY_BYTES)
    try:
        with tarfile.open(fileobj=archive, mode="w", format=tarfile.PAX_FORMAT) as tar:
            for path in _below(folder):
                member = tar.gettarinfo(path, arcname=os.path.relpath(path, folder))
                if member is None or not (
                    member.isfile() or member.isdir() or member.issym() or member.islnk()
                ):
                    raise SandboxError(f"workspace {folder}: {path} is neither file, folder nor link")
                left_bytes, left_files = left_bytes - member.size, left_files - 1
                if left_bytes < 0 or left_files < 0:
                    raise SandboxError(
                        f"workspace {folder}: has more than {limits.disk_mib} MiB (disk_mib) or "
                        f"{limits.max_files} files (max_files)"
                    )
                if member.isfile():
                    with open(path, "rb") as file:
                        tar.addfile(member, file)
                else:
                    tar.addfile(member)
    except BaseException:
        archive.close()
        raise
    archive.seek(0)
    return archive


def _below(folder: Path) -> list[str]:
    found = []
    for parent, folders, files in os.walk(folder):
        found += [os.path.join(parent, name) for name in (*folders, *files)]
    return sorted(found)


def python_program() -> str:
    """Return the source of the program that a Python session runs."""
    return resources.files("forgeasync.isolation.inside").joinpath("interpreter.py").read_text()


class Session(ABC):
    """Base class of shell and Python sessions: allows one run at a time and stores why the session ended."""

    program: ClassVar[str]
    """What the session runs, for error messages."""

    def __init__(
        self,
        connection: Connection,
        channel: CallChannel,
        *,
        output_bytes: int,
        after_kill: Callable[[], Awaitable[None]],
    ) -> None:
        """``after_kill`` cleans up after a run that was killed or cancelled."""
        self._connection = connection
        self._channel = channel
        self._output_bytes = output_bytes
        self._after_kill = after_kill
        self._one_run = asyncio.Lock()
        self._why_ended: str | None = None

    async def start(self) -> None:
        """Wait until the session's process runs; raises SandboxError if it does not start."""
        result = await self.run("", timeout_s=START_LIMIT_S)
        if result.session_ended:
            raise SandboxError(f"the sandbox could not start {self.program}: {result.stderr.strip()[-300:]}")

    @abstractmethod
    async def run(self, code: str, /, *, timeout_s: float) -> ShellResult | PythonResult:
        """Run a command or a piece of code."""

    async def _run(self, nonce: bytes, piece: bytes, *, timeout_s: float) -> Ending:
        async with self._one_run:
            if self._why_ended is not None:
                raise SessionEnded(f"the session has ended: {self._why_ended}; start another")
            # This holds until the result is known, since a cancelled run leaves an unusable session.
            self._why_ended = "a run was cancelled"
            request = {"input": piece, "nonce": nonce, "timeout_s": timeout_s}
            ending: Ending | None = None
            try:
                await self._channel.send_object(request | {"output_bytes": self._output_bytes})
                ending = await receive_ending(self._connection, self._channel, timeout_s=timeout_s)
                self._why_ended = _why_ended(ending)
                return ending
            finally:
                if self._why_ended is not None:
                    self._channel.close()
                if ending is None or ending.killed_by is not None:
                    await self._after_kill()

    async def close(self) -> None:
        """Kill the session's process and all processes that it started."""
        if self._why_ended is None:
            self._why_ended = "it was closed"
        self._channel.close()


def _why_ended(ending: Ending) -> str | None:
    """Return why a session cannot be used after a run; None if it can."""
    if ending.killed_by is not None:
        return f"its process was killed ({ending.killed_by})"
    return None if ending.goes_on else f"its process has ended with exit code {ending.exit_code}"


class ShellSession(Session):
    """Shell session in a sandbox."""

    program = "a shell"
    _prepare = "exec 8>&2 9>&1\n"
    """Commands before the first run: copy the output streams to descriptors for marks, which commands do not
    inherit."""

    async def run(self, command: str, *, timeout_s: float) -> ShellResult:
        """Run a command; see ``Shell``."""
        nonce = secrets.token_hex(wire.NONCE_CHARACTERS // 2)
        # "command" keeps the shell alive after a syntax error in the command. No braces around it: after such
        # an error, bash 5.2 does not recognize them in the next line. Standard input is /dev/null, so the
        # command cannot consume the shell's input.
        piece = (
            f"command eval {shlex.quote(command)} </dev/null 8>&- 9>&-; __code=$?; "
            f"printf %s {nonce} >&8; printf %s%08x%s {nonce} ${{#__code}} $__code >&9\n"
        )
        prepare, self._prepare = self._prepare, ""
        ending = await self._run(nonce.encode(), (prepare + piece).encode(), timeout_s=timeout_s)
        return ShellResult(
            exit_code=_exit_code(ending.report) if ending.goes_on else ending.exit_code,
            session_ended=not ending.goes_on,
            **ending.outcome(),
        )


def _exit_code(report: bytes) -> int:
    if not (report.isdigit() and len(report) <= 3):
        raise SandboxError(f"the shell reports {report[:20]!r} as an exit code")
    return int(report)


class InterpreterSession(Session):
    """Python session in a sandbox."""

    program = "Python"

    async def run(self, code: str, *, timeout_s: float) -> PythonResult:
        """Run code; see ``PythonSession``."""
        nonce = secrets.token_hex(wire.NONCE_CHARACTERS // 2).encode()
        body = code.encode("utf-8", "surrogatepass")
        # The report has two texts and must fit into one frame.
        cap = min(self._output_bytes, wire.MAX_PAYLOAD_BYTES // 8)
        header = b"%s %d %d\n" % (nonce, len(body), cap)
        ending = await self._run(nonce, header + body, timeout_s=timeout_s)
        value, traceback, num_cut = _read_report(ending.report)
        return PythonResult(
            value=value,
            traceback=traceback,
            num_report_bytes_cut=num_cut,
            session_ended=not ending.goes_on,
            exit_code=None if ending.goes_on else ending.exit_code,
            **ending.outcome(),
        )


def _read_report(report: bytes) -> tuple[str | None, str, int]:
    """Split a report into value, traceback and number of cut bytes; code in the sandbox can forge it."""
    if not report:
        return None, "", 0
    try:
        has_value, value_size, traceback_size, num_cut = wire.PYTHON_REPORT.unpack_from(report)
    except struct.error:
        raise SandboxError("the interpreter's report is too short") from None
    texts = report[wire.PYTHON_REPORT.size :]
    if len(texts) != value_size + traceback_size:
        raise SandboxError("the interpreter's report has another length than it says")
    value = text(texts[:value_size]) if has_value else None
    return value, text(texts[value_size:]), num_cut
