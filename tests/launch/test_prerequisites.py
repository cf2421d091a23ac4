"""What keeps a machine from starting hosts is named, before anything is submitted."""

import json
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from forgeasync.config import HostNames, LocalLauncher, ProcessLauncher, SlurmLauncher, SshLauncher
from forgeasync.controller import prepare
from forgeasync.launch import check_prerequisites
from forgeasync.schema import ConfigError
from forgeasync.testing import tiny_config, write_tiny_model

SLURM = SlurmLauncher(kind="slurm", gpus_per_host=8, partition="gpu")
SSH = SshLauncher(kind="ssh", gpus_per_host=8, hosts=HostNames(trainer=("a",), generators=("b",)))

PLUGIN_22_05 = {"type": "openapi/v0.0.38", "name": "Slurm OpenAPI v0.0.38"}
"""As Slurm 22.05.8 prints it: no ``data_parser``."""

Install = Callable[..., None]
Resolve = Callable[..., None]


def printed(plugin: dict[str, str]) -> str:
    return f"echo '{json.dumps({'meta': {'plugin': plugin}, 'errors': [], 'jobs': []})}'"


def parser(version: str) -> str:
    return printed({"type": "", "name": "", "data_parser": f"data_parser/{version}"})


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """PATH has the given commands, each a shell script, and nothing else."""
    monkeypatch.setenv("PATH", str(tmp_path))

    def write(**commands: str) -> None:
        for name, script in commands.items():
            (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
            (tmp_path / name).chmod(0o755)

    return write


@pytest.fixture
def resolve(monkeypatch: pytest.MonkeyPatch) -> Resolve:
    """The machine is called head; each name has the given addresses, others have none."""
    known: dict[str, list[str]] = {"head": ["10.1.2.3"]}

    def look_up(name: str, *others: object, **more: object) -> list[tuple[object, ...]]:
        if name not in known:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0)) for address in known[name]]

    monkeypatch.setattr(socket, "gethostname", lambda: "head")
    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    return known.update


def slurm_with(squeue: str) -> dict[str, str]:
    version = 'if [ "$1" = --version ]; then echo slurm 22.05.8; exit; fi'
    return {"sbatch": "exit 1", "scancel": "exit 1", "squeue": f"{version}\n{squeue}"}


def only_problem(launcher: SlurmLauncher | SshLauncher) -> str:
    (problem,) = check_prerequisites(launcher)
    return str(problem)


@pytest.mark.parametrize("version", ["v0.0.41", "v0.0.46"])
def test_a_new_enough_slurm_passes(install: Install, resolve: Resolve, version: str) -> None:
    install(**slurm_with(parser(version)))
    assert check_prerequisites(SLURM) == []


@pytest.mark.parametrize(
    ("squeue", "words"),
    [
        (printed(PLUGIN_22_05), ["Slurm 22.05.8 prints jobs without the number of its form", "24.05", "ssh"]),
        # 23.11 names its form, in which a job's nodes are elsewhere.
        (parser("v0.0.40"), ["in the form v0.0.40", "Monarch reads v0.0.41 and later", "24.05"]),
        ("echo not json", ["without the number of its form"]),
        ("echo null", ["without the number of its form"]),
        (
            "echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1",
            ["squeue --json fails on this machine", "Unable to contact slurm controller"],
        ),
        ("exit 7", ["squeue --json fails on this machine: exit code 7"]),
    ],
)
def test_a_slurm_that_monarch_cannot_read_is_refused(
    install: Install, resolve: Resolve, squeue: str, words: list[str]
) -> None:
    install(**slurm_with(squeue))
    message = only_problem(SLURM)
    assert message.startswith("launcher.kind = 'slurm': ")
    assert all(word in message for word in words), message


def test_a_slurm_that_does_not_answer_is_not_waited_for(
    install: Install, resolve: Resolve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forgeasync.launch.prerequisites.ASK_S", 0.2)
    install(**slurm_with("exec /bin/sleep 60"))
    assert "squeue --json has not answered within" in only_problem(SLURM)


def test_missing_commands_are_named(install: Install, resolve: Resolve) -> None:
    install(squeue=parser("v0.0.41"))
    message = only_problem(SLURM)
    assert "needs sbatch, scancel, which no folder of PATH has" in message, message
    assert "launcher.kind = 'ssh': needs ssh, which" in only_problem(SSH)


@pytest.mark.parametrize(
    ("addresses", "is_refused"),
    [
        (["127.0.1.1"], True),
        (["127.0.0.1", "::1"], True),
        (["10.1.2.3"], False),
        (["fd00::7"], False),
        (["127.0.1.1", "10.1.2.3"], False),
    ],
)
def test_a_name_of_loopback_alone_is_refused(
    install: Install, resolve: Resolve, addresses: list[str], is_refused: bool
) -> None:
    install(ssh="exit 1", **slurm_with(parser("v0.0.41")))
    resolve(head=addresses)
    for launcher in (SLURM, SSH):
        problems = [str(problem) for problem in check_prerequisites(launcher)]
        assert len(problems) == is_refused, problems
        if is_refused:
            assert f"'head' has {', '.join(addresses)} only" in problems[0] and "/etc/hosts" in problems[0]


def test_a_name_without_an_address_is_refused(
    install: Install, resolve: Resolve, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(ssh="exit 1")
    monkeypatch.setattr(socket, "gethostname", lambda: "nobody")
    assert "'nobody' has no address (Name or service not known)" in only_problem(SSH)


def test_hosts_that_are_all_this_machine_may_call_it_by_loopback(install: Install, resolve: Resolve) -> None:
    install(ssh="exit 1")
    resolve(head=["127.0.1.1"], one=["127.0.0.1"], two=["127.0.0.2"])
    here = SSH.model_copy(update={"hosts": HostNames(trainer=("me@one",), generators=("two",))})
    assert check_prerequisites(here) == []
    apart = SSH.model_copy(update={"hosts": HostNames(trainer=("one",), generators=("elsewhere",))})
    assert "127.0.1.1 only" in only_problem(apart)


def test_what_stays_on_this_machine_needs_nothing(install: Install, resolve: Resolve) -> None:
    resolve(head=["127.0.0.1"])
    assert check_prerequisites(LocalLauncher()) == []
    assert check_prerequisites(ProcessLauncher(kind="process")) == []


def test_a_run_is_refused_before_it_makes_anything(
    install: Install, resolve: Resolve, tmp_path: Path
) -> None:
    install(squeue=parser("v0.0.40"))
    launcher = SlurmLauncher(kind="slurm", gpus_per_host=0, partition="gpu")
    model = write_tiny_model(tmp_path / "model")
    config = tiny_config(model).model_copy(update={"launcher": launcher, "run_dir": str(tmp_path / "run")})
    with pytest.raises(ConfigError, match="needs sbatch, scancel"):
        prepare(config)
    assert not (tmp_path / "run").exists()
