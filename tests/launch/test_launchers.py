"""Launchers on paper: what is refused of them, and what Monarch would submit. Nothing is started."""

import re
import shlex
from pathlib import Path

import pytest
import yaml

from forgeasync.config import (
    KubernetesLauncher,
    LocalLauncher,
    ProcessLauncher,
    RunConfig,
    dump_config,
    load_config,
)
from forgeasync.launch import render_launch
from forgeasync.models import check_config, read_model_facts
from forgeasync.planning import (
    host_needs,
    kubernetes_quantity,
    request_warnings,
    slurm_bytes,
    with_host_requests,
)
from forgeasync.schema import ConfigError
from tests.support.app_runs import run_here
from tests.support.config_samples import CONFIGS, FACTS, MINIMAL, only
from tests.support.processes import run_apart

LARGE = CONFIGS / "qwen3_30b_a3b.yaml"
"""16 trainer procs, 8 replicas of 2 GPUs."""

SLURM = "launcher={kind: slurm, gpus_per_host: 8, partition: gpu}"
SSH = "launcher={kind: ssh, gpus_per_host: 0, hosts: {trainer: [a], generators: [b]}}"


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


def test_a_kind_alone_is_a_process_launcher(config_file: Path) -> None:
    config = load_config(config_file, ["launcher.kind=process"])
    assert config.launcher == ProcessLauncher(kind="process")
    assert check_config(config, FACTS) == []


def test_launchers_survive_being_written_and_read_back(tmp_path: Path) -> None:
    config = shipped("slurm")
    (tmp_path / "again.yaml").write_text(dump_config(config))
    assert load_config(tmp_path / "again.yaml") == config


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
            [SLURM, "trainer.parallel.num_procs=16", "algorithm.groups_per_step=4"],
            ["launcher.gpus_per_host = 8", "launcher.hosts.trainer = 1 needs 16 GPUs per host"],
        ),
        (
            [SLURM, "generator.num_replicas=5", "generator.tensor_parallel=2"],
            ["launcher.gpus_per_host = 8", "5 x 2 (tensor_parallel) = 10 GPUs per host"],
        ),
        (
            [SLURM, "launcher.gpus_per_host=1", "generator.tensor_parallel=2"],
            ["generator.tensor_parallel = 2", "at most launcher.gpus_per_host = 1"],
        ),
        (
            [SLURM, "launcher.slurm_args=[constraint=h100]"],
            ["launcher.slurm_args = 'constraint=h100'", "starts with -"],
        ),
        (
            [SSH, "launcher.hosts.generators=[a]"],
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
    config = load_config(config_file, [SLURM, "launcher.gpus_per_host=0"])
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
