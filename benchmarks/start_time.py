"""From the command to a run that is at work, in several checkouts of the project in turn.

    python benchmarks/start_time.py [--checkout FOLDER ...] [--rounds R] [--out FILE.json]

Runs `apps.grpo` on the embedded default for one step in every checkout, R rounds. Each has its own `.venv`
and `models/tiny_moe`, or links to them.

- ready: until all procs are connected, which is when the first evaluation begins
- first step: until its line, the first evaluation of 512 problems included
- whole: until the command has ended
- memory: highest sum of all processes' proportional set sizes, pages that several have in equal shares
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from common import REPOSITORY, RESULTS, MemoryWatch, machine_facts, write_json
from rich.console import Console
from rich.table import Table

CONFIG = "configs/tiny_moe_cpu.yaml"
READY = "evaluating version 0"
FIRST_STEP = "step 1/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """One start; times are seconds since the command."""

    checkout: str
    ready_s: float
    first_step_s: float
    whole_s: float
    memory_mib: float


def measure(checkout: Path, run_dir: Path) -> Start:
    """Start the run once.

    Raises:
        RuntimeError: it has failed; what it printed last is the text.
    """
    command = [".venv/bin/python", "-m", "apps.grpo", "--config", CONFIG, f"run_dir={run_dir}"]
    command += ["max_steps=1", "evaluation.every_steps=100"]
    begun_s = time.monotonic()
    seen_s: dict[str, float] = {}
    lines: list[str] = []
    with subprocess.Popen(
        command, cwd=checkout, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        watch = MemoryWatch(process.pid)
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            for sign in (READY, FIRST_STEP):
                if line.startswith(sign):
                    seen_s.setdefault(sign, time.monotonic() - begun_s)
        code = process.wait()
        memory_mib = watch.close()
    if code or len(seen_s) != 2:
        raise RuntimeError(f"{checkout}: exit code {code}\n{''.join(lines[-20:])}")
    return Start(
        checkout=str(checkout),
        ready_s=seen_s[READY],
        first_step_s=seen_s[FIRST_STEP],
        whole_s=time.monotonic() - begun_s,
        memory_mib=memory_mib,
    )


def report(starts: Sequence[Start]) -> Table:
    """Medians over the rounds, and their ratios to those of the first checkout."""
    table = Table(title="starts of a run")
    for column in ("checkout", "ready", "first step", "whole", "memory"):
        table.add_column(column, justify="right")
    first: list[float] | None = None
    for checkout in dict.fromkeys(start.checkout for start in starts):
        own = [start for start in starts if start.checkout == checkout]
        values = [
            statistics.median(of_start)
            for of_start in zip(
                *((one.ready_s, one.first_step_s, one.whole_s, one.memory_mib) for one in own), strict=True
            )
        ]
        first = values if first is None else first
        units = ("s", "s", "s", "MiB")
        cells = [
            f"{value:,.1f} {unit} ({value / base:.2f} x)"
            for value, unit, base in zip(values, units, first, strict=True)
        ]
        table.add_row(checkout, *cells)
    return table


def main() -> None:
    """Measure, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkout", action="append", type=Path, help="default: this one")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS / "start_time.json")
    arguments = parser.parse_args()
    starts = []
    with tempfile.TemporaryDirectory() as scratch:
        for index in range(arguments.rounds):
            for number, checkout in enumerate(arguments.checkout or [REPOSITORY]):
                starts.append(measure(checkout.resolve(), Path(scratch) / f"{index}-{number}"))
    Console(width=110).print(report(starts))
    write_json(arguments.out, machine_facts() | {"starts": [asdict(start) for start in starts]})


if __name__ == "__main__":
    sys.exit(main())
