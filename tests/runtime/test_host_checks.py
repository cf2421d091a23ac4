"""What prevents a run on a host: GPUs, software, memory and limits, from invented facts. No GPU is needed."""

import dataclasses
import importlib.util
import os
import re
import resource
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from monarch.actor import this_host

from forgeasync.config import FlashAttention, ModelFacts, RunConfig, load_config
from forgeasync.controller import check_gpus_of_hosts, check_hosts, check_local_gpus
from forgeasync.models import SHIPPED_MODELS, read_model_facts
from forgeasync.planning import HostNeeds, role_needs
from forgeasync.runtime import (
    Gpu,
    GpuFacts,
    HostAgent,
    HostGpus,
    HostLimits,
    HostRole,
    LocalHosts,
    RolePlan,
    check_host_limits,
    check_hosts_gpus,
    gather_gpu_facts,
    gather_host_limits,
    gpu_warnings,
    host_checks,
    lock_warning,
    spawn_role,
)
from forgeasync.schema import ConfigError
from tests.support.config_samples import CONFIGS

GIB = 2**30
H100 = Gpu(
    index=0,
    name="NVIDIA H100 80GB HBM3",
    memory_bytes=79 * GIB,
    free_bytes=79 * GIB,
    capability=(9, 0),
    is_sliced=False,
)
A100 = dataclasses.replace(H100, name="NVIDIA A100-SXM4-80GB", capability=(8, 0))
V100 = dataclasses.replace(H100, name="V100", capability=(7, 0))
PLAN = RolePlan(
    role="trainer", num_bytes=60 * GIB, field="trainer.parallel.num_procs", value=8, remedy="shard more"
)


def h100(**changes: Any) -> Gpu:
    return dataclasses.replace(H100, **changes)


def facts(*gpus: Gpu, num: int = 2, **changes: Any) -> GpuFacts:
    """Of a host with all that a run needs, but for the changes."""
    found = gpus or (H100,) * num
    good = GpuFacts(
        gpus=tuple(dataclasses.replace(gpu, index=index) for index, gpu in enumerate(found)),
        trouble=None,
        driver="580.82.07",
        driver_cuda=(13, 0),
        torch="2.13.0+cu130",
        torch_cuda=(13, 0),
        nccl=(2, 29, 7),
        flash_attention=frozenset({3}),
        compiler="/usr/bin/gcc",
        python_header="/usr/include/python3.11/Python.h",
        has_python_header=True,
    )
    return dataclasses.replace(good, **changes)


def host(found: GpuFacts, *, name: str = "node0", plan: RolePlan = PLAN, is_trainer: bool = True) -> HostGpus:
    return HostGpus(host=name, facts=found, num_needed=2, plans=(plan,), is_trainer=is_trainer)


def problems(*hosts: HostGpus, choice: FlashAttention = FlashAttention.AUTO) -> list[str]:
    return [str(problem) for problem in check_hosts_gpus(hosts, choice)]


def test_good_hosts_pass_in_silence() -> None:
    generators = host(facts(A100, A100, flash_attention=frozenset()), name="node2", is_trainer=False)
    hosts = [host(facts()), host(facts(), name="node1"), generators]
    assert problems(*hosts) == [] and gpu_warnings(hosts, FlashAttention.AUTO) == []
    # GPUs past those that the run takes may be of any kind.
    assert problems(host(facts(H100, H100, dataclasses.replace(A100, is_sliced=True)))) == []


LACKS = {
    "too_few": (facts(num=1), "GPUs = 1: must be 2 or more.*CUDA_VISIBLE_DEVICES"),
    "no_driver": (facts(gpus=(), trouble="no nvidia-smi"), "GPUs: no nvidia-smi; .*install NVIDIA's driver"),
    "old_driver": (facts(driver_cuda=(12, 4)), "NVIDIA driver = .*CUDA 12.4 at most.*must support CUDA 13.0"),
    "driver_without_cuda": (facts(driver="?", driver_cuda=None), r"NVIDIA driver = '\?': supports no CUDA"),
    "no_compiler": (facts(compiler=None), "C compiler: .*gcc nor clang.* CC .*apt-get install gcc"),
    "no_header": (facts(has_python_header=False), "Python.h = '/usr/.*': .*install python3.11-dev"),
    "cpu_torch": (facts(torch="2.13.0+cpu", torch_cuda=None, nccl=None), "torch = .*for CPUs.*gpu.lock"),
    "no_nccl": (facts(nccl=None), r"NCCL: torch 2.13.0\+cu130 was built without it"),
    "mig": (facts(H100, h100(is_sliced=True)), "GPU 1 = 'NVIDIA H100.* in MIG mode.*nvidia-smi -i 1 -mig 0"),
    "two_kinds": (facts(H100, A100), r"GPUs = '1 x .*H100.* \(9.0\), 1 x .*A100.* \(8.0\)': must be of one"),
    "small": (
        facts(H100, h100(memory_bytes=40 * GIB)),
        "trainer.parallel.num_procs = 8: .* 60 GiB on each GPU .*GPU 1 .* host node0 has 40; shard more",
    ),
    "taken": (
        facts(H100, h100(free_bytes=12 * GIB)),
        "GPU 1 = '12 GiB free': must have 54 of its 79 GiB free.*nvidia-smi.*end them",
    ),
    "prohibited": (
        facts(h100(compute_mode="Prohibited"), H100),
        "GPU 0 = 'compute mode Prohibited': .* must be Default .nvidia-smi -i 0 -c DEFAULT",
    ),
    "no_bfloat16": (facts(V100, V100), "GPU 0 = 'V100': .*compute capability 7.0; must have 8.0"),
}


@pytest.mark.parametrize(("found", "message"), LACKS.values(), ids=LACKS)
def test_what_a_host_lacks_is_named_with_its_figure_and_the_remedy(found: GpuFacts, message: str) -> None:
    first, *others = problems(host(found))
    assert re.match(f"(host node0: )?{message}", first), first
    # Each GPU without bfloat16 is refused.
    assert all("compute capability" in other for other in others)
    assert len(others) == max(0, [gpu.name for gpu in found.gpus].count("V100") - 1)


@pytest.mark.parametrize(
    ("choice", "found", "message"),
    [
        (FlashAttention.FA3, facts(flash_attention=()), "needs the package flash_attn_interface, .* node0"),
        (FlashAttention.FA4, facts(), "needs the package flash_attn.cute.interface"),
        (FlashAttention.FA3, facts(A100, A100), "needs compute capability 9.0.*8.0; must be auto or FA2"),
        (
            FlashAttention.AUTO,
            facts(*[h100(name="RTX", capability=(12, 0))] * 2, flash_attention={4}),
            r"would take FlashAttention 4, .*RTX \(.* 12.0\); must be FA2",
        ),
    ],
    ids=["no_package", "no_newer_package", "old_gpu", "untested_gpu"],
)
def test_flash_attention_that_is_asked_for_must_be_there(
    choice: FlashAttention, found: GpuFacts, message: str
) -> None:
    (problem,) = problems(host(found), choice=choice)
    assert re.match(f"trainer.flash_attention = '{choice.value}': {message}", problem), problem
    # Generators have vLLM's own.
    assert problems(host(found, is_trainer=False), choice=choice) == []
    assert problems(host(found), choice=FlashAttention.FA2) == []


def test_without_the_newer_kernel_the_run_goes_on_and_says_so() -> None:
    hosts = [host(facts(flash_attention=frozenset()))]
    assert problems(*hosts) == []
    (warning,) = gpu_warnings(hosts, FlashAttention.AUTO)
    assert re.match("host node0: .*FlashAttention 2; .*version 3.*flash_attn_interface is missing", warning)
    assert gpu_warnings(hosts, FlashAttention.FA2) == [], "it is what was asked for"


def test_a_plan_within_its_own_error_is_a_warning() -> None:
    tight = host(facts(), plan=dataclasses.replace(PLAN, num_bytes=84 * GIB))
    assert problems(tight) == []
    (warning,) = gpu_warnings([tight], FlashAttention.AUTO)
    assert "plan of 84 GiB is more than the 79 GiB of GPU 0" in warning
    assert "see trainer.parallel.num_procs = 8: shard more" in warning
    assert len(problems(host(facts(), plan=dataclasses.replace(PLAN, num_bytes=90 * GIB)))) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (facts(A100, A100), "GPUs = 'NVIDIA A100-SXM4-80GB': must be of the kind of host node0, NVIDIA H100"),
        (facts(nccl=(2, 27, 3)), "NCCL = '2.27.3': must be 2.29.7 as on host node0"),
        (facts(torch="2.12.0+cu130"), "torch = '2.12.0+cu130': must be 2.13.0+cu130 as on host node0"),
    ],
    ids=["gpus", "nccl", "torch"],
)
def test_hosts_of_a_role_must_be_alike(change: GpuFacts, message: str) -> None:
    hosts = [host(facts()), host(facts(), name="node1"), host(change, name="node2")]
    (problem,) = problems(*hosts)
    assert problem.startswith(f"host node2: {message}")
    other_role = [*hosts[:2], host(change, name="node2", is_trainer=False)]
    assert problems(*other_role) == []
    generators = [dataclasses.replace(one, is_trainer=False) for one in hosts]
    assert problems(*generators) == [problem]
    # Every problem of every host is listed.
    found = problems(host(facts(num=1)), host(facts(driver_cuda=(12, 9)), name="node1"), hosts[1])
    assert [one.split(" = ")[0] for one in found] == ["host node0: GPUs", "host node1: NVIDIA driver"]


@pytest.mark.parametrize(("is_shared", "has_mps"), [(False, False), (True, True), (True, False)])
def test_an_exclusive_gpu_is_for_one_process_or_for_mps(is_shared: bool, has_mps: bool) -> None:
    exclusive = h100(compute_mode="Exclusive_Process")
    one = dataclasses.replace(host(facts(exclusive, exclusive, has_mps=has_mps)), is_shared=is_shared)
    found = problems(one)
    assert len(found) == (2 if is_shared and not has_mps else 0)
    assert all("must be Default" in problem for problem in found)


TABLE = """\
0, GPU-aaaa1111-0000, NVIDIA H100 80GB HBM3, 81559, 81004, 9.0, Disabled, Default, 580.82.07
1, GPU-bbbb2222-0000, NVIDIA H100 80GB HBM3, 81559, 512, 9.0, Enabled, Default, 580.82.07
2, GPU-cccc3333-0000, NVIDIA A100-SXM4-40GB, 40960, 40960, 8.0, [N/A], Exclusive_Process, 580.82.07
"""
HEADER = "| NVIDIA-SMI 580.82.07    Driver Version: 580.82.07    CUDA Version: 13.0     |"


def make_smi(folder: Path, table: str, *, header: str = HEADER) -> None:
    (folder / "table").write_text(table)
    (folder / "header").write_text(header)
    script = f'case "$1" in --query-gpu=*) cat {folder}/table;; *) cat {folder}/header;; esac'
    write_program(folder / "nvidia-smi", script)


def write_program(file: Path, script: str) -> None:
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(0o755)


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which programs are looked for first; it has no nvidia-smi yet."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return tmp_path


def test_nvidia_smi_is_read(smi: Path) -> None:
    make_smi(smi, TABLE)
    found = gather_gpu_facts(None)
    assert (found.driver, found.driver_cuda, found.trouble) == ("580.82.07", (13, 0), None)
    full = h100(memory_bytes=81559 * 2**20, free_bytes=81004 * 2**20)
    sliced = dataclasses.replace(full, index=1, free_bytes=512 * 2**20, is_sliced=True)
    a100 = Gpu(
        index=2,
        name="NVIDIA A100-SXM4-40GB",
        memory_bytes=40 * GIB,
        free_bytes=40 * GIB,
        capability=(8, 0),
        is_sliced=False,
        compute_mode="Exclusive_Process",
    )
    assert found.gpus == (full, sliced, a100)
    # This torch is the CPU's.
    assert found.torch_cuda is None and found.nccl is None and found.torch == torch.__version__
    assert not torch.cuda.is_initialized()


@pytest.mark.parametrize(
    ("visible", "indices"),
    [
        ("2,0", [2, 0]),
        ("", []),
        ("-1", []),
        ("0,7,1", [0]),
        ("GPU-cccc, GPU-aaaa1111-0000", [2, 0]),
        ("MIG-5f2c", [1]),
        ("nonsense", []),
    ],
)
def test_only_visible_gpus_count(smi: Path, visible: str, indices: list[int]) -> None:
    make_smi(smi, TABLE)
    assert [gpu.index for gpu in gather_gpu_facts(visible).gpus] == indices


@pytest.mark.parametrize(
    ("header", "version"),
    [
        ("CUDA Version: 12.4 ", (12, 4)),
        ("CUDA UMD Version: 12.4", (12, 4)),
        ("CUDA Version       : 12.4", (12, 4)),
        ("CUDA Version: N/A", None),
    ],
)
def test_a_host_without_devices_still_has_a_driver(
    smi: Path, header: str, version: tuple[int, ...] | None
) -> None:
    make_smi(smi, "No devices were found\n", header=f"| {header} |")
    found = gather_gpu_facts("0")
    assert (found.gpus, found.trouble, found.driver_cuda) == ((), None, version)


ODD_ROW = "0, GPU-a, H100, 81559, [Unknown Error], 9.0, Disabled, Default, 1"


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (None, "there is no nvidia-smi"),
        ("echo NVIDIA-SMI has failed; exit 9", "exit code 9: NVIDIA-SMI has failed"),
        (f"echo '{ODD_ROW}'", "describes a GPU in a way that is not understood"),
        ("echo 0, GPU-a, H100", "describes a GPU in a way that is not understood"),
        ("exec sleep 60", "did not answer"),
    ],
    ids=["none", "fails", "odd_row", "short_row", "stuck"],
)
def test_a_driver_in_trouble_is_told(
    smi: Path, monkeypatch: pytest.MonkeyPatch, script: str | None, words: str
) -> None:
    if script is not None:
        write_program(smi / "nvidia-smi", script)
    if words == "did not answer":
        monkeypatch.setattr(host_checks, "NVIDIA_SMI_S", 0.2)
    found = gather_gpu_facts(None)
    assert found.trouble is not None and words in found.trouble and found.gpus == ()


def test_an_installed_flash_attention_is_found(smi: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def find(name: str) -> object:
        if name.startswith("flash_attn."):
            raise ModuleNotFoundError(name)
        return object() if name == "flash_attn_interface" else None

    monkeypatch.setattr(importlib.util, "find_spec", find)
    assert gather_gpu_facts(None).flash_attention == {3}


def test_the_compiler_is_the_one_that_triton_takes(smi: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With these the launcher of a kernel compiles; ``build.py`` raises where there is no compiler."""
    found = gather_gpu_facts(None)
    assert found.compiler is not None and found.has_python_header
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(sysconfig, "get_paths", lambda scheme: {"include": str(smi)})
    monkeypatch.setenv("PATH", str(smi))
    for name in ("clang", "gcc", "mine"):
        write_program(smi / name, "")
        if name == "mine":
            monkeypatch.setenv("CC", "mine -m64")
        with_paths = gather_gpu_facts(None)
        assert with_paths.compiler == str(smi / name) and not with_paths.has_python_header
    for nowhere in ("none such", ""):
        monkeypatch.setenv("CC", nowhere)
        assert gather_gpu_facts(None).compiler is None


@pytest.mark.processes
async def test_an_agent_looks_at_the_gpus_of_its_host(smi: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not at its own, which are none."""
    make_smi(smi, TABLE)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,0")
    mesh = spawn_role(this_host(), "agent", num_procs=1)
    found = await mesh.spawn("agent", HostAgent, smi / "agent.log", 600.0).gpus.call_one()
    await mesh.stop()
    assert ([gpu.index for gpu in found.gpus], found.driver_cuda, found.trouble) == ([2, 0], (13, 0), None)


LESS = ("trainer.activation_checkpointing=full",)
FULL = (
    "lora=null",
    "trainer.optimizer.learning_rate=1e-6",
    "generator.kv_cache_gib=16",
    "generator.max_num_seqs=128",
    "buffer.max_in_flight=32",
    "trainer.recovery.snapshot_every_steps=null",
)
"""Overrides of qwen3_1.7b_1gpu.yaml that train every weight, as its comment shows."""
ONE_PROC = "trainer.parallel.num_procs=1"
REFUSED_1GPU = (
    r"generator.kv_cache_gib = .*the trainer with the generator needs .*of host host-0 has .*"
    r"GiB are the trainer's, .*, 2 for CUDA contexts: .*configs/qwen3_0.6b_1gpu.yaml"
)


def shipped(*names: str, overrides: Sequence[str] = ()) -> tuple[RunConfig, ModelFacts]:
    config = load_config([CONFIGS / f"{name}.yaml" for name in names], overrides)
    return config, read_model_facts(str(SHIPPED_MODELS / config.model.path.replace("/", "--")))


EIGHT, GIB_24, GIB_16 = (8, 81_920, 81_500), (1, 24_564, 24_544), (1, 16_376, 16_356)
"""Their number, and the MiB that each one has, and has free."""


@pytest.mark.parametrize(
    ("name", "overrides", "gpus", "refused", "is_warned_of"),
    [
        ("qwen3_8b", (), EIGHT, [], False),
        (
            "qwen3_8b",
            ("generator.kv_cache_gib=78", "trainer.activation_checkpointing=none"),
            EIGHT,
            [
                "trainer.parallel.num_procs = 4: the trainer needs ",
                "generator.kv_cache_gib = 78.0: the generator needs 94.1 GiB on each GPU.*"
                "of host host-0 has 80; lower it: 16.1 GiB are for the rest",
            ],
            False,
        ),
        ("qwen3_8b", (ONE_PROC,), EIGHT, ["trainer.parallel.num_procs = 1: "], False),
        ("qwen3_8b", (ONE_PROC, "trainer.cpu_offload=true"), EIGHT, [], False),
        ("qwen3_8b", (), (0, 0, 0), ["host host-0: GPUs = 0: must be 8 or more"], False),
        # One GPU has to hold both roles.
        ("qwen3_0.6b_1gpu", (), GIB_24, [], False),
        ("qwen3_1.7b_1gpu", (), GIB_24, [], False),
        ("qwen3_1.7b_1gpu", FULL, (1, 81_920, 81_900), [], False),
        ("qwen3_1.7b_1gpu", LESS, GIB_16, [], True),
        ("qwen3_1.7b_1gpu", (), GIB_16, [REFUSED_1GPU], False),
        ("qwen3_0.6b_1gpu", (), GIB_16, [REFUSED_1GPU], False),
        ("qwen3_1.7b_1gpu", FULL, (1, 40_960, 40_940), [REFUSED_1GPU], False),
        # The rest is another process's.
        ("qwen3_0.6b_1gpu", (), (1, 24_564, 12_000), ["host host-0: GPU 0 = '11.7 .*17.6"], False),
    ],
)
def test_a_local_run_needs_the_gpus_of_its_plan(
    smi: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    overrides: Sequence[str],
    gpus: tuple[int, int, int],
    refused: list[str],
    is_warned_of: bool,
) -> None:
    num, memory_mib, free_mib = gpus
    row = f"{{}}, GPU-{{}}, NVIDIA A100, {memory_mib}, {free_mib}, 8.0, Disabled, Default, 580.82.07\n"
    make_smi(smi, "".join(row.format(index, index) for index in range(num)))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 29, 7))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    found, warnings = check_local_gpus(*shipped(name, overrides=overrides))
    for problem, words in zip(found, refused, strict=True):
        assert re.match(words, str(problem)), problem
    assert bool(warnings) == is_warned_of


@pytest.mark.parametrize("is_there", [False, True])
def test_mps_is_found_by_the_pipe_of_its_control_daemon(
    smi: Path, monkeypatch: pytest.MonkeyPatch, is_there: bool
) -> None:
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(smi))
    if is_there:
        (smi / "control").touch()
    assert gather_gpu_facts(None).has_mps is is_there


def test_a_torch_for_cpus_asks_nobody(smi: Path) -> None:
    assert check_local_gpus(*shipped("qwen3_8b")) == ([], [])


async def test_gpus_of_hosts_are_judged_by_role() -> None:
    class Hosts(LocalHosts):
        def __init__(self, num: int) -> None:
            super().__init__()
            self._num = num

        async def gpus(self, role: HostRole) -> Mapping[str, GpuFacts]:
            return {f"{role}-{index}": facts(num=self._num if index else 8) for index in range(2)}

    config, model = shipped("qwen3_30b_a3b", "launchers/slurm")
    assert await check_gpus_of_hosts(config, model, Hosts(8)) == []
    with pytest.raises(ConfigError) as refused:
        await check_gpus_of_hosts(config, model, Hosts(7))
    names = [problem.field for problem in refused.value.problems]
    assert names == ["host trainer-1: GPUs", "host generators-1: GPUs"]


NEEDS = HostNeeds(
    num_cpus=8, shared_bytes=100 * GIB, memory_bytes=300 * GIB, buffer_bytes=200 * GIB, locked_bytes=50 * GIB
)
ENOUGH = HostLimits(
    machine="gpu7",
    shared_bytes=120 * GIB,
    shared_free_bytes=100 * GIB,
    available_bytes=200 * GIB,
    lockable_bytes=None,
    num_rdma_devices=4,
)
LARGE = dataclasses.replace(ENOUGH, shared_free_bytes=2**50, available_bytes=2**50)


SHM = r"\): /dev/shm.*'100 GiB free of 120'.*100 GiB free.*--shm-size"
MEMORY = r"\): memory.*'64 GiB available'.*200 GiB and more.*launcher.mem"
LOCKED = r"\): locked memory.*'6.1e-05 GiB for each process'.*50 GiB.*ulimit -l"


@pytest.mark.parametrize(
    ("changed", "refused", "warning"),
    [
        ({}, [], None),
        ({"lockable_bytes": 50 * GIB}, [], None),
        ({"num_rdma_devices": 0}, [], None),
        ({"shared_free_bytes": 100 * GIB - 1}, [SHM], None),
        ({"available_bytes": 64 * GIB}, [MEMORY], None),
        ({"lockable_bytes": 64 * 1024}, [LOCKED], None),
        ({"shared_free_bytes": 0, "available_bytes": 0, "lockable_bytes": 0}, ["shm", "mem", "lock"], None),
        ({"lockable_bytes": 2**23, "num_rdma_devices": 0}, [], r"0.00781 GiB.*50 GiB.*ulimit -l"),
    ],
)
def test_what_is_too_small_is_named_with_figure_and_remedy(
    changed: dict[str, int], refused: list[str], warning: str | None
) -> None:
    """All at once. Without RDMA devices a low limit of locked memory is a warning."""
    limits = dataclasses.replace(ENOUGH, **changed)
    for problem, words in zip(check_host_limits("trainer-0", limits, NEEDS), refused, strict=True):
        assert re.match(rf"host trainer-0 \(gpu7.*{words}", str(problem)), problem
    told = lock_warning("trainer-0", limits, NEEDS)
    assert told is None if warning is None else re.search(warning, str(told)), told


def test_the_lock_limit_is_that_of_the_process() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    user = os.geteuid()
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (64 * 1024, hard))
    try:
        if user == 0:
            # Root may have the capability to lock all memory.
            os.seteuid(65534)
        assert gather_host_limits().lockable_bytes == 64 * 1024
    finally:
        os.seteuid(user)
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (soft, hard))


class LimitedHosts:
    """Only what ``check_hosts`` asks of hosts."""

    def __init__(self, trainer: HostLimits, generators: HostLimits) -> None:
        self._limits = {HostRole.TRAINER: trainer, HostRole.GENERATORS: generators}

    def limits(self, role: HostRole) -> dict[str, HostLimits]:
        return {f"{role}-0": self._limits[role]}


def test_each_role_is_held_to_its_own_needs() -> None:
    config, model = shipped("qwen3_30b_a3b", "launchers/slurm")
    needs = role_needs(config, model, config.launcher)
    assert check_hosts(config, model, LimitedHosts(LARGE, LARGE)) == []
    # Two staged versions of 56.9 GiB and two snapshots over two hosts are more than a generator's host has.
    assert needs.trainer.shared_bytes > needs.generators.shared_bytes
    tight = dataclasses.replace(LARGE, shared_free_bytes=needs.generators.shared_bytes)
    assert check_hosts(config, model, LimitedHosts(LARGE, tight)) == []
    with pytest.raises(ConfigError) as refused:
        check_hosts(config, model, LimitedHosts(tight, tight))
    (problem,) = refused.value.problems
    assert problem.field == "host trainer-0 (gpu7): /dev/shm"
    low = dataclasses.replace(LARGE, lockable_bytes=2**16, num_rdma_devices=0)
    warned = [words.split(":")[0] for words in check_hosts(config, model, LimitedHosts(low, low))]
    assert warned == ["host trainer-0 (gpu7)", "host generators-0 (gpu7)"], "locked memory, as they have GPUs"
