"""Isolation layers that restrict a process before it reads hostile answers.

The layers, from the outside in:

- bubblewrap (``isolation/bubblewrap.py``), around the whole process: no network, read-only access to Python's
  own files and no others, no processes of the host, and a system call filter;
- namespaces, where bubblewrap does not work and the kernel allows them: no network, and no privileges;
- Landlock, where the kernel has it, for every answer: read-only access to Python's own files and no others,
  and no TCP. Numbers and layouts are those of linux/landlock.h
  (https://docs.kernel.org/userspace-api/landlock.html). Rights that the kernel's version of Landlock does not
  have are left out;
- resource limits of the kernel, for every answer: memory, CPU time, no new process or thread (for an
  unprivileged user), no writes to files;
- an audit hook of Python, for every answer: it allows only the events that verifiers need. This is the
  weakest layer. A hook cannot be removed, but it sees only the events that Python reports, and code in the
  interpreter can bypass it. With no other layer than the limits, a determined answer can reach files and the
  network.
"""

import ctypes
import os
import resource
import signal
import sys
from collections.abc import Callable, Iterable
from enum import StrEnum

_CLONE_NEWNET, _CLONE_NEWIPC, _CLONE_NEWUSER = 0x40000000, 0x08000000, 0x10000000
_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS = 1, 38
_MAX_OPEN_FILES = 64
_STATM = "/proc/self/statm"
_LIBRARIES = ("/usr/lib", "/usr/lib64", "/lib", "/lib64", "/etc/ld.so.cache")
"""Paths in which the dynamic linker finds libraries of Python modules that are imported late."""
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_GET_VERSION = 1
_RULE_PATH_BENEATH = 1
_READ_FILE, _READ_DIR = 1 << 2, 1 << 3
_NUM_FILE_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}
"""Number of file rights by Landlock version; 16 from version 5 on."""
_ALL_TCP = 0b11
_TCP_SINCE = 4
_ALL_SCOPES = 0b11
"""Scope flags that deny connections to abstract sockets of, and signals to, processes outside."""
_SCOPES_SINCE = 6

_ALLOWED_EVENTS = frozenset(
    {
        "array.__new__",
        "builtins.id",
        "import",
        "marshal.load",
        "marshal.loads",
        "sys._getframe",
        "sys.unraisablehook",
    }
)
_CODE_EVENTS = frozenset({"code.__new__", "compile", "exec"})
"""Events that are allowed and reported."""
_PATH_EVENTS = frozenset({"os.listdir", "os.scandir"})
"""Events of Python's search for modules; allowed, like reading files, below Python's own folders only."""
_FORBIDDEN_MODULES = frozenset(
    {"_ctypes", "_multiprocessing", "_posixshmem", "_posixsubprocess", "_socket", "_sqlite3", "mmap"}
)
"""Modules that can bypass the audit hook; an answer cannot import them unless they were imported before."""


class Layer(StrEnum):
    """Isolation layer that denies answers access to network and files."""

    BUBBLEWRAP = "bubblewrap"
    NAMESPACES = "namespaces"
    LANDLOCK = "Landlock"
    AUDIT_HOOK = "an audit hook"


_libc = ctypes.CDLL(None, use_errno=True)


def enter_isolation(*, in_bubblewrap: bool) -> tuple[Layer, ...]:
    """Isolate this process, which must have no threads yet; returns the layers that apply to answers."""
    layers = [Layer.BUBBLEWRAP] if in_bubblewrap else []
    if not in_bubblewrap and _libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNET | _CLONE_NEWIPC) == 0:
        layers.append(Layer.NAMESPACES)
    if landlock_version():
        layers.append(Layer.LANDLOCK)
    _give_up_privileges()
    return (*layers, Layer.AUDIT_HOOK)


def _give_up_privileges() -> None:
    """Deny new privileges to all programs that this process executes, and leave Ctrl-C to the parent."""
    if _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_NO_NEW_PRIVS)")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def read_only_roots() -> tuple[str, ...]:
    """Return the folders that Python reads its code from, each with a trailing slash."""
    folders = {sys.prefix, sys.base_prefix, *filter(os.path.isdir, sys.path)}
    return tuple(os.path.join(os.path.realpath(one), "") for one in folders) + tuple(
        os.path.join(os.path.abspath(one), "") for one in folders
    )


def lock_down(
    *, memory_bytes: int, cpu_limit_s: int, read_roots: tuple[str, ...], report: int
) -> Callable[[], int]:
    """Restrict this process, irrevocably, before it reads its first answer.

    ``memory_bytes`` is the address space that it may allocate in addition to the current one. It is killed
    after ``cpu_limit_s`` seconds of CPU time, and when its parent exits. The hook allows reading below
    ``read_roots`` and writes a byte to the descriptor ``report`` whenever Python compiles code or executes a
    code object other than by a function call. Returns a function that returns the address space in use, in
    bytes.
    """
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    statm = os.open(_STATM, os.O_RDONLY)
    for limit, value in (
        (resource.RLIMIT_AS, address_space_bytes() + memory_bytes),
        (resource.RLIMIT_CPU, cpu_limit_s),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NOFILE, _MAX_OPEN_FILES),
        (resource.RLIMIT_NPROC, 0),
    ):
        _, most = resource.getrlimit(limit)
        value = value if most == resource.RLIM_INFINITY else min(value, most)
        resource.setrlimit(limit, (value, value))
    if landlock_version():
        _restrict_to_reading((*read_roots, *_LIBRARIES))
    sys.addaudithook(_audit_hook(read_roots, report))
    page_bytes = resource.getpagesize()
    return lambda: int(os.pread(statm, 64, 0).split()[0]) * page_bytes


def address_space_bytes() -> int:
    """Return the address space of this process in bytes, as RLIMIT_AS counts it."""
    with open(_STATM, encoding="ascii") as statm:
        return int(statm.read().split()[0]) * resource.getpagesize()


def _audit_hook(read_roots: tuple[str, ...], report: int) -> Callable[[str, tuple[object, ...]], None]:
    # The hook uses local names only, because an answer may replace attributes of modules and builtins.
    allowed, path_events, modules, writing = _ALLOWED_EVENTS, _PATH_EVENTS, _FORBIDDEN_MODULES, _WRITING
    is_a, text, number, decode, denied = isinstance, str, int, os.fsdecode, PermissionError
    buffer, write, runs_code = bytes, os.write, _CODE_EVENTS

    # The ignores below are needed because mypy narrows types by isinstance, but not by its alias is_a.
    def is_readable(path: object) -> bool:
        if is_a(path, buffer):
            path = decode(path)  # type: ignore[arg-type]
        # Paths of Python's own files have no "..". The added slash lets the folders themselves be listed.
        return is_a(path, text) and "/../" not in path and f"{path}/".startswith(read_roots)  # type: ignore[operator]

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        if event in runs_code:
            write(report, b"!")
            return
        if event in allowed:
            if event == "import" and arguments[0] in modules:
                raise denied("an answer may not import this")
            return
        if event == "open":
            path, _, flags = arguments
            if is_a(flags, number) and not flags & writing and is_readable(path):  # type: ignore[operator]
                return
        elif event in path_events and is_readable(arguments[0]):
            return
        raise denied("an answer may not do this")

    return hook


class _Ruleset(ctypes.Structure):
    _fields_ = [
        ("file_rights", ctypes.c_uint64),
        ("tcp_rights", ctypes.c_uint64),
        ("scopes", ctypes.c_uint64),
    ]


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = [("allowed", ctypes.c_uint64), ("parent", ctypes.c_int32)]


def landlock_version() -> int:
    """Return the kernel's Landlock version; 0 if the kernel lacks Landlock or has it disabled."""
    return max(0, _libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(_GET_VERSION)))


def _restrict_to_reading(paths: Iterable[str]) -> None:
    """Restrict this process and its children, irrevocably, to reading files below ``paths``.

    Denies all other file access. TCP connections, and signals to processes outside, are denied if the
    kernel's Landlock version supports that. Requires that ``no_new_privs`` is set and ``landlock_version`` is
    not 0. Raises OSError if the kernel refuses.
    """
    version = landlock_version()
    ruleset = _Ruleset(
        file_rights=(1 << _NUM_FILE_RIGHTS.get(version, 16)) - 1,
        tcp_rights=_ALL_TCP if version >= _TCP_SINCE else 0,
        scopes=_ALL_SCOPES if version >= _SCOPES_SINCE else 0,
    )
    # Older kernels accept the newer fields as long as they are zero.
    size = ctypes.c_size_t(ctypes.sizeof(ruleset))
    rules = _checked(_libc.syscall(_CREATE_RULESET, ctypes.byref(ruleset), size, ctypes.c_uint32(0)))
    try:
        for path in paths:
            _allow_reading(rules, path)
        _checked(_libc.syscall(_RESTRICT_SELF, rules, ctypes.c_uint32(0)))
    finally:
        os.close(rules)


def _allow_reading(rules: int, path: str) -> None:
    try:
        parent = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        allowed = _READ_FILE | (_READ_DIR if os.path.isdir(path) else 0)
        rule = _PathBeneath(allowed=allowed, parent=parent)
        flags = ctypes.c_uint32(0)
        _checked(_libc.syscall(_ADD_RULE, rules, _RULE_PATH_BENEATH, ctypes.byref(rule), flags))
    finally:
        os.close(parent)


def _checked(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"Landlock: {os.strerror(number)}")
    return result
