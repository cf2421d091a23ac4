"""The launcher's program: compiled here, sent to a Python without installed packages, started once.

All boxes of this process are started by one launcher, which ends with it.
"""

import functools
import marshal
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from importlib import resources

from forgeasync.environments.sandboxes.results import SandboxUnavailable

_MODULES = ("wire", "tree", "seccomp", "setup", "outbox", "session", "calls", "supervisor", "launcher")
"""In the order in which they import one another."""

_BOOT = """
import marshal, posix, sys
def read(size):
    data = b""
    while len(data) < size:
        part = posix.read(0, size - len(data))
        if not part:
            posix._exit(0)
        data += part
    return data
def module(name, code):
    made = sys.modules[name] = type(sys)(name)
    made.__package__ = "inside"
    exec(code, made.__dict__)
    return made
package = module("inside", "__path__ = []")
for name, code in marshal.loads(read(int.from_bytes(read(4), "little"))):
    setattr(package, name, module("inside." + name, code))
package.launcher.main()
"""


_HEADER_BYTES = 4
_CLOSED = (BrokenPipeError, ConnectionResetError, ConnectionRefusedError)


class Launcher:
    """A running launcher."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        kept = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
        with theirs:
            self._process = subprocess.Popen(
                [os.path.realpath(sys.executable), "-I", "-S", "-c", _BOOT],
                stdin=subprocess.PIPE,
                stdout=theirs,
                stderr=subprocess.DEVNULL,
                env={"PATH": os.defpath, "LANG": "C.UTF-8"} | kept,
                cwd="/",
                start_new_session=True,
            )
        program = compiled_program()
        assert self._process.stdin is not None
        with self._process.stdin as stdin:
            stdin.write(len(program).to_bytes(_HEADER_BYTES, "little") + program)

    def launch(self, settings: Mapping[str, object], control: socket.socket) -> bool:
        """Have a supervisor started, which gets ``control``; False if the launcher is gone."""
        try:
            socket.send_fds(self._socket, [marshal.dumps(dict(settings))], [control.fileno()])
        except _CLOSED:
            self._socket.close()
            self._process.wait()
            return False
        return True


_lock = threading.Lock()
_launchers: list[Launcher] = []


def _forget() -> None:
    # A launcher belongs to the process that has started it.
    global _lock
    _lock = threading.Lock()
    _launchers.clear()


os.register_at_fork(after_in_child=_forget)


def launch(settings: Mapping[str, object], control: socket.socket) -> None:
    """Start a supervisor with ``settings``; blocks, the first time for as long as Python takes to start."""
    with _lock:
        if not _launchers:
            _launchers.append(Launcher())
        if not _launchers[0].launch(settings, control):
            # It was killed: the next one serves.
            _launchers[0] = Launcher()
            if not _launchers[0].launch(settings, control):
                raise SandboxUnavailable("the launcher of sandboxes ends as soon as it is started")


@functools.cache
def compiled_program() -> bytes:
    """The modules of ``inside`` for the same version of Python."""
    folder = resources.files("forgeasync.environments.sandboxes.inside")
    sources = [(name, folder.joinpath(f"{name}.py").read_text(encoding="utf-8")) for name in _MODULES]
    return marshal.dumps([(name, compile(text, f"<{name}>", "exec")) for name, text in sources])
