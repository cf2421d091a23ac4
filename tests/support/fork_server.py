"""Processes that need not import anything: forks of a server that has imported it all before.

Importing torch, TorchTitan or vLLM takes nine seconds, longer than most tests of theirs take for all else.
Each fork runs one function and ends, so that no test finds what another one has left: no process group, no
cache, no seed. The server only imports. It must have a single thread, or forking it would not be safe.
"""

import atexit
import contextlib
import faulthandler
import gc
import importlib
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

SAFE_THREADS = {"jemalloc_bg_thd"}
"""pyarrow's allocator stops and starts its thread around a fork; any other could hold a lock just then."""


MAX_LAST_CHARS = 6000
"""Characters of a process's stderr that its failure repeats: one that dies of a signal says there why."""


class ProcessFailed(RuntimeError):
    """A process has raised or died; says which one, and how."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    """What the forks are to do, all of them the same but for their environment variables."""

    call: bytes
    """A pickled function and its arguments: the server itself never reads it."""
    environments: list[dict[str, str]]
    """One for each fork."""
    search_path: list[str]
    working_directory: str
    out: Path
    """Each fork writes its result into a file named by its index, and stderr into another one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Failed:
    """The first fork that has failed."""

    index: int
    message: str


class ForkServer:
    """Starts with the first call, and again after a call that was cut off."""

    def __init__(self, *modules: str) -> None:
        """Forks have imported ``modules``."""
        self._modules = modules
        self._process: multiprocessing.process.BaseProcess | None = None
        self._link: Connection | None = None
        # Before multiprocessing waits for the server, which ends when its link does.
        atexit.register(self._end)

    def run(
        self, function: Callable[..., Any], arguments: Sequence[object], *, environments: list[dict[str, str]]
    ) -> list[Any]:
        """The results of ``function(*arguments)``, called in as many forks as there are environments.

        Raises:
            ProcessFailed: one of the forks has raised or died; the others are ended.
        """
        with tempfile.TemporaryDirectory() as out:
            request = _Request(
                call=pickle.dumps((function, arguments)),
                environments=environments,
                search_path=sys.path,
                working_directory=os.getcwd(),
                out=Path(out),
            )
            try:
                with self._connected() as link:
                    link.send(request)
                    failed: _Failed | None = link.recv()
                if failed is not None:
                    # Another one may have been the reason and have ended a moment later.
                    raised = [file.read_text() for file in sorted(Path(out).glob("*.error"))]
                    died = [] if raised else [_stderr(request.out, failed.index)[-MAX_LAST_CHARS:]]
                    raise ProcessFailed("\n".join([failed.message, *raised, *died]))
            finally:
                for index in range(len(environments)):
                    sys.stderr.write(_stderr(request.out, index))
            return [pickle.loads(Path(out, str(index)).read_bytes()) for index in range(len(environments))]

    @contextlib.contextmanager
    def _connected(self) -> Iterator[Connection]:
        """A link to a living server; whatever goes wrong over it ends the server with all its forks."""
        if self._link is None:
            context = multiprocessing.get_context("spawn")
            self._link, there = context.Pipe()
            self._process = context.Process(target=_serve, args=(there, self._modules))
            self._process.start()
            there.close()
        try:
            yield self._link
        except BaseException:
            self._end()
            raise

    def _end(self) -> None:
        if self._link is None or self._process is None:
            return
        self._link.close()
        if self._process.is_alive():
            with contextlib.suppress(ProcessLookupError):
                # Not its group yet where it is only just starting.
                os.kill(self._process.pid, signal.SIGKILL)
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.join()
        self._link = self._process = None


def _serve(link: Connection, modules: Sequence[str]) -> None:
    os.setpgid(0, 0)
    before = dict(os.environ)
    # Else numpy would start threads as it is imported.
    os.environ["OMP_NUM_THREADS"] = "1"
    for module in modules:
        importlib.import_module(module)
    names = [Path(task, "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    threads = [name for name in names if name not in SAFE_THREADS]
    assert len(threads) == 1, f"importing {modules} has started threads: {threads}"
    # What importing sets for whoever imports, as forgeasync.generator does.
    set_by_imports = {name: value for name, value in os.environ.items() if before.get(name) != value}
    # Forks neither look at what was imported when they collect garbage nor copy its pages.
    gc.freeze()
    while True:
        try:
            request = link.recv()
        except EOFError:
            return
        link.send(_run_forks(request, set_by_imports, link))


def _run_forks(request: _Request, set_by_imports: dict[str, str], link: Connection) -> _Failed | None:
    """The first fork that failed; None if all have ended well."""
    context = multiprocessing.get_context("fork")
    forks = [
        context.Process(target=_fork, args=(request, set_by_imports | environment, index))
        for index, environment in enumerate(request.environments)
    ]
    for fork in forks:
        fork.start()
    running = {fork.sentinel: index for index, fork in enumerate(forks)}
    while running:
        for ended in wait([link, *running]):
            if ended is link:
                # Nothing is sent meanwhile: whoever asked is gone.
                os.killpg(0, signal.SIGKILL)
            index = running.pop(ended)
            forks[index].join()
            code = forks[index].exitcode
            if code != 0:
                for fork in forks:
                    fork.kill()
                    fork.join()
                how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
                return _Failed(index=index, message=f"process {index} of {len(forks)} {how}")
    return None


def _fork(request: _Request, environment: dict[str, str], index: int) -> None:
    stderr = os.open(_stderr_file(request.out, index), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(stderr, sys.stderr.fileno())
    # A process that dies of a signal shows where it was.
    faulthandler.enable()
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:] = request.search_path
    os.chdir(request.working_directory)
    try:
        function, arguments = pickle.loads(request.call)
        (request.out / str(index)).write_bytes(pickle.dumps(function(*arguments)))
    except BaseException:
        (request.out / f"{index}.error").write_text(traceback.format_exc())
        raise


def _stderr_file(out: Path, index: int) -> Path:
    return out / f"{index}.stderr"


def _stderr(out: Path, index: int) -> str:
    """What a fork has written to stderr so far."""
    file = _stderr_file(out, index)
    return file.read_text(errors="replace") if file.exists() else ""
