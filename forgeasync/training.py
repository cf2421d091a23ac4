"""A run from Python: from a script or a notebook cell, with code that was defined there.

The run is a process of its own, ``python -m apps.grpo``: nothing of it stays behind in a notebook, and an
interrupt ends it in order. What it prints is printed here, line by line.
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
"""``{"max_steps": 20, "algorithm.objective": PpoClip(clip_high=0.3)}``, or ``["max_steps=20"]`` as on the
command line."""

INTERRUPT_S = 60.0
"""Seconds that an interrupted run may take to save its weights before it is killed."""


class TrainingFailed(RuntimeError):
    """A run ended before its last step; the text is its last line: why, and where its newest weights are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainResult:
    """The results of a finished run."""

    run_dir: Path
    metrics: tuple[dict[str, float | None], ...]
    """The lines of metrics.jsonl; docs/metrics.md has the keys."""
    checkpoint: Path
    """The trained model, as a Hugging Face folder."""

    def metric(self, key: str) -> list[tuple[int, float]]:
        """Step and value of every line that has ``key``, such as ``eval/accuracy``."""
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

    ``config`` is a YAML file, several that are merged in order, or a ``RunConfig``. ``reward``,
    ``environment``, ``objective`` and ``advantage`` take the place of ``data.reward``, ``environment``,
    ``algorithm.objective`` and ``algorithm.advantage``: each is a class or function of your own (also one
    defined in a notebook or in the running script), or a built-in such as ``Cispo(clip_high=2.0)``.
    ``resume`` is ``"latest"`` or the folder of a checkpoint.

        import forgeasync as fa

        def shorter(task: fa.Task, response: fa.Response) -> float:
            return 1.0 / (1 + response.num_tokens)

        result = fa.train("configs/tiny_moe_cpu.yaml", {"max_steps": 20}, reward=shorter)
        print(result.metric("reward/mean"))

    Raises:
        ConfigError: the config is wrong; lists every problem.
        TrainingFailed: the run ended before its last step.
        KeyboardInterrupt: it was interrupted; it has saved its newest weights and ended.
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
    """The config with all that was given beside it, also as ``config.yaml`` in the folder."""
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
    """``key=value`` for every key, with values as JSON, which YAML reads too."""
    for key, value in values.items():
        yield f"{key}={json.dumps(_as_plain(key, value))}"


def _as_plain(key: str, value: object) -> object:
    """Return a value as YAML has it; sections, classes and functions may be anywhere within it.

    Raises:
        ConfigError: it is or holds something that no config can hold; names ``key``.
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
    """Run the process to its end and print what it says.

    Raises:
        ConfigError: it was refused.
        TrainingFailed: it failed.
        KeyboardInterrupt: this process was interrupted, and the run has ended too.
    """
    # Modules beside the running script can be imported there as they can here.
    own = [path or os.getcwd() for path in sys.path if not path.startswith((sys.prefix, sys.base_prefix))]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(own)}
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=environment,
        # A terminal's Ctrl-C goes to this process alone, which hands it on once.
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
