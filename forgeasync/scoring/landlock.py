"""Landlock: the kernel keeps a process, without any privilege, from files, TCP and signals to others.

Numbers and layouts are those of linux/landlock.h; see https://docs.kernel.org/userspace-api/landlock.html. A
kernel knows a version of it; what a later version added is left out on an earlier one.
"""

import ctypes
import os
from collections.abc import Iterable

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_GET_VERSION = 1
_RULE_PATH_BENEATH = 1
_READ_FILE, _READ_DIR = 1 << 2, 1 << 3
_NUM_FILE_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}
"""Number of rights on files by version; 16 from version 5 on."""
_ALL_TCP = 0b11
_TCP_SINCE = 4
_ALL_SCOPES = 0b11
"""Abstract sockets, and signals, of processes outside."""
_SCOPES_SINCE = 6

_libc = ctypes.CDLL(None, use_errno=True)


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
    """The version that this kernel has; 0 where it has none, or it is switched off."""
    return max(0, _libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(_GET_VERSION)))


def restrict_to_reading(paths: Iterable[str]) -> None:
    """From here on this process can read below ``paths``, and no other file; nor write, execute, connect or
    kill.

    For good, and for its children. ``no_new_privs`` is set, and ``landlock_version`` is not 0. Raises
    OSError where the kernel refuses.
    """
    version = landlock_version()
    ruleset = _Ruleset(
        file_rights=(1 << _NUM_FILE_RIGHTS.get(version, 16)) - 1,
        tcp_rights=_ALL_TCP if version >= _TCP_SINCE else 0,
        scopes=_ALL_SCOPES if version >= _SCOPES_SINCE else 0,
    )
    # Earlier kernels take later fields as long as they are zero.
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
