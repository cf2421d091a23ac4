"""Launchers without a cluster: refusals, prerequisites, what Monarch submits, what Slurm says of a job."""

import asyncio
import json
import os
import re
import shlex
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from forgeasync.config import (
    HostNames,
    KubernetesLauncher,
    LocalLauncher,
    ProcessLauncher,
    RunConfig,
    SlurmLauncher,
    SshLauncher,
    load_config,
)
from forgeasync.controller import prepare
from forgeasync.models import check_config, read_model_facts
from forgeasync.planning import (
    host_needs,
    kubernetes_quantity,
    request_warnings,
    slurm_bytes,
    with_host_requests,
)
from forgeasync.runtime import (
    LaunchFailed,
    Submission,
    build_job,
    check_prerequisites,
    jobs,
    render_launch,
)
from forgeasync.schema import ConfigError
from forgeasync.testing import HandTime, tiny_config, write_tiny_model
from tests.support.app_runs import run_here
from tests.support.config_samples import CONFIGS, FACTS, MINIMAL, only
from tests.support.processes import run_apart

LARGE = CONFIGS / "qwen3_30b_a3b.yaml"
"""16 trainer procs, 8 replicas of 2 GPUs."""

SLURM_YAML = "launcher={kind: slurm, gpus_per_host: 8, partition: gpu}"
SSH_YAML = "launcher={kind: ssh, gpus_per_host: 0, hosts: {trainer: [a], generators: [b]}}"


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    file = tmp_path / "run.yaml"
    file.write_text(MINIMAL)
    return file


def shipped(kind: str, *overrides: str) -> RunConfig:
    return load_config([LARGE, CONFIGS / "launchers" / f"{kind}.yaml"], overrides)


def rendered(config: RunConfig) -> str:
    """In a process of its own: a job decides by which transport Monarch talks, for the rest of a process."""
    text = run_apart(render_launch, config)
    assert text is not None
    return text


def test_without_a_launcher_everything_is_local(config_file: Path) -> None:
    config = load_config(config_file)
    assert config.launcher == LocalLauncher()
    assert render_launch(config) is None
    processes = load_config(config_file, ["launcher.kind=process"])
    assert processes.launcher == ProcessLauncher(kind="process")
    assert check_config(processes, FACTS) == []


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ["launcher={kind: process, hosts: {trainer: 2}}", "trainer.parallel.num_procs=3"],
            ["launcher.hosts.trainer = 2", "must divide trainer.parallel.num_procs = 3"],
        ),
        (
            ["launcher={kind: process, hosts: {generators: 2}}", "generator.num_replicas=3"],
            ["launcher.hosts.generators = 2", "must divide generator.num_replicas = 3"],
        ),
        (
            [SLURM_YAML, "trainer.parallel.num_procs=16", "algorithm.groups_per_step=4"],
            ["launcher.gpus_per_host = 8", "launcher.hosts.trainer = 1 needs 16 GPUs per host"],
        ),
        (
            [SLURM_YAML, "generator.num_replicas=5", "generator.tensor_parallel=2"],
            ["launcher.gpus_per_host = 8", "5 x 2 (tensor_parallel) = 10 GPUs per host"],
        ),
        (
            [SLURM_YAML, "launcher.gpus_per_host=1", "generator.tensor_parallel=2"],
            ["generator.tensor_parallel = 2", "at most launcher.gpus_per_host = 1"],
        ),
        (
            [SLURM_YAML, "launcher.slurm_args=[constraint=h100]"],
            ["launcher.slurm_args = 'constraint=h100'", "starts with -"],
        ),
        (
            [SSH_YAML, "launcher.hosts.generators=[a]"],
            ["launcher.hosts = 'a'", "named 2 times"],
        ),
    ],
)
def test_what_does_not_fit_is_refused(config_file: Path, overrides: list[str], words: list[str]) -> None:
    message = only(check_config(load_config(config_file, ["trainer.dtype=bfloat16", *overrides]), FACTS))
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    ("launcher", "words"),
    [
        ("{kind: slurm, gpus_per_host: 8}", ["launcher.partition", "required key is missing"]),
        ("{kind: kubernetes, gpus_per_host: 8, namespace: n}", ["launcher.image", "required key is missing"]),
        ("{kind: slurm, partition: gpu}", ["launcher.gpus_per_host", "required key is missing"]),
        (
            "{kind: slurm, gpus_per_host: 8, partition: gpu, time_limit: 4h}",
            ["launcher.time_limit = '4h'"],
        ),
        ("{kind: slum}", ["launcher.kind = 'slum'", "'slurm'", "'kubernetes'"]),
        ("{kind: process, image: x}", ["launcher.image = 'x'", "unknown key"]),
        ("{kind: ssh, gpus_per_host: 0, hosts: {trainer: [a], generators: []}}", ["hosts.generators"]),
    ],
)
def test_what_a_launcher_lacks_is_named(config_file: Path, launcher: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config(config_file, [f"launcher={launcher}"])
    assert all(word in str(refused.value) for word in words), refused.value


def test_the_sbatch_script_asks_for_what_the_config_does() -> None:
    script = rendered(shipped("slurm", "launcher.mem=512G", "launcher.account=me", "run_dir=runs/big"))
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    directives = set(re.findall(r"^#SBATCH (\S+)$", script, re.MULTILINE))
    assert {
        "--nodes=4",
        "--ntasks-per-node=1",
        "--gpus-per-node=8",
        "--partition=gpu",
        "--time=24:00:00",
        "--mem=512G",
        "--account=me",
        "--exclusive",
        "--constraint=h100",
        "--no-requeue",
    } <= directives
    (output,) = [line for line in directives if line.startswith("--output=")]
    assert output.startswith("--output=runs/big/logs/slurm_%j_qwen3_30b_a3b")
    (ids,) = re.findall(r"^export MONARCH_SERVICE_PROC_IDS='(.*)'$", script, re.MULTILINE)
    assert len(set(yaml.safe_load(ids))) == 4, "an identity for every host"
    (command,) = re.findall(r"^srun .*$", script, re.MULTILINE)
    srun, python, option, code = shlex.split(command)
    assert (srun, python, option) == ("srun", ".venv/bin/python", "-c")
    compile(code, "worker", "exec")
    assert ":22222" in code and "run_worker_loop_forever" in code


def test_a_dry_run_shows_hosts_and_script_and_starts_nothing(tmp_path: Path) -> None:
    files = [LARGE, CONFIGS / "launchers" / "slurm.yaml"]
    arguments = [argument for file in files for argument in ("--config", str(file))]
    run_dir = tmp_path / "run"
    overrides = [f"run_dir={run_dir}", "launcher.cpus_per_task=8"]
    code, out, err = run_here(*arguments, "--dry-run", *overrides)
    assert code == 0, err
    assert "\nwarning: launcher.cpus_per_task = 8: a host needs 34 by the plan" in out
    rows = {cells[1].strip(): cells[2:4] for line in out.splitlines() if len(cells := line.split("│")) > 4}
    assert [cell.strip() for cell in rows["hosts, trainer"]] == ["2", "slurm, of 8 GPUs; 8 procs each"]
    assert rows["hosts, generators"][1].strip() == "slurm, of 8 GPUs; 4 replicas of 2 each"
    assert "\n#SBATCH --nodes=4\n" in out and f"--output={run_dir}/logs/" in out
    assert not run_dir.exists() and not err


def test_without_gpus_none_are_asked_for(config_file: Path) -> None:
    config = load_config(config_file, [SLURM_YAML, "launcher.gpus_per_host=0"])
    assert "gpus" not in rendered(config)


def test_what_the_config_leaves_open_is_asked_for_as_planned() -> None:
    """A trainer host has half of the staged versions of 30.5 billion parameters in bfloat16, 56.9 GiB, of two
    snapshots of them and their moments in float32, 341.2 GiB, and of a copy for a checkpoint, 170.6 GiB."""
    facts = read_model_facts(shipped("slurm").model.path)
    planned = with_host_requests(shipped("slurm"), facts)
    directives = set(re.findall(r"^#SBATCH (\S+)$", rendered(planned), re.MULTILINE))
    # Two for the host and four for each trainer proc; 8 GiB for the host and for each trainer proc.
    assert {"--cpus-per-task=34", "--mem=641G"} <= directives
    own = with_host_requests(shipped("slurm", "launcher.mem=1T", "launcher.cpus_per_task=96"), facts)
    assert {"--cpus-per-task=96", "--mem=1T"} <= set(
        re.findall(r"^#SBATCH (\S+)$", rendered(own), re.MULTILINE)
    )


def test_pods_get_what_is_missing_as_planned() -> None:
    config = shipped("kubernetes", "launcher.shared_memory_size=null", "launcher.resources={cpu: 12}")
    launcher = with_host_requests(config, read_model_facts(config.model.path)).launcher
    assert isinstance(launcher, KubernetesLauncher)
    assert launcher.resources["cpu"] == 12 and launcher.shared_memory_size == "399Gi"


@pytest.mark.parametrize(
    ("kind", "overrides", "warnings"),
    [
        ("slurm", [], []),
        ("slurm", ["launcher.mem=768G", "launcher.cpus_per_task=34"], []),
        ("slurm", ["launcher.mem='0'"], []),
        (
            "slurm",
            ["launcher.mem=300000M", "launcher.cpus_per_task=16"],
            [
                "launcher.cpus_per_task = 16: a host needs 34 by the plan; left out, that is asked for",
                "launcher.mem = 300000M: a host needs 640.7 GiB by the plan; left out, that is asked for",
            ],
        ),
        (
            "slurm",
            ["launcher.mem=much"],
            ["launcher.mem = much: cannot be compared with the plan; must be written like 512G"],
        ),
        ("kubernetes", [], []),
        (
            "kubernetes",
            ["launcher.resources={cpu: 16000m, memory: 300G}", "launcher.shared_memory_size=64Gi"],
            [
                "launcher.resources.cpu = 16000m: a host needs 34 by the plan; left out, that is asked for",
                "launcher.resources.memory = 300G: a host needs 640.7 GiB by the plan; left out, "
                "that is asked for",
                "launcher.shared_memory_size = 64Gi: a host needs 398.1 GiB by the plan; left out, "
                "that is asked for",
            ],
        ),
        (
            "kubernetes",
            ["launcher.resources={cpu: many, memory: 1Ti}"],
            ["launcher.resources.cpu = many: cannot be compared with the plan; must be written like 64"],
        ),
    ],
)
def test_requests_below_the_plan_are_told(kind: str, overrides: list[str], warnings: list[str]) -> None:
    config = shipped(kind, *overrides)
    assert list(request_warnings(config, read_model_facts(config.model.path))) == warnings


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("512G", 2**39),
        ("512g", 2**39),
        ("1TB", 2**40),
        ("2048", 2**31),
        ("5K", 5120),
        ("1.5G", None),
        ("", None),
    ],
)
def test_memory_in_sbatchs_notation(text: str, num_bytes: int | None) -> None:
    assert slurm_bytes(text) == num_bytes


@pytest.mark.parametrize(
    ("text", "quantity"),
    [
        (64, 64),
        ("64", 64),
        ("1500m", 1.5),
        ("2Gi", 2**31),
        ("1.5Gi", 1.5 * 2**30),
        ("1Ti", 2**40),
        ("2G", 2e9),
        ("12e6", 12e6),
        ("2g", None),
        ("Gi", None),
    ],
)
def test_quantities_of_kubernetes(text: int | str, quantity: float | None) -> None:
    assert kubernetes_quantity(text) == quantity


@pytest.mark.parametrize(
    ("override", "more_gib"),
    [
        # On each of two trainer hosts: half of the parameters and moments in float32, 12 bytes for each.
        ("checkpoint.every_steps=10", 30.53e9 * 12 / 2 / 2**30),
        ("trainer.cpu_offload=true", 30.53e9 * 16 / 2 / 2**30),
        ("trainer.recovery.snapshot_every_steps=1", 30.53e9 * 24 / 2 / 2**30),
    ],
)
def test_trainer_hosts_hold_copies_of_what_is_trained(override: str, more_gib: float) -> None:
    # One replica a host, without a shadow there, so that the trainer's hosts are the larger ones.
    small = ["generator.num_replicas=2", "weights.shadow=device", "checkpoint.every_steps=null"]
    small += ["trainer.recovery.snapshot_every_steps=null"]
    facts = read_model_facts(shipped("slurm").model.path)
    before = host_needs(shipped("slurm", *small), facts)
    after = host_needs(shipped("slurm", *small, override), facts)
    staged_gib = 30.53e9 * 2 * 2 / 2 / 2**30
    assert before.memory_bytes / 2**30 == pytest.approx(8 + 8 * 8 + staged_gib, rel=0.01)
    assert (after.memory_bytes - before.memory_bytes) / 2**30 == pytest.approx(more_gib, rel=0.01)


def test_pods_are_what_the_config_asks_for() -> None:
    pytest.importorskip("kubernetes")
    config = shipped("kubernetes", "launcher.hosts.generators=4")
    launcher = config.launcher
    assert isinstance(launcher, KubernetesLauncher)
    trainer, generators = yaml.safe_load_all(rendered(config))
    assert [trainer["spec"]["replicas"], generators["spec"]["replicas"]] == [2, 4]
    names = [mesh["metadata"]["name"] for mesh in (trainer, generators)]
    assert names == ["runqwen330ba3btrainer", "runqwen330ba3bgenerators"]
    for mesh in (trainer, generators):
        assert mesh["kind"] == "MonarchMesh"
        assert mesh["metadata"]["namespace"] == "training"
        assert mesh["metadata"]["labels"] == {"team": "rl"}
        pod = mesh["spec"]["podTemplate"]["spec"]
        (worker,) = pod["containers"]
        assert worker["image"] == launcher.image
        wanted = {"cpu": "64", "memory": "1Ti", "nvidia.com/gpu": "8"}
        assert worker["resources"] == {"limits": wanted, "requests": wanted}
        assert pod["volumes"] == [{"name": "dev-shm", "emptyDir": {"medium": "Memory", "sizeLimit": "512Gi"}}]
        environment = {entry["name"]: entry.get("value") for entry in worker["env"]}
        identities = yaml.safe_load(environment["MONARCH_SERVICE_PROC_IDS"])
        assert len(set(identities)) == mesh["spec"]["replicas"]


def test_ssh_starts_a_worker_on_every_host(config_file: Path) -> None:
    launcher = (
        "launcher={kind: ssh, gpus_per_host: 0, python: /opt/python, ssh_args: [-p, '2222'], "
        "port: 4000, hosts: {trainer: [t0], generators: [g0, g1]}}"
    )
    config = load_config(config_file, [launcher, "generator.num_replicas=2"])
    lines = [shlex.split(line) for line in rendered(config).splitlines()]
    assert [line[:4] for line in lines] == [["ssh", "-p", "2222", host] for host in ("t0", "g0", "g1")]
    for (*_, host, option, command), name in zip(lines, ("t0", "g0", "g1"), strict=True):
        assert (host, option) == (name, "-n")
        assert command.startswith("/opt/python -c ") and f"tcp://{name}:4000" in command


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

    def install(**commands: str) -> None:
        for name, script in commands.items():
            write(tmp_path, name, script)

    return install


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
    monkeypatch.setattr("forgeasync.runtime.jobs.CHECK_S", 0.2)
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


TAKEN = "echo Submitted batch job 7"


@pytest.fixture
def commands(tmp_path: Path) -> Path:
    """A folder for PATH; ``scancel`` writes down which jobs it was given."""
    write(tmp_path, "scancel", f'echo "$@" >> {tmp_path}/cancelled')
    return tmp_path


def write(folder: Path, name: str, script: str) -> None:
    """A command that is a shell script."""
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


def write_squeue(folder: Path, state: str | None, told: str) -> None:
    """Job 7 as ``--json`` has it (None: no longer), and as it is told in words."""
    jobs = [] if state is None else [{"job_id": 7, "job_state": [state]}]
    text = json.dumps({"jobs": jobs})
    write(folder, "squeue", f"case \"$*\" in *--json*) echo '{text}';; *) echo '{told}';; esac")


def start(commands: Path, limit_s: int | None, *, is_interrupted: bool = False) -> tuple[str, str]:
    """Words of the failure, and what was cancelled; a process of its own, which sets Monarch up.

    With a limit no time passes until the job is said to wait. An interruption comes while sbatch runs, which
    has made a file ``begun`` and waits for a file ``go``.
    """
    words = run_apart(_start, commands, limit_s, is_interrupted)
    cancelled = commands / "cancelled"
    return words, cancelled.read_text() if cancelled.exists() else ""


def _start(commands: Path, limit_s: int | None, is_interrupted: bool) -> str:
    jobs.TELL_S = 0.0
    os.environ["PATH"] = f"{commands}:{os.environ['PATH']}"
    launcher = SLURM.model_copy(update={"start_timeout_s": limit_s})
    clock = HandTime()
    return clock.run(_start_and_end(clock, launcher, commands, is_interrupted))


async def _start_and_end(
    clock: HandTime, launcher: SlurmLauncher, commands: Path, is_interrupted: bool
) -> str:
    logs = commands / "logs"
    job = Submission(build_job(launcher, "test", logs), launcher, logs)
    told: list[str] = []
    starting = asyncio.create_task(job.start(told.append))
    if is_interrupted:
        await clock.stand_until((commands / "begun").exists)
        starting.cancel()
        (commands / "go").touch()
    elif launcher.start_timeout_s is not None:
        await clock.stand_until(lambda: any("PENDING" in one for one in told) or starting.done())
        clock.advance(launcher.start_timeout_s)
    try:
        await starting
    except (LaunchFailed, asyncio.CancelledError) as error:
        return "\n".join([*told, str(error)])
    finally:
        await job.end()
    return "started"


def test_a_job_that_waits_too_long_is_cancelled_with_slurms_reason(commands: Path) -> None:
    write(commands, "sbatch", TAKEN)
    write_squeue(commands, "PENDING", "PENDING (QOSMaxNodePerUserLimit)")
    text, cancelled = start(commands, 3)
    *told, words = text.splitlines()
    pending = "Slurm job 7 is PENDING (QOSMaxNodePerUserLimit)"
    assert told[-1] == pending and told.count(pending) == 1, "once, as it does not change"
    assert words.startswith("Slurm job 7 has not started within 3 s (launcher.start_timeout_s): it is ")
    assert "it is PENDING (QOSMaxNodePerUserLimit). It is cancelled now." in words
    assert "2 nodes of partition gpu" in words
    assert cancelled == "7\n"


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ("CANCELLED", "Slurm job 7 was cancelled by someone other than this run (scancel)"),
        ("TIMEOUT", "Slurm job 7 has reached its time limit"),
        ("PREEMPTED", "Slurm job 7 was preempted by another job"),
    ],
)
def test_a_job_that_has_gone_from_the_queue_is_told_as_what_it_is(
    commands: Path, state: str, words: str
) -> None:
    write(commands, "sbatch", TAKEN)
    write_squeue(commands, None, f"{state} (None)")
    told, _ = start(commands, None)
    assert told.splitlines()[-1].startswith(words), told


def test_a_job_that_waits_again_after_its_start_is_told_as_that(tmp_path: Path) -> None:
    """Its hosts are lost, and nothing else says why."""
    why = run_apart(_why_gone, tmp_path)
    assert why == [None, "Slurm job 7 was put back into the queue (scontrol requeue), which ends its hosts"]


def _why_gone(commands: Path) -> list[str | None]:
    os.environ["PATH"] = f"{commands}:{os.environ['PATH']}"
    write_squeue(commands, "PENDING", "PENDING (BeginTime)")
    job = Submission(build_job(SLURM, "test", commands), SLURM, commands)
    job._slurm_id = "7"
    before = asyncio.run(job.describe_end())
    job._has_hosts = True
    return [before, asyncio.run(job.describe_end())]


def test_a_job_that_slurm_refuses_has_slurms_words(commands: Path) -> None:
    write(commands, "sbatch", "echo 'sbatch: error: invalid partition specified: gpu' >&2; exit 1")
    write_squeue(commands, None, "")
    words, cancelled = start(commands, 60)
    assert "sbatch: error: invalid partition specified: gpu" in words
    assert cancelled == ""


def test_a_run_that_is_ended_while_it_submits_cancels_what_it_gets(commands: Path) -> None:
    """Between sbatch and its answer nobody knows the job's id yet."""
    wait = f"touch {commands}/begun; until [ -e {commands}/go ]; do sleep 0.01; done"
    write(commands, "sbatch", f"{wait}; {TAKEN}")
    write_squeue(commands, "PENDING", "PENDING (Resources)")
    words, cancelled = start(commands, None, is_interrupted=True)
    assert not words.startswith("Slurm job") and cancelled.split("\n")[0] == "7", (words, cancelled)
