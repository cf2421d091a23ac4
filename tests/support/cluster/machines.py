"""Machines of a cluster that are really namespaces of this one: own network, host name, processes, /dev/shm.

Nothing outside changes: the bridge between the machines is in the head's network namespace, /etc/hosts is
replaced in mount namespaces only. The kernel ends every process of a machine with the machine's first one,
and that one with the test process, however it ends.
"""

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

HEAD = "head"
HEAD_ADDRESS = "10.77.0.254"
NODES = ("node1", "node2", "node3")
ABSENT = "node9"
"""A name with an address that no machine has."""
BRIDGE = "bridge"
TOOLS = ("unshare", "nsenter", "setpriv", "ip", "mount", "sysctl")
"""Commands of util-linux, iproute2 and procps that machines are made with."""

SPACES = ("--net", "--uts", "--mount", "--pid", "--fork", "--mount-proc")
"""What a machine has of its own, as options of unshare."""

RESIDENT = ("sleep", "slurmctld", "slurmscriptd", "slurmd", "munged")
"""Names of processes that belong to a machine rather than to a run."""
LISTENER = "sshd: /"
"""How the command line of sshd begins where it waits; that of a session has the user's name there."""

START_S = 60.0

_INIT = """
mount --bind {hosts} /etc/hosts
mount -t tmpfs -o size=2g tmpfs /dev/shm
mount -t tmpfs tmpfs /run
hostname {name}
touch {ready}
sleep infinity &
wait
"""


def missing(commands: Sequence[str]) -> str | None:
    """Why machines cannot be made here, or which of ``commands`` is not installed; None: all is well."""
    if os.geteuid() != 0:
        return "namespaces of the network need root"
    absent = [command for command in (*TOOLS, *commands) if find(command) is None]
    if absent:
        return f"not installed: {', '.join(absent)}"
    tried = subprocess.run(
        ["unshare", *SPACES, "true"],
        capture_output=True,
        text=True,
        check=False,
    )
    return None if tried.returncode == 0 else f"no namespaces: {tried.stderr.strip()}"


def find(command: str) -> str | None:
    """Path of a command, also where only root has its folder in PATH."""
    return shutil.which(command, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")


@dataclass(slots=True)
class Machine:
    """One machine, alive as long as its first process."""

    name: str
    address: str
    holder: subprocess.Popen[bytes]
    """``unshare``, whose child is the first process."""
    init: psutil.Process

    def enter(self) -> list[str]:
        """The beginning of a command that runs on this machine."""
        return ["nsenter", f"--target={self.init.pid}", "--net", "--uts", "--mount", "--pid", "--"]

    def run(self, *command: str) -> str:
        """Output of a command that must succeed there."""
        done = subprocess.run([*self.enter(), *command], capture_output=True, text=True, timeout=START_S)
        assert done.returncode == 0, f"{self.name}: {command}: {done.stderr or done.stdout}"
        return done.stdout

    def _processes(self) -> set[int]:
        """All of its processes, by their ids on the outside."""
        try:
            own = os.readlink(f"/proc/{self.init.pid}/ns/pid")
        except FileNotFoundError:
            return set()
        found = set()
        for pid in psutil.pids():
            try:
                same = os.readlink(f"/proc/{pid}/ns/pid") == own
                if same and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                    found.add(pid)
            except (OSError, psutil.NoSuchProcess):
                continue
        return found

    def left_by_runs(self) -> dict[int, str]:
        """Command lines of the processes of runs, by their ids on the outside."""
        found = {}
        for pid in self._processes() - {self.init.pid}:
            try:
                process = psutil.Process(pid)
                name, words = process.name(), " ".join(process.cmdline())
            except psutil.NoSuchProcess:
                continue
            if name not in RESIDENT and not words.startswith(LISTENER):
                found[pid] = f"{self.name}: {words[:200]}"
        return found

    def folders_of_runs(self) -> list[Path]:
        """What runs have in shared memory."""
        return list(Path(f"/proc/{self.init.pid}/root/dev/shm").glob("forgeasync*"))

    def kill(self) -> None:
        """Cut the power: no process of it runs on, nothing is sent any more."""
        self.init.kill()
        self.holder.wait(START_S)


def start_machine(name: str, address: str, folder: Path) -> Machine:
    """A machine without network."""
    ready = folder / f"ready.{name}"
    ready.unlink(missing_ok=True)
    init = _INIT.format(hosts=folder / "hosts", name=name, ready=ready)
    holder = subprocess.Popen(
        # --kill-child ends the first process with unshare, and setpriv has the kernel end that with us.
        ["setpriv", "--pdeathsig", "KILL", "unshare", *SPACES, "--kill-child", "bash", "-ec", init],
        # unshare complains when its child is killed.
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    _wait(ready.exists, f"{name} is up", holder)
    (child,) = psutil.Process(holder.pid).children()
    return Machine(name=name, address=address, holder=holder, init=child)


def start_head(folder: Path) -> Machine:
    """The machine that runs are started on, with the bridge that all others hang on."""
    addresses = {HEAD: HEAD_ADDRESS} | {name: _address(name) for name in NODES} | {ABSENT: "10.77.0.9"}
    lines = ["127.0.0.1 localhost", *(f"{address} {name}" for name, address in addresses.items())]
    (folder / "hosts").write_text("".join(f"{line}\n" for line in lines))
    head = start_machine(HEAD, HEAD_ADDRESS, folder)
    head.run("ip", "link", "set", "lo", "up")
    head.run("ip", "link", "add", BRIDGE, "type", "bridge")
    head.run("ip", "address", "add", f"{HEAD_ADDRESS}/24", "dev", BRIDGE)
    head.run("ip", "link", "set", BRIDGE, "up")
    return head


def start_node(name: str, head: Machine, folder: Path) -> Machine:
    """A machine on the head's bridge."""
    node = start_machine(name, _address(name), folder)
    link = ["ip", "link", "add", f"to_{name}", "type", "veth", "peer", "name", "eth0"]
    # In the head's network only: the node's process id means nothing among the head's processes.
    in_network = ["nsenter", f"--net=/proc/{head.init.pid}/ns/net"]
    subprocess.run([*in_network, *link, "netns", str(node.init.pid)], check=True)
    head.run("ip", "link", "set", f"to_{name}", "master", BRIDGE, "up")
    node.run("ip", "link", "set", "lo", "up")
    node.run("ip", "address", "add", f"{node.address}/24", "dev", "eth0")
    node.run("ip", "link", "set", "eth0", "up")
    return node


def _address(name: str) -> str:
    return f"10.77.0.{NODES.index(name) + 1}"


def _wait(until: Callable[[], bool], what: str, holder: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_S
    while not until():
        assert holder.poll() is None, f"ended before {what}"
        assert time.monotonic() < deadline, f"not yet: {what}"
        time.sleep(0.05)
