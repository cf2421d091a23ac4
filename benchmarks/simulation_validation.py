"""Compares predictions of the simulator with real runs.

    python benchmarks/simulation_validation.py [--config FILE] [--steps N] [--rounds N] [--folder DIR]

Measures a profile of the config (``python -m apps.profile``). Then each case is simulated with
sixteen seeds and run: synchronous and asynchronous, with one to four generators, with bounds from 0 to 8, and
with responses of a quarter of their length. The first third of a run and its last steps, which have less to
sample, are left out, as the simulator does. Prints predicted and measured seconds per step, trained tokens
per second, idle shares and mean ages, with the median and the worst error, and writes
DIR/simulation_validation.json.

The speed of a shared machine changes within minutes. With several rounds, profile and runs are repeated with
other seeds, and the table has means over rounds.

A step lasts from the trainer's request for a batch to its next request, on both sides.
"""

import argparse
import shutil
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from common import CONFIG, RESULTS, machine_facts, run_app, write_json
from rich.console import Console
from rich.table import Table

from forgeasync.config import load_config, resolve
from forgeasync.files import read_json_lines
from forgeasync.models import read_model_facts
from forgeasync.observability import MeasuredWindow
from forgeasync.plugins.simulator import SimulatedRun, of_config, read_profile, simulate_seeds

CASES: dict[str, tuple[str, ...]] = {
    "synchronous": ("max_off_policy_steps=0",),
    "bound 1": ("max_off_policy_steps=1",),
    "bound 4": ("max_off_policy_steps=4",),
    "bound 8": ("max_off_policy_steps=8",),
    "2 generators": ("max_off_policy_steps=4", "generator.num_replicas=2"),
    "2 generators, synchronous": ("max_off_policy_steps=0", "generator.num_replicas=2"),
    "4 generators": ("max_off_policy_steps=4", "generator.num_replicas=4"),
    "4 generators, bound 8": ("max_off_policy_steps=8", "generator.num_replicas=4"),
    "short tail, synchronous": ("max_off_policy_steps=0", "sampling.max_response_tokens=32"),
    "short tail, bound 1": ("max_off_policy_steps=1", "sampling.max_response_tokens=32"),
    "short tail, bound 4": ("max_off_policy_steps=4", "sampling.max_response_tokens=32"),
    "short tail, 2 generators": (
        "max_off_policy_steps=4",
        "sampling.max_response_tokens=32",
        "generator.num_replicas=2",
    ),
}

QUIET = (
    "evaluation={mode: pinned, every_steps: 1000000, num_problems: 8}",
    "checkpoint.every_steps=null",
    "trainer.optimizer.learning_rate=1.0e-9",
)
"""Without what the simulator does not model; lengths stay as in the profile."""

NUM_SEEDS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Predicted or measured figures of a case."""

    step_s: float
    trained_tokens_per_s: float
    trainer_idle_share: float
    generators_idle_share: float
    mean_age: float

    @classmethod
    def mean_of(cls, several: Sequence[Any]) -> "Figures":
        """Return the mean of each figure."""
        return cls(
            **{one.name: statistics.fmean(getattr(each, one.name) for each in several) for one in fields(cls)}
        )


COLUMNS = {
    "step_s": ("s a step", "{:.2f}", "{:.0%}"),
    "trained_tokens_per_s": ("tokens/s", "{:,.0f}", "{:.0%}"),
    "trainer_idle_share": ("trainer idle", "{:.0%}", "{:.0%}"),
    "generators_idle_share": ("generators idle", "{:.0%}", "{:.0%}"),
    "mean_age": ("age", "{:.2f}", "{:.2f}"),
}
"""Title of each figure, its format, and that of its error."""
RELATIVE = ("step_s", "trained_tokens_per_s")
"""Figures whose errors are shares of the measured value. Others are differences."""

Pair = tuple[Figures, Figures]
"""Predicted and measured figures."""


def measured(lines: Sequence[Mapping[str, Any]], run: SimulatedRun) -> Figures:
    """Return the figures of the steps that the prediction covers, without waits for evaluations."""
    steps = [line for line in lines if line["step"] > 0]
    steady = run.steady_steps
    window = MeasuredWindow(num_left_out=steady.start, last_step=steady.stop)
    for line in steps:
        window.add(line)
    found = window.measured()
    assert found is not None and found.busy_share is not None, "a run of this version has all metrics"
    counted = [line for line in steps if line["step"] - 1 in steady]
    tokens = [line["throughput/train_tokens_per_s"] * line["time/step_s"] for line in counted]
    ages = [line["off_policy/age_mean"] for line in counted]
    return Figures(
        step_s=found.step_s,
        trained_tokens_per_s=found.trained_tokens_per_s,
        trainer_idle_share=found.wait_share,
        generators_idle_share=1.0 - found.busy_share,
        mean_age=statistics.fmean(ages, weights=tokens),
    )


def run_round(arguments: argparse.Namespace, number: int, console: Console) -> dict[str, Pair]:
    """Measure a profile, then simulate and run each case."""
    folder = arguments.folder / f"round-{number}"
    folder.mkdir(exist_ok=True)
    file = folder / "profile.json"
    run_app("apps.profile", arguments.config, [f"seed={number}", "--out", str(file)])
    profile, pairs = read_profile(file), {}
    for name, overrides in CASES.items():
        run_dir = folder / name.replace(",", "").replace(" ", "-")
        settings = [*QUIET, f"seed={number}", *overrides, f"max_steps={arguments.steps}"]
        config = load_config([str(arguments.config)], settings)
        facts = read_model_facts(config.model.path)
        run = of_config(resolve(config, facts), facts, profile, num_steps=arguments.steps)
        expected = Figures.mean_of(simulate_seeds(run, profile, num_seeds=NUM_SEEDS))
        shutil.rmtree(run_dir, ignore_errors=True)
        run_app("apps.grpo", arguments.config, [*settings, f"run_dir={run_dir}"])
        real = measured(read_json_lines(run_dir / "metrics.jsonl"), run)
        console.print(f"{name}: {expected.step_s:.2f} s a step predicted, {real.step_s:.2f} measured")
        pairs[name] = expected, real
    return pairs


def results(rounds: Sequence[Mapping[str, Pair]], *, title: str) -> Table:
    """Return a table with a row for each case, means over rounds of predicted / measured, and one of
    errors."""
    table = Table("case", title=f"{title}: predicted / measured", caption="errors: median, worst")
    for column, _, _ in COLUMNS.values():
        table.add_column(column, justify="right")
    errors: dict[str, list[float]] = {key: [] for key in COLUMNS}
    for name in rounds[0]:
        expected, real = (Figures.mean_of([one[name][side] for one in rounds]) for side in range(2))
        cells = []
        for key, (_, form, _) in COLUMNS.items():
            value, wanted = getattr(expected, key), getattr(real, key)
            cells.append(f"{form.format(value)} / {form.format(wanted)}")
            errors[key].append(abs(value - wanted) / (wanted if key in RELATIVE else 1.0))
        table.add_row(name, *cells)
    table.add_section()
    forms = [form for _, _, form in COLUMNS.values()]
    table.add_row(
        "error",
        *(
            f"{form.format(statistics.median(found))}, {form.format(max(found))}"
            for form, found in zip(forms, errors.values(), strict=True)
        ),
    )
    return table


def main() -> None:
    """Measure, run, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description="Compares predictions of the simulator with real runs.")
    parser.add_argument("--config", type=Path, default=CONFIG)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--folder", type=Path, default=RESULTS / "simulation_validation")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    console, rounds = Console(width=110), list[dict[str, Pair]]()
    for number in range(arguments.rounds):
        rounds.append(run_round(arguments, number, console))
        console.print(results(rounds[-1:], title=f"round {number}"))
    if len(rounds) > 1:
        console.print(results(rounds, title=f"means of {len(rounds)} rounds"))
    cases = {
        name: [{"predicted": asdict(one[name][0]), "measured": asdict(one[name][1])} for one in rounds]
        for name in CASES
    }
    write_json(arguments.folder / "simulation_validation.json", {"machine": machine_facts(), "cases": cases})


if __name__ == "__main__":
    main()
