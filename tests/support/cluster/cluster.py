"""A Slurm cluster with ssh on this one machine: real daemons on a head and three nodes."""

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.support.app_runs import REPOSITORY
from tests.support.cluster.machines import (
    HEAD,
    HEAD_ADDRESS,
    NODES,
    Machine,
    find,
    missing,
    start_head,
    start_node,
)
from tests.support.tiers import Starts, starts

PARTITION = "main"
DAEMONS = ("sbatch", "squeue", "scancel", "scontrol", "slurmctld", "slurmd", "munged", "ssh", "sshd")
PACKAGES = "slurm-wlm munge iproute2 openssh-server openssh-client"
"""What Debian calls the packages of ``DAEMONS``."""

START_S = 60.0
LEFT_S = 30.0
"""Seconds in which everything of a run that has ended must be gone: Slurm kills what does not end after 5."""


def why_not() -> str | None:
    """Why no cluster can be started on this machine; None: it can."""
    return missing(DAEMONS)


@dataclass(slots=True)
class Cluster:
    """A running cluster, and what is left on it."""

    folder: Path
    head: Machine
    nodes: dict[str, Machine] = field(default_factory=dict)

    def start(self) -> None:
        for name, command in {
            "munge": ["munged", "--foreground", "--force", *self._munge_files()],
            "slurmctld": ["slurmctld", "-D"],
        }.items():
            self._daemon(self.head, name, command)
        for name in NODES:
            self._start_node(name)
        self.wait(lambda: self._num_idle() == len(NODES), "all nodes are idle")

    @property
    def machines(self) -> list[Machine]:
        return [self.head, *self.nodes.values()]

    def _start_node(self, name: str) -> None:
        node = self.nodes[name] = start_node(name, self.head, self.folder)
        (self.folder / f"spool.{name}").mkdir(exist_ok=True)
        self._daemon(node, f"slurmd.{name}", ["slurmd", "-D", "-N", name])
        node.run("mkdir", "/run/sshd")
        self._daemon(node, f"sshd.{name}", [find("sshd"), "-D", "-f", str(self.folder / "sshd_config")])

    def make_ready(self) -> None:
        """End everything of runs, and have all nodes up and idle."""
        self.kill_runs()
        for name, node in list(self.nodes.items()):
            if node.holder.poll() is not None:
                self._replace_node(name)
        self.scontrol("update", f"NodeName={','.join(NODES)}", "State=RESUME")
        self.wait(lambda: not self.jobs() and self._num_idle() == len(NODES), "all nodes are idle")

    def slurm_release(self) -> tuple[int, int]:
        """Such as (24, 5)."""
        _, version = self._ask("squeue", "--version").split()
        major, minor, *_ = version.split(".")
        return int(major), int(minor)

    @contextmanager
    def head_name_is(self, address: str) -> Iterator[None]:
        """Meanwhile the head's name has another address; all machines share the file."""
        hosts = self.folder / "hosts"
        before = hosts.read_text()
        # In place: another file of that name would not be seen through the mounts.
        hosts.write_text(before.replace(f"{HEAD_ADDRESS} {HEAD}", f"{address} {HEAD}"))
        try:
            yield
        finally:
            hosts.write_text(before)

    def _replace_node(self, name: str) -> None:
        # The kernel takes its end of the network apart when it gets to it.
        link = [*self.head.enter(), "ip", "link", "delete", f"to_{name}"]
        subprocess.run(link, stderr=subprocess.DEVNULL, check=False)
        self._start_node(name)

    def _munge_files(self) -> list[str]:
        (self.folder / "munge.key").write_bytes(os.urandom(128))
        (self.folder / "munge.key").chmod(0o600)
        files = {"key-file": "key", "socket": "socket", "pid-file": "pid", "seed-file": "seed"}
        files["log-file"] = "log"
        return [f"--{option}={self.folder}/munge.{ending}" for option, ending in files.items()]

    def _daemon(self, machine: Machine, name: str, command: list[str]) -> None:
        with open(self.folder / f"{name}.out", "ab") as out:
            subprocess.Popen(
                [*machine.enter(), *command],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env=self.environment(),
                start_new_session=True,
            )

    def environment(self, *, first_in_path: Path | None = None) -> dict[str, str]:
        """Environment of a user of the cluster."""
        path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
        if first_in_path is not None:
            path = f"{first_in_path}:{path}"
        own = {"SLURM_CONF": str(self.folder / "slurm.conf"), "OMP_NUM_THREADS": "1", "PATH": path}
        return os.environ | own

    def scontrol(self, *arguments: str) -> str:
        return self._ask("scontrol", *arguments)

    def jobs(self) -> list[str]:
        """Ids of the jobs that wait or run.

        One that was cancelled is "completing" until every node of it has answered, a dead one too.
        """
        states = "--states=PENDING,CONFIGURING,RUNNING,SUSPENDED"
        return self._ask("squeue", "--noheader", states, "--format=%i").split()

    def cancel(self, job: str) -> None:
        self._ask("scancel", job)

    def _num_idle(self) -> int:
        return len(self._ask("sinfo", "--noheader", "--Node", "--states=idle", "--format=%N").split())

    def _ask(self, *command: str) -> str:
        done = subprocess.run(
            [*self.head.enter(), *command],
            env=self.environment(),
            capture_output=True,
            text=True,
            timeout=START_S,
        )
        # Until the daemons are up, there is no answer.
        return done.stdout if done.returncode == 0 else ""

    def left(self) -> list[str]:
        """What runs have left: jobs, and processes on any machine."""
        processes = [one for machine in self.machines for one in machine.left_by_runs().values()]
        return [*(f"job {job}" for job in self.jobs()), *processes]

    def folders(self) -> list[Path]:
        """What runs have in shared memory of any machine."""
        return [folder for machine in self.machines for folder in machine.folders_of_runs()]

    def wait_until_clean(self) -> None:
        """Nothing of any run is left, soon."""
        deadline = time.monotonic() + LEFT_S
        while left := self.left():
            assert time.monotonic() < deadline, f"left behind: {left}"
            time.sleep(0.5)

    def wait(self, until: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + START_S
        while not until():
            assert time.monotonic() < deadline, f"not yet: {what}; see {self.folder}"
            time.sleep(0.2)

    @starts(Starts.PROCESSES)
    def run(self, *command: str, first_in_path: Path | None = None) -> "HeadRun":
        """Start a command on the head, in the repository."""
        process = subprocess.Popen(
            [*self.head.enter(), *command],
            cwd=REPOSITORY,
            env=self.environment(first_in_path=first_in_path),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        return HeadRun(process)

    def kill_runs(self) -> None:
        """End everything of runs, as after a test that failed."""
        for job in self.jobs():
            self.cancel(job)
        for pid in [pid for machine in self.machines for pid in machine.left_by_runs()]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for folder in self.folders():
            shutil.rmtree(folder)

    @property
    def ssh_args(self) -> list[str]:
        """Arguments of ssh by which root of the head gets to every node."""
        options = ("StrictHostKeyChecking=no", "UserKnownHostsFile=/dev/null", "BatchMode=yes")
        return ["-F", "none", "-i", f"{self.folder}/user_key", *(f"-o{one}" for one in options)]


@dataclass(slots=True)
class HeadRun:
    """A command on the head."""

    process: subprocess.Popen[str]
    """``nsenter``, whose child is the command."""

    def interrupt(self) -> None:
        """Ctrl-C."""
        (child,) = psutil.Process(self.process.pid).children()
        child.send_signal(signal.SIGINT)

    def finish(self, within_s: float) -> tuple[int, str]:
        """Exit code and stderr."""
        _, err = self.process.communicate(timeout=within_s)
        return self.process.returncode, err


@contextmanager
def cluster_here() -> Iterator[Cluster]:
    """A cluster that is gone afterwards, whatever happens."""
    folder = Path(tempfile.mkdtemp(prefix="cluster_here."))
    machines: list[Machine] = []
    try:
        _write_settings(folder)
        head = start_head(folder)
        machines.append(head)
        cluster = Cluster(folder=folder, head=head)
        try:
            cluster.start()
            yield cluster
        finally:
            machines += cluster.nodes.values()
    finally:
        for machine in machines:
            machine.kill()
        shutil.rmtree(folder)


def _write_settings(folder: Path) -> None:
    (folder / "state").mkdir()
    nodes = f"node[1-{len(NODES)}]"
    own = {"head": HEAD, "head_address": HEAD_ADDRESS, "nodes": nodes, "partition": PARTITION}
    _fill_in("slurm.conf", folder, **own)
    for key in ("host_key", "user_key"):
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key)]
        subprocess.run(command, check=True)
    # What a login shell of a user would have: the checkout's code, and settings of this test run.
    wanted = {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    environment = " ".join(f'"{name}={value}"' for name, value in wanted.items())
    _fill_in("sshd_config", folder, environment=environment)


def _fill_in(name: str, folder: Path, **values: str) -> None:
    """Write a daemon's settings, whose template is beside this file."""
    template = Path(__file__).with_name(name).read_text()
    (folder / name).write_text(template.format(folder=folder, **values))
