"""Controls the hosts of a cluster of network namespaces and their links."""

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

PREFIX = "node"
"""Prefix of the names of namespaces and hosts; a number from 1 follows."""
LINK = "eth0"
SLOW = "rate 4mbit burst 32kb latency 200ms"
"""Arguments of tc(8) for a slow link, which drops packets that would wait for more than 200 ms."""
COMMANDS = ("ip", "tc", "nsenter", "unshare", "slurmd", "scontrol", "scancel", "squeue", "sinfo")
LEFT_S = 45.0
"""Seconds for a run's processes on its hosts to end: an agent waits for its controller for 40 s."""


class NoCluster(RuntimeError):
    """Raised if there is no cluster for the faults."""


def ask(command: Sequence[str]) -> str:
    """Run a command and return its output.

    Raises:
        NoCluster: it has failed.
    """
    done = subprocess.run(list(command), capture_output=True, text=True, check=False)
    if done.returncode:
        raise NoCluster(f"{' '.join(command)} failed: {done.stderr.strip()}")
    return done.stdout


def hosts_in(namespaces: str) -> list[str]:
    """Return the names of hosts in the output of ``ip netns list``, ordered by number."""
    first = [line.split()[0] for line in namespaces.splitlines() if line.strip()]
    numbers = sorted(
        int(name.removeprefix(PREFIX))
        for name in first
        if name.startswith(PREFIX) and name.removeprefix(PREFIX).isdecimal()
    )
    return [f"{PREFIX}{number}" for number in numbers]


def problem(names: Sequence[str], idle: Sequence[str], address: str) -> str | None:
    """Return why faults cannot be injected into a run on these hosts, or None.

    ``idle`` are those that Slurm would give to a job, and ``address`` is the head's own.
    """
    if len(names) < 2:
        return f"network namespaces {PREFIX}1, {PREFIX}2, ...: there are {len(names)}, must be 2 or more"
    if missing := sorted(set(names) - set(idle)):
        return f"Slurm does not call {', '.join(missing)} idle: end the jobs there, or bring the hosts up"
    if address.startswith("127."):
        return f"the host name of this machine is {address}, which no host reaches: start this on the head"
    return None


@dataclass(slots=True)
class ClusterHosts:
    """The hosts of the cluster and their faults; ``mend`` undoes all faults."""

    names: list[str]
    _broken: dict[str, Callable[[str], None]] = field(default_factory=dict)
    """Function that undoes the fault of each broken host."""
    _daemons: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @classmethod
    def find(cls) -> "ClusterHosts":
        """Return the cluster that is up on this machine.

        Raises:
            NoCluster: there is none, or it has a run.
        """
        if absent := [one for one in COMMANDS if shutil.which(one) is None]:
            raise NoCluster(f"not installed: {', '.join(absent)}")
        if os.geteuid() != 0:
            raise NoCluster("only root can break links")
        names = hosts_in(ask(["ip", "netns", "list"]))
        idle = ask(["sinfo", "--noheader", "--Node", "--states=idle", "--format=%N"]).split()
        try:
            address = socket.gethostbyname(socket.gethostname())
        except OSError as error:
            raise NoCluster(f"the host name {socket.gethostname()} has no address: {error}") from error
        if (words := problem(names, idle, address)) is not None:
            raise NoCluster(words)
        return cls(names=names)

    def slow(self, host: str) -> None:
        """Slow both directions of a host's link."""
        self._broken[host] = self.quicken
        ask([*_inside(host), "tc", "qdisc", "add", "dev", LINK, "root", "tbf", *SLOW.split()])
        ask(["tc", "qdisc", "add", "dev", _outer(host), "root", "tbf", *SLOW.split()])

    def quicken(self, host: str) -> None:
        """Undo ``slow``."""
        ask([*_inside(host), "tc", "qdisc", "del", "dev", LINK, "root"])
        ask(["tc", "qdisc", "del", "dev", _outer(host), "root"])
        del self._broken[host]

    def cut(self, host: str) -> None:
        """Take a host's link down at the head's end, which keeps the host's routes."""
        self._broken[host] = self.join
        ask(["ip", "link", "set", _outer(host), "down"])

    def join(self, host: str) -> None:
        """Undo ``cut``."""
        ask(["ip", "link", "set", _outer(host), "up"])
        del self._broken[host]

    def kill(self, host: str) -> None:
        """Kill every process of a host, including Slurm's daemon."""
        self._broken[host] = self.bring_back
        while pids := ask(["ip", "netns", "pids", host]).split():
            for pid in map(int, pids):
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            time.sleep(0.1)

    def bring_back(self, host: str) -> None:
        """Undo ``kill``: empty the host's /dev/shm and start Slurm's daemon."""
        inside = f"mount -t tmpfs -o size=2g tmpfs /dev/shm; hostname {host}; exec slurmd -D -N {host}"
        # Not "ip netns exec", which mounts a /sys in which slurmd finds no cgroups.
        enter = ["nsenter", f"--net=/run/netns/{host}", "unshare", "--mount", "--uts", "bash", "-c", inside]
        quiet = subprocess.DEVNULL
        self._daemons.append(
            subprocess.Popen(enter, stdin=quiet, stdout=quiet, stderr=quiet, start_new_session=True)
        )
        del self._broken[host]

    def cancel_jobs(self) -> str:
        """Cancel every Slurm job, as an administrator could; return the job numbers."""
        jobs = ask(["squeue", "--noheader", "--states=RUNNING", "--format=%i"]).split()
        for job in jobs:
            ask(["scancel", job])
        return f"job {' '.join(jobs)}"

    def mend(self) -> None:
        """Undo all faults that are still in effect."""
        for host, undo in list(self._broken.items()):
            undo(host)

    def left(self) -> list[str]:
        """Wait for the end of the run's processes on the hosts; return remaining processes and files."""
        end_s = time.monotonic() + LEFT_S
        while (found := self._left()) and time.monotonic() < end_s:
            time.sleep(1.0)
        return found

    def _left(self) -> list[str]:
        found = [f"job {one}" for one in ask(["squeue", "--noheader", "--format=%i"]).split()]
        for host in self.names:
            processes = [psutil.Process(int(pid)) for pid in ask(["ip", "netns", "pids", host]).split()]
            daemons = [one for one in processes if one.name() in ("slurmd", "slurmstepd")]
            found += [f"process {one.pid} on {host}" for one in processes if one not in daemons]
            for one in daemons[:1]:
                files = Path(f"/proc/{one.pid}/root/dev/shm").iterdir()
                found += [f"{file.name} in shared memory of {host}" for file in files]
        return found


def _inside(host: str) -> list[str]:
    return ["ip", "netns", "exec", host]


def _outer(host: str) -> str:
    """Return the name of a host's link at the head's end."""
    return f"veth{host.removeprefix(PREFIX)}"
