"""Plain processes of the host: no isolation, for machines that are a sandbox themselves."""

import os
import shutil
import sys
import tempfile

from forgeasync.config import UnsafeSubprocess
from forgeasync.environments.sandboxes.connection import Connection, in_thread
from forgeasync.environments.sandboxes.supervised import START_LIMIT_S, SupervisedBackend


class UnsafeBackend(SupervisedBackend):
    """Processes in a temporary folder, with deadlines and with the kernel's limits for each process."""

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
        # The same python3 as in other boxes comes first.
        path = os.pathsep.join([f"{sys.base_exec_prefix}/bin", os.environ.get("PATH", os.defpath)])
        own = {"PATH": path, "HOME": self._folder, "LANG": "C.UTF-8"}
        return own | self._section.env

    async def _open(self) -> Connection:
        self._made = await in_thread(tempfile.mkdtemp, prefix="forgeasync-unsafe-")
        return await Connection.open(self._settings(), holder=None, limit_s=START_LIMIT_S)

    async def close(self) -> None:
        """End its processes and delete the folder."""
        await super().close()
        if self._made is not None:
            # A command may have taken its own rights to a folder away, or still be deleting it.
            await in_thread(shutil.rmtree, self._made, ignore_errors=True)
