"""Injects random faults into a run, from outside and inside its processes, and proves that nothing was lost.

    python benchmarks/chaos.py --faults N --seed S [--role ROLE ...] [--kind KIND ...] [--moment MOMENT ...]
        [--config FILE ... | --witness] [key.path=value ...] [--band LOW HIGH | --reference-runs K]
        [--steps-per-fault N] [--disk-mib N] [--off] [--out FOLDER]

Starts ``apps.grpo`` on the embedded default, or on FILE, for enough steps. Role, moment, kind, process and
time of each fault are drawn from the seed; ``chaos_faults.py`` has the tables. Injected faults are written to
a witness file. Afterwards these conditions are checked:

- faults.jsonl and metrics.jsonl show that every fault, and nothing else, was detected and recovered from
- every step is recorded exactly once
- every group was trained on exactly once, by the batches in rollouts.jsonl and, with ``--witness``, by the
  weights themselves (``chaos_witness.py``)
- ``apps.verify`` passes
- the held-out accuracy is in the band of runs without faults, and response lengths are close to theirs
  (``chaos_lengths.py``)
- no process and no file in shared memory remains

The exit code is 1 with the first violation.

``--off`` plans faults without injecting them, so the comparison must fail. ``--reference-runs`` measures the
band with K runs with other seeds, and widens it on both sides by its width, at least by 0.02. ``--disk-mib``
puts the run on a disk in memory of that size, which ``full_disk`` fills. With the roles ``controller``,
``buffer`` and ``host``, the run starts with ``--supervise``.
"""

import argparse
import dataclasses
import statistics
import sys
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import chaos_witness
from chaos_effective import Lost, effective_share, lost_times, share_with, step_median_s
from chaos_faults import HOST, KINDS, SUPERVISED, TEACHER, Kind, Moment, Planned, plan
from chaos_injector import Injector, read_lines
from chaos_lengths import RunLengths, compare
from chaos_match import match
from chaos_orders import Orders
from chaos_report import (
    Evidence,
    accuracy_of,
    first_difference,
    rows,
    table,
)
from chaos_run import Ended, Run, SmallDisk
from common import REPOSITORY, RESULTS, machine_facts, write_json
from rich.console import Console

from forgeasync.buffer import LedgerUnreadable, verify
from forgeasync.config import LocalLauncher, RunConfig, load_config

ALL_ROLLOUTS = 1_000_000
"""Value of ``logging.rollouts_per_step`` with which all rollouts are written."""

BAND_MARGIN = 0.02
"""Minimum widening of a measured band on each side."""

HANG_LIMIT_S = 40
"""Deadline of the trainer's calls if a collective will hang; the default is ten minutes."""

DEFAULT = REPOSITORY / "configs" / "tiny_moe_cpu.yaml"


def ledger_problem(folder: Path) -> str | None:
    """Return the problem that ``apps.verify`` finds in a complete run, or None."""
    try:
        verdict = verify(folder / "ledger.jsonl", folder / "metrics.jsonl")
    except LedgerUnreadable as error:
        return str(error)
    if verdict.contradiction is None and not verdict.reading.book.is_ended:
        return "the ledger has no end"
    return verdict.contradiction


def measured_band(accuracies: Sequence[float]) -> tuple[float, float]:
    """Return the range of the accuracies, widened on both sides by its width or at least ``BAND_MARGIN``."""
    low, high = min(accuracies), max(accuracies)
    margin = max(high - low, BAND_MARGIN)
    return low - margin, high + margin


class Clock:
    """Measures how long training takes by this program's clock, and calls the injector."""

    def __init__(self, injector: Injector) -> None:
        self._injector = injector
        self._begin_s: float | None = None
        self._end_s = 0.0
        self._newest = -1
        self.seen_s: dict[int, float] = {}
        """Time (``time.time``) at which each step was first seen."""

    def look(self) -> None:
        """Inject faults that are due, and record the time of a new step."""
        self._injector.look()
        newest = self._injector.newest_step()
        if newest > self._newest:
            self._newest, self._end_s = newest, time.monotonic()
            self.seen_s[newest] = time.time()
            if self._begin_s is None:
                self._begin_s = self._end_s

    @property
    def wall_s(self) -> float:
        """Seconds from the first line of metrics to that of the newest step; 0 before the first line."""
        return 0.0 if self._begin_s is None else self._end_s - self._begin_s


def parser_of(description: str) -> argparse.ArgumentParser:
    """Return a parser with the options that all chaos programs share."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--faults", type=int, required=True, help="how many")
    parser.add_argument("--seed", type=int, required=True, help="what they are drawn from")
    parser.add_argument("--steps-per-fault", type=int, default=10)
    parser.add_argument("--limit-s", type=float, help="kill a run that has not ended by then")
    parser.add_argument("--off", action="store_true", help="inject nothing: the comparison has to fail")
    parser.add_argument("--out", type=Path, help="folder for the runs and chaos.json")
    parser.add_argument("overrides", nargs="*", metavar="key.path=value")
    return parser


def parse() -> argparse.Namespace:
    parser = parser_of("Breaks a run at random, and proves that nothing was lost.")
    parser.add_argument(
        "--role", action="append", choices=sorted(KINDS), help="by default all that there are"
    )
    parser.add_argument("--kind", action="append", choices=sorted(Kind), help="by default all")
    parser.add_argument("--moment", action="append", choices=sorted(Moment), help="by default all")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--config", type=Path, action="append", help="later ones override earlier ones")
    what.add_argument("--witness", action="store_true", help="on a model whose weights count their groups")
    parser.add_argument("--disk-mib", type=int, help="put the run on a disk of this size")
    band = parser.add_mutually_exclusive_group()
    band.add_argument("--band", nargs=2, type=float, metavar=("LOW", "HIGH"), help="of held-out accuracies")
    band.add_argument(
        "--reference-runs", type=int, default=0, help="runs without faults, to measure the band"
    )
    return parser.parse_args()


def roles_of(config: RunConfig) -> list[str]:
    """Return the roles into which faults can be injected in a run of this config."""
    missing = {
        *([] if config.environment is not None else ["environment"]),
        *([] if config.teachers else [TEACHER]),
        # Without others, every process is on the controller's own host, which has no agent.
        *([HOST] if isinstance(config.launcher, LocalLauncher) else []),
    }
    return [role for role in KINDS if role not in missing]


def run_overrides(arguments: argparse.Namespace, faults: Sequence[Planned], max_steps: int) -> list[str]:
    """Return the overrides of all runs: enough steps, frequent moments, all rollouts written."""
    every = arguments.steps_per_fault
    chosen = {
        "max_steps": max_steps,
        "evaluation.every_steps": every,
        "checkpoint.every_steps": max(1, every // 2),
        "logging.rollouts_per_step": ALL_ROLLOUTS,
    }
    if any(fault.kind is Kind.HUNG_COLLECTIVE for fault in faults):
        chosen |= {"timeouts.train_step_s": HANG_LIMIT_S, "timeouts.weights_s": HANG_LIMIT_S}
    given = {one.partition("=")[0] for one in arguments.overrides}
    return [*arguments.overrides, *(f"{key}={value}" for key, value in chosen.items() if key not in given)]


def main() -> int:
    """Run the command line; return the exit code."""
    arguments = parse()
    console = Console()
    console.width = max(console.width, 110)
    name = f"chaos-{datetime.now():%Y%m%d-%H%M%S}"
    out = (RESULTS / name if arguments.out is None else arguments.out).resolve()
    out.mkdir(parents=True, exist_ok=True)
    # The last fault has as many steps to recover as lie between two.
    max_steps = arguments.steps_per_fault * (arguments.faults + 1)
    configs = arguments.config or [DEFAULT]
    if arguments.witness:
        configs = [chaos_witness.write(out / "witness-model", num_steps=max_steps)]
    config = load_config(configs, arguments.overrides)
    roles = arguments.role or roles_of(config)
    faults = plan(
        arguments.seed,
        arguments.faults,
        roles,
        steps_per_fault=arguments.steps_per_fault,
        moments=[Moment(one) for one in arguments.moment or Moment],
        kinds=[Kind(one) for one in arguments.kind or Kind],
    )
    overrides = run_overrides(arguments, faults, max_steps)

    references: list[Path] = []
    for number in range(arguments.reference_runs):
        console.print(f"run {number + 1} of {arguments.reference_runs} without faults")
        seed = f"seed={config.seed + number + 1}"
        reference = out / f"reference-{number}"
        ended = Run(
            configs, [*overrides, seed], reference, reference.with_suffix(".out"), supervise=False
        ).until_ended(lambda: None)
        if ended.exit_code:
            console.print(f"it ended with exit code {ended.exit_code}; see {out}")
            return 1
        references.append(ended.folder)
    band = None if arguments.band is None else (arguments.band[0], arguments.band[1])
    if references:
        measured = [accuracy_of(read_lines(one / "metrics.jsonl")) for one in references]
        band = measured_band([accuracy for accuracy in measured if accuracy is not None])

    console.print(f"{max_steps} steps with {len(faults)} faults on {', '.join(roles)}, in {out}")
    for number, fault in enumerate(faults):
        console.print(
            f"  {number + 1}: after step {fault.at_step}, {fault.moment}: {fault.role} {fault.kind}"
        )
    disk = None if arguments.disk_mib is None else SmallDisk(out / "disk", num_mib=arguments.disk_mib)
    folder = out / "run" if disk is None else disk.folder / "run"
    orders = Orders(out / "orders")
    run = Run(
        configs,
        overrides,
        folder,
        out / "run.out",
        supervise=bool(SUPERVISED & set(roles)),
        environment=orders.environment() | (chaos_witness.environment() if arguments.witness else {}),
    )
    injector = Injector(
        folder,
        [] if arguments.off else faults,
        out / "witness.jsonl",
        orders=orders,
        output=out / "run.out",
        max_steps=max_steps,
        kill_everything=run.kill_everything,
        fill_disk=None if disk is None else disk.fill,
    )
    clock = Clock(injector)
    ended = run.until_ended(clock.look, limit_s=arguments.limit_s)
    if disk is not None:
        disk.close(keep=out)
        folder = out / "run"
    return judge(arguments, console, config, faults, injector, ended, clock, folder, band, references, out)


def judge(
    arguments: argparse.Namespace,
    console: Console,
    config: RunConfig,
    faults: Sequence[Planned],
    injector: Injector,
    ended: Ended,
    clock: Clock,
    folder: Path,
    band: tuple[float, float] | None,
    references: Sequence[Path],
    out: Path,
) -> int:
    """Compare the injected faults with the run's files, print and write the result; return the exit code.

    ``references`` are the folders of runs without faults.
    """
    max_steps = arguments.steps_per_fault * (arguments.faults + 1)
    rollouts, steps = read_lines(folder / "rollouts.jsonl"), read_lines(folder / "metrics.jsonl")
    evidence = Evidence(
        planned=faults,
        injected=injector.injected,
        events=read_lines(folder / "faults.jsonl"),
        steps=steps,
        rollouts=rollouts,
        ledger=read_lines(folder / "ledger.jsonl"),
        max_steps=max_steps,
        groups_per_step=config.algorithm.groups_per_step,
        exit_code=ended.exit_code,
        ledger_problem=None if ended.exit_code else ledger_problem(folder),
        witness_problem=chaos_witness.problem(folder, out / "witness-model") if arguments.witness else None,
        band=band,
        lengths=compare(
            RunLengths.of(rollouts, steps),
            [
                RunLengths.of(read_lines(one / "rollouts.jsonl"), read_lines(one / "metrics.jsonl"))
                for one in references
            ],
        ),
        left=ended.left,
    )
    difference = first_difference(evidence)
    found = rows(match(evidence.injected, evidence.events)[0])
    console.print(table(found))
    effective = effective_of(evidence, clock, references, arguments.steps_per_fault, console)
    result = {
        "seed": arguments.seed,
        "planned": [dataclasses.asdict(one) for one in faults],
        "injected": [dataclasses.asdict(one) for one in injector.injected],
        "faults": [dataclasses.asdict(row) for row in found],
        **effective,
        "lengths": None if evidence.lengths is None else dataclasses.asdict(evidence.lengths),
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


def effective_of(
    evidence: Evidence, clock: Clock, references: Sequence[Path], steps_per_fault: int, console: Console
) -> dict[str, Any]:
    """Return and print the run's share of effective time and the cost of each fault, for chaos.json."""
    trained = [line for line in evidence.steps if line["step"]]
    if not trained or not clock.wall_s:
        return {"effective_share": None, "undisturbed_step_s": None, "lost": []}
    undisturbed = [line for one in references for line in read_lines(one / "metrics.jsonl")] or trained
    step_s = step_median_s(undisturbed)
    share = effective_share(trained, clock.wall_s, undisturbed_step_s=step_s)
    pace = "runs without faults" if references else "this run itself"
    console.print(
        f"share of effective time (ETTR): {share:.3f} of {clock.wall_s:.0f} s, at the median pace of "
        f"{pace}, {step_s:.1f} s a step"
    )
    by_role: dict[str, list[Lost]] = {}
    for one in (lost := lost_times(evidence.injected, clock.seen_s, trained, undisturbed_step_s=step_s)):
        by_role.setdefault(one.role, []).append(one)
    for role, of_role in sorted(by_role.items()):
        cost_s = [one.lost_s for one in of_role]
        alone = share_with(of_role, num_steps=steps_per_fault, undisturbed_step_s=step_s)
        console.print(
            f"  {role}: a fault costs {statistics.mean(cost_s):.1f} s (mean of {len(cost_s)}, "
            f"{min(cost_s):.1f} to {max(cost_s):.1f}); with one in every {steps_per_fault} steps ETTR is "
            f"{alone:.3f}"
        )
    return {
        "effective_share": share,
        "undisturbed_step_s": step_s,
        "lost": [dataclasses.asdict(one) for one in lost],
    }


if __name__ == "__main__":
    sys.exit(main())
