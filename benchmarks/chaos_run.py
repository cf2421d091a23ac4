"""A run of ``apps.grpo`` with all processes that it starts: watched, killed at once, checked for
leftovers."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import psutil
from common import REPOSITORY

from forgeasync.files import SHARED_MEMORY
from forgeasync.observability import RunLock

LOOK_S = 0.05
"""Seconds between two calls of ``look``."""

TREE_S = 0.5
"""Seconds between two searches for new processes."""

END_S = 20.0
"""How long the processes and files of a run may outlive it."""

PREFIXES = ("forgeasync", "sem.")
"""Beginnings of the names of a run's files in shared memory."""
MARK = re.compile(r"[0-9a-f]{32}")
"""In such a name: the mark of the file's run."""


class Run:
    """The app on some configs, with everything that it starts."""

    def __init__(
        self,
        configs: Sequence[Path],
        overrides: Sequence[str],
        folder: Path,
        *,
        supervise: bool,
        environment: Mapping[str, str],
    ) -> None:
        """Start the run. A file beside its folder, which ends in ".out", gets its output."""
        self.folder = folder
        self._command = [sys.executable, "-m", "apps.grpo"]
        for config in configs:
            self._command += ["--config", str(config.resolve())]
        self._command += [f"run_dir={folder}", *overrides, *(["--supervise"] if supervise else [])]
        self._environment = os.environ | dict(environment)
        self._files_before = set(SHARED_MEMORY.iterdir())
        self._started: dict[tuple[int, float], psutil.Process] = {}
        self._marks: set[str] = set()
        self._process = self._start()

    def _start(self, *options: str) -> subprocess.Popen[bytes]:
        with self.folder.with_suffix(".out").open("ab") as file:
            # In a session of its own, so that Ctrl-C reaches this program alone, which then ends the run.
            return subprocess.Popen(
                [*self._command, *options],
                cwd=REPOSITORY,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def until_ended(self, look: Callable[[], None], *, limit_s: float | None) -> tuple[int, list[str]]:
        """Call ``look`` repeatedly until the run has ended, and kill it after ``limit_s``.

        Then wait for the end of all its processes, and kill those that remain. Returns the exit code, and the
        processes and files that remained.
        """
        begin_s = time.monotonic()
        searched_s = 0.0
        try:
            while self._process.poll() is None:
                if time.monotonic() - searched_s > TREE_S:
                    searched_s = time.monotonic()
                    self._search()
                look()
                time.sleep(LOOK_S)
                if limit_s is not None and time.monotonic() - begin_s > limit_s:
                    print(f"the run has not ended after {limit_s:g} s: it is killed", file=sys.stderr)
                    self._kill()
            end_s = time.monotonic() + END_S
            while (left := self._left()) and time.monotonic() < end_s:
                time.sleep(TREE_S)
            return self._process.wait(), left
        finally:
            self._kill()

    def _search(self) -> None:
        """Find new processes, and the mark of the run that has begun."""
        with contextlib.suppress(OSError):
            if (holder := RunLock.holder(self.folder / "run.lock")) is not None:
                self._marks.add(holder.mark)
        # It may end between the two calls, or one of its children: the next search finds the others.
        with contextlib.suppress(psutil.NoSuchProcess):
            for one in psutil.Process(self._process.pid).children(recursive=True):
                self._started.setdefault((one.pid, one.create_time()), one)

    def kill_everything(self) -> None:
        """Kill all processes at once, so that none notices the end of another. Then resume the run."""
        os.kill(self._process.pid, signal.SIGSTOP)
        self._search()
        living = [one for one in self._started.values() if _runs(one)]
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for one in living:
                with contextlib.suppress(psutil.NoSuchProcess):
                    one.send_signal(number)
        self._process.kill()
        self._process.wait()
        self._process = self._start("--resume", "latest")

    def _kill(self) -> None:
        if self._process.poll() is None:
            self._search()
            self._process.kill()
            self._process.wait()
        for one in self._started.values():
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()

    def _left(self) -> list[str]:
        processes = [f"process {one.pid}" for one in self._started.values() if _runs(one)]
        new, used = set(SHARED_MEMORY.iterdir()) - self._files_before, _used_paths()
        files = (str(file) for file in new if may_be_of(file, self._marks) and file.exists())
        return processes + sorted(file for file in files if file not in used)


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def may_be_of(file: Path, marks: Collection[str]) -> bool:
    """Whether a file in shared memory has the name of a run's file, and no mark of another run."""
    mark = MARK.search(file.name)
    return file.name.startswith(PREFIXES) and (mark is None or mark[0] in marks)


def _used_paths() -> str:
    """Return the paths that processes of this machine have open or mapped, as one text."""
    found = []
    for pid in psutil.pids():
        # It may have ended, or belong to another user.
        with contextlib.suppress(OSError):
            found += [os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir()]
            found.append(Path(f"/proc/{pid}/maps").read_text(errors="replace"))
    return "\n".join(found)
