"""Kills and stops processes of a run at random, and proves that nothing was lost.

    python benchmarks/chaos.py --faults N --seed S [--role ROLE ...] [--config FILE] [key.path=value ...]
        [--band LOW HIGH | --reference-runs K] [--steps-per-fault N] [--off] [--out FOLDER]

Starts ``apps.grpo`` on the embedded default, or on FILE, for enough steps. Faults are drawn from the seed:
role, kind, process and time. Each follows only when its role has recovered from the one before. What was
injected is written to a witness file. Afterwards the counts by role have to agree (injected = detected =
recovered, in faults.jsonl and in metrics.jsonl), every step has to be there once, every group has to have
been trained on once by the batches in rollouts.jsonl, ``apps.verify`` has to pass, the held-out accuracy
has to lie in the band of runs without faults, and no process and no file in shared memory may be left. Exit
code 1 with the first difference.

``--off`` plans faults and injects none: the comparison has to fail. ``--reference-runs`` measures the band by
K runs with other seeds, widened on both sides by their spread, and by 0.02 at least. The roles ``controller``
and ``buffer`` start the run with ``--supervise``.
"""

import argparse
import dataclasses
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil
from chaos_faults import KINDS, SUPERVISED, Injector, plan, read_lines
from chaos_report import (
    Evidence,
    accuracy_of,
    effective_share,
    first_difference,
    rows,
    step_median_s,
    table,
)
from common import REPOSITORY, RESULTS, machine_facts, write_json
from rich.console import Console

from forgeasync.config.load import load_config
from forgeasync.ledger.reading import LedgerUnreadable
from forgeasync.ledger.report import verify

LOOK_S = 0.2
"""Seconds between two looks at the run."""

END_S = 20.0
"""Time for what a run has started to be gone once it has ended."""

SHARED_MEMORY = Path("/dev/shm")

ALL_ROLLOUTS = 1_000_000
"""More than a step has: all are written, to be counted."""

BAND_MARGIN = 0.02
"""Least widening of a measured band on both sides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A run that has ended."""

    folder: Path
    exit_code: int
    wall_s: float
    left: list[str]
    """Processes and files that are still there."""


class Watched:
    """A run with everything that it starts; it is ended when the body ends."""

    def __init__(self, command: Sequence[str], output: Path) -> None:
        self._files_before = set(SHARED_MEMORY.iterdir())
        self._started: dict[tuple[int, float], psutil.Process] = {}
        self._begin_s = time.monotonic()
        with output.open("wb") as file:
            # A session of its own: Ctrl-C reaches this program alone, which then ends the run.
            self._process = subprocess.Popen(
                list(command),
                cwd=REPOSITORY,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def is_running(self) -> bool:
        """Look which processes there are now; whether the run goes on."""
        try:
            root = psutil.Process(self._process.pid)
            for one in root.children(recursive=True):
                self._started.setdefault((one.pid, one.create_time()), one)
        except psutil.NoSuchProcess:
            # It ended between the two calls, or one of its children did: the next look finds the others.
            pass
        return self._process.poll() is None

    def ended(self, folder: Path) -> Ended:
        """Wait for the end of all that the run has started; what does not end is killed, and named."""
        wall_s = time.monotonic() - self._begin_s
        end_s = time.monotonic() + END_S
        while (left := self._left()) and time.monotonic() < end_s:
            time.sleep(LOOK_S)
        self.kill()
        return Ended(folder=folder, exit_code=self._process.wait(), wall_s=wall_s, left=left)

    def kill(self) -> None:
        """Kill the run and what it has started."""
        if self._process.poll() is None:
            self.is_running()
            self._process.kill()
        for one in self._started.values():
            if _runs(one):
                one.kill()

    def _left(self) -> list[str]:
        processes = [f"process {one.pid}" for one in self._started.values() if _runs(one)]
        # Of other runs on this machine somebody has them open.
        files = set(SHARED_MEMORY.iterdir()) - self._files_before
        return processes + sorted(str(file) for file in files - _open_files() if file.exists())


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _open_files() -> set[Path]:
    """Return the files and folders in shared memory that a process has open or mapped."""
    found: set[Path] = set()
    for pid in psutil.pids():
        proc = Path(f"/proc/{pid}")
        try:
            names = [os.readlink(link) for link in (proc / "fd").iterdir()]
            names += [line.split(maxsplit=5)[-1] for line in (proc / "maps").read_text().splitlines()]
        except OSError:
            continue  # it has ended, or is another user's
        prefix = f"{SHARED_MEMORY}/"
        found |= {
            SHARED_MEMORY / name.removeprefix(prefix).split("/")[0]
            for name in names
            if name.startswith(prefix)
        }
    return found


def run(
    config: Path, overrides: Sequence[str], folder: Path, *, injector: Injector | None, supervise: bool
) -> Ended:
    """Run the app to its end, with faults if there is an injector."""
    command = [
        sys.executable,
        "-m",
        "apps.grpo",
        "--config",
        str(config.resolve()),
        f"run_dir={folder}",
        *overrides,
    ]
    watched = Watched([*command, *(["--supervise"] if supervise else [])], folder.with_suffix(".out"))
    try:
        while watched.is_running():
            if injector is not None:
                injector.look()
            time.sleep(LOOK_S)
        return watched.ended(folder)
    finally:
        watched.kill()


def ledger_problem(folder: Path) -> str | None:
    """What ``apps.verify`` says against a run that has made all of its steps."""
    try:
        verdict = verify(folder / "ledger.jsonl", folder / "metrics.jsonl")
    except LedgerUnreadable as error:
        return str(error)
    if verdict.contradiction is None and not verdict.reading.book.is_ended:
        return "the ledger has no end"
    return verdict.contradiction


def measured_band(accuracies: Sequence[float]) -> tuple[float, float]:
    """Return the band of some runs' accuracies, widened by their spread."""
    low, high = min(accuracies), max(accuracies)
    margin = max(high - low, BAND_MARGIN)
    return low - margin, high + margin


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Injects faults into a run, and proves that nothing was lost."
    )
    parser.add_argument("--faults", type=int, required=True, help="how many")
    parser.add_argument("--seed", type=int, required=True, help="what they are drawn from")
    parser.add_argument("--role", action="append", choices=sorted(KINDS), help="by default all that recover")
    parser.add_argument("--config", type=Path, default=REPOSITORY / "configs" / "tiny_moe_cpu.yaml")
    parser.add_argument("--steps-per-fault", type=int, default=10)
    parser.add_argument("--off", action="store_true", help="inject nothing: the comparison has to fail")
    band = parser.add_mutually_exclusive_group()
    band.add_argument("--band", nargs=2, type=float, metavar=("LOW", "HIGH"), help="of held-out accuracies")
    band.add_argument(
        "--reference-runs", type=int, default=0, help="runs without faults, to measure the band"
    )
    parser.add_argument("--out", type=Path, help="folder for the runs and chaos.json")
    parser.add_argument("overrides", nargs="*", metavar="key.path=value")
    return parser.parse_args()


def main() -> int:
    """Run the command line; returns the exit code."""
    arguments = parse()
    console = Console()
    console.width = max(console.width, 100)
    name = f"chaos-{datetime.now():%Y%m%d-%H%M%S}"
    out = (RESULTS / name if arguments.out is None else arguments.out).resolve()
    out.mkdir(parents=True, exist_ok=True)
    config = load_config([arguments.config], arguments.overrides)
    recover = [role for role in KINDS if role != "environment" or config.environment is not None]
    roles = arguments.role or recover
    faults = plan(arguments.seed, arguments.faults, roles, steps_per_fault=arguments.steps_per_fault)
    # The last fault has as many steps to recover as lie between two.
    max_steps = arguments.steps_per_fault * (arguments.faults + 1)
    overrides = [
        *arguments.overrides,
        f"max_steps={max_steps}",
        f"evaluation.every_steps={max_steps}",
        f"logging.rollouts_per_step={ALL_ROLLOUTS}",
    ]

    references: list[list[dict[str, Any]]] = []
    for number in range(arguments.reference_runs):
        console.print(f"run {number + 1} of {arguments.reference_runs} without faults")
        seed = f"seed={config.seed + number + 1}"
        ended = run(
            arguments.config, [*overrides, seed], out / f"reference-{number}", injector=None, supervise=False
        )
        if ended.exit_code:
            console.print(f"it ended with exit code {ended.exit_code}; see {out}")
            return 1
        references.append(read_lines(ended.folder / "metrics.jsonl"))
    band = None if arguments.band is None else (arguments.band[0], arguments.band[1])
    if references:
        band = measured_band([accuracy for one in references if (accuracy := accuracy_of(one)) is not None])

    folder = out / "run"
    console.print(f"{max_steps} steps with {len(faults)} faults on {', '.join(roles)}, in {folder}")
    injector = Injector(folder, [] if arguments.off else faults, out / "witness.jsonl")
    ended = run(
        arguments.config, overrides, folder, injector=injector, supervise=bool(SUPERVISED & set(roles))
    )
    evidence = Evidence(
        planned=faults,
        injected=injector.injected,
        events=read_lines(folder / "faults.jsonl"),
        steps=read_lines(folder / "metrics.jsonl"),
        rollouts=read_lines(folder / "rollouts.jsonl"),
        max_steps=max_steps,
        groups_per_step=config.algorithm.groups_per_step,
        exit_code=ended.exit_code,
        ledger_problem=ledger_problem(folder),
        band=band,
        left=ended.left,
    )
    difference = first_difference(evidence)
    found = rows(evidence.injected, evidence.events)
    console.print(table(found))
    trained = [line for line in evidence.steps if line["step"]]
    share = None
    if trained:
        undisturbed = [line for one in references for line in one] or trained
        share = effective_share(trained, undisturbed_step_s=step_median_s(undisturbed))
        pace = "runs without faults" if references else "this run itself"
        console.print(f"share of effective time (ETTR): {share:.3f}, at the median pace of {pace}")
    result = {
        "seed": arguments.seed,
        "roles": roles,
        "planned": [dataclasses.asdict(one) for one in faults],
        "faults": [dataclasses.asdict(row) for row in found],
        "effective_share": share,
        "accuracy": accuracy_of(evidence.steps),
        "band": band,
        "wall_s": ended.wall_s,
        "difference": difference,
        "machine": machine_facts(),
    }
    write_json(out / "chaos.json", result)
    console.print(f"{out / 'chaos.json'}")
    console.print("nothing was lost" if difference is None else f"failed: {difference}")
    return 0 if difference is None else 1


if __name__ == "__main__":
    sys.exit(main())
