"""The folder of one run: its files, the lock that keeps other runs out, and the list of its processes.

runs/<name>-<time>/
    config.yaml      the resolved config, as the run used it
    run.log          command line, commit, versions and host, every console line, and how the run ended
    metrics.jsonl    one object per optimizer step (keys: docs/metrics.md)
    ledger.jsonl     what became of every prompt (docs/ledger.md)
    execution.jsonl  the steps with their groups, with record_execution (apps.reexecute)
    faults.jsonl     what has failed and what came back; made by the first fault
    procs.json       which process has which role
    run.lock         which process the run is, locked as long as it is one
    control/         requests of apps.control to a run that goes on, and its answers
    rollouts.jsonl   a few rollouts per step, with text; whole episodes
    tokens.jsonl     values of every token of these, and the worst tokens of each step (docs/viewer.md)
    serving.json     where people are served, with the token if the run has made one; for its owner only
    artifacts/       files that these episodes have kept
    bad_steps/       batches of steps that were not made because something was not finite, or far too large;
                     what operators computed for a token that differs, with fidelity: bitwise
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
"""Has another content after every boot of a machine."""

LOCK_WAIT_S = 1.0
"""How long a start waits for a lock, so that a process that is just ending can be gone."""


class Holder(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The process that a run is, or was."""

    pid: int
    host: str
    since_s: float
    """When it began, by ``time.time``."""
    mark: str
    """What everything that it starts carries (``forgeasync.files``)."""
    has_ended: bool = False
    """Whether it has ended in order."""

    def __str__(self) -> str:
        since = datetime.fromtimestamp(self.since_s)
        return f"process {self.pid} on {self.host}, since {since:%Y-%m-%d %H:%M:%S}"


class RunInUse(RuntimeError):
    """Another process is the run in this folder; the text says which."""


class RunLock:
    """The lock of a run's folder (``run.lock``), held by this process until ``release`` or its end.

    The kernel releases the lock when the process ends, in whatever way: a dead run does not block others. A
    process that ends in order says so in the file. A free file that does not say so was left by a process
    that died.
    """

    def __init__(self, descriptor: int, own: Holder, before: Holder | None) -> None:
        self._descriptor = descriptor
        self._own = own
        self.before = before
        """The process that had the lock before. None: none had, or the file system has no locks (some network
        file systems have none), so that it may still be there."""

    @classmethod
    def take(cls, file: Path, mark: str) -> "RunLock":
        """Lock the file, which is made if it is not there, and write this process into it.

        Raises:
            RunInUse: another process has it.
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
        """Return the process that a lock file names; None if it names none that this version can read.

        The lock itself is not tried: whoever tries it holds it for a moment, and a run that starts just then
        would have to wait.

        Raises:
            OSError: the file is not there, or cannot be read.
        """
        with file.open("rb") as opened:
            return _read_holder(opened.fileno())

    @property
    def mark(self) -> str:
        """What everything that this process starts for the run carries."""
        return self._own.mark

    def release(self) -> None:
        """Say that this process ends in order, and let others have the folder."""
        try:
            _write_holder(self._descriptor, msgspec.structs.replace(self._own, has_ended=True))
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
    """Paths inside the folder of one run; the module's docstring says what they hold."""

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
        """Make the folder of a new run: ``config.run_dir``, or runs/<name>-<now> where that is not set.

        ``config_yaml`` is the resolved config as text. Call ``put_start_aside`` first if a start that never
        trained may have left files in the folder.

        Raises:
            ConfigError: the folder already holds a run, is in use by another run, or cannot be one.
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
        """Return the folder of a run that is resumed. What it lacks is made, as of a run without a step.

        Raises:
            ConfigError: the folder is in use by another run, or cannot be one.
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

        What this process starts after the call carries the mark of the claim.

        Raises:
            ConfigError: another process has it.
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
        """The process that had the folder before this one has claimed it."""
        claim = _held.get(self.path.resolve())
        return None if claim is None else claim.before

    def put_start_aside(self) -> list[str]:
        """Move away what a start that never trained has left; return the new names, if there are any.

        Raises:
            ConfigError: the folder is in use by another run.
        """
        if not (self.metrics.exists() or self.ledger.exists()) or self.has_trained:
            return []
        self.claim()
        faults = [put_aside(self.faults).name] if self.faults.exists() else []
        return self.put_all_aside() + faults

    def put_all_aside(self) -> list[str]:
        """Move away what a start without a checkpoint has left; return the new names.

        ``faults.jsonl`` stays: it is of the whole run, which begins again. The caller has the folder's lock.
        """
        left = [self.metrics, self.rollouts, self.tokens, self.ledger, self.procs, self.config]
        left += [self.execution, self.versions]
        left += [self.artifacts, self.bad_steps, self.payloads, self.logs, self.tensorboard, self.wandb]
        if self.checkpoints.is_dir() and any(self.checkpoints.iterdir()):
            left.append(self.checkpoints)
        return [put_aside(path).name for path in left if path.exists()]

    @property
    def has_trained(self) -> bool:
        """Whether a step, or anything in ``checkpoints``, is there. What cannot be read counts as a step."""
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
    """Return the marks of what this process has started for its runs, up to ``release_claims``."""
    return tuple(claim.mark for claim in _held.values())


def release_claims() -> None:
    """Let others have the folders that this process has claimed: it ends in order.

    If the disk refuses to note that, a line on stderr says so. The run itself is done.
    """
    while _held:
        path, claim = _held.popitem()
        try:
            claim.release()
        except OSError as error:
            if not is_refusal(error):
                raise
            say_on_stderr(
                f"{path} cannot say that this run has ended in order ({error.strerror}): "
                "the next start there will count a death"
            )


def default_run_dir(name: str, now: datetime) -> Path:
    """Return where a run lies whose config does not say: runs/<name>-<time>."""
    return RUNS_FOLDER / f"{name}-{now:%Y%m%d-%H%M%S}"


def check_run_dir(config: RunConfig, *, is_resumed: bool) -> Iterator[Problem]:
    """Check that the run's folder can be one, and that a new run does not write into the files of another."""
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
    """Check that files can be written in a folder, or where it would be made. Makes nothing."""
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

    A last line that was not written to its end counts as later.
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
    """Its place in its role; a process that replaces another has the other's."""
    pid: int
    """Its id on its host."""
    host: str
    since_s: float
    """When it was listed, by ``time.time``."""
    start_ticks: int | None
    """Clock ticks from the boot of the controller's machine to the start of the process. No other process has
    the same id and start. None: it is on another machine, whose agent ends it."""


class ProcessListFile:
    """``procs.json`` of a run's folder: which process has which role.

    It is for people (which process is generator 2?), for programs that look at a run from outside, and for a
    later start that has to end what a killed run has left.
    """

    def __init__(self, file: Path | None = None) -> None:
        """Without a file the processes are kept in memory only."""
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
        """Take a process off the list; no error if it is not there."""
        if self._entries.pop((role, rank), None) is not None:
            self._write()

    @property
    def entries(self) -> tuple[ProcessEntry, ...]:
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
    """Find the processes that the procs.json of a dead controller lists and that still run on this machine.

    A process that only has the id of a listed one is not found, since ids are used again.
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
    """Whether this process has started it, directly or not; an id of another machine says nothing here."""
    with contextlib.suppress(psutil.Error):
        return any(one.pid == os.getpid() for one in psutil.Process(pid).parents())
    return False
