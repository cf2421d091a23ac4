"""Servers of Verifiers and OpenEnv, each in an environment of its own that ``make test-all`` makes."""

import contextlib
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from tests.support.tiers import Starts, starts

REPOSITORY = Path(__file__).resolve().parents[3]
HERE = Path(__file__).resolve().parent

UP_S = 120.0
"""Time for a server to come up, also on a busy machine."""


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@dataclass(kw_only=True)
class Server:
    """A server that can be killed and started again at the same port."""

    name: str
    arguments: tuple[str, ...]
    port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None
    _log: IO[bytes] = field(default_factory=lambda: tempfile.TemporaryFile("a+b"))

    @property
    def log(self) -> str:
        """Everything that it has said, in all its lives."""
        self._log.seek(0)
        return self._log.read().decode(errors="replace")

    def start(self) -> None:
        """Start it and wait until it listens."""
        python = REPOSITORY / f".venv-{self.name}" / "bin" / "python"
        assert (python.parents[1] / "installed").exists(), (
            f".venv-{self.name} is missing, in which these tests start {self.name}: make .venv-{self.name}"
        )
        self.process = subprocess.Popen(
            [str(python), *self.arguments],
            cwd=HERE,
            env={"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/tmp"), "HF_HUB_OFFLINE": "1"}
            | {"PYTHONPATH": str(HERE), "PORT": str(self.port), "OMP_NUM_THREADS": "1"},
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
        )
        deadline = time.monotonic() + UP_S
        while True:
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", self.port)).close()
                return
            if self.process.poll() is not None:
                raise AssertionError(self.log[-2000:])
            assert time.monotonic() < deadline, "the server does not come up"
            time.sleep(0.05)

    def kill(self) -> None:
        """End it with all of its processes, at once."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, 9)
            self.process.wait()


@starts(Starts.PROCS)
@contextlib.contextmanager
def verifiers_server(*options: str) -> Iterator[Server]:
    """A server of the words that ``verifiers_words.py`` asks for."""
    server = Server(name="verifiers", arguments=("verifiers_words.py", *options))
    try:
        server.start()
        yield server
    finally:
        server.kill()


@starts(Starts.PROCS)
@contextlib.contextmanager
def openenv_server() -> Iterator[Server]:
    """A server of the environments of ``openenv_games.py``."""
    server = Server(name="openenv", arguments=("openenv_games.py",))
    try:
        server.start()
        yield server
    finally:
        server.kill()
