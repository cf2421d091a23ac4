"""A backend whose calls a supervisor of ours watches over; where that runs isolates them."""

import asyncio
from abc import abstractmethod
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import BinaryIO

from forgeasync.config import SandboxLimits
from forgeasync.environments.sandboxes.backend import PythonSession, SandboxBackend, Shell
from forgeasync.environments.sandboxes.connection import CallChannel, Connection, in_thread
from forgeasync.environments.sandboxes.endings import Ending, receive_ending, text
from forgeasync.environments.sandboxes.inside import wire
from forgeasync.environments.sandboxes.results import (
    ExecResult,
    FileTooLarge,
    SandboxClosed,
    SandboxError,
)
from forgeasync.environments.sandboxes.sessions import (
    InterpreterSession,
    ShellSession,
    python_program,
)
from forgeasync.environments.sandboxes.workspace import pack_workspace

START_LIMIT_S = 30.0
FILE_LIMIT_S = 60.0
"""Wall time for reading or writing one file, or the workspace."""

_ABSENT, _NO_FILE = 44, 45
_READ = f'[ -e "$1" ] || exit {_ABSENT}; [ -f "$1" ] || exit {_NO_FILE}; exec cat -- "$1"'
_WRITE = 'mkdir -p -- "$(dirname -- "$1")" && exec cat > "$1"'
_UNPACK = "exec tar -xf - --no-same-owner"

MIB, KIB = 2**20, 2**10


class SupervisedBackend(SandboxBackend):
    """Runs calls by a supervisor. Derived classes say where that is started, and with which settings."""

    def __init__(self, limits: SandboxLimits) -> None:
        self._limits = limits
        self._connection: Connection | None = None
        self._output_bytes = limits.output_kib * KIB

    def _settings(self) -> dict[str, object]:
        """Settings of the supervisor that all backends share."""
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
        """Start the supervisor."""

    @abstractmethod
    def _environment(self) -> dict[str, str]:
        """All environment variables of commands."""

    @property
    @abstractmethod
    def _folder(self) -> str:
        """The workspace, as the supervisor sees it."""

    @property
    @abstractmethod
    def _shell(self) -> str:
        """The program of shell sessions."""

    def _wrap(self, command: Sequence[str]) -> list[str]:
        """The command as the supervisor starts it."""
        return list(command)

    async def _after_kill(self) -> None:
        """What remains to be ended after a call was killed."""

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

    async def _unpack(self, archive: BinaryIO) -> None:
        ending = await self._call(
            ["sh", "-c", _UNPACK],
            timeout_s=FILE_LIMIT_S,
            output_bytes=wire.CHUNK_BYTES,
            stdin=_chunks_of(archive),
        )
        _raise_if_failed(ending, "the workspace could not be unpacked")

    async def exec(self, command: list[str], *, timeout_s: float) -> ExecResult:
        ending = await self._call(command, timeout_s=timeout_s, output_bytes=self._output_bytes)
        return ExecResult(
            exit_code=ending.exit_code,
            stdout=text(ending.stdout),
            stderr=text(ending.stderr),
            timed_out=ending.timed_out,
            num_stdout_bytes_cut=ending.num_stdout_bytes_cut,
            num_stderr_bytes_cut=ending.num_stderr_bytes_cut,
            duration_s=ending.duration_s,
            killed_by=ending.killed_by,
        )

    async def read(self, path: str, *, max_bytes: int) -> bytes:
        ending = await self._call(
            ["sh", "-c", _READ, "sh", path], timeout_s=FILE_LIMIT_S, output_bytes=max_bytes
        )
        if ending.exit_code == _ABSENT:
            raise FileNotFoundError(f"{path}: there is no such file in the box")
        if ending.exit_code == _NO_FILE:
            raise SandboxError(f"{path}: is a folder, a pipe or a device in the box, not a file")
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
        session = ShellSession(*await self._open_session([self._shell]), output_bytes=self._output_bytes)
        await session.start()
        return session

    async def python(self) -> PythonSession:
        command = ["python3", "-u", "-c", python_program()]
        session = InterpreterSession(*await self._open_session(command), output_bytes=self._output_bytes)
        await session.start()
        return session

    async def _open_session(self, command: Sequence[str]) -> tuple[Connection, CallChannel]:
        connection = self._require_connection()
        channel = await connection.call()
        await channel.send_object(self._request(command) | {"session": True})
        return connection, channel

    async def close(self) -> None:
        if self._connection is not None:
            await self._connection.close()

    def _require_connection(self) -> Connection:
        if self._connection is None or self._connection.has_ended:
            raise SandboxClosed("the box has ended")
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


async def _feed(channel: CallChannel, stdin: AsyncIterator[bytes] | None) -> None:
    """Send a command's standard input and its end."""
    if stdin is not None:
        async for part in stdin:
            await channel.send(wire.STDIN, part)
    await channel.send(wire.STDIN, b"")


async def _parts_of(data: bytes) -> AsyncIterator[bytes]:
    for begin in range(0, len(data), wire.CHUNK_BYTES):
        yield data[begin : begin + wire.CHUNK_BYTES]


async def _chunks_of(file: BinaryIO) -> AsyncIterator[bytes]:
    while part := await in_thread(file.read, wire.CHUNK_BYTES):
        yield part


def _raise_if_failed(ending: Ending, what: str) -> None:
    if ending.killed_by is not None:
        raise SandboxError(f"{what}: its command was killed ({ending.killed_by})")
    if ending.exit_code != 0:
        lines = text(ending.stderr).strip().splitlines() or [f"exit code {ending.exit_code}"]
        raise SandboxError(f"{what}: {lines[-1][:300]}")
