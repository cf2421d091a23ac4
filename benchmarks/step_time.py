"""The same job synchronous and asynchronous, interleaved in one run: step time and idle shares.

    python benchmarks/step_time.py [--steps N] [--rounds R] [--out FILE.json]

Runs `apps.grpo` on the embedded default with max_off_policy_steps 0 and 4 in turn, R times each, and reads
their metrics.jsonl. Excludes the first steps, in which processes warm up, and steps with an evaluation.

- step time: median of `time/step_s`
- trainer idle: 1 - time/train_s / time/step_s, over the sums
- generator idle: 1 - (time with a request in flight) / time/step_s, from the engines' own counters
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

CONFIG = "configs/tiny_moe_cpu.yaml"
NUM_SKIPPED_STEPS = 3
MODES = {"synchronous": 0, "asynchronous": 4}
"""Value of max_off_policy_steps by mode."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """Measured steps of one run."""

    mode: str
    step_s: float
    trained_tokens_per_s: float
    trainer_idle: float
    generator_idle: float


def measure(mode: str, num_steps: int, run_dir: Path) -> Measurement:
    """Run the job once; return its measurement."""
    command = [
        sys.executable,
        "-m",
        "apps.grpo",
        "--config",
        CONFIG,
        f"max_steps={num_steps + NUM_SKIPPED_STEPS + 1}",
        f"max_off_policy_steps={MODES[mode]}",
        f"run_dir={run_dir}",
        "evaluation.num_problems=8",
        "evaluation.every_steps=100000",
    ]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    # Line 0 is the evaluation before training, the last step evaluates.
    before, *steps = lines[NUM_SKIPPED_STEPS:-1]
    total_s = sum(step["time/step_s"] for step in steps)
    busy_s = steps[-1]["generator/busy_s"] - before["generator/busy_s"]
    tokens = sum(step["throughput/train_tokens_per_s"] * step["time/step_s"] for step in steps)
    return Measurement(
        mode=mode,
        step_s=statistics.median(step["time/step_s"] for step in steps),
        trained_tokens_per_s=tokens / total_s,
        trainer_idle=1.0 - sum(step["time/train_s"] for step in steps) / total_s,
        generator_idle=max(0.0, 1.0 - busy_s / total_s),
    )


def report(measurements: list[Measurement]) -> Table:
    """Return a table of medians over rounds, and the ratio of the two modes."""
    table = Table(title="synchronous against asynchronous")
    for column in ("mode", "step time", "trained tokens/s", "trainer idle", "generator idle"):
        table.add_column(column, justify="right")
    medians = {}
    for mode in MODES:
        own = [measurement for measurement in measurements if measurement.mode == mode]
        medians[mode] = statistics.median(measurement.step_s for measurement in own)
        table.add_row(
            mode,
            f"{medians[mode]:.2f} s",
            f"{statistics.median(m.trained_tokens_per_s for m in own):,.0f}",
            f"{statistics.median(m.trainer_idle for m in own):.0%}",
            f"{statistics.median(m.generator_idle for m in own):.0%}",
        )
    table.caption = (
        f"synchronous / asynchronous step time: {medians['synchronous'] / medians['asynchronous']:.2f}"
    )
    return table


def main() -> None:
    """Run all measurements, print the table and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20, help="measured steps a run")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/step_time.json"))
    arguments = parser.parse_args()
    measurements = []
    with tempfile.TemporaryDirectory() as scratch:
        for index in range(arguments.rounds):
            for mode in MODES:
                run_dir = Path(scratch) / f"{mode}-{index}"
                measurements.append(measure(mode, arguments.steps, run_dir))
    Console(width=100).print(report(measurements))
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps([asdict(measurement) for measurement in measurements], indent=2))


if __name__ == "__main__":
    main()
