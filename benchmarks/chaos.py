"""Breaks a run at random and checks that it lost nothing.

    python benchmarks/chaos.py --faults N --seed S [--role ROLE ...] [--kind KIND ...] [--moment MOMENT ...]
        [--config FILE ... | --witness] [key.path=value ...] [--band LOW HIGH | --reference-runs K]
        [--steps-per-fault N] [--limit-s S] [--off] [--out FOLDER]

Starts ``apps.grpo`` on the embedded default, or on FILE, for enough steps. The seed determines role, moment,
kind, process and time of each fault; ``chaos_faults.py`` has the tables. Injected faults are written to
witness.jsonl. The roles ``controller``, ``buffer`` and ``host`` start the run with ``--supervise``.
Afterwards this checks that

- faults.jsonl and metrics.jsonl have each fault as detected and recovered, and no other fault;
- metrics.jsonl has each step once, and the batches in rollouts.jsonl have each group once;
- with ``--witness``, the weights show that each group was trained on once (``chaos_witness.py``);
- ``apps.verify`` passes;
- the held-out accuracy lies in the band of runs without faults, and the lengths of responses near theirs;
- no process and no file in shared memory remains.

The exit code is 1 with the first difference. ``--off`` injects nothing, so that the checks have to fail.
``--reference-runs`` measures the band with K runs of other seeds. It is widened on both sides by the
difference of their accuracies, and by 0.02 at least.
"""

import argparse
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

import chaos_witness
from chaos_faults import HOST, KINDS, SUPERVISED, TEACHER, Kind, Moment, Planned, plan
from chaos_injector import Injector, Orders
from chaos_report import (
    Evidence,
    accuracy_of,
    first_difference,
    length_distances,
    lost_times,
    match,
    read_lines,
    rows,
    step_median_s,
    table,
)
from chaos_run import Run
from common import CONFIG, RESULTS, machine_facts, write_json
from rich.console import Console

from forgeasync.buffer import LedgerUnreadable, verify
from forgeasync.config import LocalLauncher, RunConfig, load_config

ALL_ROLLOUTS = 1_000_000
"""Value of ``logging.rollouts_per_step`` that writes every rollout of every batch."""

BAND_MARGIN = 0.02
"""Smallest widening of a measured band on both sides."""

HANG_LIMIT_S = 40
"""Deadline of the trainer's calls if a collective hangs, in place of ten minutes."""


def ledger_problem(folder: Path) -> str | None:
    """Return the contradiction that ``apps.verify`` finds in a run that has made all of its steps."""
    try:
        verdict = verify(folder / "ledger.jsonl", folder / "metrics.jsonl")
    except LedgerUnreadable as error:
        return str(error)
    if verdict.contradiction is None and not verdict.reading.book.is_ended:
        return "the ledger has no end"
    return verdict.contradiction


def measured_band(accuracies: Sequence[float]) -> tuple[float, float]:
    """Return the range of accuracies, widened on both sides."""
    low, high = min(accuracies), max(accuracies)
    margin = max(high - low, BAND_MARGIN)
    return low - margin, high + margin


def parser_of(description: str, kinds: Sequence[Kind]) -> argparse.ArgumentParser:
    """Return the command line of this program and of ``chaos_cluster.py``."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--faults", type=int, required=True, help="number of faults")
    parser.add_argument("--seed", type=int, required=True, help="determines all faults")
    parser.add_argument("--kind", action="append", choices=sorted(kinds), help="by default all")
    parser.add_argument("--config", type=Path, action="append", help="later ones override earlier ones")
    parser.add_argument("--steps-per-fault", type=int, default=10)
    parser.add_argument("--limit-s", type=float, help="kill the run if it takes longer")
    parser.add_argument("--off", action="store_true", help="inject nothing: the checks have to fail")
    parser.add_argument("--out", type=Path, help="folder for the runs and chaos.json")
    parser.add_argument("overrides", nargs="*", metavar="key.path=value")
    parser.set_defaults(band=None, witness=False)
    return parser


def parse() -> argparse.Namespace:
    parser = parser_of("Breaks a run at random and checks that it lost nothing.", list(Kind))
    parser.add_argument(
        "--role", action="append", choices=sorted(KINDS), help="by default all that the run has"
    )
    parser.add_argument("--moment", action="append", choices=sorted(Moment), help="by default all")
    parser.add_argument(
        "--witness", action="store_true", help="train a model whose weights count their groups"
    )
    band = parser.add_mutually_exclusive_group()
    band.add_argument("--band", nargs=2, type=float, metavar=("LOW", "HIGH"), help="of held-out accuracies")
    band.add_argument(
        "--reference-runs", type=int, default=0, help="runs without faults, to measure the band"
    )
    arguments = parser.parse_args()
    if arguments.witness and arguments.config:
        parser.error("--witness has a config of its own: leave --config out")
    return arguments


def roles_of(config: RunConfig) -> list[str]:
    """Return the roles that a run of this config has."""
    has_role = {
        "environment": config.environment is not None,
        TEACHER: bool(config.teachers),
        # With this launcher all processes are on the controller's own host, which has no agent.
        HOST: not isinstance(config.launcher, LocalLauncher),
    }
    return [role for role in KINDS if has_role.get(role, True)]


def num_steps(arguments: argparse.Namespace) -> int:
    """Return the steps of a run: the last fault has time to recover."""
    steps: int = arguments.steps_per_fault * (arguments.faults + 1)
    return steps


def run_overrides(arguments: argparse.Namespace, faults: Sequence[Planned]) -> list[str]:
    """Return the overrides of all runs: enough steps, frequent moments, all rollouts written."""
    every = arguments.steps_per_fault
    chosen = {
        "max_steps": num_steps(arguments),
        "evaluation.every_steps": every,
        "checkpoint.every_steps": max(1, every // 2),
        "logging.rollouts_per_step": ALL_ROLLOUTS,
    }
    if any(fault.kind is Kind.HUNG_COLLECTIVE for fault in faults):
        chosen |= {"timeouts.train_step_s": HANG_LIMIT_S, "timeouts.weights_s": HANG_LIMIT_S}
    given = {one.partition("=")[0] for one in arguments.overrides}
    return [*arguments.overrides, *(f"{key}={value}" for key, value in chosen.items() if key not in given)]


def out_folder(arguments: argparse.Namespace) -> Path:
    """Return the folder for the runs and chaos.json, and make it."""
    out: Path = (arguments.out or RESULTS / f"chaos-{datetime.now():%Y%m%d-%H%M%S}").resolve()
    out.mkdir(parents=True, exist_ok=True)
    return out


def main() -> int:
    """Run the command line. Returns the exit code."""
    arguments = parse()
    out = out_folder(arguments)
    configs = arguments.config or [CONFIG]
    orders = Orders(out / "orders")
    if arguments.witness:
        configs = [chaos_witness.write(out / "witness-model", num_steps=num_steps(arguments))]
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
    overrides = run_overrides(arguments, faults)
    references: list[Path] = []
    for number in range(arguments.reference_runs):
        print(f"run {number + 1} of {arguments.reference_runs} without faults", flush=True)
        reference = out / f"reference-{number}"
        seeded = [*overrides, f"seed={config.seed + number + 1}"]
        ended = Run(
            configs, seeded, reference, supervise=False, environment=orders.environment()
        ).until_ended()
        if ended.exit_code:
            print(f"it ended with exit code {ended.exit_code}; see {out}")
            return 1
        references.append(reference)
    return break_run(
        arguments,
        configs,
        overrides,
        faults,
        out,
        orders=orders,
        supervise=bool(SUPERVISED & set(roles)),
        environment=orders.environment(),
        references=references,
    )


def break_run(
    arguments: argparse.Namespace,
    configs: Sequence[Path],
    overrides: Sequence[str],
    faults: Sequence[Planned],
    out: Path,
    *,
    orders: Orders,
    supervise: bool,
    environment: Mapping[str, str],
    references: Sequence[Path] = (),
    injector_class: Callable[..., Injector] = Injector,
    mend: Callable[[], list[str]] = list,
) -> int:
    """Run the app while faults are injected, make all checks, and write chaos.json. Returns the exit code.

    ``references`` are the folders of runs without faults. ``mend`` undoes what the faults broke, and returns
    what then remains of the run.
    """
    console = Console()
    console.width = max(console.width, 110)
    console.print(f"{num_steps(arguments)} steps with {len(faults)} faults, in {out}")
    for number, fault in enumerate(faults):
        console.print(
            f"  {number + 1}: after step {fault.at_step}, {fault.moment}: {fault.role} {fault.kind}"
        )
    run = Run(configs, overrides, out / "run", supervise=supervise, environment=environment)
    injector = injector_class(
        run.folder,
        [] if arguments.off else faults,
        out / "witness.jsonl",
        orders=orders,
        output=run.output,
        max_steps=num_steps(arguments),
        kill_everything=run.kill_everything,
    )
    try:
        ended = run.until_ended(injector.look, limit_s=arguments.limit_s)
    finally:
        left = mend()
    rollouts, steps = read_lines(run.folder / "rollouts.jsonl"), read_lines(run.folder / "metrics.jsonl")
    undisturbed = [
        (read_lines(one / "rollouts.jsonl"), read_lines(one / "metrics.jsonl")) for one in references
    ]
    band = arguments.band
    if references:
        accuracies = [accuracy_of(lines) for _, lines in undisturbed]
        band = measured_band([one for one in accuracies if one is not None])
    evidence = Evidence(
        planned=faults,
        injected=injector.injected,
        events=read_lines(run.folder / "faults.jsonl"),
        steps=steps,
        rollouts=rollouts,
        ledger=read_lines(run.folder / "ledger.jsonl"),
        max_steps=num_steps(arguments),
        groups_per_step=load_config(configs, overrides).algorithm.groups_per_step,
        exit_code=ended.exit_code,
        ledger_problem=None if ended.exit_code else ledger_problem(run.folder),
        witness_problem=chaos_witness.problem(run.folder, out / "witness-model")
        if arguments.witness
        else None,
        band=band,
        lengths=length_distances((rollouts, steps), undisturbed),
        left=[*ended.left, *left],
    )
    difference = first_difference(evidence)
    found = rows(match(evidence.injected, evidence.events)[0])
    console.print(table(found))
    result = {
        "seed": arguments.seed,
        "planned": [asdict(one) for one in faults],
        "injected": [asdict(one) for one in injector.injected],
        "faults": [asdict(row) for row in found],
        **costs_of(evidence, injector.seen_s, [line for _, lines in undisturbed for line in lines]),
        "lengths": evidence.lengths,
        "accuracy": accuracy_of(steps),
        "band": band,
        "wall_s": ended.wall_s,
        "difference": difference,
        "machine": machine_facts(),
    }
    write_json(out / "chaos.json", result)
    console.print(f"{out / 'chaos.json'}")
    console.print("nothing was lost" if difference is None else f"failed: {difference}")
    return 0 if difference is None else 1


def costs_of(
    evidence: Evidence, seen_s: Mapping[int, float], undisturbed: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return what each fault cost, as chaos.json has it, and print the means by role.

    A step's time without faults is the median of ``undisturbed``, the steps of other runs, or of the run
    itself.
    """
    if not any(line["step"] for line in evidence.steps):
        return {"undisturbed_step_s": None, "lost": []}
    step_s = step_median_s(undisturbed or evidence.steps)
    lost = lost_times(evidence.injected, seen_s, evidence.steps, undisturbed_step_s=step_s)
    for role in sorted({fault.role for fault, _ in lost}):
        cost_s = [one_s for fault, one_s in lost if fault.role == role]
        print(
            f"  {role}: a fault costs {statistics.mean(cost_s):.1f} s (mean of {len(cost_s)}, "
            f"{min(cost_s):.1f} to {max(cost_s):.1f})"
        )
    named = [
        {"role": one.role, "kind": one.kind, "moment": one.moment, "lost_s": lost_s} for one, lost_s in lost
    ]
    return {"undisturbed_step_s": step_s, "lost": named}


if __name__ == "__main__":
    sys.exit(main())
