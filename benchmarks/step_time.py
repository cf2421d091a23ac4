"""Step time and idle shares of the same job, synchronous and asynchronous.

    python benchmarks/step_time.py [--steps N] [--rounds R] [--out FILE.json]

Runs ``apps.grpo`` on the embedded default with ``max_off_policy_steps`` 0 and 4 in turn, R times each, and
reads their metrics.jsonl. The first steps, in which processes warm up, and steps that evaluate are left out.

- step time: median of ``time/step_s``
- trainer idle: 1 - time/train_s / time/step_s, over the sums
- generator idle: 1 - (time with a request in flight) / time/step_s, from the engines' own counters
"""

import argparse
import statistics
import tempfile
from pathlib import Path

from common import CONFIG, RESULTS, machine_facts, run_app, write_json
from rich.console import Console
from rich.table import Table

from forgeasync.files import read_json_lines

NUM_SKIPPED_STEPS = 3
MODES = {"synchronous": 0, "asynchronous": 4}
"""``max_off_policy_steps`` of each mode."""
COLUMNS = {
    "step time": ("step_s", "{:.2f} s"),
    "trained tokens/s": ("trained_tokens_per_s", "{:,.0f}"),
    "trainer idle": ("trainer_idle", "{:.0%}"),
    "generator idle": ("generator_idle", "{:.0%}"),
}
"""Key and format of each column."""


def measure(mode: str, num_steps: int, run_dir: Path) -> dict[str, float]:
    """Run the job once."""
    overrides = {
        "max_steps": num_steps + NUM_SKIPPED_STEPS + 1,
        "max_off_policy_steps": MODES[mode],
        "run_dir": run_dir,
        "evaluation.num_problems": 8,
        "evaluation.every_steps": 100_000,
    }
    run_app("apps.grpo", CONFIG, [f"{key}={value}" for key, value in overrides.items()])
    # Line 0 is the evaluation before training. The last step evaluates.
    before, *steps = read_json_lines(run_dir / "metrics.jsonl")[NUM_SKIPPED_STEPS:-1]
    total_s = sum(step["time/step_s"] for step in steps)
    busy_s = steps[-1]["generator/busy_s"] - before["generator/busy_s"]
    tokens = sum(step["throughput/train_tokens_per_s"] * step["time/step_s"] for step in steps)
    return {
        "step_s": statistics.median(step["time/step_s"] for step in steps),
        "trained_tokens_per_s": tokens / total_s,
        "trainer_idle": 1.0 - sum(step["time/train_s"] for step in steps) / total_s,
        "generator_idle": max(0.0, 1.0 - busy_s / total_s),
    }


def report(runs: dict[str, list[dict[str, float]]]) -> Table:
    """Return a table with medians over rounds, and the ratio of step times."""
    table = Table(title="synchronous against asynchronous")
    for column in ("mode", *COLUMNS):
        table.add_column(column, justify="right")
    medians = {
        mode: {key: statistics.median(one[key] for one in own) for key, _ in COLUMNS.values()}
        for mode, own in runs.items()
    }
    for mode, values in medians.items():
        table.add_row(mode, *(form.format(values[key]) for key, form in COLUMNS.values()))
    ratio = medians["synchronous"]["step_s"] / medians["asynchronous"]["step_s"]
    table.caption = f"synchronous / asynchronous step time: {ratio:.2f}"
    return table


def main() -> None:
    """Measure, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20, help="measured steps of each run")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path, default=RESULTS / "step_time.json")
    arguments = parser.parse_args()
    runs: dict[str, list[dict[str, float]]] = {mode: [] for mode in MODES}
    with tempfile.TemporaryDirectory() as scratch:
        for number in range(arguments.rounds):
            for mode, own in runs.items():
                own.append(measure(mode, arguments.steps, Path(scratch) / f"{mode}-{number}"))
    Console(width=100).print(report(runs))
    write_json(arguments.out, {"machine": machine_facts(), "runs": runs})


if __name__ == "__main__":
    main()
