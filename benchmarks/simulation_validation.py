"""Compares predictions of the simulator with real runs.

    python benchmarks/simulation_validation.py [--config FILE] [--steps N] [--rounds N] [--folder DIR]

Runs each setup, with one to four generators or with responses of a quarter of their length, under several
age bounds. Reads a profile from each run (``python -m apps.profile --run``), and simulates the run with it,
with sixteen seeds. The first third of a run and its last steps, which have less to sample, are left out, as
the simulator does. Prints predicted and measured seconds per step, trained tokens per second, idle shares and
mean ages, with the median and the worst error. The last column has the seconds per step that the profile of
the setup's first run predicts: what a change of the bound costs. Writes DIR/simulation_validation.json.

The speed of a shared machine changes within minutes. With several rounds, the runs are repeated with other
seeds, and the table has means over rounds.

A step lasts from the trainer's request for a batch to its next request, on both sides.
"""

import argparse
import shutil
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common import CONFIG, RESULTS, machine_facts, print_table, run_app, write_json

from forgeasync.config import load_config, resolve
from forgeasync.files import read_json_lines
from forgeasync.models import read_model_facts
from forgeasync.observability import MeasuredWindow
from forgeasync.plugins.simulator import SimulatedRun, of_config, profile_run, simulate_seeds

SHORT = "sampling.max_response_tokens=32"
SETUPS: dict[str, tuple[tuple[str, ...], tuple[int, ...]]] = {
    "1 generator": ((), (4, 1, 8, 0)),
    "2 generators": (("generator.num_replicas=2",), (4, 0)),
    "4 generators": (("generator.num_replicas=4",), (4, 8)),
    "short tail": ((SHORT,), (4, 1, 0)),
    "short tail, 2 generators": ((SHORT, "generator.num_replicas=2"), (4,)),
}
"""Overrides and age bounds of each setup."""

QUIET = (
    "evaluation={mode: pinned, every_steps: 1000000, num_problems: 8}",
    "checkpoint.every_steps=null",
    "trainer.optimizer.learning_rate=1.0e-9",
)
"""Without what the simulator does not model; lengths stay the same."""

NUM_SEEDS = 16


Figures = Mapping[str, float]
"""Predicted or measured figures of a run, by the keys of ``COLUMNS``."""

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


Case = Mapping[str, Figures]
"""Figures of a run, "measured", and predicted with its "own" profile and with that of the "first" run."""


def means(several: Sequence[Figures]) -> Figures:
    """Return the mean of each figure."""
    return {key: statistics.fmean(one[key] for one in several) for key in COLUMNS}


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
    return dict(
        step_s=found.step_s,
        trained_tokens_per_s=found.trained_tokens_per_s,
        trainer_idle_share=found.wait_share,
        generators_idle_share=1.0 - found.busy_share,
        mean_age=statistics.fmean(ages, weights=tokens),
    )


def run_round(arguments: argparse.Namespace, number: int) -> dict[str, Case]:
    """Run and simulate each case."""
    cases = {}
    for setup, (overrides, bounds) in SETUPS.items():
        first = None
        for bound in bounds:
            name = f"{setup}, bound {bound}"
            run_dir = arguments.folder / f"round-{number}" / name.replace(",", "").replace(" ", "-")
            settings = [*QUIET, *overrides, f"max_off_policy_steps={bound}", f"seed={number}"]
            settings.append(f"max_steps={arguments.steps}")
            shutil.rmtree(run_dir, ignore_errors=True)
            run_app("apps.grpo", arguments.config, [*settings, f"run_dir={run_dir}"])
            own = profile_run(run_dir).profile
            first = first or own
            config = load_config([str(arguments.config)], settings)
            facts = read_model_facts(config.model.path)
            run = of_config(resolve(config, facts), facts, own, num_steps=arguments.steps)
            case = {"measured": measured(read_json_lines(run_dir / "metrics.jsonl"), run)}
            for kind, profile in (("own", own), ("first", first)):
                simulated = simulate_seeds(run, profile, num_seeds=NUM_SEEDS)
                case[kind] = means([{key: getattr(one, key) for key in COLUMNS} for one in simulated])
            predicted_s, measured_s = (case[kind]["step_s"] for kind in ("own", "measured"))
            print(f"{name}: {predicted_s:.2f} s a step predicted, {measured_s:.2f} measured", flush=True)
            cases[name] = case
    return cases


def print_results(rounds: Sequence[Mapping[str, Case]]) -> None:
    """Print a row for each case, and one of errors."""
    rows = []
    errors: dict[str, list[float]] = {key: [] for key in (*COLUMNS, "first")}
    for name in rounds[0]:
        real, own, first = (
            means([one[name][kind] for one in rounds]) for kind in ("measured", "own", "first")
        )
        cells = []
        for key, (_, form, _) in COLUMNS.items():
            value, wanted = own[key], real[key]
            cells.append(f"{form.format(value)} / {form.format(wanted)}")
            errors[key].append(abs(value - wanted) / (wanted if key in RELATIVE else 1.0))
        errors["first"].append(abs(first["step_s"] / real["step_s"] - 1.0))
        rows.append([name, *cells, f"{first['step_s']:.2f}"])
    forms = [*(form for _, _, form in COLUMNS.values()), "{:.0%}"]
    pairs = zip(forms, errors.values(), strict=True)
    worst = [f"{form.format(statistics.median(found))}, {form.format(max(found))}" for form, found in pairs]
    titles = [column for column, _, _ in COLUMNS.values()]
    print_table(
        f"means of {len(rounds)} rounds: predicted / measured",
        ("case", *titles, "first run's profile"),
        [*rows, ["errors: median, worst", *worst]],
    )


def main() -> None:
    """Run, simulate, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description="Compares predictions of the simulator with real runs.")
    parser.add_argument("--config", type=Path, default=CONFIG)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--folder", type=Path, default=RESULTS / "simulation_validation")
    arguments = parser.parse_args()
    rounds = [run_round(arguments, number) for number in range(arguments.rounds)]
    print_results(rounds)
    cases = {name: [one[name] for one in rounds] for name in rounds[0]}
    write_json(arguments.folder / "simulation_validation.json", {"machine": machine_facts(), "cases": cases})


if __name__ == "__main__":
    main()
