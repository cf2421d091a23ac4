"""Breaks a run at random and checks that it lost nothing.

    python benchmarks/chaos.py --faults N --seed S [--role ROLE ...] [--kind KIND ...] [--moment MOMENT ...]
        [--config FILE ... | --witness] [key.path=value ...] [--reference-runs K]
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
    print_faults,
    read_lines,
    rows,
    step_median_s,
)
from chaos_run import Run
from common import CONFIG, RESULTS, machine_facts, write_json

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


def parse(parser: argparse.ArgumentParser, kinds: Sequence[Kind]) -> argparse.Namespace:
    """Parse the options that this program and ``chaos_cluster.py`` share, and those of ``parser``."""
    parser.add_argument("--faults", type=int, required=True, help="number of faults")
    parser.add_argument("--seed", type=int, required=True, help="determines all faults")
    parser.add_argument("--kind", action="append", type=Kind, choices=sorted(kinds), help="by default all")
    parser.add_argument("--config", type=Path, action="append", help="later ones override earlier ones")
    parser.add_argument("--steps-per-fault", type=int, default=10)
    parser.add_argument("--limit-s", type=float, help="kill the run if it takes longer")
    parser.add_argument("--off", action="store_true", help="inject nothing: the checks have to fail")
    parser.add_argument("--out", type=Path, default=RESULTS / f"chaos-{datetime.now():%Y%m%d-%H%M%S}")
    parser.add_argument("overrides", nargs="*", metavar="key.path=value")
    arguments = parser.parse_args()
    if arguments.witness and arguments.config:
        parser.error("--witness has its own config: must be without --config")
    # The last fault has as many steps to recover.
    arguments.max_steps = arguments.steps_per_fault * (arguments.faults + 1)
    arguments.config = arguments.config or [CONFIG]
    arguments.out = arguments.out.resolve()
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


def run_overrides(arguments: argparse.Namespace, faults: Sequence[Planned]) -> list[str]:
    """Return the overrides of all runs: enough steps, frequent moments, all rollouts written."""
    every = arguments.steps_per_fault
    chosen = {
        "max_steps": arguments.max_steps,
        "evaluation.every_steps": every,
        "checkpoint.every_steps": max(1, every // 2),
        "logging.rollouts_per_step": ALL_ROLLOUTS,
    }
    if any(fault.kind is Kind.HUNG_COLLECTIVE for fault in faults):
        chosen |= {"timeouts.train_step_s": HANG_LIMIT_S, "timeouts.weights_s": HANG_LIMIT_S}
    given = {one.partition("=")[0] for one in arguments.overrides}
    return [*arguments.overrides, *(f"{key}={value}" for key, value in chosen.items() if key not in given)]


def main() -> int:
    """Run the command line. Returns the exit code."""
    parser = argparse.ArgumentParser(description="Breaks a run at random and checks that it lost nothing.")
    parser.add_argument("--role", action="append", choices=sorted(KINDS), help="by default all of the run")
    parser.add_argument(
        "--moment", action="append", type=Moment, choices=sorted(Moment), help="by default all"
    )
    parser.add_argument(
        "--witness", action="store_true", help="train a model whose weights count their groups"
    )
    parser.add_argument(
        "--reference-runs", type=int, default=0, help="runs without faults, to measure the band"
    )
    arguments = parse(parser, list(Kind))
    if arguments.witness:
        folder = arguments.out / "witness-model"
        arguments.config = [chaos_witness.write(folder, num_steps=arguments.max_steps)]
    arguments.role = arguments.role or roles_of(load_config(arguments.config, arguments.overrides))
    return break_run(arguments, KINDS, environment=Orders(arguments.out / "orders").environment())


def reference_runs(
    arguments: argparse.Namespace, overrides: Sequence[str], environment: Mapping[str, str]
) -> list[Path]:
    """Run without faults, with other seeds. Returns their folders."""
    found = []
    first_seed = load_config(arguments.config, overrides).seed + 1
    for number in range(arguments.reference_runs):
        print(f"run {number + 1} of {arguments.reference_runs} without faults", flush=True)
        folder = arguments.out / f"reference-{number}"
        seeded = [*overrides, f"seed={first_seed + number}"]
        run = Run(arguments.config, seeded, folder, supervise=False, environment=environment)
        exit_code, _ = run.until_ended()
        if exit_code:
            sys.exit(f"it ended with exit code {exit_code}; see {arguments.out}")
        found.append(folder)
    return found


def break_run(
    arguments: argparse.Namespace,
    kinds_of: Mapping[str, Sequence[Kind]],
    *,
    environment: Mapping[str, str],
    injector_class: Callable[..., Injector] = Injector,
    mend: Callable[[], list[str]] = list,
) -> int:
    """Run the app while faults are injected, make all checks, and write chaos.json. Returns the exit code.

    ``mend`` undoes what the faults broke, and returns what then remains of the run.
    """
    out = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    faults = plan(
        arguments.seed,
        arguments.faults,
        arguments.role,
        steps_per_fault=arguments.steps_per_fault,
        moments=arguments.moment or list(Moment),
        kinds=arguments.kind or list(Kind),
        kinds_of=kinds_of,
    )
    overrides = run_overrides(arguments, faults)
    references = reference_runs(arguments, overrides, environment)
    print(f"{arguments.max_steps} steps with {len(faults)} faults, in {out}", flush=True)
    for number, fault in enumerate(faults):
        words = f"{number + 1}: after step {fault.at_step}, {fault.moment}: {fault.role} {fault.kind}"
        print(f"  {words}", flush=True)
    is_supervised = bool(SUPERVISED & set(arguments.role))
    run = Run(arguments.config, overrides, out / "run", supervise=is_supervised, environment=environment)
    injector = injector_class(
        out,
        [] if arguments.off else faults,
        max_steps=arguments.max_steps,
        kill_everything=run.kill_everything,
    )
    try:
        exit_code, remaining = run.until_ended(injector.look, limit_s=arguments.limit_s)
    finally:
        on_hosts = mend()
    rollouts, steps, events, ledger = (
        read_lines(run.folder / f"{name}.jsonl") for name in ("rollouts", "metrics", "faults", "ledger")
    )
    undisturbed = [read_lines(one / "metrics.jsonl") for one in references]
    accuracies = [accuracy for lines in undisturbed if (accuracy := accuracy_of(lines)) is not None]
    evidence = Evidence(
        planned=faults,
        injected=injector.injected,
        events=events,
        steps=steps,
        rollouts=rollouts,
        ledger=ledger,
        max_steps=arguments.max_steps,
        groups_per_step=load_config(arguments.config, overrides).algorithm.groups_per_step,
        exit_code=exit_code,
        ledger_problem=None if exit_code else ledger_problem(run.folder),
        witness_problem=chaos_witness.problem(run.folder, out / "witness-model")
        if arguments.witness
        else None,
        band=measured_band(accuracies) if accuracies else None,
        lengths=length_distances(rollouts, [read_lines(one / "rollouts.jsonl") for one in references]),
        left=[*remaining, *on_hosts],
    )
    difference = first_difference(evidence)
    found = rows(match(evidence.injected, evidence.events)[0])
    print_faults(found)
    result = {
        "seed": arguments.seed,
        "faults": found,
        **costs_of(evidence, injector.seen_s, [line for lines in undisturbed for line in lines]),
        "lengths": evidence.lengths,
        "accuracy": accuracy_of(steps),
        "band": evidence.band,
        "difference": difference,
        "machine": machine_facts(),
    }
    write_json(out / "chaos.json", result)
    print(f"{out / 'chaos.json'}")
    print("nothing was lost" if difference is None else f"failed: {difference}")
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
    for role in sorted({one["role"] for one in lost}):
        cost_s = [one["lost_s"] for one in lost if one["role"] == role]
        print(
            f"  {role}: a fault costs {statistics.mean(cost_s):.1f} s (mean of {len(cost_s)}, "
            f"{min(cost_s):.1f} to {max(cost_s):.1f})"
        )
    return {"undisturbed_step_s": step_s, "lost": lost}


if __name__ == "__main__":
    sys.exit(main())
