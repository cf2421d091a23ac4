"""Injects faults into the hosts and links of a run's cluster, and proves that nothing was lost.

    python benchmarks/chaos_cluster.py --faults N --seed S [--kind KIND ...] [--config FILE ...]
        [key.path=value ...] [--steps-per-fault N] [--limit-s S] [--off] [--out FOLDER]

The hosts of the cluster are network namespaces node1, node2, ... of this machine under a real Slurm; run this
as root on its head (docs/hosts.md). The first host is the trainer's, the others are the generators'. The rest
is as in ``chaos.py``: faults are drawn from the seed, ``apps.grpo --supervise`` runs, and the same conditions
are checked afterwards, except accuracy and response lengths. Nothing may remain on the hosts either. The exit
code is 1 with the first violation, and 2 without such a cluster.
"""

import argparse
import dataclasses
import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from pathlib import Path

from chaos import DEFAULT, Clock, judge, parser_of, run_overrides
from chaos_cluster_hosts import ClusterHosts, NoCluster
from chaos_faults import CLUSTER_KINDS, HOST, Kind, Planned, plan
from chaos_injector import Injector, read_lines
from chaos_orders import Orders
from chaos_run import Run
from common import RESULTS
from rich.console import Console

from forgeasync.config import load_config

HOST_LIMIT_S = 20.0
"""Value of ``timeouts.host_s`` in the run."""
SHORT_S = 5.0
"""Length of a partition that must go unnoticed: with TCP's retransmission, still less than a heartbeat."""
SLOW_S = 20.0
NOTICE_S = 120.0
"""Seconds after which a fault that the run has not noticed is undone; the comparison then fails."""


def overrides_of(num_hosts: int, given: Sequence[str]) -> list[str]:
    """Return the overrides that place a run on ``num_hosts`` hosts; those in ``given`` take precedence."""
    launcher = {
        "kind": "slurm",
        "hosts": {"trainer": 1, "generators": num_hosts - 1},
        "gpus_per_host": 0,
        "partition": "main",
        "cpus_per_task": 1,
        "mem": "8G",
        "python": sys.executable,
    }
    chosen = {
        "launcher": json.dumps(launcher),
        "generator.num_replicas": num_hosts - 1,
        "timeouts.host_s": HOST_LIMIT_S,
        "timeouts.weights_s": 2 * HOST_LIMIT_S,
    }
    return [*(f"{key}={value}" for key, value in chosen.items()), *given]


class ClusterInjector(Injector):
    """Injects faults of hosts, and undoes each one before the next."""

    def __init__(
        self,
        run_dir: Path,
        faults: Sequence[Planned],
        witness: Path,
        *,
        orders: Orders,
        hosts: ClusterHosts,
        max_steps: int,
    ) -> None:
        super().__init__(run_dir, faults, witness, orders=orders, max_steps=max_steps)
        self._hosts = hosts

    def _strike(self, number: int, fault: Planned) -> Iterator[None]:
        rank = int(fault.which * len(self._hosts.names))
        host = self._hosts.names[rank]
        time_s = time.time()
        undo: Callable[[str], None] | None = None
        match fault.kind:
            case Kind.SLOW_LINK:
                self._hosts.slow(host)
                undo = self._hosts.quicken
            case Kind.SHORT_PARTITION | Kind.LONG_PARTITION:
                self._hosts.cut(host)
                undo = self._hosts.join
            case Kind.LOST_NODE:
                self._hosts.kill(host)
                undo = self._hosts.bring_back
            case Kind.CANCELLED_JOB:
                host = self._hosts.cancel_jobs()
            case _:
                raise AssertionError(f"{fault.kind} is none of a cluster")
        self._note(number, fault.role, fault.kind, fault.moment, time_s, (rank, 0), host)
        match fault.kind:
            case Kind.SLOW_LINK:
                yield from self._pause(SLOW_S)
            case Kind.SHORT_PARTITION:
                yield from self._pause(SHORT_S)
            case Kind.LONG_PARTITION:
                yield from self._until_noticed(time_s)
                yield from self._pause(HOST_LIMIT_S)
            case Kind.LOST_NODE:
                yield from self._until_noticed(time_s)
        if undo is not None:
            undo(host)

    def _until_noticed(self, since_s: float) -> Iterator[None]:
        end_s = time.monotonic() + NOTICE_S
        while time.monotonic() < end_s and not is_noticed(self._run_dir, since_s):
            yield


def is_noticed(run_dir: Path, since_s: float) -> bool:
    """Return whether a run has recorded a lost host since ``since_s``."""
    events = read_lines(run_dir / "faults.jsonl")
    return any(one["role"] == HOST and one["time_s"] >= since_s for one in events)


def parse() -> argparse.Namespace:
    parser = parser_of("Breaks hosts, and proves that nothing was lost.")
    parser.add_argument("--kind", action="append", choices=sorted(CLUSTER_KINDS[HOST]), help="by default all")
    parser.add_argument("--config", type=Path, action="append", help="later ones override earlier ones")
    parser.set_defaults(witness=False)
    return parser.parse_args()


def main() -> int:
    """Run the command line; return the exit code."""
    arguments = parse()
    try:
        hosts = ClusterHosts.find()
    except NoCluster as error:
        print(f"refused: {error}", file=sys.stderr)
        return 2
    console = Console()
    console.width = max(console.width, 110)
    name = f"chaos-cluster-{datetime.now():%Y%m%d-%H%M%S}"
    out = (RESULTS / name if arguments.out is None else arguments.out).resolve()
    out.mkdir(parents=True, exist_ok=True)
    arguments.overrides = overrides_of(len(hosts.names), arguments.overrides)
    configs = arguments.config or [DEFAULT]
    config = load_config(configs, arguments.overrides)
    faults = plan(
        arguments.seed,
        arguments.faults,
        [HOST],
        steps_per_fault=arguments.steps_per_fault,
        kinds=[Kind(one) for one in arguments.kind or CLUSTER_KINDS[HOST]],
        kinds_of=CLUSTER_KINDS,
    )
    max_steps = arguments.steps_per_fault * (arguments.faults + 1)
    console.print(f"{max_steps} steps with {len(faults)} faults of {len(hosts.names)} hosts, in {out}")
    run = Run(
        configs,
        run_overrides(arguments, faults, max_steps),
        out / "run",
        out / "run.out",
        supervise=True,
    )
    injector = ClusterInjector(
        out / "run",
        [] if arguments.off else faults,
        out / "witness.jsonl",
        orders=Orders(out / "orders"),
        hosts=hosts,
        max_steps=max_steps,
    )
    clock = Clock(injector)
    try:
        ended = run.until_ended(clock.look, limit_s=arguments.limit_s)
    finally:
        hosts.mend()
    ended = dataclasses.replace(ended, left=[*ended.left, *hosts.left()])
    shutil.rmtree(out / "orders", ignore_errors=True)
    return judge(arguments, console, config, faults, injector, ended, clock, out / "run", None, [], out)


if __name__ == "__main__":
    sys.exit(main())
