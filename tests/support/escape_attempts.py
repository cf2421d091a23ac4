"""Ways out of a box: each attempt is Python code that runs in one and prints ESCAPED if it got somewhere.

``python -m tests.support.escape_attempts KIND`` tries all of them and prints what each has printed as JSON.
"""

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from forgeasync.config import Bubblewrap, SandboxSection, UnsafeSubprocess
from forgeasync.isolation import (
    ContainedProcess,
    Sandbox,
    find_bubblewrap,
    python_command,
    python_environment,
)

ESCAPED = "ESCAPED"

_COMMON = """
import ctypes, errno, json, os, socket, stat, sys
facts = json.loads(sys.argv[1])
libc = ctypes.CDLL(None, use_errno=True)
def escaped(what=""):
    print("ESCAPED", what)
def call(number, *arguments):
    words = [ctypes.c_ulong(one) if isinstance(one, int) else one for one in arguments]
    ctypes.set_errno(0)
    result = libc.syscall(ctypes.c_long(number), *words, *[ctypes.c_ulong(0)] * (6 - len(words)))
    return result, ctypes.get_errno()
def reaches(number, *arguments):
    "Whether a system call gets past the filter to the kernel."
    result, error = call(number, *arguments)
    if error not in (errno.EPERM, errno.ENOSYS):
        escaped(f"call {number}: {result}, {errno.errorcode.get(error)}")
def connects(family, address):
    try:
        with socket.socket(family) as sock:
            sock.settimeout(2)
            sock.connect(address)
            escaped(f"connected to {address}")
    except OSError as error:
        print(error)
def reads(path):
    try:
        with open(path, "rb") as file:
            return file.read(1 << 20)
    except OSError as error:
        print(path, error)
        return b""
def grants(function, *arguments):
    try:
        function(*arguments)
        escaped(f"{function.__name__}{arguments}")
    except OSError as error:
        print(error)
"""


@dataclass(frozen=True, slots=True)
class Attempt:
    """One way out."""

    name: str
    code: str
    works_unsafe: bool
    """Whether plain processes of the same user succeed with it; False also where that would do harm."""


_WORKING_UNSAFE = {
    "loopback": "connects(socket.AF_INET, ('127.0.0.1', facts['port']))",
    "network_devices": """
devices = [line.split(':')[0].strip() for line in open('/proc/net/dev') if ':' in line]
if set(devices) - {'lo'}: escaped(devices)
""",
    "abstract_socket": "connects(socket.AF_UNIX, chr(0) + facts['abstract'])",
    "socket_file": "connects(socket.AF_UNIX, facts['socket_file'])",
    "netlink": "grants(socket.socket, 16, 3, 0)",
    "host_processes": """
for pid in filter(str.isdigit, os.listdir('/proc')):
    line = reads(f'/proc/{pid}/cmdline').replace(sys.argv[1].encode(), b'')
    if facts['marker'].encode() in line: escaped(pid)
""",
    "host_environment": """
secret = facts['secret_parts'][0] + facts['secret_parts'][1]
for pid in filter(str.isdigit, os.listdir('/proc')):
    if secret.encode() in reads(f'/proc/{pid}/environ'): escaped(pid)
if secret in str(dict(os.environ)): escaped('own')
""",
    "host_file": "if reads(facts['file']): escaped()",
    "host_file_by_parent": "if reads('/proc/self/cwd/../..' + facts['file']): escaped()",
    "accounts": "if reads('/etc/shadow') or b'nologin' in reads('/etc/passwd'): escaped()",
    "host_folder": "grants(open, facts['folder'] + '/written', 'w')",
    "sysfs": "if os.path.exists('/sys/kernel'): escaped()",
    "devices": """
known = {'core', 'fd', 'full', 'null', 'ptmx', 'pts', 'random', 'shm', 'stderr', 'stdin',
         'stdout', 'tty', 'urandom', 'zero', 'console'}
if more := set(os.listdir('/dev')) - known: escaped(more)
""",
    "signals": "grants(os.kill, facts['victim'], 0)",
    "ptrace": "reaches(101, 0)",
    "memory_of_others": "reaches(310, os.getppid(), 0, 0, 0, 0)",
    "first_process_is_filtered": "if b'Seccomp:\\t2' not in reads('/proc/1/status'): escaped()",
    "keyrings": """
reaches(248, b'user', b'name', b'text', 4, 2**64 - 3)
reaches(250, 0, 2**64 - 3, 1)
""",
    "unshare": """
for bit in (0x10000000, 0x20000, 0x40000000, 0x20000000, 0x08000000, 0x04000000): reaches(272, bit)
""",
    "clone_with_namespaces": """
for bit in (0x10000000, 0x20000, 0x40000000, 0x20000000, 0x08000000, 0x04000000):
    result, error = call(56, bit | 17, 0)
    if result == 0: os._exit(0)
    if result > 0: escaped(hex(bit))
reaches(435, 0, 0)
""",
    "setns": "reaches(308, os.open('/proc/self/ns/net', os.O_RDONLY), 0)",
    "io_uring": """
buffer = ctypes.create_string_buffer(256)
reaches(425, 1, buffer)
reaches(426)
""",
    "bpf": """
reaches(321, 0)
reaches(298, 0)
""",
    "userfaultfd": "reaches(323, 0)",
    "unmapped_memory": """
reaches(319, b'name', 0)
reaches(447, 0)
reaches(29, 0, 4096, 0o1600)
""",
    "becoming_root": """
for function in (os.setuid, os.seteuid, os.setgid): grants(function, 0) if os.getuid() else None
status = open('/proc/self/status').read()
for line in ('CapPrm', 'CapEff', 'CapBnd', 'CapInh', 'CapAmb'):
    if int(status.partition(line + ':')[2].split()[0], 16): escaped(line)
if 'NoNewPrivs:\\t1' not in status: escaped('privileges')
""",
    "setuid_program": """
import shutil, subprocess
shutil.copy('/usr/bin/id', 'id'); os.chmod('id', 0o6755)
flags = os.statvfs('.').f_flag, os.statvfs('/usr').f_flag
if not all(one & os.ST_NOSUID for one in flags): escaped(flags)
""",
    "terminal_input": """
master, slave = os.openpty()
import fcntl
try:
    fcntl.ioctl(slave, 0x5412, b'x'); escaped()
except OSError as error: print(error) if error.errno == errno.EPERM else escaped(error)
""",
}
"""Plain processes of the same user succeed with these."""

_OTHERS = {
    "packets": "grants(socket.socket, 17, 3, 0)",
    "vsock": "grants(socket.socket, 40, 1, 0)",
    "kernel_crypto": "grants(socket.socket, 38, 5, 0)",
    # An ordinary user may not follow this link to another's process.
    "host_file_by_root_of_process": "if reads('/proc/1/root' + facts['file']): escaped()",
    "system_folders": """
for path in ('/', '/usr', '/usr/bin', '/etc', '/dev', '/run', '/run/disk', '/root', '/proc'):
    if os.path.isdir(path): grants(open, path + '/written', 'w')
""",
    "kernel_settings": """
for path in ('/proc/sys/kernel/core_pattern', '/proc/sysrq-trigger', '/proc/sys/vm/drop_caches'):
    grants(open, path, 'w')
if reads('/proc/kcore') or reads('/dev/mem') or reads('/dev/kmsg'): escaped()
""",
    "own_device": """
grants(os.mknod, 'disk', stat.S_IFBLK | 0o600, os.makedev(254, 0))
grants(os.mknod, 'memory', stat.S_IFCHR | 0o600, os.makedev(1, 1))
""",
    "memory_files": "for pid in (2, os.getppid()): grants(open, f'/proc/{pid}/mem', 'r+b')",
    "mounts": "for number in (165, 166, 155, 161, 428, 429, 430, 431, 432, 433, 442): reaches(number)",
    "all_denied_calls": "for number in facts['denied']: reaches(number)",
    "calls_of_x32": "reaches(0x40000000 + 39)",
    "unknown_calls": """
reaches(467)
reaches(600)
""",
    "open_descriptors": """
for fd in set(map(int, os.listdir('/proc/self/fd'))) - {0, 1, 2}:
    try: escaped(os.readlink(f'/proc/self/fd/{fd}'))
    except OSError: pass
""",
}
"""They do not succeed with these, or it would do harm."""

ATTEMPTS = tuple(
    Attempt(name, code, works_unsafe)
    for attempts, works_unsafe in ((_WORKING_UNSAFE, True), (_OTHERS, False))
    for name, code in attempts.items()
)


@contextlib.contextmanager
def host_facts() -> Iterator[dict[str, object]]:
    """Things on the host that a box must not reach, and where they are."""
    from forgeasync.isolation.inside import seccomp

    secret = "host-only-" + os.urandom(8).hex()
    marker = "marker-" + os.urandom(8).hex()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.chmod(0o777)
        (folder / "secret.txt").write_text(secret)
        listener = stack.enter_context(socket.create_server(("0.0.0.0", 0)))
        abstract = stack.enter_context(socket.socket(socket.AF_UNIX))
        abstract.bind("\0" + marker)
        abstract.listen()
        named = stack.enter_context(socket.socket(socket.AF_UNIX))
        named.bind(str(folder / "socket"))
        named.listen()
        (folder / "socket").chmod(0o777)
        victim = subprocess.Popen(
            [sys.executable, "-c", "import time; time.sleep(600)", marker], env={"SECRET": secret}
        )
        try:
            yield {
                "port": listener.getsockname()[1],
                "abstract": marker,
                "marker": marker,
                "secret_parts": [secret[:12], secret[12:]],
                "socket_file": str(folder / "socket"),
                "file": str(folder / "secret.txt"),
                "folder": str(folder),
                "victim": victim.pid,
                "denied": [one[0] for one in seccomp.DENIED.values() if one[0] is not None],
            }
            assert victim.poll() is None, "a box has ended a process of the host"
        finally:
            victim.kill()
            victim.wait()


async def try_all(section: SandboxSection, *, harmless_only: bool) -> dict[str, str]:
    """Run the attempts in a box; what each has printed, by its name."""
    with host_facts() as facts:
        async with Sandbox(section) as box:

            async def run(attempt: Attempt) -> tuple[str, str]:
                code = _COMMON + attempt.code
                done = await box.exec(["python3", "-c", code, json.dumps(facts)], timeout_s=300)
                # An attempt that breaks proves nothing.
                problem = "" if done.exit_code == 0 else f"BROKEN {done.exit_code} {done.stderr}"
                return attempt.name, done.stdout + problem

            tried = [one for one in ATTEMPTS if one.works_unsafe or not harmless_only]
            found = dict([await run(one) for one in tried])
        if Path(str(facts["folder"]), "written").exists():
            found["host_folder"] += ESCAPED
    return found


_ATTEMPT = """
import contextlib, io, json, sys
request = json.loads(sys.stdin.readline())
sys.argv[1:] = [json.dumps(request["facts"])]
said = io.StringIO()
try:
    with contextlib.redirect_stdout(said):
        exec(request["code"], {"__name__": "__main__"})
except BaseException as error:
    print(f"BROKEN {type(error).__name__}: {error}", file=said)
print(json.dumps({"said": said.getvalue()}), flush=True)
"""


def try_all_as_verifiers() -> dict[str, str]:
    """Run the attempts where answers are verified, each in a process of its own, without the inner layers."""
    found = {}
    with host_facts() as facts:
        for attempt in ATTEMPTS:
            process = ContainedProcess(
                python_command(["-c", _ATTEMPT]),
                env=python_environment(),
                bubblewrap=find_bubblewrap().path,
            )
            request = {"code": _COMMON + attempt.code, "facts": facts}
            found[attempt.name] = process.ask(request, limit_s=300.0)["said"]
            process.stop()
        if Path(str(facts["folder"]), "written").exists():
            found["host_folder"] += ESCAPED
    return found


def sections() -> dict[str, SandboxSection]:
    return {"bubblewrap": Bubblewrap(), "unsafe": UnsafeSubprocess()}


if __name__ == "__main__":
    kind = sys.argv[1]
    if kind == "verifiers":
        print(json.dumps(try_all_as_verifiers()))
    else:
        print(json.dumps(asyncio.run(try_all(sections()[kind], harmless_only=kind == "unsafe"))))
