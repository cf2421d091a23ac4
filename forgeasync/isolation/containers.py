"""Boxes that are containers of Docker or Podman, driven by their command lines.

A supervisor of ours runs on the host and watches over one client process (``docker exec``) for every call: it
bounds the output and keeps the deadline. Killing a client leaves its command running in the container, so
after a killed call all processes of the container are killed too. Its files stay.
"""

import asyncio
import contextlib
import os
import secrets
import shutil
from collections.abc import AsyncIterator, Sequence

from forgeasync.config import Docker, Podman
from forgeasync.isolation.backend import SandboxClosed, SandboxUnavailable
from forgeasync.isolation.connection import START_LIMIT_S, Connection, Ending
from forgeasync.isolation.supervised import SupervisedBackend

_WORK = "/work"
_USER, _KEEPER, _OWNER = "65534:65534", "65533:65533", "0:0"
"""Users and groups of commands; of the processes that keep the container, which commands cannot kill; of its
folders. None of them has a capability."""
_KILL_LIMIT_S = 30.0
_SHM_SHARE = 8
"""/dev/shm gets disk_mib divided by this."""


def run_command(program: str, section: Docker | Podman, name: str) -> list[str]:
    """The client's command that starts the container of a box."""
    memory, disk = f"{section.memory_mib}m", f"{section.disk_mib}m"
    options = f"rw,exec,nosuid,nodev,size={disk},mode=1777"
    if isinstance(section, Docker):
        # Podman's command line has no such option.
        options += f",nr_inodes={section.max_files}"
    command = [program, "run", "--detach", "--rm", "--init", "--name", name, "--hostname", "box"]
    command += ["--network", "none", "--ipc", "private", "--read-only", "--user", _KEEPER]
    command += ["--cap-drop", "ALL", "--security-opt", "no-new-privileges"]
    command += ["--tmpfs", f"{_WORK}:{options}", "--tmpfs", f"/tmp:{options}"]
    command += ["--shm-size", f"{max(1, section.disk_mib // _SHM_SHARE)}m"]
    command += ["--memory", memory, "--memory-swap", memory, "--pids-limit", str(section.max_processes)]
    for limit, value in (
        ("core", 0),
        ("cpu", section.cpu_s),
        ("nofile", section.max_open_files),
        ("fsize", section.disk_mib * 2**20),
    ):
        command += ["--ulimit", f"{limit}={value}:{value}"]
    for source, target in section.mounts.items():
        command += ["--mount", f"type=bind,source={source},target={target},readonly"]
    for variable, setting in ({"HOME": "/tmp", "LANG": "C.UTF-8"} | section.env).items():
        command += ["--env", f"{variable}={setting}"]
    return [*command, "--workdir", _WORK, "--entrypoint", "sleep", section.image, "infinity"]


def exec_command(program: str, name: str, command: Sequence[str]) -> list[str]:
    """The client's command that runs a command in the container."""
    return [program, "exec", "--interactive", "--user", _USER, name, *command]


def open_command(program: str, name: str) -> list[str]:
    """The client's command that lets everybody write to the folders of a box.

    Engines give a new file system the mode of the image's folder below it, whatever mode was asked for.
    """
    return [program, "exec", "--user", _OWNER, name, "chmod", "1777", _WORK, "/tmp"]


def kill_command(program: str, name: str) -> list[str]:
    """The client's command that kills all processes of calls: every process of their user."""
    return [program, "exec", "--user", _USER, name, "sh", "-c", "kill -9 -1"]


def remove_command(program: str, name: str) -> list[str]:
    """The client's command that ends and removes the container."""
    return [program, "rm", "--force", "--volumes", name]


class ContainerBackend(SupervisedBackend):
    """A container."""

    def __init__(self, section: Docker | Podman) -> None:
        super().__init__(section)
        self._section = section
        self._name = f"forgeasync-{secrets.token_hex(8)}"
        self._may_exist = False

    @property
    def _program(self) -> str:
        program = self._section.program or shutil.which(self._section.kind)
        if program is None:
            raise SandboxUnavailable(
                f"there is no program {self._section.kind} in PATH: install it, or set sandbox.program"
            )
        return program

    @property
    def _folder(self) -> str:
        # Where the clients run; they take no files from there.
        return "/"

    @property
    def _shell(self) -> str:
        return "sh"

    def _settings(self) -> dict[str, object]:
        # The limits are the container's. A client is a program of the host with threads of its own.
        own = {"memory_bytes": 2**40, "max_processes": 2**20, "max_open_files": 2**16, "disk_bytes": 2**50}
        return super()._settings() | own

    def _environment(self) -> dict[str, str]:
        # Of the clients, which find their engine and its certificates by it; commands have the container's.
        return dict(os.environ)

    def _wrap(self, command: Sequence[str]) -> list[str]:
        return exec_command(self._program, self._name, command)

    async def _open(self) -> Connection:
        self._may_exist = True
        try:
            await self._run_client(
                run_command(self._program, self._section, self._name), limit_s=self._section.start_s
            )
            await self._run_client(open_command(self._program, self._name), limit_s=self._section.start_s)
            return await Connection.open(self._settings(), limit_s=START_LIMIT_S)
        except BaseException:
            # What went wrong first is told, also where the removal fails for the same reason.
            with contextlib.suppress(SandboxUnavailable):
                await self._remove()
            raise

    async def _call(
        self,
        command: Sequence[str],
        *,
        timeout_s: float,
        output_bytes: int,
        stdin: AsyncIterator[bytes] | None = None,
    ) -> Ending:
        ending = await super()._call(command, timeout_s=timeout_s, output_bytes=output_bytes, stdin=stdin)
        # Where there is no container, the client fails as a command would.
        if ending.exit_code != 0 and ending.stderr.startswith(b"Error"):
            try:
                await self._run_client(
                    exec_command(self._program, self._name, ["true"]), limit_s=self._section.start_s
                )
            except SandboxUnavailable as error:
                raise SandboxClosed(f"the container has ended: {error}") from error
        return ending

    async def _after_kill(self) -> None:
        try:
            await asyncio.shield(
                self._run_client(kill_command(self._program, self._name), limit_s=_KILL_LIMIT_S)
            )
        except SandboxUnavailable:
            # The container has ended, or has no room for the process that kills.
            with contextlib.suppress(SandboxUnavailable):
                await self.close()

    async def close(self) -> None:
        """End the container and the clients."""
        await super().close()
        await self._remove()

    async def _remove(self) -> None:
        if self._may_exist:
            self._may_exist = False
            await asyncio.shield(
                self._run_client(remove_command(self._program, self._name), limit_s=self._section.start_s)
            )

    async def _run_client(self, command: Sequence[str], *, limit_s: float) -> None:
        """Run the client for its effect; raises SandboxUnavailable with what it says if it fails."""
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                # Some errors are written to the one, some to the other.
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            raise SandboxUnavailable(f"{command[0]} could not be started: {error}") from error
        try:
            async with asyncio.timeout(limit_s):
                said, _ = await process.communicate()
        except TimeoutError:
            raise SandboxUnavailable(f"{' '.join(command[:2])} took longer than {limit_s} s") from None
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if process.returncode != 0:
            text = " ".join(said.decode(errors="replace").split()) or "no message"
            raise SandboxUnavailable(
                f"{' '.join(command[:2])} failed with exit code {process.returncode}: {text[:300]}"
            )
