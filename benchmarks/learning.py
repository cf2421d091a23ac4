"""Compares learning curves of several ways to train the embedded default's model, over several seeds.

    python benchmarks/learning.py [key.path=value ...] [--compare ages | distillation | steps] [--steps N]
                                  [--num-seeds N] [--variants NAME ...] [--folder DIR]

``ages`` compares staleness bounds, ``distillation`` compares a teacher with the reward, and ``steps``
compares step rewards with outcome rewards. All variants of a comparison start with the same model. Each
variant runs once with every seed, one run after the other, in DIR/<variant>-seed<S>. Complete runs are not
repeated; interrupted ones are. Overrides on the command line apply to all variants, after the variants' own.
Writes to DIR

- learning.png: held-out accuracy against optimizer steps and against minutes or sampled tokens, with mean and
  range over seeds
- learning.md: a table of variants, and a table of the accuracy at every evaluated step with the tokens
  sampled until then
- learning.json: the same figures, and those of every run

Prints for every evaluated step the range of each variant's held-out accuracy over seeds, and names the
variants whose range does not overlap that of the first variant.
"""

import argparse
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from common import REPOSITORY, RESULTS, machine_facts, run_watched, write_json
from learning_report import (
    Against,
    RunResult,
    VariantResult,
    accuracy_lines,
    accuracy_table,
    markdown_table,
    plot_variants,
    run_result,
    variant_result,
)

from forgeasync.files import read_json_lines

CONFIGS = REPOSITORY / "configs"
CONFIG = CONFIGS / "tiny_moe_cpu.yaml"
OVERRIDES_FILE = "overrides.txt"
"""Name of the file in a run's folder with the overrides that it was started with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A way to train; ``overrides`` are its differences from the config."""

    name: str
    overrides: tuple[str, ...]
    config: Path = CONFIG
    app: str = "apps.grpo"
    num_seeds: int = 3
    """Number of runs, with seeds 0, 1, ... ."""


LEARNING_RATE = "trainer.optimizer.learning_rate=2.0e-5"
"""A fifth of the embedded default's rate, with which the model learns everything in 20 steps: no method could
make up for an age of 32 steps there."""


def at_most(max_off_policy_steps: int) -> tuple[str, ...]:
    """Return overrides with which the data are as old as the bound allows.

    The generator is faster than the trainer, and neither the buffer, the load control nor the payload store
    limits it. So after the first steps every batch has the maximum age.
    """
    return (
        f"max_off_policy_steps={max_off_policy_steps}",
        "buffer.max_groups=null",
        "buffer.adapt_load=false",
        "payload.capacity_gib=0.5",
        "generator.max_num_seqs=1024",
        "generator.max_num_batched_tokens=4096",
        LEARNING_RATE,
    )


REINFORCE = "algorithm.objective={kind: reinforce}"
"""Objective without a ratio: every token counts as if the current policy had sampled it."""
CORRECTED = (REINFORCE, "algorithm.corrections=[{kind: truncated_is, cap: 2.0}]")
"""Capped importance weights; at age 32, a clip would drop the few tokens that matter."""
AGES = (
    Variant(name="synchronous", overrides=(*at_most(0), *CORRECTED)),
    Variant(name="age 1", overrides=(*at_most(1), *CORRECTED), num_seeds=1),
    Variant(name="age 8", overrides=(*at_most(8), *CORRECTED)),
    Variant(name="age 32", overrides=(*at_most(32), *CORRECTED)),
    Variant(name="age 32 uncorrected", overrides=(*at_most(32), REINFORCE), num_seeds=1),
)
DISTILLATION = (
    Variant(name="GRPO", overrides=()),
    Variant(name="distillation", overrides=(), config=CONFIGS / "distill_cpu.yaml", app="apps.distill"),
)
"""Two ways to train models/tiny_moe; run ``make models/tiny_moe models/tiny_teacher`` first."""
OF_STEPS = CONFIGS / "process_reward_cpu.yaml"
"""Config for step rewards; run ``make models/tiny_steps`` first."""
STEPS = (
    Variant(name="outcome alone", overrides=("data.reward=null",), config=OF_STEPS),
    Variant(name="sum to go", overrides=(), config=OF_STEPS),
    Variant(name="minimum", overrides=("algorithm.step_credit=minimum",), config=OF_STEPS),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Variants, which are compared with the first one, and the x-axes of the plot."""

    variants: tuple[Variant, ...]
    against: tuple[Against, Against]


COMPARISONS = {
    "ages": Comparison(variants=AGES, against=(Against.STEPS, Against.MINUTES)),
    "distillation": Comparison(variants=DISTILLATION, against=(Against.TOKENS, Against.STEPS)),
    "steps": Comparison(variants=STEPS, against=(Against.STEPS, Against.TOKENS)),
}


def ensure_run(variant: Variant, seed: int, num_steps: int, folder: Path, extra: Sequence[str]) -> Path:
    """Return the folder of the variant's complete run with this seed; run it if it is missing.

    Raises:
        ValueError: the folder has a run that was started with other overrides.
        RuntimeError: the run failed.
    """
    run_dir = folder / f"{variant.name.replace(' ', '_')}-seed{seed}"
    overrides = [*variant.overrides, f"seed={seed}", f"max_steps={num_steps}", *extra]
    if run_dir.exists():
        text, wanted = (run_dir / OVERRIDES_FILE).read_text(encoding="utf-8"), "\n".join(overrides)
        if text != wanted:
            raise ValueError(
                f"{run_dir} holds a run with the overrides {text.split()}, not {wanted.split()}; "
                "delete it or choose another --folder"
            )
        if is_complete(run_dir, num_steps):
            return run_dir
        shutil.rmtree(run_dir)
    run_dir.mkdir(parents=True)
    (run_dir / OVERRIDES_FILE).write_text("\n".join(overrides), encoding="utf-8")
    command = [sys.executable, "-m", variant.app, "--config", str(variant.config)]
    command += [*overrides, f"run_dir={run_dir}"]
    print(f"running {run_dir.name}", flush=True)
    # One thread in each of the procs that share the cores, as in the Makefile.
    run_watched(command, environment={"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"})
    return run_dir


def is_complete(run_dir: Path, num_steps: int) -> bool:
    """Return whether a run's metrics include its last step."""
    metrics = run_dir / "metrics.jsonl"
    lines = read_json_lines(metrics) if metrics.exists() else []
    return bool(lines) and lines[-1]["step"] == num_steps


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="Learning curves of ways to train, over seeds.")
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps of every run")
    parser.add_argument("--num-seeds", type=int, help="instead of each variant's own number")
    parser.add_argument("--compare", choices=list(COMPARISONS), default="ages")
    parser.add_argument("--variants", nargs="+", help="names of some of them; all if left out")
    parser.add_argument("--folder", type=Path, help="results/learning_COMPARISON if left out")
    parser.add_argument("overrides", nargs="*", metavar="key.path=value", help="change the config")
    return parser.parse_intermixed_args()


def write_report(results: Sequence[VariantResult], folder: Path, arguments: argparse.Namespace) -> None:
    """Write the plot, the tables and the JSON to ``folder``; print the table and the accuracies."""
    comparison = COMPARISONS[arguments.compare]
    plot_variants(results, folder / "learning.png", comparison.against)
    table = f"{markdown_table(results)}\n{accuracy_table(results)}"
    (folder / "learning.md").write_text(table, encoding="utf-8")
    content = {
        "machine": machine_facts(),
        "configs": {one.name: str(one.config.relative_to(REPOSITORY)) for one in comparison.variants},
        "steps": arguments.steps,
        "overrides": {variant.name: variant.overrides for variant in comparison.variants},
        "overrides_of_all": arguments.overrides,
        "variants": [
            {"name": one.name, "summary": asdict(one.summary), "runs": [asdict(run) for run in one.runs]}
            for one in results
        ],
    }
    write_json(folder / "learning.json", content)
    print(table)
    print("\n".join(accuracy_lines(results)))
    print(f"wrote {folder}/learning.png, .md and .json")


def main() -> None:
    """Run the missing runs, then report on all of them."""
    arguments = parse_arguments()
    folder = (arguments.folder or RESULTS / f"learning_{arguments.compare}").resolve()
    variants = COMPARISONS[arguments.compare].variants
    names = [one.name for one in variants]
    if unknown := [name for name in arguments.variants or () if name not in names]:
        sys.exit(f"--variants {', '.join(unknown)}: must be of {', '.join(names)}")
    chosen = [one for one in variants if arguments.variants is None or one.name in arguments.variants]
    runs: dict[str, list[RunResult]] = {variant.name: [] for variant in chosen}
    # Seeds in the outer loop: what the machine does over hours then meets all variants alike.
    num_seeds = {one.name: arguments.num_seeds or one.num_seeds for one in chosen}
    for seed in range(max(num_seeds.values())):
        for variant in chosen:
            if seed >= num_seeds[variant.name]:
                continue
            try:
                run_dir = ensure_run(variant, seed, arguments.steps, folder, arguments.overrides)
            except (ValueError, RuntimeError) as error:
                sys.exit(str(error))
            runs[variant.name].append(run_result(run_dir, seed))
    write_report([variant_result(name, own) for name, own in runs.items()], folder, arguments)


if __name__ == "__main__":
    main()
