"""Starts, watches, kills and restarts a run with all of its processes, and finds what it leaves behind."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
from common import REPOSITORY

LOOK_S = 0.05
"""Seconds between two checks of the run."""

TREE_S = 0.5
"""Seconds between two listings of processes."""

END_S = 20.0
"""Seconds for a run's processes to end after the run."""

SHARED_MEMORY = Path("/dev/shm")

PREFIXES = ("forgeasync", "sem.")
"""Prefixes of a run's files in shared memory, which other programs and tests use too."""
SEMAPHORE = re.compile(r"sem\.forgeasync-([0-9a-f]+)-")
"""Pattern of the names of semaphores, which contain their run's mark."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """Result of a run that has ended."""

    folder: Path
    exit_code: int
    wall_s: float
    left: list[str]
    """Processes and files that remain."""


class Watched:
    """A run with all of its processes; a context manager that ends them."""

    def __init__(
        self,
        command: Sequence[str],
        output: Path,
        run_lock: Path,
        *,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._files_before = set(SHARED_MEMORY.iterdir())
        self._started: dict[tuple[int, float], psutil.Process] = {}
        self._begin_s = time.monotonic()
        self._looked_s = 0.0
        self._output = output
        self._run_lock = run_lock
        self._marks: set[str] = set()
        """Marks of all starts of the run."""
        self._environment = os.environ | dict(environment or {})
        self._process = self._start(command)

    def _start(self, command: Sequence[str]) -> subprocess.Popen[bytes]:
        with self._output.open("ab") as file:
            # A session of its own: Ctrl-C reaches this program alone, which then ends the run.
            return subprocess.Popen(
                list(command),
                cwd=REPOSITORY,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def start_again(self, command: Sequence[str]) -> None:
        """Restart the run after it has ended."""
        self._process = self._start(command)

    def is_running(self) -> bool:
        """Update the list of processes; return whether the run is in progress."""
        if time.monotonic() - self._looked_s > TREE_S:
            self._looked_s = time.monotonic()
            self._look()
        return self._process.poll() is None

    def _look(self) -> None:
        self._marks |= marks_in(self._run_lock)
        try:
            root = psutil.Process(self._process.pid)
            for one in root.children(recursive=True):
                self._started.setdefault((one.pid, one.create_time()), one)
        except psutil.NoSuchProcess:
            # It ended between the two calls, or one of its children did: the next look finds the others.
            pass

    def kill_all_at_once(self) -> None:
        """Suspend and then kill the run with all of its processes, so that none sees another one die."""
        os.kill(self._process.pid, signal.SIGSTOP)
        self._look()
        living = [one for one in self._started.values() if _runs(one)]
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for one in living:
                with contextlib.suppress(psutil.NoSuchProcess):
                    one.send_signal(number)
        self._process.kill()
        self._process.wait()

    def ended(self, folder: Path) -> Ended:
        """Wait until all processes of the run have ended; kill those that remain and list them."""
        wall_s = time.monotonic() - self._begin_s
        end_s = time.monotonic() + END_S
        while (left := self._left()) and time.monotonic() < end_s:
            time.sleep(TREE_S)
        self.kill()
        return Ended(folder=folder, exit_code=self._process.wait(), wall_s=wall_s, left=left)

    def kill(self) -> None:
        """Kill the run and all of its processes."""
        if self._process.poll() is None:
            self._look()
            self._process.kill()
        for one in self._started.values():
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()

    def _left(self) -> list[str]:
        processes = [f"process {one.pid}" for one in self._started.values() if _runs(one)]
        # Of other runs on this machine somebody has them open.
        files = set(SHARED_MEMORY.iterdir()) - self._files_before
        return processes + sorted(
            str(file)
            for file in files - _open_files()
            if file.name.startswith(PREFIXES) and file.exists() and not is_of_another_run(file, self._marks)
        )


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def marks_in(run_lock: Path) -> set[str]:
    """Return the run's mark in a run.lock, if any, which is also in the names of its semaphores."""
    with contextlib.suppress(OSError, ValueError, LookupError):
        return {str(json.loads(run_lock.read_text(encoding="utf-8"))["mark"])}
    return set()


def is_of_another_run(file: Path, marks: Collection[str]) -> bool:
    """Return whether a file is a semaphore of another run; semaphores are not kept open."""
    name = SEMAPHORE.match(file.name)
    return name is not None and name[1] not in marks


def _open_files() -> set[Path]:
    """Return the files and folders in shared memory that any process has open or mapped."""
    found: set[Path] = set()
    for pid in psutil.pids():
        proc = Path(f"/proc/{pid}")
        try:
            names = [os.readlink(link) for link in (proc / "fd").iterdir()]
            names += [line.split(maxsplit=5)[-1] for line in (proc / "maps").read_text().splitlines()]
        except OSError:
            continue  # it has ended, or is another user's
        prefix = f"{SHARED_MEMORY}/"
        found |= {
            SHARED_MEMORY / name.removeprefix(prefix).split("/")[0]
            for name in names
            if name.startswith(prefix)
        }
    return found


class Run:
    """A run of the app on a config, including its restarts."""

    def __init__(
        self,
        configs: Sequence[Path],
        overrides: Sequence[str],
        folder: Path,
        output: Path,
        *,
        supervise: bool,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """``output`` is the file for the run's output, on a disk that faults do not fill."""
        self.folder = folder
        self._command = [sys.executable, "-m", "apps.grpo"]
        for config in configs:
            self._command += ["--config", str(config.resolve())]
        self._command += [f"run_dir={folder}", *overrides, *(["--supervise"] if supervise else [])]
        self._watched = Watched(self._command, output, folder / "run.lock", environment=environment)
        self._is_killed = False

    def kill_everything(self) -> None:
        """Kill all processes at once; then restart the run with ``--resume latest``."""
        self._watched.kill_all_at_once()
        self._watched.start_again([*self._command, "--resume", "latest"])

    def until_ended(self, look: Callable[[], None], *, limit_s: float | None = None) -> Ended:
        """Call ``look`` repeatedly until the run has ended; kill it after ``limit_s``."""
        end_s = None if limit_s is None else time.monotonic() + limit_s
        try:
            while self._watched.is_running():
                look()
                time.sleep(LOOK_S)
                if end_s is not None and time.monotonic() > end_s:
                    print(f"the run has not ended after {limit_s:g} s: it is killed", file=sys.stderr)
                    break
            else:
                return self._watched.ended(self.folder)
            self._watched.kill()
            return self._watched.ended(self.folder)
        finally:
            self._watched.kill()


class SmallDisk:
    """A small disk in memory for a run's files."""

    def __init__(self, folder: Path, *, num_mib: int) -> None:
        """Mount the disk; raise ``RuntimeError`` if this machine does not allow that."""
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        command = ["mount", "-t", "tmpfs", "-o", f"size={num_mib}m", "tmpfs", str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"--disk-mib: {' '.join(command)} failed: {done.stderr.strip()}")

    def fill(self) -> Callable[[], None]:
        """Keep the disk full; return a function that frees the space."""
        filler = self.folder / "filler"
        stopping = False

        def go() -> None:
            with filler.open("ab", buffering=0) as file:
                while not stopping:
                    try:
                        # What the run removes makes room again.
                        file.write(bytes(max(1, min(1 << 20, shutil.disk_usage(self.folder).free))))
                    except OSError:
                        time.sleep(LOOK_S)

        import threading

        thread = threading.Thread(target=go, daemon=True)
        thread.start()

        def give_back() -> None:
            nonlocal stopping
            stopping = True
            thread.join()
            filler.unlink()

        return give_back

    def close(self, keep: Path) -> None:
        """Copy the disk's files to ``keep``, and unmount it."""
        shutil.copytree(self.folder, keep, dirs_exist_ok=True, symlinks=True)
        subprocess.run(["umount", "-l", str(self.folder)], check=True)
