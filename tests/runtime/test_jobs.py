"""Launchers without a cluster: refusals, prerequisites, what Monarch submits, what Slurm says of a job."""

import asyncio
import json
import os
import re
import shlex
import socket
import subprocess
from collections.abc import Callable, Mapping
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
from tests.support.config_samples import CONFIGS, FACTS, MINIMAL_FILE
from tests.support.processes import run_apart

LARGE = CONFIGS / "qwen3_30b_a3b.yaml"
"""16 trainer processes, 8 replicas of 2 GPUs."""

SLURM_YAML = "launcher={kind: slurm, gpus_per_host: 8, partition: gpu}"


def shipped(kind: str, *overrides: str) -> RunConfig:
    return load_config([LARGE, CONFIGS / "launchers" / f"{kind}.yaml"], overrides)


def rendered(config: RunConfig) -> str:
    """In a process of its own: a job decides by which transport Monarch talks, for the rest of a process."""
    text = run_apart(render_launch, config)
    assert text is not None
    return text


def test_without_a_launcher_everything_is_local() -> None:
    config = load_config(MINIMAL_FILE)
    assert config.launcher == LocalLauncher() and render_launch(config) is None
    assert check_config(load_config(MINIMAL_FILE, ["launcher.kind=process"]), FACTS) == []


REFUSED = """
launcher={kind: process, hosts: {trainer: 2}}; trainer.parallel.num_procs=3
    => launcher.hosts.trainer = 2: must divide trainer.parallel.num_procs = 3
launcher={kind: process, hosts: {generators: 2}}; generator.num_replicas=3
    => launcher.hosts.generators = 2: must divide generator.num_replicas = 3
$SLURM; trainer.parallel.num_procs=16; algorithm.groups_per_step=4
    => launcher.gpus_per_host = 8: .*launcher.hosts.trainer = 1 needs 16 GPUs per host
$SLURM; generator.num_replicas=5; generator.tensor_parallel=2
    => launcher.gpus_per_host = 8: .*5 x 2 .tensor_parallel. = 10 GPUs per host
$SLURM; launcher.gpus_per_host=1; generator.tensor_parallel=2
    => generator.tensor_parallel = 2: .*at most launcher.gpus_per_host = 1
$SLURM; launcher.slurm_args=[constraint=h100]
    => launcher.slurm_args = 'constraint=h100': .*starts with -
launcher={kind: ssh, gpus_per_host: 0, hosts: {trainer: [a], generators: [a]}}
    => launcher.hosts = 'a': .*named 2 times
launcher={kind: ssh, gpus_per_host: 0, hosts: {trainer: [a], generators: []}}
    => launcher.hosts.generators
launcher={kind: slurm, gpus_per_host: 8}
    => launcher.partition: required key is missing
launcher={kind: kubernetes, gpus_per_host: 8, namespace: n}
    => launcher.image: required key is missing
launcher={kind: slurm, partition: gpu}
    => launcher.gpus_per_host: required key is missing
$SLURM; launcher.time_limit=4h
    => launcher.time_limit = '4h'
launcher={kind: slum}
    => launcher.kind = 'slum': .*'slurm'.*'kubernetes'
launcher={kind: process, image: x}
    => launcher.image = 'x': .*unknown key
"""
"""Overrides, and how the problem that they cause begins."""


@pytest.mark.parametrize(
    ("overrides", "message"), re.findall(r"^(\S.*)\n    => (.*)$", REFUSED, re.MULTILINE)
)
def test_what_a_launcher_lacks_or_does_not_fit_is_refused(overrides: str, message: str) -> None:
    given = overrides.replace("$SLURM", SLURM_YAML).split("; ")
    try:
        problems = check_config(load_config(MINIMAL_FILE, ["trainer.dtype=bfloat16", *given]), FACTS)
    except ConfigError as refused:
        problems = refused.problems
    (problem,) = problems
    assert re.match(message, str(problem)), problem


def directives(script: str) -> set[str]:
    return set(re.findall(r"^#SBATCH (\S+)$", script, re.MULTILINE))


def test_the_sbatch_script_asks_for_what_the_config_does() -> None:
    script = rendered(shipped("slurm", "launcher.mem=512G", "launcher.account=me", "run_dir=runs/big"))
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    found = directives(script)
    wanted = "nodes=4 ntasks-per-node=1 gpus-per-node=8 partition=gpu time=24:00:00 mem=512G account=me"
    assert {f"--{one}" for one in (*wanted.split(), "exclusive", "constraint=h100", "no-requeue")} <= found
    (output,) = [line for line in found if line.startswith("--output=")]
    assert output.startswith("--output=runs/big/logs/slurm_%j_qwen3_30b_a3b")
    (ids,) = re.findall(r"^export MONARCH_SERVICE_PROC_IDS='(.*)'$", script, re.MULTILINE)
    assert len(set(yaml.safe_load(ids))) == 4, "an identity for every host"
    (command,) = re.findall(r"^srun .*$", script, re.MULTILINE)
    srun, python, option, code = shlex.split(command)
    assert (srun, python, option) == ("srun", ".venv/bin/python", "-c")
    compile(code, "worker", "exec")
    assert ":22222" in code and "run_worker_loop_forever" in code
    without_gpus = load_config(MINIMAL_FILE, [SLURM_YAML, "launcher.gpus_per_host=0"])
    assert "gpus" not in rendered(without_gpus)


def test_a_dry_run_shows_hosts_and_script_and_starts_nothing(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    code, out, err = run_here(
        *("--config", str(LARGE), "--config", str(CONFIGS / "launchers" / "slurm.yaml")),
        *("--dry-run", f"run_dir={run_dir}"),
    )
    assert code == 0, err
    rows = {cells[1].strip(): cells[2:4] for line in out.splitlines() if len(cells := line.split("│")) > 4}
    assert [cell.strip() for cell in rows["hosts, trainer"]] == ["2", "slurm, of 8 GPUs; 8 processes each"]
    assert rows["hosts, generators"][1].strip() == "slurm, of 8 GPUs; 4 replicas of 2 each"
    assert "\n#SBATCH --nodes=4\n" in out and f"--output={run_dir}/logs/" in out
    assert not run_dir.exists() and not err


def test_what_the_config_leaves_open_is_asked_for_as_planned() -> None:
    """A trainer host has half of the staged versions of 30.5 billion parameters in bfloat16, 56.9 GiB, of two
    snapshots of them and their moments in float32, 341.2 GiB, and of a copy for a checkpoint, 170.6 GiB."""
    facts = read_model_facts(shipped("slurm").model.path)
    # Two for the host and four for each trainer proc; 8 GiB for the host and for each trainer proc.
    planned = directives(rendered(with_host_requests(shipped("slurm"), facts)))
    assert {"--cpus-per-task=34", "--mem=641G"} <= planned
    own = with_host_requests(shipped("slurm", "launcher.mem=1T", "launcher.cpus_per_task=96"), facts)
    assert {"--cpus-per-task=96", "--mem=1T"} <= directives(rendered(own))
    pods = shipped("kubernetes", "launcher.shared_memory_size=null", "launcher.resources={cpu: 12}")
    launcher = with_host_requests(pods, facts).launcher
    assert isinstance(launcher, KubernetesLauncher)
    assert launcher.resources["cpu"] == 12 and launcher.shared_memory_size == "399Gi"


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
    meshes = list(yaml.safe_load_all(rendered(config)))
    assert [(mesh["metadata"]["name"], mesh["spec"]["replicas"]) for mesh in meshes] == [
        ("runqwen330ba3btrainer", 2),
        ("runqwen330ba3bgenerators", 4),
    ]
    for mesh in meshes:
        found = mesh["kind"], mesh["metadata"]["namespace"], mesh["metadata"]["labels"]
        assert found == ("MonarchMesh", "training", {"team": "rl"})
        pod = mesh["spec"]["podTemplate"]["spec"]
        (worker,) = pod["containers"]
        assert worker["image"] == launcher.image
        wanted = {"cpu": "64", "memory": "1Ti", "nvidia.com/gpu": "8"}
        assert worker["resources"] == {"limits": wanted, "requests": wanted}
        assert pod["volumes"] == [{"name": "dev-shm", "emptyDir": {"medium": "Memory", "sizeLimit": "512Gi"}}]
        environment = {entry["name"]: entry.get("value") for entry in worker["env"]}
        identities = yaml.safe_load(environment["MONARCH_SERVICE_PROC_IDS"])
        assert len(set(identities)) == mesh["spec"]["replicas"]


def test_ssh_starts_a_worker_on_every_host() -> None:
    launcher = (
        "launcher={kind: ssh, gpus_per_host: 0, python: /opt/python, ssh_args: [-p, '2222'], "
        "port: 4000, hosts: {trainer: [t0], generators: [g0, g1]}}"
    )
    config = load_config(MINIMAL_FILE, [launcher, "generator.num_replicas=2"])
    for line, name in zip(rendered(config).splitlines(), ("t0", "g0", "g1"), strict=True):
        *ssh, option, command = shlex.split(line)
        assert (ssh, option) == (["ssh", "-p", "2222", name], "-n")
        assert command.startswith("/opt/python -c ") and f"tcp://{name}:4000" in command


SLURM = SlurmLauncher(kind="slurm", gpus_per_host=8, partition="gpu")
SSH = SshLauncher(kind="ssh", gpus_per_host=8, hosts=HostNames(trainer=("a",), generators=("b",)))

Install = Callable[..., None]


def printed(plugin: dict[str, str]) -> str:
    return f"echo '{json.dumps({'meta': {'plugin': plugin}, 'errors': [], 'jobs': []})}'"


def parser(version: str) -> str:
    return printed({"type": "", "name": "", "data_parser": f"data_parser/{version}"})


def slurm_with(squeue: str) -> dict[str, str]:
    version = 'if [ "$1" = --version ]; then echo slurm 22.05.8; exit; fi'
    return {"sbatch": "exit 1", "scancel": "exit 1", "squeue": f"{version}\n{squeue}"}


READABLE = slurm_with(parser("v0.0.41"))
HAS_SSH = {"ssh": "exit 1"}
HEAD = {"head": ["10.1.2.3"]}


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """PATH has the given commands, each a shell script, and nothing else. The machine is the first one of the
    names, each of which has the given addresses."""
    monkeypatch.setenv("PATH", str(tmp_path))

    def install(commands: Mapping[str, str], known: Mapping[str, list[str]]) -> None:
        def look_up(name: str, *others: object, **more: object) -> list[tuple[object, ...]]:
            if not known.get(name):
                raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0)) for address in known[name]]

        monkeypatch.setattr(socket, "gethostname", lambda: next(iter(known)))
        monkeypatch.setattr(socket, "getaddrinfo", look_up)
        for name, script in commands.items():
            write(tmp_path, name, script)

    return install


@pytest.mark.parametrize(
    ("squeue", "message"),
    [
        (parser("v0.0.41"), None),
        (parser("v0.0.46"), None),
        # As Slurm 22.05.8 prints it: no ``data_parser``.
        (printed({"type": "openapi/v0.0.38"}), "22.05.8 prints .*without the number of its form.*24.*ssh"),
        # 23.11 names its form, in which a job's nodes are elsewhere.
        (parser("v0.0.40"), "in the form v0.0.40.*Monarch reads v0.0.41 and later.*24.05"),
        ("echo not json", "without the number of its form"),
        ("echo null", "without the number of its form"),
        ("echo 'Unable to contact' >&2; exit 1", "squeue --json fails on this machine.*Unable to contact"),
        ("exit 7", "squeue --json fails on this machine: exit code 7"),
        ("exec /bin/sleep 60", "squeue --json has not answered within"),
    ],
    ids=["24.05", "later", "22.05", "23.11", "words", "null", "unreachable", "fails", "stuck"],
)
def test_a_slurm_that_monarch_cannot_read_is_refused(
    install: Install, monkeypatch: pytest.MonkeyPatch, squeue: str, message: str | None
) -> None:
    if "sleep" in squeue:
        monkeypatch.setattr("forgeasync.runtime.jobs.CHECK_S", 0.2)
    install(slurm_with(squeue), HEAD)
    found = [str(problem) for problem in check_prerequisites(SLURM)]
    assert len(found) == (message is not None)
    assert all(re.match(f"launcher.kind = 'slurm': .*{message}", one) for one in found), found


@pytest.mark.parametrize(
    ("launcher", "commands", "known", "message"),
    [
        (SLURM, {"squeue": parser("v0.0.41")}, HEAD, "needs sbatch, scancel, which no folder of PATH has"),
        (SSH, {}, HEAD, "launcher.kind = 'ssh': needs ssh, which"),
        (SSH, HAS_SSH, {"nobody": []}, "'nobody' has no address (Name or service not known)"),
    ],
    ids=["slurm", "ssh", "no_address"],
)
def test_what_a_launcher_needs_of_this_machine(
    install: Install,
    launcher: SlurmLauncher | SshLauncher,
    commands: dict[str, str],
    known: dict[str, list[str]],
    message: str,
) -> None:
    install(commands, known)
    (problem,) = check_prerequisites(launcher)
    assert message in str(problem)
    # What stays on this machine needs nothing.
    assert check_prerequisites(LocalLauncher()) == check_prerequisites(ProcessLauncher(kind="process")) == []


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
    install: Install, addresses: list[str], is_refused: bool
) -> None:
    """Unless all hosts are this machine."""
    install(HAS_SSH | READABLE, {"head": addresses, "one": ["127.0.0.1"], "two": ["127.0.0.2"]})
    apart = SSH.model_copy(update={"hosts": HostNames(trainer=("one",), generators=("elsewhere",))})
    for launcher in (SLURM, SSH, apart):
        problems = [str(problem) for problem in check_prerequisites(launcher)]
        assert len(problems) == is_refused, problems
        if is_refused:
            assert f"'head' has {', '.join(addresses)} only" in problems[0] and "/etc/hosts" in problems[0]
    here = SSH.model_copy(update={"hosts": HostNames(trainer=("me@one",), generators=("two",))})
    assert check_prerequisites(here) == []
    assert check_prerequisites(LocalLauncher()) == check_prerequisites(ProcessLauncher(kind="process")) == []


def test_a_run_is_refused_before_it_makes_anything(install: Install, tmp_path: Path) -> None:
    install({"squeue": parser("v0.0.40")}, HEAD)
    launcher = SlurmLauncher(kind="slurm", gpus_per_host=0, partition="gpu")
    model = write_tiny_model(tmp_path / "model")
    config = tiny_config(model).model_copy(update={"launcher": launcher, "run_dir": str(tmp_path / "run")})
    with pytest.raises(ConfigError, match="needs sbatch, scancel"):
        prepare(config)
    assert not (tmp_path / "run").exists()


TAKEN = "echo Submitted batch job 7"


@pytest.fixture
def commands(tmp_path: Path) -> Path:
    """A folder for PATH; ``sbatch`` submits job 7, ``scancel`` writes down which jobs it was given."""
    write(tmp_path, "sbatch", TAKEN)
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


def start(commands: Path, limit_s: int | None, *, is_interrupted: bool = False) -> tuple[list[str], str]:
    """What was told, the failure last, and what was cancelled; a process of its own, which sets Monarch up.

    With a limit no time passes until the job is said to wait. An interruption comes while sbatch runs, which
    has made a file ``begun`` and waits for a file ``go``.
    """
    told = run_apart(_start, commands, limit_s, is_interrupted)
    cancelled = commands / "cancelled"
    return told, cancelled.read_text() if cancelled.exists() else ""


def submission(commands: Path, launcher: SlurmLauncher) -> Submission:
    os.environ["PATH"] = f"{commands}:{os.environ['PATH']}"
    logs = commands / "logs"
    return Submission(build_job(launcher, "test", logs), launcher, logs)


def _start(commands: Path, limit_s: int | None, is_interrupted: bool) -> list[str]:
    jobs.TELL_S = 0.0
    clock = HandTime()

    async def start_and_end() -> list[str]:
        job = submission(commands, SLURM.model_copy(update={"start_timeout_s": limit_s}))
        told: list[str] = []
        starting = asyncio.create_task(job.start(told.append))
        if is_interrupted:
            await clock.stand_until((commands / "begun").exists)
            starting.cancel()
            (commands / "go").touch()
        elif limit_s is not None:
            await clock.stand_until(lambda: any("PENDING" in one for one in told) or starting.done())
            clock.advance(limit_s)
        try:
            await starting
        except (LaunchFailed, asyncio.CancelledError) as error:
            return [*told, str(error)]
        finally:
            await job.end()
        return ["started"]

    return clock.run(start_and_end())


def test_a_job_that_waits_too_long_is_cancelled_with_slurms_reason(commands: Path) -> None:
    write_squeue(commands, "PENDING", "PENDING (QOSMaxNodePerUserLimit)")
    (*told, words), cancelled = start(commands, 3)
    pending = "Slurm job 7 is PENDING (QOSMaxNodePerUserLimit)"
    assert told[-1] == pending and told.count(pending) == 1, "once, as it does not change"
    assert words.startswith("Slurm job 7 has not started within 3 s (launcher.start_timeout_s): it is ")
    assert "it is PENDING (QOSMaxNodePerUserLimit). It was cancelled." in words
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
    write_squeue(commands, None, f"{state} (None)")
    (*_, last), _ = start(commands, None)
    assert last.startswith(words), last


def test_a_job_that_waits_again_after_its_start_is_told_as_that(tmp_path: Path) -> None:
    """Its hosts are lost, and nothing else says why."""
    why = run_apart(_why_gone, tmp_path)
    assert why == [None, "Slurm job 7 was put back into the queue (scontrol requeue), which ends its hosts"]


def _why_gone(commands: Path) -> list[str | None]:
    write_squeue(commands, "PENDING", "PENDING (BeginTime)")
    job = submission(commands, SLURM)
    job._slurm_id = "7"
    before = asyncio.run(job.describe_end())
    job._has_hosts = True
    return [before, asyncio.run(job.describe_end())]


def test_a_job_that_slurm_refuses_has_slurms_words(commands: Path) -> None:
    write(commands, "sbatch", "echo 'sbatch: error: invalid partition specified: gpu' >&2; exit 1")
    write_squeue(commands, None, "")
    told, cancelled = start(commands, 60)
    assert "sbatch: error: invalid partition specified: gpu" in told[-1]
    assert cancelled == ""


def test_a_run_that_is_ended_while_it_submits_cancels_what_it_gets(commands: Path) -> None:
    """Between sbatch and its answer nobody knows the job's id yet."""
    wait = f"touch {commands}/begun; until [ -e {commands}/go ]; do sleep 0.01; done"
    write(commands, "sbatch", f"{wait}; {TAKEN}")
    write_squeue(commands, "PENDING", "PENDING (Resources)")
    told, cancelled = start(commands, None, is_interrupted=True)
    assert not told[0].startswith("Slurm job") and cancelled.split("\n")[0] == "7", (told, cancelled)
