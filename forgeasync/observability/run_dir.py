"""The folder of one run: where its config, metrics, rollouts, checkpoints and logs lie.

runs/<name>-<time>/
    config.yaml      the resolved config, as the run used it
    run.log          command line, commit, versions and host, every console line, and how the run ended
    metrics.jsonl    one object per optimizer step (keys: forgeasync.observability.metrics)
    rollouts.jsonl   a few rollouts per step, with text
    checkpoints/     what a later run resumes from or samples with
    logs/            output of the controller's libraries and of every actor process
    tensorboard/     event files
"""

from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from forgeasync.config.schema import RunConfig

RUNS_FOLDER = Path("runs")
"""Parent of the runs that do not name their own folder; relative to the working directory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDir:
    """Paths inside the folder of one run."""

    path: Path

    @classmethod
    def create(cls, config: RunConfig, config_yaml: str, now: datetime) -> "RunDir":
        """Make the folder of a new run: ``config.run_dir``, or runs/<name>-<now> where that is not set.

        ``config_yaml`` is the resolved config as text. Raises ValueError where the folder already holds a
        run or is not a folder.
        """
        default = RUNS_FOLDER / f"{config.name}-{now:%Y%m%d-%H%M%S}"
        run_dir = cls(path=default if config.run_dir is None else Path(config.run_dir))
        if run_dir.path.exists() and not run_dir.path.is_dir():
            raise ValueError(f"run_dir: {run_dir.path} is a file, not a folder")
        run_dir.path.mkdir(parents=True, exist_ok=True)
        try:
            # Exclusive creation: of two runs that start in the same second only one gets the folder.
            run_dir.metrics.open("x").close()
        except FileExistsError:
            raise ValueError(
                f"run_dir: {run_dir.path} already holds a run (metrics.jsonl); name another folder"
            ) from None
        run_dir.config.write_text(config_yaml, encoding="utf-8")
        run_dir._fill_up()
        return run_dir

    @classmethod
    def reopen(cls, path: Path) -> "RunDir":
        """The folder of a run that is resumed; whatever it lacks is made, as of a run without a step."""
        run_dir = cls(path=path)
        path.mkdir(parents=True, exist_ok=True)
        run_dir.metrics.touch()
        run_dir._fill_up()
        return run_dir

    def _fill_up(self) -> None:
        self.rollouts.touch()
        for folder in (self.checkpoints, self.logs, self.tensorboard):
            folder.mkdir(exist_ok=True)

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

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
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    def log(self, process: str) -> Path:
        """Log file of the process called ``process``, such as ``generator-0``."""
        return self.logs / f"{process}.log"
