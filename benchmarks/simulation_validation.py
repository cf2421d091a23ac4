"""Compares the simulator's predictions from an earlier profile with measured runs.

    python benchmarks/simulation_validation.py [--config FILE] [--profile FILE] [--cases NAME ...] [--steps N]
        [--rounds N] [--folder DIR]

Measures a profile of the config (`python -m apps.profile`), or reads a given one. Each case is then simulated
with sixteen seeds and run, one after the other: synchronous and asynchronous, with one to four generators,
staleness bounds from 0 to 8, and responses cut at a quarter of their length. As in the simulator, means
exclude a run's first third and its last steps, in which less and less is sampled. Prints predicted and
measured seconds per step, trained tokens per second, idle shares and mean ages, with the median and the
largest error. Writes DIR/simulation_validation.json.

The speed of a shared machine changes over time. Each further round repeats the profile and the runs with
another seed, and the table has means over rounds. A fixed work load (``machine_speed.py``) is timed around
the profile and around every run. The last line of the table has the errors after the predictions are scaled
by the change in the work load's time.

A step lasts from one request of the trainer for a batch to the next, in predictions and in measurements.
"""

import argparse
import shutil
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from common import REPOSITORY, RESULTS, machine_facts, run_watched, write_json
from machine_speed import work_s
from rich.console import Console
from rich.table import Table

from forgeasync.config import load_config, resolve
from forgeasync.files import read_json_lines
from forgeasync.models import read_model_facts
from forgeasync.observability import MeasuredWindow
from forgeasync.plugins.simulator import Profile, SimulatedRun, of_config, read_profile, simulate_seeds

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
        *("max_off_policy_steps=4", "sampling.max_response_tokens=32"),
        "generator.num_replicas=2",
    ),
}

QUIET = (
    "evaluation={mode: pinned, every_steps: 1000000, num_problems: 8}",
    "checkpoint.every_steps=null",
    "trainer.optimizer.learning_rate=1.0e-9",
)
"""Settings without features that the simulator lacks, and with response lengths that do not change."""

NUM_SEEDS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Predicted or measured figures of one case."""

    step_s: float
    trained_tokens_per_s: float
    trainer_idle_share: float
    generators_idle_share: float
    mean_age: float

    def on_slower_machine(self, slowness: float) -> "Figures":
        """Return the figures for a machine on which everything takes ``slowness`` times as long."""
        return replace(
            self,
            step_s=self.step_s * slowness,
            trained_tokens_per_s=self.trained_tokens_per_s / slowness,
        )


Pair = tuple[Figures, Figures]
"""Predicted and measured figures."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Result of one case in one round."""

    predicted: Figures
    measured: Figures
    slowness: float
    """Time of the fixed work load around the run, relative to its time around the profile."""


def pairs_of(rounds: Sequence[Mapping[str, Outcome]], *, at_speed_of_run: bool) -> dict[str, Pair]:
    """Return means over rounds; ``at_speed_of_run`` scales predictions to the machine's speed at the run."""
    return {
        name: (
            mean_of(
                [
                    one[name].predicted.on_slower_machine(one[name].slowness if at_speed_of_run else 1.0)
                    for one in rounds
                ]
            ),
            mean_of([one[name].measured for one in rounds]),
        )
        for name in rounds[0]
    }


def predicted(run: SimulatedRun, profile: Profile) -> Figures:
    """Return mean figures over simulated runs with different seeds."""
    found = simulate_seeds(run, profile, num_seeds=NUM_SEEDS)
    return mean_of(
        [Figures(**{one.name: getattr(each, one.name) for one in fields(Figures)}) for each in found]
    )


def measured(lines: Sequence[Mapping[str, Any]], run: SimulatedRun) -> Figures:
    """Return a run's figures over the same steps as its prediction, without waits for evaluations."""
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
        mean_age=sum(age * num for age, num in zip(ages, tokens, strict=True)) / sum(tokens),
    )


def run_case(config: Path, settings: Sequence[str], profile: Profile, num_steps: int, folder: Path) -> Pair:
    """Simulate a case, then run it; return both figures."""
    settings = [*QUIET, *settings, f"max_steps={num_steps}"]
    loaded = load_config([str(config)], settings)
    facts = read_model_facts(loaded.model.path)
    loaded = resolve(loaded, facts)
    run = of_config(loaded, facts, profile, num_steps=num_steps)
    expected = predicted(run, profile)
    shutil.rmtree(folder, ignore_errors=True)
    start_app("apps.grpo", config, [*settings, f"run_dir={folder}"])
    return expected, measured(read_json_lines(folder / "metrics.jsonl"), run)


def run_round(arguments: argparse.Namespace, number: int, console: Console) -> dict[str, Outcome]:
    """Measure a profile unless one is given, and run all cases."""
    folder, file = arguments.folder / f"round-{number}", arguments.profile
    folder.mkdir(exist_ok=True)
    seed = f"seed={number}"
    work_before_s = work_s()
    if file is None:
        file = folder / "profile.json"
        start_app("apps.profile", arguments.config, [seed, "--out", str(file)])
    work_after_s = work_s()
    profiled_s = (work_before_s + work_after_s) / 2
    profile, outcomes = read_profile(file), {}
    for name in arguments.cases:
        run_dir = folder / name.replace(",", "").replace(" ", "-")
        settings = [seed, *CASES[name]]
        expected, real = run_case(arguments.config, settings, profile, arguments.steps, run_dir)
        work_before_s, work_after_s = work_after_s, work_s()
        slowness = (work_before_s + work_after_s) / 2 / profiled_s
        outcomes[name] = Outcome(predicted=expected, measured=real, slowness=slowness)
        console.print(
            f"{name}: {expected.step_s:.2f} s a step predicted, {real.step_s:.2f} measured, on a machine "
            f"that takes {slowness:.2f} times as long as at the profile"
        )
    return outcomes


def mean_of(figures: Sequence[Figures]) -> Figures:
    """Return the mean of each figure."""
    return Figures(
        **{one.name: statistics.fmean(getattr(each, one.name) for each in figures) for one in fields(Figures)}
    )


def start_app(app: str, config: Path, arguments: Sequence[str]) -> None:
    """Run an app with a config and overrides, and wait for its end."""
    command = [sys.executable, "-m", app, "--config", str(config), *arguments]
    run_watched(command, environment={"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"})


def errors(pairs: Sequence[Pair], field: str, *, is_relative: bool) -> list[float]:
    """Return the error of each prediction, relative to the measurement or as a difference."""
    found = []
    for expected, real in pairs:
        wanted, value = getattr(real, field), getattr(expected, field)
        found.append(abs(value / wanted - 1.0) if is_relative else abs(value - wanted))
    return found


def results(rounds: Sequence[Mapping[str, Outcome]], *, title: str) -> Table:
    """Return a table with a row per case: means over rounds, predicted / measured."""
    table = Table(title=f"{title}: predicted / measured", caption="errors: median, worst")
    for column in ("case", "s a step", "tokens/s", "trainer idle", "generators idle", "age"):
        table.add_column(column, justify="left" if column == "case" else "right")
    pairs = pairs_of(rounds, at_speed_of_run=False)
    for name, (expected, real) in pairs.items():
        table.add_row(
            name,
            f"{expected.step_s:.2f} / {real.step_s:.2f}",
            f"{expected.trained_tokens_per_s:,.0f} / {real.trained_tokens_per_s:,.0f}",
            f"{expected.trainer_idle_share:.0%} / {real.trainer_idle_share:.0%}",
            f"{expected.generators_idle_share:.0%} / {real.generators_idle_share:.0%}",
            f"{expected.mean_age:.2f} / {real.mean_age:.2f}",
        )
    table.add_section()
    table.add_row("error", *error_cells(pairs))
    table.add_row("error at the run's speed", *error_cells(pairs_of(rounds, at_speed_of_run=True)))
    return table


def error_cells(pairs: Mapping[str, Pair]) -> list[str]:
    """Return the median and worst error of each figure, as text."""
    cells = []
    for field, is_relative in FIELDS:
        found = errors(list(pairs.values()), field, is_relative=is_relative)
        form = "{:.0%}" if is_relative or "share" in field else "{:.2f}"
        cells.append(f"{form.format(statistics.median(found))}, {form.format(max(found))}")
    return cells


FIELDS = (
    ("step_s", True),
    ("trained_tokens_per_s", True),
    ("trainer_idle_share", False),
    ("generators_idle_share", False),
    ("mean_age", False),
)
"""Fields of ``Figures``, and whether their errors are relative."""


def main() -> None:
    """Run all rounds, print the table and write the JSON."""
    parser = argparse.ArgumentParser(description="What the simulator predicts against what runs do.")
    parser.add_argument("--config", type=Path, default=REPOSITORY / "configs" / "tiny_moe_cpu.yaml")
    parser.add_argument("--profile", type=Path)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--folder", type=Path, default=RESULTS / "simulation_validation")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    console, rounds = Console(width=110), list[dict[str, Outcome]]()
    for number in range(arguments.rounds):
        rounds.append(run_round(arguments, number, console))
        console.print(results(rounds[-1:], title=f"round {number}"))
    if len(rounds) > 1:
        console.print(results(rounds, title=f"means of {len(rounds)} rounds"))
    cases = {name: [asdict(one[name]) for one in rounds] for name in arguments.cases}
    write_json(arguments.folder / "simulation_validation.json", {"machine": machine_facts(), "cases": cases})


if __name__ == "__main__":
    main()
