"""Compares apps.grpo, asynchronous and synchronous, with TRL's GRPOTrainer on the same cores.

    python benchmarks/against_trl.py [--steps N] [--rounds R] [--out FILE.json] [key.path=value ...]

The contenders take turns for R rounds: forgeasync with max_off_policy_steps 4 and 0, and TRL 1.16.0 with one
and with two threads, of which the faster counts. TRL samples with transformers' ``generate``, its path
without a GPU, in the environment .venv-trl, which this script creates from requirements/trl.lock. All
contenders train the config's model (``make models/tiny_moe``) on its training problems in its order, with its
sampling, groups, clipping, optimizer and reward, in float32. The learning rate is almost 0, so that all keep
sampling from the same policy and responses are equally long. ``TrlSettings`` has all other settings that
affect TRL's speed. Overrides of the config apply to all contenders.

Two figures are compared over N steps after the first ones: trained response tokens per second, and the median
step time, from the end of one step to the end of the next. The third is the peak memory of the process tree
over the whole run. The N steps exclude our evaluations and our last steps, in which nothing is left to
generate. Response lengths are reported too, because speeds in tokens are comparable only for equal lengths.
"""

import argparse
import dataclasses
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import (
    REPOSITORY,
    RESULTS,
    Measurement,
    Step,
    machine_facts,
    measurement,
    medians,
    results_table,
    run_watched,
    write_json,
)
from rich.console import Console

from forgeasync.algorithms import PpoClip
from forgeasync.config import AnswerPart, ReasoningGymSource, RunConfig, load_config
from forgeasync.environments import ReasoningGymProblems, TaskOrder, build_source
from forgeasync.files import read_json_lines

CONFIG = REPOSITORY / "configs" / "tiny_moe_cpu.yaml"
TRL_VENV = REPOSITORY / ".venv-trl"
TRL_LOCK = REPOSITORY / "requirements" / "trl.lock"
TRL_PYTHON = TRL_VENV / "bin" / "python"

SKIPPED_STEPS = 15
"""First steps to exclude: caches fill, and an asynchronous run fills its buffer, short responses first."""

SAME_POLICY = "trainer.optimizer.learning_rate=1e-9"

OFF_POLICY_STEPS = {"ours async": 4, "ours sync": 0}
TRL_THREADS = {"TRL 1 thread": 1, "TRL 2 threads": 2}
CONTENDERS = (*OFF_POLICY_STEPS, *TRL_THREADS)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrlSettings:
    """TRL settings that affect only its speed, besides the number of threads."""

    micro_batch: int = 64
    """Sequences per forward and backward pass; generation uses the whole batch at once."""
    experts: str = "grouped_mm"
    """Implementation of the expert layers in transformers."""
    continuous_batching: bool = False
    wait_policy: str = "passive"
    """OpenMP's wait policy. With active waiting and a busy core, a step can take 20 times as long, because
    waiting threads keep the core from the thread that they wait for."""


def run_ours(
    contender: str, number: int, num_steps: int, folder: Path, overrides: Sequence[str]
) -> Measurement:
    """Run apps.grpo in ``folder``; return its measurement."""
    off_policy_steps = OFF_POLICY_STEPS[contender]
    config = load_config(CONFIG, overrides)
    own_overrides = {
        # Generation ends up to off_policy_steps before training does, and the last step evaluates.
        "max_steps": SKIPPED_STEPS + num_steps + off_policy_steps + 1,
        "max_off_policy_steps": off_policy_steps,
        "evaluation.num_problems": 8,
        "evaluation.every_steps": 1_000_000,
        # All of them: the lengths of every response are read from there.
        "logging.rollouts_per_step": config.algorithm.group_size * config.algorithm.groups_per_step,
        # TRL reports nowhere either.
        "logging.tensorboard": "false",
        "run_dir": folder,
    }
    command = [sys.executable, "-m", "apps.grpo", "--config", str(CONFIG), *overrides]
    command += [f"{key}={value}" for key, value in own_overrides.items()]
    # One thread in each of the procs that share the cores, as in the Makefile.
    finished = run_watched(command, environment={"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"})

    lengths: dict[int, list[int]] = {}
    for rollout in read_json_lines(folder / "rollouts.jsonl"):
        lengths.setdefault(rollout["step"], []).append(rollout["response_tokens"])
    lines = {line["step"]: line for line in read_json_lines(folder / "metrics.jsonl")}
    first = SKIPPED_STEPS + 1
    steps = [
        Step(
            step_s=lines[step]["time/elapsed_s"] - lines[step - 1]["time/elapsed_s"],
            lengths=lengths[step],
            generated_tokens=lines[step]["throughput/generated_tokens_per_s"] * lines[step]["time/step_s"],
            reward_mean=lines[step]["reward/mean"],
        )
        for step in range(first, first + num_steps)
    ]
    return measurement(contender, number, steps, finished)


def run_trl(
    contender: str, number: int, num_steps: int, folder: Path, overrides: Sequence[str], settings: TrlSettings
) -> Measurement:
    """Run GRPOTrainer in ``folder``; return its measurement."""
    config, threads = load_config(CONFIG, overrides), TRL_THREADS[contender]
    max_steps = SKIPPED_STEPS + num_steps
    folder.mkdir()
    tasks, spec, out = folder / "tasks.jsonl", folder / "spec.json", folder / "steps.json"
    write_tasks(config, max_steps * config.algorithm.groups_per_step, tasks)
    agreed = run_spec(config, max_steps=max_steps, tasks=tasks, scratch=folder)
    speed = {
        "threads": threads,
        "micro_batch": settings.micro_batch,
        "experts": settings.experts,
        "continuous_batching": settings.continuous_batching,
    }
    write_json(spec, {**agreed, **speed})
    finished = run_watched(
        [str(TRL_PYTHON), str(REPOSITORY / "benchmarks" / "trl_side.py"), str(spec), str(out)],
        environment={
            "OMP_NUM_THREADS": str(threads),
            "OMP_WAIT_POLICY": settings.wait_policy,
            "HF_HUB_OFFLINE": "1",
        },
    )
    records = json.loads(out.read_text(encoding="utf-8"))
    steps = [
        Step(
            step_s=record["end_s"] - before["end_s"],
            lengths=record["lengths"],
            generated_tokens=sum(record["lengths"]),
            reward_mean=record["reward_mean"],
        )
        for before, record in zip(records[SKIPPED_STEPS - 1 :], records[SKIPPED_STEPS:], strict=False)
    ]
    return measurement(contender, number, steps, finished)


def write_tasks(config: RunConfig, num_tasks: int, path: Path) -> None:
    """Write the first training problems of ``config``, with the data for their verifier."""
    problems = ReasoningGymProblems(
        gym_source(config),
        num_train=config.data.num_train,
        num_held_out=config.data.num_held_out,
        seed=config.seed,
    )
    order = TaskOrder(build_source(config.data, seed=config.seed).train, seed=config.seed)
    with path.open("w", encoding="utf-8") as file:
        for task in (order.next() for _ in range(num_tasks)):
            # As text: entries differ in shape from problem to problem, columns of a table must not.
            entry = json.dumps(problems.entry(task.source_index))
            file.write(json.dumps({"prompt": task.prompt, "entry": entry}) + "\n")


def gym_source(config: RunConfig) -> ReasoningGymSource:
    """Return the config's data source, which must be reasoning-gym: TRL's side supports no other."""
    assert isinstance(config.data.source, ReasoningGymSource), f"{CONFIG} has no reasoning-gym problems"
    return config.data.source


def run_spec(config: RunConfig, *, max_steps: int, tasks: Path, scratch: Path) -> dict[str, Any]:
    """Return the fields of ``trl_side.Spec`` that both sides share."""
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
    """Create .venv-trl if it is missing or was created from another lock."""
    stamp, lock = TRL_VENV / "installed", TRL_LOCK.read_text(encoding="utf-8")
    if stamp.exists() and stamp.read_text(encoding="utf-8") == lock:
        return
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(TRL_VENV)], check=True)
    # The lock names every package: nothing is resolved, so no other build of torch can come in.
    install = ["-m", "pip", "install", "--quiet", "--no-deps", "-r", str(TRL_LOCK)]
    subprocess.run([str(TRL_PYTHON), *install], check=True)
    stamp.write_text(lock, encoding="utf-8")


def parse_arguments() -> argparse.Namespace:
    """Parse the command line, which can vary TRL's settings to measure the effect of each."""
    settings = TrlSettings()
    parser = argparse.ArgumentParser(description="apps.grpo against TRL's GRPOTrainer.")
    parser.add_argument("--steps", type=int, default=10, help="measured steps of every run")
    parser.add_argument("--rounds", type=int, default=2, help="runs of every contender")
    parser.add_argument("--out", type=Path, default=RESULTS / "against_trl.json")
    parser.add_argument("--only", choices=CONTENDERS, action="append", help="leave the others out")
    parser.add_argument("--trl-micro-batch", type=int, default=settings.micro_batch)
    parser.add_argument("--trl-experts", default=settings.experts)
    parser.add_argument(
        "--trl-continuous-batching",
        action=argparse.BooleanOptionalAction,
        default=settings.continuous_batching,
    )
    parser.add_argument("--trl-wait-policy", choices=("active", "passive"), default=settings.wait_policy)
    parser.add_argument("overrides", nargs="*", metavar="key.path=value", help="change the config")
    return parser.parse_intermixed_args()


def main() -> None:
    """Run all contenders, print the table and write the JSON."""
    arguments = parse_arguments()
    # Room for the table also where the output is no terminal.
    console = Console(width=110)
    settings = TrlSettings(
        micro_batch=arguments.trl_micro_batch,
        experts=arguments.trl_experts,
        continuous_batching=arguments.trl_continuous_batching,
        wait_policy=arguments.trl_wait_policy,
    )
    overrides = [SAME_POLICY, *arguments.overrides]
    contenders = arguments.only or CONTENDERS
    if not TRL_THREADS.keys().isdisjoint(contenders):
        ensure_trl_environment()
    measurements: list[Measurement] = []
    with tempfile.TemporaryDirectory(prefix="against_trl-") as scratch:
        for number in range(1, arguments.rounds + 1):
            for contender in contenders:
                folder = Path(scratch) / f"{contender.replace(' ', '_')}-{number}"
                what = (contender, number, arguments.steps, folder, overrides)
                one = run_trl(*what, settings) if contender in TRL_THREADS else run_ours(*what)
                measurements.append(one)
                console.print(f"round {number}, {contender}: {one.tokens_per_s:.0f} tokens/s")
    middle = medians(measurements)
    trl = [contender for contender in contenders if contender in TRL_THREADS]
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
        "trl_settings": dataclasses.asdict(settings),
        "baseline": baseline,
        "medians": middle,
        "runs": [dataclasses.asdict(one) for one in measurements],
    }
    write_json(arguments.out, content)
    console.print(f"wrote {arguments.out}")


if __name__ == "__main__":
    main()
