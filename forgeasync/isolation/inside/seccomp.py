"""System calls that a sandbox may not make, and the seccomp filter program that denies them.

The program is classic BPF over ``struct seccomp_data``
(https://docs.kernel.org/userspace-api/seccomp_filter.html). Numbers are those of
arch/x86/entry/syscalls/syscall_64.tbl and include/uapi/asm-generic/unistd.h of Linux 6.18. Calls that are
newer than the list fail with ENOSYS, as if the kernel did not have them.
"""

import struct

INSTRUCTION_BYTES = 8
_INSTRUCTION = struct.Struct("=HBBI")
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _ARGUMENT_0, _ARGUMENT_1 = 0, 4, 16, 24
"""Offsets in ``struct seccomp_data``. Arguments have 64 bits; the lower 32 come first."""
_ALLOW, _ERROR = 0x7FFF0000, 0x00050000
_EPERM, _ENOSYS, _EAFNOSUPPORT = 1, 38, 97

_NEWEST_CALL = 466
"""Number of ``removexattrat``, the newest call that this list covers."""

_NAMESPACES = 0x7E020000
"""Flags of ``clone`` that are denied: CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET."""
_FAMILIES = (1, 2, 10)
"""Address families that are allowed: AF_UNIX, AF_INET and AF_INET6, which the sandbox's network namespace
isolates. Others are not isolated (AF_VSOCK reaches the hypervisor) or expose much of the kernel (AF_ALG,
AF_NETLINK, AF_PACKET)."""
_TERMINAL_INPUT = (0x5412, 0x541C)
"""Requests of ``ioctl`` that are denied: TIOCSTI and TIOCLINUX insert input into a terminal."""
_PERSONALITIES = (0, 0xFFFFFFFF)
"""Arguments of ``personality`` that are allowed: PER_LINUX, and the query of the current value."""

_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

DENIED: dict[str, tuple[int | None, int | None]] = {
    # Other processes.
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "kcmp": (312, 272),
    "pidfd_getfd": (438, 438),
    "perf_event_open": (298, 241),
    # Keyrings belong to users, not to namespaces.
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    # Parts of the kernel with a long record of vulnerabilities.
    "bpf": (321, 280),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "modify_ldt": (154, None),
    # Memory that can exist without being mapped by a process, which the memory watch would not count.
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "shmat": (30, 196),
    "shmctl": (31, 195),
    "shmdt": (67, 197),
    "semget": (64, 190),
    "semop": (65, 193),
    "semctl": (66, 191),
    "semtimedop": (220, 192),
    "msgget": (68, 186),
    "msgsnd": (69, 189),
    "msgrcv": (70, 188),
    "msgctl": (71, 187),
    "mq_open": (240, 180),
    "mq_unlink": (241, 181),
    # File systems and namespaces. clone3 passes its flags in memory, which a filter cannot read; the C
    # library falls back to clone.
    "clone3": (435, 435),
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "statmount": (457, 457),
    "listmount": (458, 458),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "fanotify_init": (300, 262),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    # The machine.
    "reboot": (169, 142),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "create_module": (174, None),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "iopl": (172, None),
    "ioperm": (173, None),
    "acct": (163, 89),
    "syslog": (103, 116),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "adjtimex": (159, 171),
    "clock_adjtime": (305, 266),
    "vhangup": (153, 58),
    "uselib": (134, None),
    "sysfs": (139, None),
    "nfsservctl": (180, 42),
    "lookup_dcookie": (212, 18),
    "move_pages": (279, 239),
    "migrate_pages": (256, 238),
    "mbind": (237, 235),
    "set_mempolicy": (238, 237),
    "set_mempolicy_home_node": (450, 450),
}
"""Denied calls with their numbers on x86_64 and aarch64; None where the call does not exist. They fail with
EPERM, except those in ``_ABSENT``, for which programs have a fallback and which fail with ENOSYS."""

_ABSENT = frozenset({"clone3", "memfd_create", "memfd_secret"})

_CLONE, _IOCTL, _PERSONALITY = (56, 220), (16, 29), (135, 92)
_SOCKETS = ((41, 198), (53, 199))


def program(machine: str) -> bytes:
    """Return the filter's instructions for an architecture, named as in ``os.uname().machine``.

    Raises:
        OSError: there is no list of calls for this architecture.
    """
    if machine not in _ARCHITECTURES:
        raise OSError(f"no list of system calls for machines of type {machine}")
    column = list(_ARCHITECTURES).index(machine)
    code = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, _ARCHITECTURES[machine]),
        _fail(_ENOSYS),
        (_LOAD, 0, 0, _NUMBER),
        # This also denies the calls of x32, whose numbers start at 2**30.
        (_AT_LEAST, 0, 1, _NEWEST_CALL + 1),
        _fail(_ENOSYS),
    ]
    for name, numbers in DENIED.items():
        if (number := numbers[column]) is not None:
            code += [(_EQUAL, 0, 1, number), _fail(_ENOSYS if name in _ABSENT else _EPERM)]
    code += _by_argument(_CLONE[column], _ARGUMENT_0, [(_ANY_BIT, 0, 1, _NAMESPACES), _fail(_EPERM)])
    for numbers in _SOCKETS:
        code += _by_argument(numbers[column], _ARGUMENT_0, _only(_FAMILIES, _EAFNOSUPPORT))
    code += _by_argument(_PERSONALITY[column], _ARGUMENT_0, _only(_PERSONALITIES, _EPERM))
    denied_input = [part for one in _TERMINAL_INPUT for part in ((_EQUAL, 0, 1, one), _fail(_EPERM))]
    code += _by_argument(_IOCTL[column], _ARGUMENT_1, denied_input)
    code.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(_INSTRUCTION.pack(*one) for one in code)


def _fail(number: int) -> tuple[int, int, int, int]:
    return (_RETURN, 0, 0, _ERROR | number)


def _only(values: tuple[int, ...], error: int) -> list[tuple[int, int, int, int]]:
    """Return instructions that fail unless the loaded argument is one of ``values``."""
    checks = [(_EQUAL, len(values) - index, 0, value) for index, value in enumerate(values)]
    return [*checks, _fail(error)]


def _by_argument(
    number: int, offset: int, checks: list[tuple[int, int, int, int]]
) -> list[tuple[int, int, int, int]]:
    """Return instructions that run ``checks`` on one argument of a call and allow it if none fails."""
    body = [(_LOAD, 0, 0, offset), *checks, (_RETURN, 0, 0, _ALLOW)]
    return [(_EQUAL, 0, len(body), number), *body]
