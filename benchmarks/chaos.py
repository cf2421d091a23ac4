"""Breaks a run at random and checks that it lost nothing.

    python benchmarks/chaos.py --faults N --seed S [--role ROLE ...] [--kind KIND ...] [--moment MOMENT ...]
        [--config FILE ... | --witness] [key.path=value ...] [--steps-per-fault N] [--limit-s S] [--off]
        [--undisturbed RUN RUN] [--out FOLDER]

Starts ``apps.grpo`` on the embedded default, or on FILE, for enough steps. The seed determines role, moment,
kind, process and time of each fault; ``chaos_faults.py`` has the tables. Injected faults are written to
witness.jsonl. The roles ``controller``, ``buffer`` and ``host`` start the run with ``--supervise``.
Afterwards this checks that

- faults.jsonl and metrics.jsonl have each fault as detected and recovered, and no other fault;
- metrics.jsonl has each step once, and the batches in rollouts.jsonl have each group once;
- with ``--witness``, the weights show that each group was trained on once (``chaos_witness.py``);
- ``apps.verify`` passes;
- with ``--undisturbed``, lengths of responses are near those of two runs without faults;
- no process and no file in shared memory remains.

The exit code is 1 with the first difference. ``--off`` injects nothing, so that the checks have to fail.
With other values of ``seed=``, the folders ``run`` that it leaves are of runs without faults.
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
    first_difference,
    length_problem,
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

HANG_LIMIT_S = 40
"""Deadline of the trainer's calls if a collective hangs, in place of ten minutes."""

FILES = ("faults", "ledger", "metrics", "rollouts")
"""Files that ``Evidence`` has."""


def ledger_problem(folder: Path) -> str | None:
    """Return the contradiction that ``apps.verify`` finds in a run that has made all of its steps."""
    try:
        verdict = verify(folder / "ledger.jsonl", folder / "metrics.jsonl")
    except LedgerUnreadable as error:
        return str(error)
    if verdict.contradiction is None and not verdict.reading.book.is_ended:
        return "the ledger has no end"
    return verdict.contradiction


def parse(parser: argparse.ArgumentParser, kinds: Sequence[Kind]) -> argparse.Namespace:
    """Parse the options that this program and ``chaos_cluster.py`` share, and those of ``parser``."""
    parser.add_argument("--faults", type=int, required=True, help="number of faults")
    parser.add_argument("--seed", type=int, required=True, help="determines all faults")
    parser.add_argument("--kind", action="append", type=Kind, choices=sorted(kinds), help="by default all")
    parser.add_argument("--config", type=Path, action="append", help="later ones override earlier ones")
    parser.add_argument("--steps-per-fault", type=int, default=10)
    parser.add_argument("--limit-s", type=float, help="kill the run if it takes longer")
    parser.add_argument("--undisturbed", type=Path, nargs=2, metavar="RUN", default=[], help="without faults")
    parser.add_argument("--off", action="store_true", help="inject nothing: the checks have to fail")
    parser.add_argument("--out", type=Path, default=RESULTS / f"chaos-{datetime.now():%Y%m%d-%H%M%S}")
    parser.add_argument("overrides", nargs="*", metavar="key.path=value")
    arguments = parser.parse_args()
    if arguments.witness and arguments.config:
        parser.error("--witness has its own config: must be without --config")
    if missing := [one for one in arguments.undisturbed if not (one / "rollouts.jsonl").exists()]:
        parser.error(f"--undisturbed {missing[0]}: must be the folder of a run, with rollouts.jsonl")
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
    arguments = parse(parser, list(Kind))
    if arguments.witness:
        folder = arguments.out / "witness-model"
        arguments.config = [chaos_witness.write(folder, num_steps=arguments.max_steps)]
    arguments.role = arguments.role or roles_of(load_config(arguments.config, arguments.overrides))
    return break_run(arguments, KINDS, environment=Orders(arguments.out / "orders").environment())


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
    files = {name: read_lines(run.folder / f"{name}.jsonl") for name in FILES}
    problems = {"apps.verify": None if exit_code else ledger_problem(run.folder)}
    if arguments.witness:
        problems["the counting witness"] = chaos_witness.problem(run.folder, out / "witness-model")
    if arguments.undisturbed and not exit_code:
        others = [read_lines(folder / "rollouts.jsonl") for folder in arguments.undisturbed]
        problems["lengths of responses"] = length_problem(files["rollouts"], others)
    evidence = Evidence(
        **files,
        planned=faults,
        injected=injector.injected,
        max_steps=arguments.max_steps,
        groups_per_step=load_config(arguments.config, overrides).algorithm.groups_per_step,
        exit_code=exit_code,
        problems=problems,
        left=[*remaining, *on_hosts],
    )
    difference = first_difference(evidence)
    found = rows(match(evidence.injected, evidence.faults)[0])
    print_faults(found)
    result = {
        "seed": arguments.seed,
        "faults": found,
        **costs_of(evidence, injector.seen_s),
        "difference": difference,
        "machine": machine_facts(),
    }
    write_json(out / "chaos.json", result)
    print(f"{out / 'chaos.json'}")
    print("nothing was lost" if difference is None else f"failed: {difference}")
    return 0 if difference is None else 1


def costs_of(evidence: Evidence, seen_s: Mapping[int, float]) -> dict[str, Any]:
    """Return what each fault cost, as chaos.json has it, and print the means by role.

    A step's time without faults is the median of all steps.
    """
    if not any(line["step"] for line in evidence.metrics):
        return {"undisturbed_step_s": None, "lost": []}
    step_s = step_median_s(evidence.metrics)
    lost = lost_times(evidence.injected, seen_s, evidence.metrics, undisturbed_step_s=step_s)
    for role in sorted({one["role"] for one in lost}):
        cost_s = [one["lost_s"] for one in lost if one["role"] == role]
        print(
            f"  {role}: a fault costs {statistics.mean(cost_s):.1f} s (mean of {len(cost_s)}, "
            f"{min(cost_s):.1f} to {max(cost_s):.1f})"
        )
    return {"undisturbed_step_s": step_s, "lost": lost}


if __name__ == "__main__":
    sys.exit(main())
