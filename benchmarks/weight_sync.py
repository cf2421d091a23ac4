"""Weights on their way from the trainer into an engine that decodes, against memcpy of the same bytes.

    python benchmarks/weight_sync.py [--sizes 2M,50M,500M] [--rounds N] [--growth N] [--out FILE.json]

A size is a fleet of its own, in a process of its own: two trainer procs (FSDP2 with expert parallelism 2) and
a generator that samples without a break. Its transports take turns: every round publishes, fetches and swaps
one new version by each of them, and the next round starts with the next transport. Medians over rounds.

- publish: the slowest rank's ``stage``, against a plain copy of as many elements in that proc just before,
  within the generator's dtype (same) and from the trainer's float32 (cast); the call: with the actor calls
- fetch: ``WeightFetcher.fetch``, against a plain copy of as many bytes in the generator just after
- pause: for which the swap held the engine; gap: between the last tokens of the old weights and the first of
  the new; longest: gap of the whole update; median: gap between any two tokens of the run
- moved: bytes that the fetch moved, against those that the engine takes
- growth: resident memory of all procs, and the time of an update, over many updates by one transport
- delta: bytes moved by a generator that holds the version before
- modes: tokens that an interruption mode does not generate during its update, of those that ``in_flight``
  generates in the same time; one sequence of ten times the mean length has just begun
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
from common import RESULTS, machine_facts, write_json
from rich.console import Console
from weight_models import SIZES
from weight_tables import busy_table, delta_table, growth_table, modes_table, updates_table

HERE = Path(__file__).resolve().parent


def measure_one(name: str, arguments: argparse.Namespace) -> dict[str, object]:
    """Measure one size in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        command = [sys.executable, str(HERE / "weight_fleet.py"), name, str(out)]
        for option in ("rounds", "growth", "growth_s", "mode_rounds"):
            command += [f"--{option.replace('_', '-')}", str(vars(arguments)[option])]
        subprocess.run(command, check=True)
        return json.loads(out.read_text(encoding="utf-8"))


def main() -> None:
    """Measure, print the tables, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", default=",".join(SIZES), help="comma-separated")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--growth", type=int, default=50, help="updates by one transport; 0: none")
    parser.add_argument("--growth-s", type=float, default=90.0, help="longest that those may take")
    parser.add_argument("--mode-rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS / "weight_sync.json")
    arguments = parser.parse_args()
    console = Console(width=190)
    results = {}
    for name in arguments.sizes.split(","):
        free_gib = psutil.virtual_memory().available / 2**30
        if free_gib < SIZES[name].memory_gib:
            console.print(f"{name}: skipped, needs {SIZES[name].memory_gib} GiB, {free_gib:.1f} are free")
            continue
        results[name] = measure_one(name, arguments)
    for table in (updates_table, growth_table, delta_table, busy_table, modes_table):
        console.print(table(results))
    content = {"machine": machine_facts(), "load_average": os.getloadavg()[0], "sizes": results}
    write_json(arguments.out, content)


if __name__ == "__main__":
    main()
