"""What the controller's machine must have before hosts are asked for: commands, a readable Slurm, a name.

Monarch finds each of these out after the job was submitted, or never: with an older Slurm it says that a job
is no longer active which has just been submitted, and hosts that cannot reach the controller stay silent.
"""

import ipaddress
import json
import re
import shutil
import socket
import subprocess
from collections.abc import Iterator

from forgeasync.config import (
    KubernetesLauncher,
    LocalLauncher,
    ProcessLauncher,
    RemoteLauncher,
    SlurmLauncher,
    SshLauncher,
)
from forgeasync.schema import Problem

COMMANDS = {"slurm": ("sbatch", "squeue", "scancel"), "ssh": ("ssh",)}
"""Commands that Monarch's jobs call, by the launcher's kind."""

FIRST_FORM = 41
"""The form of ``squeue --json`` that has ``job_resources.nodes.allocation``, which Monarch 0.7.0 reads.

Slurm 24.05 made v0.0.41 its own (``src/plugins/data_parser/v0.0.41/parsers.c``, "nodes/allocation"); v0.0.40
of 23.11 has ``allocated_nodes`` instead. Later forms up to v0.0.46 keep it.
"""

FIRST_RELEASE = "24.05"

ASK_S = 60.0
"""Slurm's commands give up after 10 s without an answer by default (MessageTimeout), some after a retry."""


def check_prerequisites(launcher: LocalLauncher | RemoteLauncher) -> list[Problem]:
    """What keeps this machine from starting hosts with ``launcher``; asks Slurm, starts nothing."""
    if isinstance(launcher, LocalLauncher | ProcessLauncher | KubernetesLauncher):
        # The first two start processes of this machine; for pods see ``KubernetesLauncher.kubeconfig``.
        return []
    problems = list(_check_commands(launcher.kind))
    if isinstance(launcher, SlurmLauncher) and not problems:
        problems += _check_slurm()
    if isinstance(launcher, SlurmLauncher) or not _all_here(launcher):
        problems += _check_own_name(launcher.kind)
    return problems


def _check_commands(kind: str) -> Iterator[Problem]:
    absent = [command for command in COMMANDS[kind] if shutil.which(command) is None]
    if absent:
        client = "Slurm's client commands" if kind == "slurm" else "OpenSSH's client"
        remedy = (
            f"needs {', '.join(absent)}, which no folder of PATH has; install {client} on this machine, or "
            "start the run on one that has them"
        )
        yield Problem(field="launcher.kind", value=kind, remedy=remedy)


def _check_slurm() -> Iterator[Problem]:
    try:
        # Only the form matters, so only this user's jobs are asked for.
        asked = subprocess.run(
            ["squeue", "--me", "--json"], capture_output=True, text=True, check=False, timeout=ASK_S
        )
    except subprocess.TimeoutExpired:
        yield _slurm_problem(f"squeue --json has not answered within {ASK_S:.0f} s; is slurmctld up?")
        return
    if asked.returncode != 0:
        words = " ".join(asked.stderr.split()) or f"exit code {asked.returncode}"
        yield _slurm_problem(f"squeue --json fails on this machine: {words}")
        return
    form = _form(asked.stdout)
    if form is None or form < FIRST_FORM:
        printed = "without the number of its form" if form is None else f"in the form v0.0.{form}"
        yield _slurm_problem(
            f"{_release()} prints jobs {printed}, but Monarch reads v0.0.{FIRST_FORM} and later, which "
            f"Slurm has from {FIRST_RELEASE} on; use a cluster with such a release, or reserve nodes with "
            "salloc and name them in launcher: {kind: ssh, ...}"
        )


def _slurm_problem(remedy: str) -> Problem:
    return Problem(field="launcher.kind", value="slurm", remedy=remedy)


def _form(text: str) -> int | None:
    """The last number of ``meta.plugin.data_parser``, 41 of data_parser/v0.0.41; None: there is none."""
    try:
        parser = json.loads(text)["meta"]["plugin"]["data_parser"]
    except (ValueError, KeyError, TypeError):
        return None
    match = re.search(r"v0\.0\.(\d+)", str(parser))
    return None if match is None else int(match[1])


def _release() -> str:
    command = ["squeue", "--version"]
    asked = subprocess.run(command, capture_output=True, text=True, check=False, timeout=ASK_S)
    return asked.stdout.strip().replace("slurm", "Slurm", 1) or "this Slurm"


def _check_own_name(kind: str) -> Iterator[Problem]:
    """Hosts call the controller by an address of its host name (Monarch 0.7.0: TcpWithHostname).

    Of several it takes one that is not loopback (tried).
    """
    name = socket.gethostname()
    try:
        addresses = _addresses(name)
    except socket.gaierror as error:
        problem = f"no address ({error.strerror})"
    else:
        if not all(ipaddress.ip_address(address).is_loopback for address in addresses):
            return
        problem = f"{', '.join(addresses)} only, which no other machine can reach"
    remedy = (
        f"hosts call this machine by the address of its name, but {name!r} has {problem}; give the name the "
        "address of this machine's network in /etc/hosts (ip address shows it), or start the run on a "
        "machine whose name has one"
    )
    yield Problem(field="launcher.kind", value=kind, remedy=remedy)


def _addresses(name: str) -> list[str]:
    found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    # An IPv6 address may carry its interface.
    return sorted({str(address[0]).partition("%")[0] for *_, address in found})


def _all_here(launcher: SshLauncher) -> bool:
    """Whether all hosts are this machine by a name of its loopback interface."""
    for name in (*launcher.hosts.trainer, *launcher.hosts.generators):
        try:
            addresses = _addresses(name.rpartition("@")[2])
        except socket.gaierror:
            # ssh may know the name from its own settings.
            return False
        if not all(ipaddress.ip_address(address).is_loopback for address in addresses):
            return False
    return True
