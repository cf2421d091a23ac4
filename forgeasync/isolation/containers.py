"""Sandboxes that are Docker or Podman containers, controlled through the engine's command line.

A supervisor on the host runs one client process (``docker exec``) per call, limits its output and enforces
its deadline. Killing a client leaves its command running in the container, so after a killed call all
processes of calls in the container are killed too. The container's files stay.
"""

import asyncio
import contextlib
import os
import secrets
import shutil
from collections.abc import AsyncIterator, Sequence
from subprocess import DEVNULL, STDOUT

import anyio

from forgeasync.config import Docker, Podman
from forgeasync.isolation.backend import SandboxClosed, SandboxUnavailable
from forgeasync.isolation.connection import START_LIMIT_S, Connection, Ending
from forgeasync.isolation.supervised import SupervisedBackend

_WORK = "/work"
_USER, _KEEPER, _OWNER = "65534:65534", "65533:65533", "0:0"
"""User and group of commands; of the container's main process, which commands cannot kill; and of the
container's folders. None of them has capabilities."""
_KILL_LIMIT_S = 30.0
_SHM_SHARE = 8
"""Divisor of ``disk_mib`` that gives the size of /dev/shm."""


def run_command(program: str, section: Docker | Podman, name: str) -> list[str]:
    """Return the client command that starts the container of a sandbox."""
    memory, disk = f"{section.memory_mib}m", f"{section.disk_mib}m"
    options = f"rw,exec,nosuid,nodev,size={disk},mode=1777"
    if isinstance(section, Docker):
        # Podman's --tmpfs has no option nr_inodes.
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
    """Return the client command that runs ``command`` in the container."""
    return [program, "exec", "--interactive", "--user", _USER, name, *command]


def open_command(program: str, name: str) -> list[str]:
    """Return the client command that makes the folders of a sandbox writable for every user.

    This is needed because engines give a new tmpfs the mode of the image's folder below it and ignore the
    option ``mode``.
    """
    return [program, "exec", "--user", _OWNER, name, "chmod", "1777", _WORK, "/tmp"]


def kill_command(program: str, name: str) -> list[str]:
    """Return the client command that kills all processes of calls, which are all processes of their user."""
    return [program, "exec", "--user", _USER, name, "sh", "-c", "kill -9 -1"]


def remove_command(program: str, name: str) -> list[str]:
    """Return the client command that kills and removes the container."""
    return [program, "rm", "--force", "--volumes", name]


class ContainerBackend(SupervisedBackend):
    """Sandbox backend that isolates with a Docker or Podman container."""

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
        # Working directory of the clients on the host; they read no files from it.
        return "/"

    @property
    def _shell(self) -> str:
        return "sh"

    def _settings(self) -> dict[str, object]:
        # The container enforces the limits. A client is a host program with threads, so it gets none.
        own = {"memory_bytes": 2**40, "max_processes": 2**20, "max_open_files": 2**16, "disk_bytes": 2**50}
        return super()._settings() | own

    def _environment(self) -> dict[str, str]:
        # Environment of the clients, which use it to find the engine and its certificates. Commands have the
        # container's environment.
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
            # The first error is raised, even if the removal fails for the same reason.
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
        # If the container is gone, the client fails in a way that looks like a failed command.
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
        """End the clients and remove the container."""
        await super().close()
        await self._remove()

    async def _remove(self) -> None:
        if self._may_exist:
            self._may_exist = False
            await asyncio.shield(
                self._run_client(remove_command(self._program, self._name), limit_s=self._section.start_s)
            )

    async def _run_client(self, command: Sequence[str], *, limit_s: float) -> None:
        """Run a client command; raises SandboxUnavailable with the client's output if it fails."""
        what = " ".join(command[:2])
        try:
            with anyio.fail_after(limit_s):
                # Engines write some errors to stdout and some to stderr. A client that is late is killed.
                done = await anyio.run_process(
                    command, stdin=DEVNULL, stderr=STDOUT, check=False, start_new_session=True
                )
        except TimeoutError:
            raise SandboxUnavailable(f"{what} took longer than {limit_s} s") from None
        except OSError as error:
            raise SandboxUnavailable(f"{command[0]} could not be started: {error}") from error
        if done.returncode != 0:
            text = " ".join(done.stdout.decode(errors="replace").split()) or "no message"
            raise SandboxUnavailable(f"{what} failed with exit code {done.returncode}: {text[:300]}")
