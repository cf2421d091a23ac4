"""Starts runs from Python, in a script or a notebook cell, with code that is defined there.

The run is a separate process, ``python -m apps.grpo``, so nothing of it remains in a notebook, and an
interrupt ends it cleanly. Its output is printed here, line by line.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from forgeasync.checkpoints import FINAL
from forgeasync.config import RunConfig, dump_config, load_config
from forgeasync.files import read_json_lines
from forgeasync.observability import RunDir, default_run_dir
from forgeasync.schema import EXIT_REFUSED, ConfigError, Problem, Section, code_of, section_of

Overrides = Mapping[str, object] | Sequence[str]
"""Overrides of a config by dotted key, or as texts in the form of the command line.

``{"max_steps": 20, "algorithm.objective": PpoClip(clip_high=0.3)}`` or ``["max_steps=20"]``.
"""

INTERRUPT_S = 60.0
"""Seconds that an interrupted run has for saving its weights before it is killed."""


class TrainingFailed(RuntimeError):
    """A run ended before its last step.

    The text is the last line of its output, with the reason and the folder of its newest weights.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainResult:
    """Results of a finished run."""

    run_dir: Path
    """Folder of the run."""
    metrics: tuple[dict[str, float | None], ...]
    """Lines of metrics.jsonl, by key (docs/metrics.md)."""
    checkpoint: Path
    """Folder of the trained model in Hugging Face format."""

    def metric(self, key: str) -> list[tuple[int, float]]:
        """Return step and value of every line that has a value for ``key``, such as ``eval/accuracy``."""
        found = ((line["step"], line[key]) for line in self.metrics if key in line)
        return [(int(step), value) for step, value in found if step is not None and value is not None]


def train(
    config: str | Path | Sequence[str | Path] | RunConfig,
    overrides: Overrides = (),
    *,
    reward: Callable[..., object] | Section | None = None,
    environment: Callable[..., object] | Section | None = None,
    objective: Callable[..., object] | Section | None = None,
    advantage: Callable[..., object] | Section | None = None,
    resume: str | None = None,
) -> TrainResult:
    """Train as ``python -m apps.grpo`` does, and wait for the end.

        import forgeasync as fa

        def shorter(task: fa.Task, response: fa.Response) -> float:
            return 1.0 / (1 + response.num_tokens)

        result = fa.train("configs/tiny_moe_cpu.yaml", {"max_steps": 20}, reward=shorter)
        print(result.metric("reward/mean"))

    ``reward``, ``environment``, ``objective`` and ``advantage`` can each be your own class or function, even
    one defined in a notebook or in the running script, or a built-in section such as
    ``Cispo(clip_high=2.0)``.

    Args:
        config: A YAML file, several files to merge in order, or a ``RunConfig``.
        overrides: Values that replace those of the config.
        reward: Replaces ``data.reward``.
        environment: Replaces ``environment``.
        objective: Replaces ``algorithm.objective``.
        advantage: Replaces ``algorithm.advantage``.
        resume: ``"latest"``, or the folder of the checkpoint from which to continue.

    Raises:
        ConfigError: The config is wrong. The message lists all problems.
        TrainingFailed: The run ended before its last step.
        KeyboardInterrupt: You interrupted the run. It saved its newest weights and ended.
    """
    given = {
        "data.reward": reward,
        "environment": environment,
        "algorithm.objective": objective,
        "algorithm.advantage": advantage,
    }
    with tempfile.TemporaryDirectory(prefix="forgeasync-") as folder:
        run = _write_config(Path(folder), config, overrides, given)
        run_dir = Path(run.run_dir) if run.run_dir is not None else default_run_dir(run.name, datetime.now())
        command = [sys.executable, "-m", "apps.grpo", "--config", str(Path(folder) / "config.yaml")]
        if run.run_dir is None:
            command.append(f"run_dir={json.dumps(str(run_dir))}")
        if resume is not None:
            command += ["--resume", resume]
        _follow(command)
    return _result(RunDir(path=run_dir))


def _write_config(
    folder: Path,
    config: str | Path | Sequence[str | Path] | RunConfig,
    overrides: Overrides,
    given: Mapping[str, Callable[..., object] | Section | None],
) -> RunConfig:
    """Return the config with all overrides, and write it to ``config.yaml`` in the folder."""
    paths: list[str | Path] = []
    if isinstance(config, RunConfig):
        paths.append(folder / "given.yaml")
        (folder / "given.yaml").write_text(dump_config(config), encoding="utf-8")
    else:
        paths += [config] if isinstance(config, str | Path) else config
    texts = list(overrides) if not isinstance(overrides, Mapping) else list(_as_texts(overrides))
    texts += _as_texts({key: thing for key, thing in given.items() if thing is not None})
    run = load_config(paths, texts)
    (folder / "config.yaml").write_text(dump_config(run), encoding="utf-8")
    return run


def _as_texts(values: Mapping[str, object]) -> Iterable[str]:
    """Yield ``key=value`` for each key, with the value as JSON, which is valid YAML."""
    for key, value in values.items():
        yield f"{key}={json.dumps(_as_plain(key, value))}"


def _as_plain(key: str, value: object) -> object:
    """Convert a value to plain data. Sections, classes and functions may occur anywhere within it.

    Raises:
        ConfigError: The value contains something that a config cannot contain. The problem names ``key``.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {str(name): _as_plain(f"{key}.{name}", one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_as_plain(f"{key}.{index}", one) for index, one in enumerate(value)]
    try:
        if isinstance(value, Section):
            own = section_of(value)
            return value.model_dump(mode="json") if own is None else own
        if not callable(value):
            raise ValueError("must be plain data, a section, or a class or function")
        factory, pickled = code_of(value)
    except ValueError as error:
        raise ConfigError([Problem(field=key, value=value, remedy=str(error))]) from error
    return {"kind": "python", "factory": factory} | ({} if pickled is None else {"pickled": pickled})


def _follow(command: Sequence[str]) -> None:
    """Run a command to its end and print its output.

    Raises:
        ConfigError: The command refused its config.
        TrainingFailed: The command failed.
        KeyboardInterrupt: This process was interrupted. The command has ended too.
    """
    # Lets the run import modules beside the running script, as this process can.
    own = [path or os.getcwd() for path in sys.path if not path.startswith((sys.prefix, sys.base_prefix))]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(own)}
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=environment,
        # With its own session, a terminal's Ctrl-C reaches only this process, which forwards it once.
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        lines: list[str] = []
        try:
            for line in process.stdout:
                print(line, end="", flush=True)
                lines.append(line.rstrip())
        except KeyboardInterrupt:
            process.send_signal(signal.SIGINT)
            try:
                rest, _ = process.communicate(timeout=INTERRUPT_S)
                print(rest, end="", flush=True)
            except subprocess.TimeoutExpired:
                process.kill()
            raise
        code = process.wait()
    if code == EXIT_REFUSED:
        said = [line.partition(": ") for line in lines[lines.index("refused:") + 1 :]]
        raise ConfigError(Problem(field=field, remedy=remedy) for field, _, remedy in said)
    if code:
        raise TrainingFailed(next((line for line in reversed(lines) if line), f"exit code {code}"))


def _result(run_dir: RunDir) -> TrainResult:
    return TrainResult(
        run_dir=run_dir.path,
        metrics=tuple(read_json_lines(run_dir.metrics)),
        checkpoint=run_dir.checkpoints / FINAL,
    )
