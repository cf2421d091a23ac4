"""The folder of one run: where its config, metrics, rollouts, checkpoints and logs lie.

runs/<name>-<time>/
    config.yaml      the resolved config, as the run used it
    run.log          command line, commit, versions and host, every console line, and how the run ended
    metrics.jsonl    one object per optimizer step (keys: docs/metrics.md)
    ledger.jsonl     what became of every prompt (docs/ledger.md)
    faults.jsonl     what has failed and what came back; made by the first fault
    procs.json       which process fills which role at this moment
    run.lock         which process the run is, locked as long as it is one
    control/         requests of apps.control to a run that goes on, and its answers
    rollouts.jsonl   a few rollouts per step, with text; whole episodes
    tokens.jsonl     values of every token of these, and the worst tokens of each step (docs/viewer.md)
    serving.json     where people are served, with the token if the run has made one; for its owner only
    artifacts/       files that these episodes have kept
    bad_steps/       batches of steps that were not made because something was not finite, or far too large
    payloads/        finished groups that no checkpoint has, for a run that is resumed
    checkpoints/     what a later run resumes from or samples with
    logs/            output of the controller's libraries and of every process, and what each did when
    tensorboard/     event files
    wandb/           files of Weights & Biases, with logging.wandb
"""

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from forgeasync.config import RunConfig
from forgeasync.faults import is_refusal, mark_this_run
from forgeasync.observability.failures import say_on_stderr
from forgeasync.observability.run_lock import Holder, RunInUse, RunLock
from forgeasync.observability.truncation import put_aside
from forgeasync.schema import ConfigError, Problem, raise_if_any

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


RUNS_FOLDER = Path("runs")
"""Parent of the runs that do not name their own folder; relative to the working directory."""


_held: dict[Path, RunLock] = {}
"""Folders that this process has claimed for its runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDir:
    """Paths inside the folder of one run."""

    path: Path

    @classmethod
    def create(cls, config: RunConfig, config_yaml: str, now: datetime) -> "RunDir":
        """Make the folder of a new run: ``config.run_dir``, or runs/<name>-<now> where that is not set.

        ``config_yaml`` is the resolved config as text. What a start that never trained left in the folder has
        to be moved with ``put_start_aside`` before.

        Raises:
            ConfigError: the folder already holds a run, is another run's at this moment, or cannot be one.
        """
        default = default_run_dir(config.name, now)
        run_dir = cls(path=default if config.run_dir is None else Path(config.run_dir))
        raise_if_any(check_folder("run_dir", run_dir.path))
        run_dir.path.mkdir(parents=True, exist_ok=True)
        run_dir.claim()
        try:
            run_dir.metrics.open("x").close()
        except FileExistsError:
            raise ConfigError([_taken(run_dir.path)]) from None
        run_dir.config.write_text(config_yaml, encoding="utf-8")
        run_dir._fill_up()
        return run_dir

    @classmethod
    def reopen(cls, path: Path) -> "RunDir":
        """The folder of a run that is resumed; whatever it lacks is made, as of a run without a step."""
        run_dir = cls(path=path)
        raise_if_any(check_folder("run_dir", path))
        path.mkdir(parents=True, exist_ok=True)
        run_dir.claim()
        run_dir.metrics.touch()
        run_dir._fill_up()
        return run_dir

    def claim(self) -> None:
        """Keep other runs out of the folder until ``release_claims``, or as long as this process lives.

        What this process starts from now on carries the mark that the claim says.

        Raises:
            ConfigError: another process has it.
        """
        folder = self.path.resolve()
        if folder in _held:
            return
        try:
            _held[folder] = RunLock.take(self.lock, mark_this_run())
        except RunInUse as holder:
            remedy = f"is the folder of a run that goes on at this moment ({holder}); name another one"
            raise ConfigError([Problem(field="run_dir", value=str(self.path), remedy=remedy)]) from None

    @property
    def before(self) -> Holder | None:
        """The process that had the folder before this one has claimed it."""
        claim = _held.get(self.path.resolve())
        return None if claim is None else claim.before

    def put_start_aside(self) -> list[str]:
        """Move what a start that never trained has left out of the way; the new names, if there are any.

        Raises:
            ConfigError: the folder is another run's at this moment.
        """
        if not (self.metrics.exists() or self.ledger.exists()) or self.has_trained:
            return []
        self.claim()
        faults = [put_aside(self.faults).name] if self.faults.exists() else []
        return self.put_all_aside() + faults

    def put_all_aside(self) -> list[str]:
        """Move what a start without a checkpoint has left out of the way; the new names.

        Failures stay: their file is of the whole run, which begins anew. The caller has the folder's lock.
        """
        files = (self.metrics, self.rollouts, self.tokens, self.ledger, self.procs, self.config)
        left = [*files, self.artifacts, self.bad_steps, self.payloads, self.logs]
        left += [self.tensorboard, self.wandb]
        if self.checkpoints.is_dir() and any(self.checkpoints.iterdir()):
            left.append(self.checkpoints)
        return [put_aside(path).name for path in left if path.exists()]

    @property
    def has_trained(self) -> bool:
        """Whether a step, or anything in ``checkpoints``, is there; what cannot be read counts as a step."""
        if self.checkpoints.is_dir() and any(self.checkpoints.iterdir()):
            return True
        if not self.metrics.is_file():
            return False
        try:
            steps = [json.loads(line)["step"] for line in self.metrics.read_bytes().splitlines()]
        except (ValueError, LookupError, TypeError):
            return True
        # Step 0 is the evaluation before the first one.
        return any(step != 0 for step in steps)

    def _fill_up(self) -> None:
        self.rollouts.touch()
        for folder in (self.checkpoints, self.logs, self.tensorboard):
            folder.mkdir(exist_ok=True)

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def faults(self) -> Path:
        return self.path / "faults.jsonl"

    @property
    def procs(self) -> Path:
        return self.path / "procs.json"

    @property
    def lock(self) -> Path:
        return self.path / "run.lock"

    @property
    def run_log(self) -> Path:
        return self.path / "run.log"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def rollouts(self) -> Path:
        return self.path / "rollouts.jsonl"

    @property
    def tokens(self) -> Path:
        """Values of single tokens; there where rollouts are written."""
        return self.path / "tokens.jsonl"

    @property
    def control(self) -> Path:
        return self.path / "control"

    @property
    def ledger(self) -> Path:
        return self.path / "ledger.jsonl"

    @property
    def serving(self) -> Path:
        """Where people are served, if they are."""
        return self.path / "serving.json"

    @property
    def artifacts(self) -> Path:
        """Files that episodes have kept, in a folder for each attempt; made when the first is kept."""
        return self.path / "artifacts"

    @property
    def payloads(self) -> Path:
        return self.path / "payloads"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def bad_steps(self) -> Path:
        """Batches with a bad step, in a folder for each; made when the first is kept."""
        return self.path / "bad_steps"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def wandb(self) -> Path:
        """Files of Weights & Biases, if the run has them."""
        return self.path / "wandb"

    def log(self, process: str) -> Path:
        """Log file of the process called ``process``, such as ``generator-0``."""
        return self.logs / f"{process}.log"


def claimed_marks() -> tuple[str, ...]:
    """The marks of what this process has started for its runs, up to ``release_claims``."""
    return tuple(claim.mark for claim in _held.values())


def release_claims() -> None:
    """Let others have the folders that this process has claimed: it ends in order.

    Where the disk refuses to note that, it is told on stderr: what the run has done stays done.
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
    """Where a run lies whose config does not say: runs/<name>-<time>."""
    return RUNS_FOLDER / f"{name}-{now:%Y%m%d-%H%M%S}"


def check_run_dir(config: RunConfig, *, is_resumed: bool) -> Iterator[Problem]:
    """Whether the run's folder can be one, and a new run would write into the files of another."""
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
        yield _taken(path)


def check_folder(field: str, path: Path) -> Iterator[Problem]:
    """Whether files can be written in a folder, or where it is to be made; makes nothing."""
    if "\0" in str(path):
        yield Problem(field=field, value=str(path), remedy="has a NUL in it, which no path can have")
        return
    if path == Path() or path.parts[0].startswith("~"):
        remedy = "is not expanded; write the path out" if path.parts else "is no folder of its own; name one"
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


def _taken(path: Path) -> Problem:
    return Problem(
        field="run_dir",
        value=str(path),
        remedy="already holds a run (steps in metrics.jsonl, or checkpoints); give another folder, move that "
        "run away or go on with it (--resume latest)",
    )
