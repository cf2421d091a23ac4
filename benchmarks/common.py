"""Shared by benchmarks: runs a command while measuring its memory, summarizes its steps, prints a table.

Benchmarks are scripts, started as ``python benchmarks/NAME.py``; the package does not import them. They
report times and do not judge them.
"""

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from rich.table import Table

from forgeasync.plugins.simulator import processor_name

REPOSITORY = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).resolve().parent / "results"
"""Default output folder of benchmarks; not tracked by git."""

MEMORY_INTERVAL_S = 3.0
"""Seconds between two memory samples of a process tree; the kernel needs about 10 ms per process."""

LOG_TAIL_CHARACTERS = 3000


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """Result of a successful command."""

    peak_memory_mib: float
    """Peak of the proportional set size (shared pages counted once), summed over the process tree."""
    load_before: float
    """One-minute load average at the start."""


class MemoryMonitor:
    """Samples the memory of a process and all its descendants in a thread."""

    def __init__(self, pid: int) -> None:
        self._root = psutil.Process(pid)
        self._peak_bytes = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="memory-watch", daemon=True)
        self._thread.start()

    def close(self) -> float:
        """Stop sampling; return the peak in MiB."""
        self._stop.set()
        self._thread.join()
        return self._peak_bytes / 2**20

    def _run(self) -> None:
        while not self._stop.wait(MEMORY_INTERVAL_S):
            self._peak_bytes = max(self._peak_bytes, self._tree_bytes())

    def _tree_bytes(self) -> int:
        try:
            tree = [self._root, *self._root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return 0
        total = 0
        for process in tree:
            try:
                total += process.memory_full_info().pss
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue  # ended between the two calls
        return total


def run_watched(command: Sequence[str], *, environment: Mapping[str, str]) -> Finished:
    """Run ``command`` in the repository until it ends, with additional environment variables.

    Raises:
        RuntimeError: the exit code is not 0; the message ends with the tail of the command's output.
    """
    load_before = os.getloadavg()[0]
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
        process = subprocess.Popen(
            list(command),
            cwd=REPOSITORY,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        watch = MemoryMonitor(process.pid)
        try:
            exit_code = process.wait()
        except KeyboardInterrupt:
            # The terminal has sent it to the run too, which needs a moment to end its own processes.
            process.wait()
            raise
        finally:
            peak_memory_mib = watch.close()
        if exit_code != 0:
            output.seek(0)
            tail = output.read()[-LOG_TAIL_CHARACTERS:]
            raise RuntimeError(f"{' '.join(command)} ended with exit code {exit_code}:\n{tail}")
    return Finished(peak_memory_mib=peak_memory_mib, load_before=load_before)


def quantiles(values: Sequence[int]) -> dict[str, float]:
    """Return mean, minimum, 10 %, 50 % and 90 % quantiles, and maximum."""
    p10, p50, p90 = np.percentile(values, [10, 50, 90])
    return {
        "mean": float(np.mean(values)),
        "min": float(min(values)),
        "p10": float(p10),
        "p50": float(p50),
        "p90": float(p90),
        "max": float(max(values)),
    }


def machine_facts() -> dict[str, Any]:
    """Return the facts about this machine that measurements depend on."""
    return {
        "processor": processor_name(),
        "usable_cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "system": platform.platform(),
        "python": sys.version.split()[0],
    }


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write ``content`` as indented JSON; create the folder if it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One optimizer step; ``generated_tokens`` may belong to later batches."""

    step_s: float
    lengths: list[int]
    generated_tokens: float
    reward_mean: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """Measurements of one run of one contender."""

    contender: str
    round: int
    tokens_per_s: float
    step_s_median: float
    step_s: list[float]
    response_lengths: dict[str, float]
    generated_per_trained_token: float
    reward_mean: float
    peak_memory_mib: float
    load_before: float


def measurement(contender: str, number: int, steps: Sequence[Step], finished: Finished) -> Measurement:
    """Return the measurement of one run's steps."""
    lengths = [length for step in steps for length in step.lengths]
    return Measurement(
        contender=contender,
        round=number,
        tokens_per_s=sum(lengths) / sum(step.step_s for step in steps),
        step_s_median=statistics.median(step.step_s for step in steps),
        step_s=[step.step_s for step in steps],
        response_lengths=quantiles(lengths),
        generated_per_trained_token=sum(step.generated_tokens for step in steps) / sum(lengths),
        reward_mean=statistics.mean(step.reward_mean for step in steps),
        peak_memory_mib=finished.peak_memory_mib,
        load_before=finished.load_before,
    )


def medians(measurements: Sequence[Measurement]) -> dict[str, dict[str, float]]:
    """Return medians over each contender's rounds, by contender and name of the value."""
    runs: dict[str, list[Measurement]] = {}
    for one in measurements:
        runs.setdefault(one.contender, []).append(one)
    values = ("tokens_per_s", "step_s_median", "peak_memory_mib")
    return {
        contender: {value: statistics.median(getattr(one, value) for one in rounds) for value in values}
        for contender, rounds in runs.items()
    }


def results_table(measurements: Sequence[Measurement], *, title: str, baseline: str) -> Table:
    """Return a table with a row per run, then a row per contender with medians and ratios to ``baseline``."""
    table = Table(title=title)
    table.add_column("contender")
    lengths_column = "length mean (p10/p50/p90) max"
    for name in ("round", "tokens/s", "step s", lengths_column, "reward", "peak MiB", "load"):
        table.add_column(name, justify="right")
    for one in measurements:
        lengths = one.response_lengths
        spread = f"({lengths['p10']:.0f}/{lengths['p50']:.0f}/{lengths['p90']:.0f})"
        table.add_row(
            one.contender,
            str(one.round),
            f"{one.tokens_per_s:.0f}",
            f"{one.step_s_median:.2f}",
            f"{lengths['mean']:.1f} {spread} {lengths['max']:.0f}",
            f"{one.reward_mean:.3f}",
            f"{one.peak_memory_mib:.0f}",
            f"{one.load_before:.1f}",
        )
    table.add_section()
    middle = medians(measurements)
    base = middle.get(baseline)
    for contender, values in middle.items():
        cells = [f"{values['tokens_per_s']:.0f}", f"{values['step_s_median']:.2f}"]
        memory = f"{values['peak_memory_mib']:.0f}"
        if base is not None and contender != baseline:
            ratios = {name: value / base[name] for name, value in values.items()}
            cells = [
                f"{cells[0]} (x{ratios['tokens_per_s']:.2f})",
                f"{cells[1]} (x{ratios['step_s_median']:.2f})",
            ]
            memory += f" (x{ratios['peak_memory_mib']:.2f})"
        table.add_row(contender, "median", *cells, "", "", memory, "")
    return table
