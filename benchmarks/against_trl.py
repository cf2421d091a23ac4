"""apps.grpo, asynchronous and synchronous, against TRL's GRPOTrainer on the same cores.

    python benchmarks/against_trl.py [--steps N] [--rounds R] [--out FILE.json] [key.path=value ...]

The contenders take turns, R rounds: ours with ``max_off_policy_steps`` 4, ours with 0, and TRL 1.16.0 with
one and with two threads, of which the faster counts. TRL samples with transformers' ``generate`` (its path
without a GPU) in an environment of its own, .venv-trl, which this script makes from requirements/trl.lock.
All train the model of the config (``make models/tiny_moe``) on the config's training problems in their order,
with its sampling, groups, clipping, optimizer and reward, in float32. The learning rate is next to zero, so
that all sample from the same policy and their responses are equally long. ``MICRO_BATCH``, ``EXPERTS`` and
``TRL_WAIT_POLICY`` affect TRL's speed alone. Overrides of the config hold for all contenders.

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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from common import CONFIG, REPOSITORY, RESULTS, machine_facts, print_table, run_app, run_watched, write_json

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

MICRO_BATCH = 64
"""Sequences in one of TRL's forward and backward passes. Its generation takes the whole batch at once."""
EXPERTS = "grouped_mm"
"""Implementation of the expert layers in transformers."""
TRL_WAIT_POLICY = "passive"
"""How OpenMP's threads wait. Active ones keep a core from the thread that they wait for, and a step can take
20 times as long."""


def measurement(
    contender: str,
    number: int,
    peak_memory_mib: float,
    *,
    step_s: list[float],
    lengths: list[list[int]],
    rewards: list[float],
) -> dict[str, Any]:
    """Summarize the measured steps of a run."""
    all_lengths = [length for of_step in lengths for length in of_step]
    return {
        "contender": contender,
        "round": number,
        "tokens_per_s": sum(all_lengths) / sum(step_s),
        "step_s_median": statistics.median(step_s),
        "step_s": step_s,
        "response_tokens_mean": statistics.fmean(all_lengths),
        "reward_mean": statistics.mean(rewards),
        "peak_memory_mib": peak_memory_mib,
    }


def run_ours(
    contender: str, number: int, num_steps: int, folder: Path, overrides: Sequence[str]
) -> dict[str, Any]:
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
    peak_memory_mib = run_app("apps.grpo", CONFIG, [*overrides, *own])
    lengths: dict[int, list[int]] = {}
    for rollout in read_json_lines(folder / "rollouts.jsonl"):
        lengths.setdefault(rollout["step"], []).append(rollout["response_tokens"])
    lines = {line["step"]: line for line in read_json_lines(folder / "metrics.jsonl")}
    steps = range(SKIPPED_STEPS + 1, SKIPPED_STEPS + 1 + num_steps)
    return measurement(
        contender,
        number,
        peak_memory_mib,
        step_s=[lines[step]["time/elapsed_s"] - lines[step - 1]["time/elapsed_s"] for step in steps],
        lengths=[lengths[step] for step in steps],
        rewards=[lines[step]["reward/mean"] for step in steps],
    )


def run_trl(
    contender: str, number: int, num_steps: int, folder: Path, overrides: Sequence[str]
) -> dict[str, Any]:
    """Run GRPOTrainer once, in ``folder``."""
    config, threads = load_config(CONFIG, overrides), TRL_THREADS[contender]
    max_steps = SKIPPED_STEPS + num_steps
    folder.mkdir()
    tasks, spec, out = folder / "tasks.jsonl", folder / "spec.json", folder / "steps.json"
    write_tasks(config, max_steps * config.algorithm.groups_per_step, tasks)
    source = gym_source(config)
    content = {
        "model": str(REPOSITORY / config.model.path),
        "tasks": str(tasks),
        "gym_task": source.task,
        "gym_options": source.options,
        "answer_prefix": source.answer_prefix,
        "threads": threads,
        "grpo": grpo_settings(config, max_steps=max_steps, scratch=folder),
    }
    write_json(spec, content)
    peak_memory_mib = run_watched(
        [str(TRL_PYTHON), str(REPOSITORY / "benchmarks" / "trl_side.py"), str(spec), str(out)],
        environment={
            "OMP_NUM_THREADS": str(threads),
            "OMP_WAIT_POLICY": TRL_WAIT_POLICY,
            "HF_HUB_OFFLINE": "1",
        },
    )
    before, *steps = json.loads(out.read_text(encoding="utf-8"))[SKIPPED_STEPS - 1 :]
    ends_s = [before["end_s"], *(step["end_s"] for step in steps)]
    return measurement(
        contender,
        number,
        peak_memory_mib,
        step_s=np.diff(ends_s).tolist(),
        lengths=[step["lengths"] for step in steps],
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


def grpo_settings(config: RunConfig, *, max_steps: int, scratch: Path) -> dict[str, Any]:
    """Return the arguments of TRL's GRPOConfig for a config.

    They make one optimizer step per generated batch, without evaluation, reports or checkpoints.
    """
    sampling, algorithm, optimizer = config.sampling, config.algorithm, config.trainer.optimizer
    sequences_per_step = algorithm.group_size * algorithm.groups_per_step
    assert isinstance(algorithm.objective, PpoClip), "TRL's side clips as PPO does"
    assert gym_source(config).answer_part is AnswerPart.ALL, "trl_side takes all of what follows the prefix"
    assert optimizer.decay_steps is None, "trl_side trains with a constant rate after its warm-up"
    assert sequences_per_step % MICRO_BATCH == 0, "micro batches must divide the batch"
    return {
        "output_dir": str(scratch / "trl"),
        "seed": config.seed,
        "use_cpu": True,
        "bf16": False,
        "max_steps": max_steps,
        "num_generations": algorithm.group_size,
        "per_device_train_batch_size": MICRO_BATCH,
        "gradient_accumulation_steps": sequences_per_step // MICRO_BATCH,
        # TRL's default recomputes activations, which saves memory and costs time.
        "gradient_checkpointing": False,
        "shuffle_dataset": False,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "max_completion_length": sampling.max_response_tokens,
        "use_transformers_continuous_batching": False,
        # The mean over all tokens of the batch, as on our side.
        "loss_type": "dapo",
        "beta": 0.0,
        "epsilon": algorithm.objective.clip_low,
        "epsilon_high": algorithm.objective.clip_high,
        "scale_rewards": "group",
        # TRL would add the load-balancing loss that the model's config names. Our side has none.
        "router_aux_loss_coef": 0.0,
        "learning_rate": optimizer.learning_rate,
        "lr_scheduler_type": "constant_with_warmup",
        "warmup_steps": optimizer.warmup_steps,
        "adam_beta1": optimizer.betas[0],
        "adam_beta2": optimizer.betas[1],
        "adam_epsilon": optimizer.eps,
        "weight_decay": optimizer.weight_decay,
        "max_grad_norm": optimizer.max_grad_norm,
        "model_init_kwargs": {"dtype": "float32", "experts_implementation": EXPERTS},
        "logging_steps": 1,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
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


COLUMNS = {
    "tokens_per_s": ("tokens/s", "{:.0f}"),
    "step_s_median": ("step s", "{:.2f}"),
    "peak_memory_mib": ("peak MiB", "{:.0f}"),
    "response_tokens_mean": ("response tokens", "{:.1f}"),
    "reward_mean": ("reward", "{:.3f}"),
}
"""Title and format of what is reported of a run."""


def medians(measurements: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Return medians over rounds, by contender and name of the value."""
    return {
        contender: {
            value: statistics.median(one[value] for one in measurements if one["contender"] == contender)
            for value in COLUMNS
        }
        for contender in dict.fromkeys(one["contender"] for one in measurements)
    }


def main() -> None:
    """Measure, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description="apps.grpo against TRL's GRPOTrainer.")
    parser.add_argument("--steps", type=int, default=10, help="measured steps of every run")
    parser.add_argument("--rounds", type=int, default=2, help="runs of every contender")
    parser.add_argument("--out", type=Path, default=RESULTS / "against_trl.json")
    parser.add_argument("overrides", nargs="*", metavar="key.path=value", help="change the config")
    arguments = parser.parse_intermixed_args()
    overrides = [SAME_POLICY, *arguments.overrides]
    ensure_trl_environment()
    measurements: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="against_trl-") as scratch:
        for number in range(1, arguments.rounds + 1):
            for contender in (*OFF_POLICY_STEPS, *TRL_THREADS):
                folder = Path(scratch) / f"{contender.replace(' ', '_')}-{number}"
                run = run_trl if contender in TRL_THREADS else run_ours
                measurements.append(run(contender, number, arguments.steps, folder, overrides))
                tokens_per_s = measurements[-1]["tokens_per_s"]
                print(f"round {number}, {contender}: {tokens_per_s:.0f} tokens/s", flush=True)
    middle = medians(measurements)
    # Ratios are to the faster of TRL's.
    baseline = max(TRL_THREADS, key=lambda contender: middle[contender]["tokens_per_s"])
    print_table(
        f"GRPO on the same cores: medians of {arguments.rounds} rounds (ratios to {baseline})",
        ("contender", *(title for title, _ in COLUMNS.values())),
        (
            [contender]
            + [
                f"{form.format(values[key])} (x{values[key] / middle[baseline][key]:.2f})"
                for key, (_, form) in COLUMNS.items()
            ]
            for contender, values in middle.items()
        ),
    )
    content = {
        "machine": machine_facts(),
        "overrides": overrides,
        "measured_steps": arguments.steps,
        "baseline": baseline,
        "medians": middle,
        "runs": measurements,
    }
    write_json(arguments.out, content)
    print(f"wrote {arguments.out}")


if __name__ == "__main__":
    main()
