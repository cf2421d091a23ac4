"""apps.grpo, asynchronous and synchronous, against TRL's GRPOTrainer on the same cores.

    python benchmarks/against_trl.py [--steps N] [--rounds R] [--only CONTENDER ...] [--out FILE.json]
                                     [key.path=value ...]

The contenders take turns, R rounds: ours with ``max_off_policy_steps`` 4, ours with 0, and TRL 1.16.0 with
one and with two threads, of which the faster counts. TRL samples with transformers' ``generate`` (its path
without a GPU) in an environment of its own, .venv-trl, which this script makes from requirements/trl.lock.
All train the model of the config (``make models/tiny_moe``) on the config's training problems in their order,
with its sampling, groups, clipping, optimizer and reward, in float32. The learning rate is next to zero, so
that all sample from the same policy and their responses are equally long. ``TRL_SETTINGS`` has what else
affects TRL's speed. Overrides of the config hold for all contenders.

Reported over N steps after the first ones: trained response tokens per second and the median time of a step,
from the end of one step to the end of the next; over a whole run: the peak memory of its process tree. Our
evaluations lie outside the N steps, and so do our last steps, in which nothing is generated. Compare speeds
only at equal response lengths, which the table has too.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from common import (
    CONFIG,
    REPOSITORY,
    RESULTS,
    Finished,
    machine_facts,
    run_app,
    run_watched,
    write_json,
)
from rich.console import Console
from rich.table import Table

from forgeasync.algorithms import PpoClip
from forgeasync.config import AnswerPart, ReasoningGymSource, RunConfig, load_config
from forgeasync.environments import ReasoningGymProblems, TaskOrder, build_source
from forgeasync.files import read_json_lines

TRL_VENV = REPOSITORY / ".venv-trl"
TRL_LOCK = REPOSITORY / "requirements" / "trl.lock"
TRL_PYTHON = TRL_VENV / "bin" / "python"

SKIPPED_STEPS = 15
"""First steps, left out: caches fill, and an asynchronous run fills its buffer with short responses first."""

SAME_POLICY = "trainer.optimizer.learning_rate=1e-9"

OFF_POLICY_STEPS = {"ours async": 4, "ours sync": 0}
TRL_THREADS = {"TRL 1 thread": 1, "TRL 2 threads": 2}
CONTENDERS = (*OFF_POLICY_STEPS, *TRL_THREADS)

TRL_SETTINGS = {"micro_batch": 64, "experts": "grouped_mm", "continuous_batching": False}
"""The fastest of TRL's settings here: sequences in one forward and backward pass (generation takes the whole
batch at once), and transformers' implementation of the expert layers."""
TRL_WAIT_POLICY = "passive"
"""How OpenMP's threads wait. Active ones keep a core from the thread that they wait for, and a step can take
20 times as long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One run of one contender."""

    contender: str
    round: int
    tokens_per_s: float
    step_s_median: float
    step_s: list[float]
    response_lengths: dict[str, float]
    generated_per_trained_token: float
    reward_mean: float
    peak_memory_mib: float
    load_before: float

    @classmethod
    def of(
        cls,
        contender: str,
        number: int,
        finished: Finished,
        *,
        step_s: list[float],
        lengths: list[list[int]],
        generated_tokens: float,
        rewards: list[float],
    ) -> "Measurement":
        """Summarize the measured steps of a run. Generated tokens may belong to later batches."""
        all_lengths = [length for of_step in lengths for length in of_step]
        quantiles = np.percentile(all_lengths, [0, 10, 50, 90, 100]).tolist()
        return cls(
            contender=contender,
            round=number,
            tokens_per_s=sum(all_lengths) / sum(step_s),
            step_s_median=statistics.median(step_s),
            step_s=step_s,
            response_lengths={
                "mean": statistics.fmean(all_lengths),
                **dict(zip(("min", "p10", "p50", "p90", "max"), quantiles, strict=True)),
            },
            generated_per_trained_token=generated_tokens / sum(all_lengths),
            reward_mean=statistics.mean(rewards),
            peak_memory_mib=finished.peak_memory_mib,
            load_before=finished.load_before,
        )


def run_ours(
    contender: str, number: int, num_steps: int, folder: Path, overrides: Sequence[str]
) -> Measurement:
    """Run apps.grpo once, in ``folder``."""
    off_policy_steps = OFF_POLICY_STEPS[contender]
    config = load_config(CONFIG, overrides)
    own_overrides = {
        # Generation ends up to off_policy_steps before training does, and the last step evaluates.
        "max_steps": SKIPPED_STEPS + num_steps + off_policy_steps + 1,
        "max_off_policy_steps": off_policy_steps,
        "evaluation.num_problems": 8,
        "evaluation.every_steps": 1_000_000,
        # All rollouts: they have the lengths of responses.
        "logging.rollouts_per_step": config.algorithm.group_size * config.algorithm.groups_per_step,
        # TRL reports nowhere either.
        "logging.tensorboard": "false",
        "run_dir": folder,
    }
    own = [f"{key}={value}" for key, value in own_overrides.items()]
    finished = run_app("apps.grpo", CONFIG, [*overrides, *own])
    lengths: dict[int, list[int]] = {}
    for rollout in read_json_lines(folder / "rollouts.jsonl"):
        lengths.setdefault(rollout["step"], []).append(rollout["response_tokens"])
    lines = {line["step"]: line for line in read_json_lines(folder / "metrics.jsonl")}
    steps = range(SKIPPED_STEPS + 1, SKIPPED_STEPS + 1 + num_steps)
    return Measurement.of(
        contender,
        number,
        finished,
        step_s=[lines[step]["time/elapsed_s"] - lines[step - 1]["time/elapsed_s"] for step in steps],
        lengths=[lengths[step] for step in steps],
        generated_tokens=sum(
            lines[step]["throughput/generated_tokens_per_s"] * lines[step]["time/step_s"] for step in steps
        ),
        rewards=[lines[step]["reward/mean"] for step in steps],
    )


def run_trl(
    contender: str, number: int, num_steps: int, folder: Path, overrides: Sequence[str]
) -> Measurement:
    """Run GRPOTrainer once, in ``folder``."""
    config, threads = load_config(CONFIG, overrides), TRL_THREADS[contender]
    max_steps = SKIPPED_STEPS + num_steps
    folder.mkdir()
    tasks, spec, out = folder / "tasks.jsonl", folder / "spec.json", folder / "steps.json"
    write_tasks(config, max_steps * config.algorithm.groups_per_step, tasks)
    agreed = run_spec(config, max_steps=max_steps, tasks=tasks, scratch=folder)
    write_json(spec, {**agreed, **TRL_SETTINGS, "threads": threads})
    finished = run_watched(
        [str(TRL_PYTHON), str(REPOSITORY / "benchmarks" / "trl_side.py"), str(spec), str(out)],
        environment={
            "OMP_NUM_THREADS": str(threads),
            "OMP_WAIT_POLICY": TRL_WAIT_POLICY,
            "HF_HUB_OFFLINE": "1",
        },
    )
    before, *steps = json.loads(out.read_text(encoding="utf-8"))[SKIPPED_STEPS - 1 :]
    ends_s = [before["end_s"], *(step["end_s"] for step in steps)]
    return Measurement.of(
        contender,
        number,
        finished,
        step_s=np.diff(ends_s).tolist(),
        lengths=[step["lengths"] for step in steps],
        generated_tokens=sum(sum(step["lengths"]) for step in steps),
        rewards=[step["reward_mean"] for step in steps],
    )


def write_tasks(config: RunConfig, num_tasks: int, path: Path) -> None:
    """Write the first problems that a run of ``config`` trains on, with the input of their verifier."""
    problems = ReasoningGymProblems(
        gym_source(config),
        num_train=config.data.num_train,
        num_held_out=config.data.num_held_out,
        seed=config.seed,
    )
    order = TaskOrder(build_source(config.data, seed=config.seed).train, seed=config.seed)
    with path.open("w", encoding="utf-8") as file:
        for task in (order.next() for _ in range(num_tasks)):
            # As text: entries of problems differ in shape, and those of a table column must not.
            entry = json.dumps(problems.entry(task.source_index))
            file.write(json.dumps({"prompt": task.prompt, "entry": entry}) + "\n")


def gym_source(config: RunConfig) -> ReasoningGymSource:
    """Return the config's source of problems. TRL's side knows only this kind."""
    assert isinstance(config.data.source, ReasoningGymSource), f"{CONFIG} has no reasoning-gym problems"
    return config.data.source


def run_spec(config: RunConfig, *, max_steps: int, tasks: Path, scratch: Path) -> dict[str, Any]:
    """Return the settings of ``trl_side.py`` in which both sides agree."""
    source, sampling, algorithm = gym_source(config), config.sampling, config.algorithm
    optimizer = config.trainer.optimizer
    assert isinstance(algorithm.objective, PpoClip), "TRL's side clips as PPO does"
    assert source.answer_part is AnswerPart.ALL, "trl_side takes all of what follows the prefix"
    assert optimizer.decay_steps is None, "trl_side trains with a constant rate after its warm-up"
    return {
        "model": str(REPOSITORY / config.model.path),
        "tasks": str(tasks),
        "scratch": str(scratch / "trl"),
        "gym_task": source.task,
        "gym_options": source.options,
        "answer_prefix": source.answer_prefix,
        "seed": config.seed,
        "max_steps": max_steps,
        "group_size": algorithm.group_size,
        "groups_per_step": algorithm.groups_per_step,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "max_response_tokens": sampling.max_response_tokens,
        "clip_low": algorithm.objective.clip_low,
        "clip_high": algorithm.objective.clip_high,
        **optimizer.model_dump(exclude={"decay_steps"}),
    }


def ensure_trl_environment() -> None:
    """Make .venv-trl if it is missing or was made from another lock."""
    stamp, lock = TRL_VENV / "installed", TRL_LOCK.read_text(encoding="utf-8")
    if stamp.exists() and stamp.read_text(encoding="utf-8") == lock:
        return
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(TRL_VENV)], check=True)
    # The lock names every package, so no other build of torch can be installed.
    install = ["-m", "pip", "install", "--quiet", "--no-deps", "-r", str(TRL_LOCK)]
    subprocess.run([str(TRL_PYTHON), *install], check=True)
    stamp.write_text(lock, encoding="utf-8")


def medians(measurements: Sequence[Measurement]) -> dict[str, dict[str, float]]:
    """Return medians over rounds, by contender and name of the value."""
    values = ("tokens_per_s", "step_s_median", "peak_memory_mib")
    runs: dict[str, list[Measurement]] = {}
    for one in measurements:
        runs.setdefault(one.contender, []).append(one)
    return {
        contender: {value: statistics.median(getattr(one, value) for one in own) for value in values}
        for contender, own in runs.items()
    }


def results_table(measurements: Sequence[Measurement], *, title: str, baseline: str) -> Table:
    """Return a table with a row for each run, then one for each contender with medians and ratios to
    ``baseline``."""
    table = Table("contender", title=title)
    lengths_column = "length mean (p10/p50/p90) max"
    for name in ("round", "tokens/s", "step s", lengths_column, "reward", "peak MiB", "load"):
        table.add_column(name, justify="right")
    for one in measurements:
        lengths = "{mean:.1f} ({p10:.0f}/{p50:.0f}/{p90:.0f}) {max:.0f}".format(**one.response_lengths)
        table.add_row(
            one.contender,
            str(one.round),
            f"{one.tokens_per_s:.0f}",
            f"{one.step_s_median:.2f}",
            lengths,
            f"{one.reward_mean:.3f}",
            f"{one.peak_memory_mib:.0f}",
            f"{one.load_before:.1f}",
        )
    table.add_section()
    middle = medians(measurements)
    for contender, values in middle.items():
        speed, step_s, memory = (
            form.format(value)
            + (f" (x{value / middle[baseline][key]:.2f})" if baseline not in ("", contender) else "")
            for form, (key, value) in zip(("{:.0f}", "{:.2f}", "{:.0f}"), values.items(), strict=True)
        )
        table.add_row(contender, "median", speed, step_s, "", "", memory, "")
    return table


def main() -> None:
    """Measure, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description="apps.grpo against TRL's GRPOTrainer.")
    parser.add_argument("--steps", type=int, default=10, help="measured steps of every run")
    parser.add_argument("--rounds", type=int, default=2, help="runs of every contender")
    parser.add_argument("--out", type=Path, default=RESULTS / "against_trl.json")
    parser.add_argument("--only", choices=CONTENDERS, action="append", help="leave the others out")
    parser.add_argument("overrides", nargs="*", metavar="key.path=value", help="change the config")
    arguments = parser.parse_intermixed_args()
    # Wide enough for the table if the output is no terminal.
    console = Console(width=110)
    overrides = [SAME_POLICY, *arguments.overrides]
    contenders = arguments.only or CONTENDERS
    trl = [contender for contender in contenders if contender in TRL_THREADS]
    if trl:
        ensure_trl_environment()
    measurements: list[Measurement] = []
    with tempfile.TemporaryDirectory(prefix="against_trl-") as scratch:
        for number in range(1, arguments.rounds + 1):
            for contender in contenders:
                folder = Path(scratch) / f"{contender.replace(' ', '_')}-{number}"
                run = run_trl if contender in trl else run_ours
                measurements.append(run(contender, number, arguments.steps, folder, overrides))
                console.print(f"round {number}, {contender}: {measurements[-1].tokens_per_s:.0f} tokens/s")
    middle = medians(measurements)
    # Ratios are to the faster of TRL's.
    baseline = max(trl, key=lambda contender: middle[contender]["tokens_per_s"], default="")
    title = f"GRPO on the same cores, {arguments.steps} steps a run"
    console.print(results_table(measurements, title=title, baseline=baseline))
    content = {
        "machine": machine_facts(),
        "config": str(CONFIG.relative_to(REPOSITORY)),
        "overrides": overrides,
        "skipped_steps": SKIPPED_STEPS,
        "measured_steps": arguments.steps,
        "trl_settings": {**TRL_SETTINGS, "wait_policy": TRL_WAIT_POLICY},
        "baseline": baseline,
        "medians": middle,
        "runs": [asdict(one) for one in measurements],
    }
    write_json(arguments.out, content)
    console.print(f"wrote {arguments.out}")


if __name__ == "__main__":
    main()
