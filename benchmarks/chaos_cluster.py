"""Breaks hosts and links of a cluster under a run and checks that the run lost nothing.

    python benchmarks/chaos_cluster.py --faults N --seed S [--kind KIND ...] [--config FILE ...]
        [key.path=value ...] [--steps-per-fault N] [--limit-s S] [--off] [--out FOLDER]

Start it as root on the head of a cluster whose hosts are network namespaces node1, node2, ... of this machine
under a real Slurm (docs/hosts.md). The first host is the trainer's, the others are the generators'. Faults
are drawn, injected and checked as in ``chaos.py``; nothing may remain on the hosts either. The exit code is 1
with the first difference, and 2 without such a cluster.
"""

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from chaos import break_run, parse
from chaos_faults import CLUSTER_KINDS, HOST, Kind, Planned
from chaos_injector import Injector, until

HOST_LIMIT_S = 20.0
"""``timeouts.host_s`` of the run."""
SHORT_S = 5.0
"""Length of a partition that must pass without notice: with TCP's retries it is shorter than a heartbeat."""
SLOW_S = 20.0
NOTICE_S = 120.0
"""A fault that the run has not noticed by then is undone, and fails the checks."""
LEFT_S = 45.0
"""How long the processes of a run may outlive it: an agent waits for its controller for 40 s."""

PREFIX = "node"
"""Begins the names of namespaces and hosts. A number from 1 follows."""
LINK = "eth0"
SLOW = "rate 4mbit burst 32kb latency 200ms"
"""Arguments of tc(8) for a slow link, which drops what would wait for longer than 200 ms."""
COMMANDS = ("ip", "tc", "nsenter", "unshare", "slurmd", "scontrol", "scancel", "squeue", "sinfo")


class NoCluster(RuntimeError):
    """There is no cluster into which faults can be injected."""


def ask(*command: str) -> str:
    """Return what a command prints.

    Raises:
        NoCluster: it has failed.
    """
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NoCluster(f"{' '.join(command)} failed: {done.stderr.strip()}")
    return done.stdout


def hosts_in(namespaces: str) -> list[str]:
    """Return the names of hosts in the output of ``ip netns list``, in the order of their numbers."""
    names = [line.split()[0] for line in namespaces.splitlines() if line.strip()]
    numbers = [name.removeprefix(PREFIX) for name in names if name.startswith(PREFIX)]
    return [f"{PREFIX}{number}" for number in sorted(int(one) for one in numbers if one.isdecimal())]


def problem(names: Sequence[str], idle: Sequence[str], address: str) -> str | None:
    """Return why faults cannot be injected into a run of these hosts; None if they can.

    ``idle`` has the hosts that Slurm would give to a job. ``address`` is the head's own.
    """
    if len(names) < 2:
        return f"network namespaces {PREFIX}1, {PREFIX}2, ...: there are {len(names)}, must be 2 or more"
    if missing := sorted(set(names) - set(idle)):
        return f"Slurm does not call {', '.join(missing)} idle: end the jobs there, or bring the hosts up"
    if address.startswith("127."):
        return f"the host name of this machine is {address}, which no host reaches: start this on the head"
    return None


def find_hosts() -> list[str]:
    """Return the names of the hosts of this machine's cluster.

    Raises:
        NoCluster: there is none, or it has a run.
    """
    if absent := [one for one in COMMANDS if shutil.which(one) is None]:
        raise NoCluster(f"not installed: {', '.join(absent)}")
    if os.geteuid() != 0:
        raise NoCluster("only root can break links")
    names = hosts_in(ask("ip", "netns", "list"))
    idle = ask("sinfo", "--noheader", "--Node", "--states=idle", "--format=%N").split()
    try:
        address = socket.gethostbyname(socket.gethostname())
    except OSError as error:
        raise NoCluster(f"the host name {socket.gethostname()} has no address: {error}") from error
    if (words := problem(names, idle, address)) is not None:
        raise NoCluster(words)
    return names


class ClusterHosts:
    """Breaks hosts and their links, and repairs them."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names
        self._daemons: list[subprocess.Popen[bytes]] = []
        self._repairs: dict[str, Callable[[], None]] = {}
        """What undoes the fault of a host."""

    def break_host(self, host: str, kind: Kind) -> None:
        """Inject a fault of a host or of its link."""
        match kind:
            case Kind.SLOW_LINK:
                self._repairs[host] = partial(self._limit_link, host, "del")
                self._limit_link(host, "add", "tbf", *SLOW.split())
            case Kind.SHORT_PARTITION | Kind.LONG_PARTITION:
                # At the outer end of the link, so that the host keeps its routes.
                self._repairs[host] = partial(ask, "ip", "link", "set", _outer(host), "up")
                ask("ip", "link", "set", _outer(host), "down")
            case Kind.LOST_NODE:
                self._repairs[host] = partial(self._start_host, host)
                self._kill_host(host)
            case _:
                raise AssertionError(f"{kind} is not a fault of a host")

    def repair(self, host: str) -> None:
        """Undo the fault of a host, if it has one."""
        if host in self._repairs:
            self._repairs[host]()
            del self._repairs[host]

    def _limit_link(self, host: str, action: str, *limits: str) -> None:
        """Limit both directions of a host's link, or end that."""
        ask("ip", "netns", "exec", host, "tc", "qdisc", action, "dev", LINK, "root", *limits)
        ask("tc", "qdisc", action, "dev", _outer(host), "root", *limits)

    def _kill_host(self, host: str) -> None:
        """Kill all processes of a host, Slurm's daemon too."""
        while pids := ask("ip", "netns", "pids", host).split():
            for pid in map(int, pids):
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            time.sleep(0.1)

    def _start_host(self, host: str) -> None:
        """Start a host with an empty /dev/shm and Slurm's daemon."""
        inside = f"mount -t tmpfs -o size=2g tmpfs /dev/shm; hostname {host}; exec slurmd -D -N {host}"
        # "ip netns exec" mounts a /sys in which slurmd finds no cgroups.
        enter = ["nsenter", f"--net=/run/netns/{host}", "unshare", "--mount", "--uts", "bash", "-c", inside]
        quiet = subprocess.DEVNULL
        self._daemons.append(
            subprocess.Popen(enter, stdin=quiet, stdout=quiet, stderr=quiet, start_new_session=True)
        )

    def cancel_jobs(self) -> str:
        """Cancel all jobs. Returns their numbers."""
        jobs = ask("squeue", "--noheader", "--states=RUNNING", "--format=%i").split()
        for job in jobs:
            ask("scancel", job)
        return f"job {' '.join(jobs)}"

    def mend(self) -> list[str]:
        """Undo all faults and wait for the end of the run's processes. Returns processes and files that
        remain."""
        for host in self.names:
            self.repair(host)
        end_s = time.monotonic() + LEFT_S
        while (found := self._left()) and time.monotonic() < end_s:
            time.sleep(1.0)
        return found

    def _left(self) -> list[str]:
        found = [f"job {one}" for one in ask("squeue", "--noheader", "--format=%i").split()]
        for host in self.names:
            processes = [psutil.Process(int(pid)) for pid in ask("ip", "netns", "pids", host).split()]
            daemons = [one for one in processes if one.name() in ("slurmd", "slurmstepd")]
            found += [f"process {one.pid} on {host}" for one in processes if one not in daemons]
            for one in daemons[:1]:
                files = Path(f"/proc/{one.pid}/root/dev/shm").iterdir()
                found += [f"{file.name} in shared memory of {host}" for file in files]
        return found


def _outer(host: str) -> str:
    """Return the name of the end of a host's link that is in no namespace."""
    return f"veth{host.removeprefix(PREFIX)}"


class ClusterInjector(Injector):
    """Injects faults of hosts, and undoes each before the next one."""

    def __init__(self, *arguments: Any, hosts: ClusterHosts, **others: Any) -> None:
        super().__init__(*arguments, **others)
        self._hosts = hosts

    def _strike(self, number: int, fault: Planned) -> Iterator[None]:
        rank = int(fault.which * len(self._hosts.names))
        host = self._hosts.names[rank]
        time_s, words = time.time(), host
        if fault.kind is Kind.CANCELLED_JOB:
            words = self._hosts.cancel_jobs()
        else:
            self._hosts.break_host(host, fault.kind)
        self._note(number, fault, time_s, (rank, 0), words)
        if fault.kind in (Kind.LONG_PARTITION, Kind.LOST_NODE):
            end_s = time.monotonic() + NOTICE_S
            yield from until(lambda: time.monotonic() >= end_s or self._has_noticed(HOST, time_s))
        pauses_s = {Kind.SLOW_LINK: SLOW_S, Kind.SHORT_PARTITION: SHORT_S, Kind.LONG_PARTITION: HOST_LIMIT_S}
        yield from self._pause(pauses_s.get(fault.kind, 0.0))
        self._hosts.repair(host)


def overrides_of(num_hosts: int, given: Sequence[str]) -> list[str]:
    """Return the overrides of a run on this number of hosts. Those on the command line come last."""
    launcher = {
        "kind": "slurm",
        "hosts": {"trainer": 1, "generators": num_hosts - 1},
        "gpus_per_host": 0,
        "partition": "main",
        "cpus_per_task": 1,
        "mem": "8G",
        "python": sys.executable,
    }
    chosen = [
        f"launcher={json.dumps(launcher)}",
        f"generator.num_replicas={num_hosts - 1}",
        f"timeouts.host_s={HOST_LIMIT_S}",
        f"timeouts.weights_s={2 * HOST_LIMIT_S}",
    ]
    return [*chosen, *given]


def main() -> int:
    """Run the command line. Returns the exit code."""
    parser = argparse.ArgumentParser(description="Breaks hosts and checks that a run lost nothing.")
    parser.set_defaults(role=[HOST], moment=None, witness=False)
    arguments = parse(parser, CLUSTER_KINDS[HOST])
    try:
        hosts = ClusterHosts(find_hosts())
    except NoCluster as error:
        print(f"refused: {error}", file=sys.stderr)
        return 2
    arguments.overrides = overrides_of(len(hosts.names), arguments.overrides)
    injector = partial(ClusterInjector, hosts=hosts)
    return break_run(arguments, CLUSTER_KINDS, environment={}, injector_class=injector, mend=hosts.mend)


if __name__ == "__main__":
    sys.exit(main())
