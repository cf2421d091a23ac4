"""Sets up a sandbox inside bubblewrap's namespaces: file systems, user, privileges and system call filter.

This runs once in the supervisor, before any code of the sandbox. Dropped privileges cannot be regained.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import resource

from . import seccomp

TYPE_CHECKING = False  # typing itself takes 13 ms to import
if TYPE_CHECKING:
    from typing import Any

RESERVED_PROCESSES = 16
"""Number of processes beyond ``max_processes`` that is reserved for the supervisor and the watchers."""

_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_REMOUNT, _MS_BIND = 1, 2, 4, 32, 4096
_MNT_DETACH = 2
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_NAME, _PR_SET_SECCOMP = 1, 4, 15, 22
_PR_CAPBSET_READ, _PR_CAPBSET_DROP = 23, 24
_PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS, _PR_CAP_AMBIENT = 36, 38, 47
_PR_CAP_AMBIENT_CLEAR_ALL = 4
_SECCOMP_MODE_FILTER = 2
_CAPABILITY_VERSION_3 = 0x20080522
_NUM_CAPABILITIES = 64
_SIGKILL = 9
_DISK = "/run/disk"
_JOINED = ("cgroup", "ipc", "uts", "net", "pid", "mnt")
"""Namespaces to join, in order. The mount namespace comes last, because it replaces /proc."""
_NS_GET_USERNS = 0xB701
"""``ioctl`` request of linux/nsfs.h that returns the user namespace that owns a namespace."""

_libc = ctypes.CDLL(None, use_errno=True)


class _FilterProgram(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p)]


def join(holder: int) -> int | None:
    """Join the namespaces of ``holder``, the process id of the first process that bubblewrap has started.

    If bubblewrap has made a second user namespace, returns its descriptor, which is to be entered at the end.
    The first user namespace owns the mount namespace and so has the right to mount.
    """
    opened = {name: os.open(f"/proc/{holder}/ns/{name}", os.O_RDONLY | os.O_CLOEXEC) for name in _JOINED}
    user = os.open(f"/proc/{holder}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    owner = fcntl.ioctl(opened["mnt"], _NS_GET_USERNS)
    final_user = None
    if not _is_same(owner, "/proc/self/ns/user"):
        if not _is_same(owner, user):
            final_user = os.dup(user)
        _join(owner, "user")
    for name, fd in opened.items():
        _join(fd, name)
    for fd in (*opened.values(), user, owner):
        os.close(fd)
    return final_user


def _is_same(namespace: int, other: int | str) -> bool:
    return os.stat(namespace).st_ino == os.stat(other).st_ino


def _join(namespace: int, name: str) -> None:
    _checked(_libc.setns(namespace, 0), f"setns to the namespace {name}")


def enter(settings: dict[str, Any], final_user: int | None) -> None:
    """Set up the sandbox in this process, its future supervisor; raise OSError if the kernel refuses."""
    become_subreaper()
    if settings["isolated"]:
        _mount_writable_folders(settings)
        _write_system_files(settings)
        for folder in ("/dev", "/"):
            _mount(None, folder, None, _MS_REMOUNT | _MS_BIND | _MS_RDONLY | _MS_NOSUID | _MS_NODEV, None)
        if final_user is not None:
            _join(final_user, "user")
            os.close(final_user)
        _give_up_privileges(settings)
    os.chdir(settings["folder"])


def _mount_writable_folders(settings: dict[str, Any]) -> None:
    """Mount all writable folders from one tmpfs, so that they share one limit on bytes and files."""
    # In a user namespace, the sandbox's user is the current user under another id.
    uid, gid = (settings["uid"], settings["gid"]) if settings["change_user"] else (os.getuid(), os.getgid())
    options = f"size={settings['disk_bytes']},nr_inodes={settings['max_files'] + 4},mode=0755"
    _mount("box", _DISK, "tmpfs", _MS_NOSUID | _MS_NODEV, options)
    for name, target, mode in (
        ("work", settings["folder"], 0o700),
        ("tmp", "/tmp", 0o1777),
        ("shm", "/dev/shm", 0o1777),
    ):
        folder = f"{_DISK}/{name}"
        os.mkdir(folder)
        os.chmod(folder, mode)
        os.chown(folder, uid, gid)
        _mount(folder, target, None, _MS_BIND, None)
    _checked(_libc.umount2(_DISK.encode(), _MNT_DETACH), "umount2")


def _write_system_files(settings: dict[str, Any]) -> None:
    """Write files in /etc that name the users of the sandbox and the loopback address."""
    uid, gid = settings["uid"], settings["gid"]
    for name, text in (
        ("passwd", f"root:x:0:0::/:/bin/sh\nbox:x:{uid}:{gid}::/tmp:/bin/sh\n"),
        ("group", f"root:x:0:\nbox:x:{gid}:\n"),
        ("hosts", "127.0.0.1 localhost\n::1 localhost\n"),
        ("nsswitch.conf", "passwd: files\ngroup: files\nhosts: files\n"),
    ):
        with open(f"/etc/{name}", "w", encoding="ascii") as file:
            file.write(text)
        os.chmod(f"/etc/{name}", 0o644)


def _give_up_privileges(settings: dict[str, Any]) -> None:
    for capability in range(_NUM_CAPABILITIES):
        if _libc.prctl(_PR_CAPBSET_READ, capability, 0, 0, 0) < 0:
            break  # The kernel has no capabilities beyond this one.
        _prctl(_PR_CAPBSET_DROP, capability)
    _prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL)
    if settings["change_user"]:
        os.setgroups([])
        os.setresgid(settings["gid"], settings["gid"], settings["gid"])
        os.setresuid(settings["uid"], settings["uid"], settings["uid"])
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    _checked(_libc.capset(header, (ctypes.c_uint32 * 6)()), "capset")
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    # Processes of the sandbox have the same user and could otherwise read and write this process's memory.
    _prctl(_PR_SET_DUMPABLE, 0)
    instructions = seccomp.program(os.uname().machine)
    filtered = _FilterProgram(
        length=len(instructions) // seccomp.INSTRUCTION_BYTES, instructions=instructions
    )
    _prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.addressof(filtered))


def rename(name: str) -> None:
    """Change the name and command line of this process and its forks."""
    text = ctypes.create_string_buffer(name.encode())
    _prctl(_PR_SET_NAME, ctypes.addressof(text))
    with open("/proc/self/stat", "rb") as file:
        # arg_start and arg_end: fields 48 and 49 of proc_pid_stat(5). The list starts with field 3.
        fields = file.read().rpartition(b")")[2].split()
    begin, end = int(fields[45]), int(fields[46])
    ctypes.memset(begin, 0, end - begin)
    ctypes.memmove(begin, text, min(len(text), end - begin))


def become_subreaper() -> None:
    """Make this process a subreaper: orphaned descendants become its children."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def become_watcher() -> None:
    """Make this process the watcher of a call: a subreaper that is killed when the supervisor exits."""
    become_subreaper()
    _prctl(_PR_SET_PDEATHSIG, _SIGKILL)


def limit_resources(settings: dict[str, Any]) -> None:
    """Set the kernel's per-process limits on this process, which is about to execute a command."""
    memory, disk = settings["memory_bytes"], settings["disk_bytes"]
    for limit, value in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_CPU, settings["cpu_s"]),
        # Limits private writable memory. RLIMIT_AS would stop programs that only reserve address space.
        (resource.RLIMIT_DATA, memory),
        # An isolated sandbox has a tmpfs of limited size: a full disk is an error that programs can handle,
        # whereas exceeding RLIMIT_FSIZE kills them.
        (resource.RLIMIT_FSIZE, resource.RLIM_INFINITY if settings["isolated"] else disk),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
        (resource.RLIMIT_NOFILE, settings["max_open_files"]),
        (resource.RLIMIT_NPROC, settings["max_processes"]),
        (resource.RLIMIT_RTPRIO, 0),
        (resource.RLIMIT_SIGPENDING, settings["max_open_files"]),
    ):
        _, most = resource.getrlimit(limit)
        if most != resource.RLIM_INFINITY:
            value = most if value == resource.RLIM_INFINITY else min(value, most)
        resource.setrlimit(limit, (value, value))


def _mount(source: str | None, target: str, kind: str | None, flags: int, options: str | None) -> None:
    source_, kind_, options_ = (None if text is None else text.encode() for text in (source, kind, options))
    result = _libc.mount(source_, target.encode(), kind_, ctypes.c_ulong(flags), options_)
    _checked(result, f"mount of {target}")


def _prctl(option: int, value: int, more: int = 0) -> None:
    words = (ctypes.c_ulong(value), ctypes.c_ulong(more), ctypes.c_ulong(0), ctypes.c_ulong(0))
    _checked(_libc.prctl(option, *words), f"prctl {option}")


def _checked(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
