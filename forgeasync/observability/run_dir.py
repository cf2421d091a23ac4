"""The folder of one run: its files, the lock that keeps other runs out, and the list of its processes.

The files:

    runs/<name>-<time>/
        config.yaml      the resolved config, as the run used it
        run.log          command line, commit, versions, host, console lines, and how the run ended
        metrics.jsonl    one object per optimizer step (keys: docs/metrics.md)
        ledger.jsonl     what became of every prompt (docs/ledger.md)
        execution.jsonl  the steps with their groups, with record_execution (apps.reexecute)
        faults.jsonl     what failed and what came back; made by the first fault
        procs.json       which process has which role
        run.lock         which process the run is, locked as long as it is one
        control/         requests of apps.control to a run that goes on, and its answers
        rollouts.jsonl   a few rollouts per step, with text; whole episodes
        tokens.jsonl     values of every token of these, and the worst tokens of each step (docs/viewer.md)
        serving.json     where people are served, with the token if the run has made one; for its owner only
        artifacts/       files that these episodes have kept
        bad_steps/       batches of steps that were not made because something was not finite, or far too
                         large; what operators computed for a token that differs, with fidelity: bitwise
        payloads/        finished groups that no checkpoint has, for a run that is resumed
        versions/        every published version, with weights.archive
        checkpoints/     what a later run resumes from or samples with
        logs/            output of the controller's libraries and of every process, and what each did when
        tensorboard/     event files
        wandb/           files of Weights & Biases, with logging.wandb
"""

import contextlib
import json
import os
import re
import socket
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

import msgspec
import psutil

from forgeasync.config import RunConfig
from forgeasync.files import FileLocked, is_refusal, lock, mark_this_run, replacing
from forgeasync.observability.run_log import say_on_stderr
from forgeasync.processes import start_ticks
from forgeasync.schema import ConfigError, Problem, raise_if_any

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")

RUNS_FOLDER = Path("runs")
"""Parent of the runs that do not name their own folder, relative to the working directory."""

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
"""Id of the machine's boot, which changes with every boot."""

LOCK_WAIT_S = 1.0
"""Seconds that a start waits for a lock, for a process that is about to end."""


class Holder(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Process that holds the lock of a run's folder, or held it before."""

    pid: int
    host: str
    since_s: float
    """Start of the process, by ``time.time``."""
    mark: str
    """Mark on everything that it starts (``forgeasync.files``)."""
    has_ended: bool = False
    """Whether it released the lock itself, rather than died."""

    def __str__(self) -> str:
        since = datetime.fromtimestamp(self.since_s)
        return f"process {self.pid} on {self.host}, since {since:%Y-%m-%d %H:%M:%S}"


class RunInUse(RuntimeError):
    """Another process holds the lock of this folder. The message names it."""


class RunLock:
    """The lock of a run's folder (``run.lock``), held by this process until ``release`` or its end.

    The kernel releases the lock when the process ends for any reason, so a dead run does not block others.
    ``release`` sets ``Holder.has_ended`` in the file. If it is not set in an unlocked file, the process died.
    """

    def __init__(self, descriptor: int, own: Holder, before: Holder | None) -> None:
        self._descriptor = descriptor
        self._own = own
        self.before = before
        """Process that held the lock before. None: there is none, or the file system has no locks, as some
        network file systems, so that it may still run."""

    @classmethod
    def take(cls, file: Path, mark: str) -> "RunLock":
        """Lock the file, after creating it if necessary, and write this process into it.

        Raises:
            RunInUse: Another process holds the lock.
        """
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            try:
                has_locks = lock(descriptor, wait_s=LOCK_WAIT_S)
            except FileLocked:
                holder = _read_holder(descriptor)
                raise RunInUse("another process" if holder is None else str(holder)) from None
            before = _read_holder(descriptor) if has_locks else None
            own = Holder(pid=os.getpid(), host=socket.gethostname(), since_s=time.time(), mark=mark)
            _write_holder(descriptor, own)
        except BaseException:
            os.close(descriptor)
            raise
        return cls(descriptor, own, before)

    @staticmethod
    def holder(file: Path) -> Holder | None:
        """Return the process in a lock file; None if this version cannot read one.

        This does not try to lock the file, because a run that starts at the same time would have to wait.

        Raises:
            OSError: The file does not exist, or cannot be read.
        """
        with file.open("rb") as opened:
            return _read_holder(opened.fileno())

    @property
    def mark(self) -> str:
        """Mark on everything that this process starts for the run."""
        return self._own.mark

    def release(self, *, was_refused: bool = False) -> None:
        """Set ``Holder.has_ended`` in the file, and release the lock.

        If this start ``was_refused``, the file names the process before it again.
        """
        holder = self.before if was_refused and self.before is not None else self._own
        try:
            _write_holder(self._descriptor, msgspec.structs.replace(holder, has_ended=True))
        finally:
            os.close(self._descriptor)


def _write_holder(descriptor: int, holder: Holder) -> None:
    line = msgspec.json.encode(holder) + b"\n"
    os.pwrite(descriptor, line, 0)
    os.ftruncate(descriptor, len(line))


def _read_holder(descriptor: int) -> Holder | None:
    """Return the process in the file; None if it is empty or was cut."""
    try:
        return msgspec.json.decode(os.pread(descriptor, 4096, 0), type=Holder)
    except (ValueError, RecursionError):
        return None


_held: dict[Path, RunLock] = {}
"""Folders that this process has claimed for its runs."""


class _Inside:
    """A path inside a run's folder."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, run_dir: "RunDir", owner: type["RunDir"]) -> Path:
        return run_dir.path / self._name


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDir:
    """Paths inside the folder of one run. The docstring of this module describes the files."""

    path: Path

    config = _Inside("config.yaml")
    run_log = _Inside("run.log")
    metrics = _Inside("metrics.jsonl")
    execution = _Inside("execution.jsonl")
    ledger = _Inside("ledger.jsonl")
    faults = _Inside("faults.jsonl")
    procs = _Inside("procs.json")
    lock = _Inside("run.lock")
    control = _Inside("control")
    rollouts = _Inside("rollouts.jsonl")
    tokens = _Inside("tokens.jsonl")
    serving = _Inside("serving.json")
    artifacts = _Inside("artifacts")
    bad_steps = _Inside("bad_steps")
    payloads = _Inside("payloads")
    versions = _Inside("versions")
    checkpoints = _Inside("checkpoints")
    logs = _Inside("logs")
    tensorboard = _Inside("tensorboard")
    wandb = _Inside("wandb")

    def log(self, process: str) -> Path:
        """Return the log file of a process, such as ``generator-0``."""
        return self.logs / f"{process}.log"

    @classmethod
    def create(cls, config: RunConfig, config_yaml: str, now: datetime) -> "RunDir":
        """Create the folder of a new run: ``config.run_dir``, or ``runs/<name>-<now>`` if that is not set.

        Call ``put_start_aside`` first if a start that never trained may have left files in the folder.

        Args:
            config: The run's config.
            config_yaml: The resolved config as text, which is written to ``config.yaml``.
            now: Time in the name of the folder.

        Raises:
            ConfigError: The folder has a run, is in use by another run, or cannot be created.
        """
        default = default_run_dir(config.name, now)
        run_dir = cls(path=default if config.run_dir is None else Path(config.run_dir))
        run_dir._make()
        try:
            run_dir.metrics.open("x").close()
        except FileExistsError:
            raise ConfigError([_in_use(run_dir.path)]) from None
        run_dir.config.write_text(config_yaml, encoding="utf-8")
        run_dir._fill_up()
        return run_dir

    @classmethod
    def reopen(cls, path: Path) -> "RunDir":
        """Return the folder of a run that is resumed, after creating missing files as for a new run.

        Raises:
            ConfigError: The folder is in use by another run, or cannot be created.
        """
        run_dir = cls(path=path)
        run_dir._make()
        run_dir.metrics.touch()
        run_dir._fill_up()
        return run_dir

    def _make(self) -> None:
        raise_if_any(check_folder("run_dir", self.path))
        self.path.mkdir(parents=True, exist_ok=True)
        self.claim()

    def _fill_up(self) -> None:
        self.rollouts.touch()
        for folder in (self.checkpoints, self.logs, self.tensorboard):
            folder.mkdir(exist_ok=True)

    def claim(self) -> None:
        """Keep other runs out of the folder until ``release_claims``, or as long as this process lives.

        Everything that this process starts after the call has the mark of the claim.

        Raises:
            ConfigError: Another process has claimed the folder.
        """
        folder = self.path.resolve()
        if folder in _held:
            return
        try:
            _held[folder] = RunLock.take(self.lock, mark_this_run())
        except RunInUse as holder:
            remedy = f"is the folder of a run that is in progress ({holder}); name another one"
            raise ConfigError([Problem(field="run_dir", value=str(self.path), remedy=remedy)]) from None

    @property
    def before(self) -> Holder | None:
        """Process that claimed the folder before this one; None without a claim, or if there was no other."""
        claim = _held.get(self.path.resolve())
        return None if claim is None else claim.before

    def put_start_aside(self) -> list[str]:
        """Rename the files that a start without a step has left; return their new names.

        Raises:
            ConfigError: The folder is in use by another run.
        """
        if not (self.metrics.exists() or self.ledger.exists()) or self.has_trained:
            return []
        self.claim()
        faults = [put_aside(self.faults).name] if self.faults.exists() else []
        return self.put_all_aside() + faults

    def put_all_aside(self) -> list[str]:
        """Rename the files that a start without a checkpoint has left; return their new names.

        ``faults.jsonl`` stays, because it is about all starts of a run. Call ``claim`` first.
        """
        left = [self.metrics, self.rollouts, self.tokens, self.ledger, self.procs, self.config]
        left += [self.execution, self.versions]
        left += [self.artifacts, self.bad_steps, self.payloads, self.logs, self.tensorboard, self.wandb]
        if self.checkpoints.is_dir() and any(self.checkpoints.iterdir()):
            left.append(self.checkpoints)
        return [put_aside(path).name for path in left if path.exists()]

    @property
    def has_trained(self) -> bool:
        """Whether the folder has a step or a checkpoint. Metrics that cannot be read count as a step."""
        if self.checkpoints.is_dir() and any(self.checkpoints.iterdir()):
            return True
        if not self.metrics.is_file():
            return False
        try:
            steps = [json.loads(line)["step"] for line in self.metrics.read_bytes().splitlines()]
        except (ValueError, LookupError, TypeError):
            return True
        # Step 0 is the evaluation before the first step.
        return any(step != 0 for step in steps)


def claimed_marks() -> tuple[str, ...]:
    """Return the marks of the claims of this process that are not released."""
    return tuple(claim.mark for claim in _held.values())


def release_claims(*, was_refused: bool = False) -> None:
    """Release the folders that this process has claimed. Call it at the end of a run, or of a refused start.

    If the disk refuses to record that, a line is printed to stderr.
    """
    while _held:
        path, claim = _held.popitem()
        try:
            claim.release(was_refused=was_refused)
        except OSError as error:
            if not is_refusal(error):
                raise
            say_on_stderr(
                f"{path} cannot say that this run has ended in order ({error.strerror}): "
                "the next start there will count a death"
            )


def default_run_dir(name: str, now: datetime) -> Path:
    """Return the folder of a run whose config does not set one: ``runs/<name>-<time>``."""
    return RUNS_FOLDER / f"{name}-{now:%Y%m%d-%H%M%S}"


def check_run_dir(config: RunConfig, *, is_resumed: bool) -> Iterator[Problem]:
    """Yield a problem if the run's folder cannot be created, or if a new run would write into another one."""
    if config.run_dir is None:
        yield from check_folder("run_dir", RUNS_FOLDER)
        if NAME.fullmatch(config.name) is None:
            remedy = (
                "names the run's folder: must be 1 to 100 letters, digits, '.', '_' or '-', and begin with a "
                "letter or a digit"
            )
            yield Problem(field="name", value=config.name, remedy=remedy)
        return
    path = Path(config.run_dir)
    problems = list(check_folder("run_dir", path))
    yield from problems
    if not problems and not is_resumed and RunDir(path=path).has_trained:
        yield _in_use(path)


def check_folder(field: str, path: Path) -> Iterator[Problem]:
    """Yield a problem if files cannot be written in a folder, or if it cannot be created. Creates nothing."""
    if "\0" in str(path):
        yield Problem(field=field, value=str(path), remedy="has a NUL in it, which no path can have")
        return
    if path == Path() or path.parts[0].startswith("~"):
        remedy = "is not expanded; write the path out" if path.parts else "is not a run's folder; name one"
        yield Problem(field=field, value=str(path), remedy=remedy)
        return
    try:
        existing = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    except OSError as error:
        # A name that is too long.
        yield Problem(field=field, value=str(path)[:80], remedy=f"cannot be a folder: {error}"[:200])
        return
    if not existing.is_dir():
        what = "is a file" if existing == path else f"lies below {existing}, which is a file"
        yield Problem(field=field, value=str(path), remedy=f"{what}; name a folder")
    elif not os.access(existing, os.W_OK | os.X_OK):
        where = "it" if existing == path else f"{existing}, where it would be made,"
        yield Problem(field=field, value=str(path), remedy=f"{where} is not writable; name another folder")


def _in_use(path: Path) -> Problem:
    return Problem(
        field="run_dir",
        value=str(path),
        remedy="already holds a run (steps in metrics.jsonl, or checkpoints); give another folder, move that "
        "run, or continue it (--resume latest)",
    )


# --- a run that goes on from an earlier step: later files and lines move aside, nothing is deleted ---


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """Lines that were moved into a side file."""

    num_lines: int
    file: Path


def put_aside(path: Path) -> Path:
    """Rename a file or folder to ``<stem>.cut-<n><suffix>``; return its new path."""
    aside = _free_name(path)
    path.rename(aside)
    return aside


def cut_after(path: Path, step: int) -> Cut | None:
    """Move the lines of a .jsonl file whose ``step`` is later into a side file; None if there are none.

    An incomplete last line counts as later.
    """
    kept: list[bytes] = []
    cut: list[bytes] = []
    for line in path.read_bytes().splitlines(keepends=True):
        is_kept = line.endswith(b"\n") and json.loads(line)["step"] <= step
        (kept if is_kept else cut).append(line)
    if not cut:
        return None
    aside = _free_name(path)
    aside.write_bytes(b"".join(cut))
    with replacing(path) as shortened:
        shortened.writelines(kept)
    return Cut(num_lines=len(cut), file=aside)


def _free_name(path: Path) -> Path:
    number = 1
    while (aside := path.with_name(f"{path.stem}.cut-{number}{path.suffix}")).exists():
        number += 1
    return aside


# --- procs.json ---


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessEntry:
    """One process of a run."""

    role: str
    rank: int
    """Rank within the role; a process that replaces another one has the same rank."""
    pid: int
    """Process id on ``host``."""
    host: str
    since_s: float
    """Time at which it was listed, by ``time.time``."""
    start_ticks: int | None
    """Clock ticks from the boot of the controller's machine to the start of the process. Together with the id
    they name one process. None: it is on another machine, whose agent ends it."""


class ProcessListFile:
    """``procs.json`` of a run's folder: which process has which role.

    It tells people which process is generator 2, and lets other programs observe a run. A later start ends
    the processes in it that a killed run has left.
    """

    def __init__(self, file: Path | None = None) -> None:
        """Create an empty list. Without ``file`` it is kept in memory only."""
        self._file = file
        self._entries: dict[tuple[str, int], ProcessEntry] = {}

    def put(self, role: str, rank: int, *, pid: int, host: str) -> None:
        """List a process, in place of the one that had its role and rank."""
        self._entries[role, rank] = ProcessEntry(
            role=role,
            rank=rank,
            pid=pid,
            host=host,
            since_s=time.time(),
            start_ticks=start_ticks(pid) if _is_descendant(pid) else None,
        )
        self._write()

    def remove(self, role: str, rank: int) -> None:
        """Remove a process from the list, if it is listed."""
        if self._entries.pop((role, rank), None) is not None:
            self._write()

    @property
    def entries(self) -> tuple[ProcessEntry, ...]:
        """Processes of the list, in the order in which they were added."""
        return tuple(self._entries.values())

    def _write(self) -> None:
        if self._file is None:
            return
        processes = [asdict(one) for one in self.entries]
        text = json.dumps({"controller": os.getpid(), "boot": _boot(), "procs": processes}, indent=1)
        # A full disk must not end a role that has just been started; the next change writes all of it.
        with contextlib.suppress(OSError), replacing(self._file) as file:
            file.write(text.encode() + b"\n")


def leftover_processes(file: Path) -> Iterator[psutil.Process]:
    """Find processes of the ``procs.json`` of a dead controller that still run on this machine.

    A different process that got the id of a listed one is not returned.
    """
    try:
        listed = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return
    if listed["boot"] != _boot():
        return
    for one in listed["procs"]:
        with contextlib.suppress(psutil.Error):
            # First: psutil takes a process that gets the id after this line for another one.
            process = psutil.Process(one["pid"])
            if one["start_ticks"] is not None and start_ticks(one["pid"]) == one["start_ticks"]:
                yield process


def _boot() -> str:
    return BOOT_ID.read_text(encoding="utf-8").strip()


def _is_descendant(pid: int) -> bool:
    """Whether this process has started a process, directly or not."""
    with contextlib.suppress(psutil.Error):
        return any(one.pid == os.getpid() for one in psutil.Process(pid).parents())
    return False
