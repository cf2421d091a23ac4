"""Bridges and servers in the environments of Verifiers and OpenEnv, which ``make test-all`` makes."""

import contextlib
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from forgeasync.config import RemoteEnvironment
from tests.support.tiers import Starts, starts

REPOSITORY = Path(__file__).resolve().parents[3]
HERE = Path(__file__).resolve().parent

UP_S = 120.0
"""Time for a program to come up, also on a busy machine."""


@dataclass(kw_only=True)
class Program:
    """A program that listens at ``url``."""

    process: subprocess.Popen[bytes]
    log: IO[bytes]
    url: str = ""

    @property
    def said(self) -> str:
        """Everything that it has printed."""
        self.log.seek(0)
        return self.log.read().decode(errors="replace")

    def kill(self) -> None:
        """End it with all of its processes, at once."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, 9)
        self.process.wait()

    def section(self, **keys: object) -> RemoteEnvironment:
        """The section of a config for episodes that it runs."""
        return RemoteEnvironment.model_validate({"kind": "remote", "url": self.url} | keys)


def begin(package: str, *arguments: str, **variables: str) -> Program:
    """Start a program by the Python that has ``package``."""
    python = REPOSITORY / f".venv-{package}" / "bin" / "python"
    assert (python.parents[1] / "installed").exists(), (
        f".venv-{package} is missing, in which this test starts {package}: make .venv-{package}"
    )
    log = tempfile.TemporaryFile("a+b")
    process = subprocess.Popen(
        [str(python), *arguments],
        cwd=REPOSITORY,
        env={"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/tmp"), "HF_HUB_OFFLINE": "1"}
        | {"PYTHONPATH": str(HERE), "OMP_NUM_THREADS": "1"}
        | variables,
        stdout=log,
        stderr=log,
        start_new_session=True,
    )
    return Program(process=process, log=log)


@starts(Starts.PROCESSES)
@contextlib.contextmanager
def running(package: str, *arguments: str, **variables: str) -> Iterator[Program]:
    """A program that has said where it listens."""
    program = begin(package, *arguments, **variables)
    try:
        deadline = time.monotonic() + UP_S
        while "listening on " not in program.said:
            assert program.process.poll() is None, program.said[-2000:]
            assert time.monotonic() < deadline, "the program does not come up"
            time.sleep(0.05)
        program.url = program.said.partition("listening on ")[2].split()[0]
        yield program
    finally:
        program.kill()


def verifiers_bridge(**variables: str) -> contextlib.AbstractContextManager[Program]:
    """A bridge to the words that ``verifiers_words.py`` asks for."""
    config = str(HERE / "verifiers_words.toml")
    return running("verifiers", "examples/remote/verifiers_bridge.py", "0", config, **variables)


def openenv_games(port: int = 0) -> contextlib.AbstractContextManager[Program]:
    """A server of the environments of ``openenv_games.py``."""
    return running("openenv", str(HERE / "openenv_games.py"), str(port))


def openenv_options(games: Program, game: str, options: Sequence[str]) -> list[str]:
    """The command line of a bridge to one of the games."""
    return ["examples/remote/openenv_bridge.py", "0", "--url", f"{games.url}/{game}", *options]


def openenv_bridge(games: Program, game: str, *options: str) -> contextlib.AbstractContextManager[Program]:
    """A bridge to one of the games."""
    return running("openenv", *openenv_options(games, game, options))
