"""Learning curves: compares ways to train the embedded default's model, over several seeds.

    python benchmarks/learning.py [key.path=value ...] [--compare ages | distillation | steps] [--steps N]
                                  [--folder DIR]

``ages`` compares bounds on age, ``distillation`` a teacher with the reward, ``steps`` rewards of steps with
the reward of the outcome. All variants of a comparison begin with the same model. Runs each variant once with
every seed, one after the other, in DIR/<variant>-seed<S>. A complete run is not repeated, but one that was
cut short is. Overrides on the command line hold for all variants. Writes to DIR

- learning.png: held-out accuracy against optimizer steps and against minutes, or sampled tokens, mean and
  range over seeds;
- learning.json: the numbers of each run. Its metrics.jsonl has all others.

The table has a row for each variant: ages, the accuracy at each step that evaluated, and the tokens that were
sampled by then.
"""

import argparse
import shutil
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from itertools import accumulate, cycle
from pathlib import Path

from common import CONFIG, REPOSITORY, RESULTS, machine_facts, print_table, run_app, write_json
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from forgeasync.files import read_json_lines

CONFIGS = CONFIG.parent
OVERRIDES_FILE = "overrides.txt"
"""In a run's folder: the overrides of its start."""
COLORS = ("#000000", "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9")
"""Okabe's and Ito's colors for the color-blind, without yellow, which is too light on white."""
LINES = ("-", "--", "-.", (0, (1, 1)), (0, (5, 1, 1, 1, 1, 1)))


class Against(StrEnum):
    """Horizontal axis of a plot. Values are labels."""

    STEPS = "optimizer steps"
    MINUTES = "minutes of training, evaluations included"
    TOKENS = "response tokens sampled and trained on"


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One way to train: overrides of a config, and the number of its seeds 0, 1, ... ."""

    name: str
    overrides: tuple[str, ...]
    config: Path = CONFIG
    app: str = "apps.grpo"
    num_seeds: int = 3


LEARNING_RATE = "trainer.optimizer.learning_rate=2.0e-5"
"""A fifth of the embedded default's, with which all of learning takes 20 steps, less than an age of 32."""


def at_most(max_off_policy_steps: int) -> tuple[str, ...]:
    """Return overrides with which the data are as old as the bound allows.

    The generator is faster than the trainer. Neither buffer, load control nor payload store holds it back, so
    that after the first steps each batch has the age of the bound.
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
"""Without a ratio: each token counts as if the current policy had sampled it."""
CORRECTED = (REINFORCE, "algorithm.corrections=[{kind: truncated_is, cap: 2.0}]")
"""With capped importance weights. A clip would cut off the few tokens that matter at an age of 32."""
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
"""Both from models/tiny_moe; ``make models/tiny_moe models/tiny_teacher`` first."""
OF_STEPS = CONFIGS / "process_reward_cpu.yaml"
"""``make models/tiny_steps`` first."""
STEPS = (
    Variant(name="outcome alone", overrides=("data.reward=null",), config=OF_STEPS),
    Variant(name="sum to go", overrides=(), config=OF_STEPS),
    Variant(name="minimum", overrides=("algorithm.step_credit=minimum",), config=OF_STEPS),
)


COMPARISONS = {
    "ages": (AGES, (Against.STEPS, Against.MINUTES)),
    "distillation": (DISTILLATION, (Against.TOKENS, Against.STEPS)),
    "steps": (STEPS, (Against.STEPS, Against.TOKENS)),
}
"""Variants, and the horizontal axes of their plots."""


def ensure_run(variant: Variant, seed: int, num_steps: int, folder: Path, extra: Sequence[str]) -> Path:
    """Return the folder of the variant's complete run with this seed, and run it if necessary.

    Raises:
        ValueError: the folder holds a run that was started with other overrides.
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
        metrics = run_dir / "metrics.jsonl"
        if metrics.exists() and [line["step"] for line in read_json_lines(metrics)][-1:] == [num_steps]:
            return run_dir
        shutil.rmtree(run_dir)
    run_dir.mkdir(parents=True)
    (run_dir / OVERRIDES_FILE).write_text("\n".join(overrides), encoding="utf-8")
    print(f"running {run_dir.name}", flush=True)
    run_app(variant.app, variant.config, [*overrides, f"run_dir={run_dir}"])
    return run_dir


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """The numbers of one run.

    Attributes:
        accuracy_by_step: Held-out accuracy after each step that evaluated; 0 is before training.
        minutes: Time at the end of each step, evaluations included.
        tokens: Response tokens that were trained on by the end of each step, without dropped groups.
        age_mean: Mean of the steps' mean ages.
    """

    seed: int
    accuracy_by_step: dict[int, float]
    minutes: dict[int, float]
    tokens: dict[int, float]
    age_mean: float
    age_max: float

    def at(self, step: int, axis: Against) -> float:
        """Return the place of a step on an axis."""
        places = {Against.STEPS: {step: step}, Against.MINUTES: self.minutes, Against.TOKENS: self.tokens}
        return places[axis][step]


Results = Mapping[str, Sequence[RunResult]]
"""Runs of each variant, by its name."""


def run_result(run_dir: Path, seed: int) -> RunResult:
    """Read the metrics.jsonl of a complete run."""
    lines = read_json_lines(run_dir / "metrics.jsonl")
    steps = [line for line in lines if line["step"] > 0]
    numbers = [0, *(line["step"] for line in steps)]
    trained = [line["throughput/train_tokens_per_s"] * line["time/step_s"] for line in steps]
    return RunResult(
        seed=seed,
        accuracy_by_step={line["step"]: line["eval/accuracy"] for line in lines if "eval/accuracy" in line},
        minutes=dict(zip(numbers, [0.0, *(line["time/elapsed_s"] / 60.0 for line in steps)], strict=True)),
        tokens=dict(zip(numbers, accumulate(trained, initial=0.0), strict=True)),
        age_mean=statistics.fmean(line["off_policy/age_mean"] for line in steps),
        age_max=max(line["off_policy/age_max"] for line in steps),
    )


def common_steps(runs: Iterable[RunResult]) -> list[int]:
    """Return the steps after which all runs evaluated."""
    return sorted(set.intersection(*(set(run.accuracy_by_step) for run in runs)))


def accuracies_at(runs: Sequence[RunResult], step: int) -> tuple[float, float, float]:
    """Return the mean, the lowest and the highest held-out accuracy over seeds after a step."""
    found = [run.accuracy_by_step[step] for run in runs]
    return statistics.fmean(found), min(found), max(found)


def accuracy_table(results: Results) -> list[list[str]]:
    """Return titles, and a row for each variant: ages, accuracies over seeds, and the tokens that were
    sampled by then."""
    steps = common_steps(run for runs in results.values() for run in runs)
    rows = [["after", "seeds", "age mean / max", *(f"{step} steps" for step in steps)]]
    for name, runs in results.items():
        age_mean = statistics.fmean(run.age_mean for run in runs)
        cells = [name, str(len(runs)), f"{age_mean:.2f} / {max(run.age_max for run in runs):.0f}"]
        for step in steps:
            mean, low, high = accuracies_at(runs, step)
            tokens = statistics.fmean(run.tokens[step] for run in runs)
            cells.append(f"{mean:.1%} ({100 * low:.1f}-{100 * high:.1f}) {tokens / 1000:.0f}k")
        rows.append(cells)
    return rows


def plot_variants(results: Results, out: Path, against: tuple[Against, Against]) -> None:
    """Plot held-out accuracies (PNG): mean over seeds in their range, once against each of two axes.

    The reward of a batch would be that of older policies.
    """
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, 2, sharey=True)
    for (name, runs), color, line in zip(results.items(), cycle(COLORS), cycle(LINES), strict=False):
        steps = common_steps(runs)
        means, lows, highs = zip(*(accuracies_at(runs, step) for step in steps), strict=True)
        for axis, what in zip(axes, against, strict=True):
            x = [statistics.fmean(run.at(step, what) for run in runs) for step in steps]
            style = {"color": color, "linestyle": line, "linewidth": 1.8, "marker": "o", "markersize": 3}
            axis.fill_between(x, lows, highs, color=color, alpha=0.15, linewidth=0)
            axis.plot(x, means, label=name, **style)
    axes[0].set_ylabel("held-out accuracy of the current policy")
    for axis, what in zip(axes, against, strict=True):
        axis.set_xlabel(what.value)
        axis.grid(alpha=0.25, linewidth=0.6)
        axis.spines[["top", "right"]].set_visible(False)
        axis.set_xlim(left=0.0)
    axes[0].legend(frameon=False)
    figure.savefig(out, dpi=150, format="png")


def write_report(results: Results, folder: Path, arguments: argparse.Namespace) -> None:
    """Write the plot and the JSON to ``folder``, and print the table."""
    variants, against = COMPARISONS[arguments.compare]
    plot_variants(results, folder / "learning.png", against)
    columns, *rows = accuracy_table(results)
    print_table("held-out accuracy (range over seeds), sampled tokens", columns, rows)
    content = {
        "machine": machine_facts(),
        "configs": {one.name: str(one.config.relative_to(REPOSITORY)) for one in variants},
        "steps": arguments.steps,
        "overrides": {variant.name: variant.overrides for variant in variants},
        "overrides_of_all": arguments.overrides,
        "variants": [{"name": name, "runs": [asdict(run) for run in runs]} for name, runs in results.items()],
    }
    write_json(folder / "learning.json", content)
    print(f"wrote {folder}/learning.png and .json")


def main() -> None:
    """Run what is missing, then report on all runs."""
    parser = argparse.ArgumentParser(description="Learning curves of ways to train, over seeds.")
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps of every run")
    parser.add_argument("--compare", choices=list(COMPARISONS), default="ages")
    parser.add_argument("--folder", type=Path, help="results/learning_COMPARISON if left out")
    parser.add_argument("overrides", nargs="*", metavar="key.path=value", help="change the config")
    arguments = parser.parse_intermixed_args()
    folder = (arguments.folder or RESULTS / f"learning_{arguments.compare}").resolve()
    variants, _ = COMPARISONS[arguments.compare]
    runs: dict[str, list[RunResult]] = {variant.name: [] for variant in variants}
    # Seeds in the outer loop, so that changes of the machine's speed over hours affect all variants.
    for seed in range(max(variant.num_seeds for variant in variants)):
        for variant in variants:
            if seed < variant.num_seeds:
                try:
                    run_dir = ensure_run(variant, seed, arguments.steps, folder, arguments.overrides)
                except (ValueError, RuntimeError) as error:
                    sys.exit(str(error))
                runs[variant.name].append(run_result(run_dir, seed))
    write_report(runs, folder, arguments)


if __name__ == "__main__":
    main()
