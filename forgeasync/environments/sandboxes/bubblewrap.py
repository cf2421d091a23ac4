"""Boxes of Linux namespaces, set up by bubblewrap and finished by our own supervisor (``inside/setup.py``).

As root, bubblewrap works without a user namespace, and the supervisor becomes a user that exists nowhere
else on the machine: root's own files stay closed to a box, and the kernel's limit on processes, which does
not bind root, binds it. As an ordinary user everything happens in a user namespace.
"""

import asyncio
import os
import random
import sys
from dataclasses import dataclass
from pathlib import Path

from forgeasync.config import Bubblewrap
from forgeasync.environments.sandboxes.bubblewrap_program import HOW_TO_GET, bubblewrap_programs
from forgeasync.environments.sandboxes.connection import Connection, in_thread
from forgeasync.environments.sandboxes.holder import Holder
from forgeasync.environments.sandboxes.results import SandboxUnavailable
from forgeasync.environments.sandboxes.supervised import START_LIMIT_S, SupervisedBackend

_WORK = "/work"
_BOX_ID = 1000
"""User and group in a box of an ordinary user."""
_FIRST_OWN_ID, _NUM_OWN_IDS = 2**30, 2**24
"""Where the machine maps all user ids, root's boxes take one from here: no account has them."""
_FIRST_SMALL_ID, _NUM_SMALL_IDS = 50_000, 10_000
"""Where it maps 2**16, as in many containers."""
_ROOT_NEEDS = (0, 1, 6, 7, 8, 12, 18, 21)
"""CAP_CHOWN, DAC_OVERRIDE, SETGID, SETUID, SETPCAP, NET_ADMIN, SYS_CHROOT and SYS_ADMIN of
linux/capability.h: what setting a box up takes without a user namespace."""

_SYSTEM_FOLDERS = ("bin", "lib", "lib32", "lib64", "sbin")
_SYSTEM_FILES = ("/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime")


@dataclass(frozen=True, slots=True, kw_only=True)
class BoxUser:
    """Who the processes of a box are."""

    uid: int
    gid: int
    change_user: bool
    """The supervisor changes to this user, as root can; otherwise a user namespace maps it to the run's."""


def find_program(section: Bubblewrap) -> str:
    """Return the path of ``bwrap``.

    Raises:
        SandboxUnavailable: there is none; says how to get it.
    """
    programs = bubblewrap_programs() if section.program is None else (section.program,)
    if programs and os.access(programs[0], os.X_OK):
        return programs[0]
    missing = (
        "bubblewrap is not installed" if section.program is None else f"there is no program {section.program}"
    )
    raise SandboxUnavailable(f"{missing}: {HOW_TO_GET}, or set sandbox.program to the path of bwrap")


def choose_user() -> BoxUser:
    """Say who the processes of the next box are; root's boxes have a user of their own each."""
    capabilities, highest = 0, 0
    if os.geteuid() == 0:
        with open("/proc/self/status", encoding="ascii") as status:
            capabilities = next(int(line.split()[1], 16) for line in status if line.startswith("CapEff:"))
        with open("/proc/self/uid_map", encoding="ascii") as ranges:
            highest = max(first + count for first, _, count in (map(int, line.split()) for line in ranges))
    can_change_user = all(capabilities >> one & 1 for one in _ROOT_NEEDS)
    for first, count in ((_FIRST_OWN_ID, _NUM_OWN_IDS), (_FIRST_SMALL_ID, _NUM_SMALL_IDS)):
        if can_change_user and highest >= first + count:
            own = first + random.SystemRandom().randrange(count)
            return BoxUser(uid=own, gid=own, change_user=True)
    return BoxUser(uid=_BOX_ID, gid=_BOX_ID, change_user=False)


def python_folders() -> list[str]:
    """Folders of the Python that runs this process, without the packages installed beside it."""
    executable = os.path.realpath(sys.executable)
    wanted = {sys.base_prefix, sys.base_exec_prefix, os.path.realpath(sys.base_prefix)}
    if not any(Path(executable).is_relative_to(one) for one in wanted):
        wanted.add(os.path.dirname(executable))
    # Outer folders first: what is bound later lies over what was bound before.
    return sorted(one for one in wanted if not Path(one).is_relative_to("/usr"))


def box_command(program: str, section: Bubblewrap, user: BoxUser) -> list[str]:
    """bubblewrap's part of the command: namespaces, and a root of what is needed, read-only."""
    command = [program, "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts"]
    command += ["--unshare-cgroup-try", "--hostname", "box", "--as-pid-1", "--die-with-parent"]
    command += ["--cap-drop", "ALL"]
    if not user.change_user:
        command += ["--unshare-user", "--uid", str(user.uid), "--gid", str(user.gid)]
    binds = [("/usr", "/usr"), *((folder, folder) for folder in python_folders())]
    links = []
    for folder in map("/{}".format, _SYSTEM_FOLDERS):
        if os.path.islink(folder):
            links += ["--symlink", os.readlink(folder), folder]
        elif os.path.isdir(folder):
            binds.append((folder, folder))
    binds += [(file, file) for file in _SYSTEM_FILES if os.path.exists(file)]
    binds += section.mounts.items()
    # Folders above that bubblewrap makes by itself would be closed to the box's user.
    above = {str(one) for _, target in binds for one in Path(target).parents if str(one) != "/"}
    for folder in (*sorted(above - {target for _, target in binds}), "/run/disk", _WORK, "/tmp"):
        command += ["--dir", folder]
    for source, target in binds:
        command += ["--ro-bind", source, target]
    return [*command, *links, "--proc", "/proc", "--dev", "/dev", "--chdir", "/", "--"]


class BubblewrapBackend(SupervisedBackend):
    """A box of namespaces."""

    def __init__(self, section: Bubblewrap) -> None:
        super().__init__(section)
        self._section = section

    @property
    def _folder(self) -> str:
        return _WORK

    @property
    def _shell(self) -> str:
        return "bash" if os.path.exists("/usr/bin/bash") else "sh"

    def _environment(self) -> dict[str, str]:
        folders = (f"{sys.base_exec_prefix}/bin", "/usr/local/bin", "/usr/bin", "/bin")
        return {
            "PATH": os.pathsep.join(dict.fromkeys(folders)),
            "HOME": "/tmp",
            "USER": "box",
            "LOGNAME": "box",
            "LANG": "C.UTF-8",
        } | self._section.env

    async def _open(self) -> Connection:
        user = choose_user()
        command = box_command(find_program(self._section), self._section, user)
        starting = asyncio.ensure_future(in_thread(Holder, command))
        try:
            holder = await asyncio.shield(starting)
        except asyncio.CancelledError:
            # The thread goes on; what it starts is ended at once.
            starting.add_done_callback(_end_unwanted)
            raise
        except OSError as error:
            raise SandboxUnavailable(str(error)) from error
        settings = self._settings() | {
            "isolated": True,
            "holder": holder.pid,
            "uid": user.uid,
            "gid": user.gid,
            "change_user": user.change_user,
        }
        return await Connection.open(settings, holder=holder, limit_s=START_LIMIT_S)


def _end_unwanted(starting: "asyncio.Future[Holder]") -> None:
    if not starting.cancelled() and starting.exception() is None:
        starting.result().close()
