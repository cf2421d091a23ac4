"""What prevents a run on a host: GPUs, software, memory and limits, from invented facts. No GPU is needed."""

import asyncio
import dataclasses
import importlib.util
import os
import resource
import shutil
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from monarch.actor import this_host

from forgeasync.config import FlashAttention, SlurmLauncher, load_config
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
from tests.support.config_samples import CONFIGS, only

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
PLAN = RolePlan(
    role="trainer", num_bytes=60 * GIB, field="trainer.parallel.num_procs", value=8, remedy="shard more"
)


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


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (
            facts(num=1),
            "host node0: GPUs = 1: must be 2 or more, which the run uses there; "
            "CUDA_VISIBLE_DEVICES, the scheduler",
        ),
        (
            facts(gpus=(), trouble="there is no nvidia-smi, which comes with NVIDIA's driver", driver=None),
            "host node0: GPUs: there is no nvidia-smi, which comes with NVIDIA's driver; the run needs 2 "
            "there: install NVIDIA's driver",
        ),
        (
            facts(driver="550.54.15", driver_cuda=(12, 4)),
            "host node0: NVIDIA driver = '550.54.15': supports CUDA 12.4 at most, and torch 2.13.0+cu130 is "
            "built for CUDA 13.0; must support CUDA 13.0 or later: update it",
        ),
        (
            facts(driver="?", driver_cuda=None),
            "host node0: NVIDIA driver = '?': supports no CUDA, and torch",
        ),
        (
            facts(compiler=None),
            "host node0: C compiler: there is neither gcc nor clang, nor a program that the environment "
            "variable CC names; Triton compiles the launchers of its kernels with it: install gcc (Debian, "
            "Ubuntu: apt-get install gcc)",
        ),
        (
            facts(has_python_header=False),
            "host node0: Python.h = '/usr/include/python3.11/Python.h': is not there; Triton compiles the "
            "launchers of its kernels with it: install Python's headers (Debian, Ubuntu: apt-get install "
            "python3.11-dev)",
        ),
        (
            facts(torch="2.13.0+cpu", torch_cuda=None, nccl=None),
            "host node0: torch = '2.13.0+cpu': is built for CPUs, and the run needs 2 GPUs there; install "
            "what requirements/gpu.lock names (make setup-gpu)",
        ),
        (
            facts(nccl=None),
            "host node0: NCCL: torch 2.13.0+cu130 was built without it, and 2 GPUs exchange data",
        ),
        (
            facts(H100, dataclasses.replace(H100, is_sliced=True)),
            "host node0: GPU 1 = 'NVIDIA H100 80GB HBM3': is in MIG mode: a process sees one slice of it, "
            "and NCCL does not connect slices; use whole GPUs (nvidia-smi -i 1 -mig 0",
        ),
        (
            facts(H100, A100),
            "host node0: GPUs = '1 x NVIDIA H100 80GB HBM3 (9.0), 1 x NVIDIA A100-SXM4-80GB (8.0)': must be "
            "of one kind: ranks wait for the slowest one",
        ),
        (
            facts(H100, dataclasses.replace(H100, memory_bytes=40 * GIB)),
            "trainer.parallel.num_procs = 8: the trainer needs 60 GiB on each GPU (--dry-run shows what "
            "for), and GPU 1 (NVIDIA H100 80GB HBM3) of host node0 has 40; shard more",
        ),
        (
            facts(H100, dataclasses.replace(H100, free_bytes=12 * GIB)),
            "host node0: GPU 1 = '12 GiB free': must have 54 of its 79 GiB free: processes that nvidia-smi "
            "lists hold the rest; end them",
        ),
    ],
)
def test_what_a_host_lacks_is_named_with_its_figure_and_the_remedy(found: GpuFacts, message: str) -> None:
    (problem,) = problems(host(found))
    assert problem.startswith(message), problem


def test_gpus_without_bfloat16_are_refused() -> None:
    v100 = dataclasses.replace(H100, name="Tesla V100-SXM3-80GB", capability=(7, 0))
    first, second = problems(host(facts(v100, v100)))
    assert first == (
        "host node0: GPU 0 = 'Tesla V100-SXM3-80GB': has compute capability 7.0; must have 8.0 (A100) or "
        "more, which bfloat16 and FlashAttention 2 need"
    )
    assert second.startswith("host node0: GPU 1 = ")


@pytest.mark.parametrize(
    ("choice", "found", "message"),
    [
        (
            FlashAttention.FA3,
            facts(flash_attention=frozenset()),
            "trainer.flash_attention = 'FA3': needs the package flash_attn_interface, which host node0 "
            "lacks; install it there, or leave it at auto",
        ),
        (
            FlashAttention.FA4,
            facts(),
            "trainer.flash_attention = 'FA4': needs the package flash_attn.cute.interface, which "
            "host node0 lacks",
        ),
        (
            FlashAttention.FA3,
            facts(A100, A100),
            "trainer.flash_attention = 'FA3': needs compute capability 9.0, and NVIDIA A100-SXM4-80GB of "
            "host node0 has 8.0; must be auto or FA2",
        ),
        (
            FlashAttention.AUTO,
            facts(*[dataclasses.replace(H100, name="RTX", capability=(12, 0))] * 2, flash_attention={4}),
            "trainer.flash_attention = 'auto': would take FlashAttention 4, which host node0 has and which "
            "does not support its RTX (compute capability 12.0); must be FA2 there",
        ),
    ],
)
def test_flash_attention_that_is_asked_for_must_be_there(
    choice: FlashAttention, found: GpuFacts, message: str
) -> None:
    (problem,) = problems(host(found), choice=choice)
    assert problem.startswith(message), problem
    # Generators have vLLM's own.
    assert problems(host(found, is_trainer=False), choice=choice) == []
    assert problems(host(found), choice=FlashAttention.FA2) == []


def test_without_the_newer_kernel_the_run_goes_on_and_says_so() -> None:
    hosts = [host(facts(flash_attention=frozenset()))]
    assert problems(*hosts) == []
    (warning,) = gpu_warnings(hosts, FlashAttention.AUTO)
    assert warning == (
        "host node0: attention in the trainer is computed by FlashAttention 2; NVIDIA H100 80GB HBM3 can run "
        "version 3, for which the package flash_attn_interface is missing"
    )
    assert gpu_warnings(hosts, FlashAttention.FA2) == [], "it is what was asked for"


def test_a_plan_within_its_own_error_is_a_warning() -> None:
    tight = dataclasses.replace(PLAN, num_bytes=84 * GIB)
    assert problems(host(facts(), plan=tight)) == []
    (warning,) = gpu_warnings([host(facts(), plan=tight)], FlashAttention.AUTO)
    assert "plan of 84 GiB is more than the 79 GiB of GPU 0" in warning
    assert "see trainer.parallel.num_procs = 8: shard more" in warning
    (problem,) = problems(host(facts(), plan=dataclasses.replace(PLAN, num_bytes=90 * GIB)))
    assert "needs 90 GiB" in problem


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (facts(A100, A100), "GPUs = 'NVIDIA A100-SXM4-80GB': must be of the kind of host node0, NVIDIA H100"),
        (facts(nccl=(2, 27, 3)), "NCCL = '2.27.3': must be 2.29.7 as on host node0: ranks with different"),
        (facts(torch="2.12.0+cu130"), "torch = '2.12.0+cu130': must be 2.13.0+cu130 as on host node0"),
    ],
)
def test_hosts_of_a_role_must_be_alike(change: GpuFacts, message: str) -> None:
    hosts = [host(facts()), host(facts(), name="node1"), host(change, name="node2")]
    (problem,) = problems(*hosts)
    assert problem.startswith(f"host node2: {message}")
    other_role = [*hosts[:2], host(change, name="node2", is_trainer=False)]
    assert problems(*other_role) == []
    generators = [dataclasses.replace(one, is_trainer=False) for one in hosts]
    assert problems(*generators) == problems(*hosts)


def test_every_problem_of_every_host_is_listed() -> None:
    found = problems(
        host(facts(num=1)), host(facts(driver_cuda=(12, 9)), name="node1"), host(facts(), name="node2")
    )
    assert [problem.split(" = ")[0] for problem in found] == ["host node0: GPUs", "host node1: NVIDIA driver"]


TABLE = """\
0, GPU-aaaa1111-0000, NVIDIA H100 80GB HBM3, 81559, 81004, 9.0, Disabled, 580.82.07
1, GPU-bbbb2222-0000, NVIDIA H100 80GB HBM3, 81559, 512, 9.0, Enabled, 580.82.07
2, GPU-cccc3333-0000, NVIDIA A100-SXM4-40GB, 40960, 40960, 8.0, [N/A], 580.82.07
"""
HEADER = "| NVIDIA-SMI 580.82.07    Driver Version: 580.82.07    CUDA Version: 13.0     |"


def make_smi(folder: Path, table: str, *, header: str = HEADER, exit_code: int = 0) -> None:
    (folder / "table").write_text(table)
    (folder / "header").write_text(header)
    script = f'#!/bin/sh\ncase "$1" in --query-gpu=*) cat {folder}/table;; *) cat {folder}/header;; esac\n'
    (folder / "nvidia-smi").write_text(f"{script}exit {exit_code}\n")
    (folder / "nvidia-smi").chmod(0o755)


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which programs are looked for first; it has no nvidia-smi yet."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return tmp_path


def test_nvidia_smi_is_read(smi: Path) -> None:
    make_smi(smi, TABLE)
    found = gather_gpu_facts(None)
    assert (found.driver, found.driver_cuda, found.trouble) == ("580.82.07", (13, 0), None)
    assert [gpu.name for gpu in found.gpus] == ["NVIDIA H100 80GB HBM3"] * 2 + ["NVIDIA A100-SXM4-40GB"]
    assert [gpu.is_sliced for gpu in found.gpus] == [False, True, False]
    assert [gpu.capability for gpu in found.gpus] == [(9, 0), (9, 0), (8, 0)]
    assert found.gpus[1].memory_bytes == 81559 * 2**20 and found.gpus[1].free_bytes == 512 * 2**20
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


@pytest.mark.parametrize(
    ("table", "exit_code", "words"),
    [
        (None, 0, "there is no nvidia-smi"),
        (
            "NVIDIA-SMI has failed because it couldn't\ncommunicate",
            9,
            "exit code 9: NVIDIA-SMI has failed because",
        ),
        (
            "0, GPU-a, H100, 81559, [Unknown Error], 9.0, Disabled, 1\n",
            0,
            "describes a GPU in a way that is not",
        ),
        ("0, GPU-a, H100\n", 0, "describes a GPU in a way that is not understood"),
    ],
)
def test_a_driver_in_trouble_is_told(smi: Path, table: str | None, exit_code: int, words: str) -> None:
    if table is not None:
        make_smi(smi, table, exit_code=exit_code)
    found = gather_gpu_facts(None)
    assert found.trouble is not None and words in found.trouble and found.gpus == ()
    (problem,) = problems(host(dataclasses.replace(found, torch_cuda=(13, 0), nccl=(2, 29, 7))))
    assert words in problem


def test_a_stuck_driver_is_told(smi: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (smi / "nvidia-smi").write_text("#!/bin/sh\nexec sleep 60\n")
    (smi / "nvidia-smi").chmod(0o755)
    monkeypatch.setattr(host_checks, "NVIDIA_SMI_S", 0.2)
    assert "did not answer" in str(gather_gpu_facts(None).trouble)


def test_an_installed_flash_attention_is_found(smi: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted: list[str] = []

    def find(name: str) -> object:
        wanted.append(name)
        if name.startswith("flash_attn."):
            raise ModuleNotFoundError(name)
        return object()

    monkeypatch.setattr(importlib.util, "find_spec", find)
    assert gather_gpu_facts(None).flash_attention == {3}
    assert wanted == ["flash_attn_interface", "flash_attn.cute.interface"]


def test_the_compiler_is_the_one_that_triton_takes(
    smi: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With these the launcher of a kernel compiles; ``build.py`` raises where there is no compiler."""
    found = gather_gpu_facts(None)
    assert found.compiler is not None and found.has_python_header
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(sysconfig, "get_paths", lambda scheme: {"include": str(tmp_path)})
    for name in ("clang", "gcc", "mine"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path))
        if name == "mine":
            monkeypatch.setenv("CC", "mine -m64")
        with_paths = gather_gpu_facts(None)
        assert with_paths.compiler == str(tmp_path / name) and not with_paths.has_python_header
    for nowhere in ("none such", ""):
        monkeypatch.setenv("CC", nowhere)
        assert gather_gpu_facts(None).compiler is None


@pytest.mark.procs
async def test_an_agent_looks_at_the_gpus_of_its_host(smi: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not at its own, which are none."""
    make_smi(smi, TABLE)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,0")
    mesh = spawn_role(this_host(), "agent", num_procs=1)
    found = await mesh.spawn("agent", HostAgent, smi / "agent.log", 600.0).gpus.call_one()
    await mesh.stop()
    found = found
    assert ([gpu.index for gpu in found.gpus], found.driver_cuda, found.trouble) == ([2, 0], (13, 0), None)


FULL = (
    "lora=null",
    "trainer.optimizer.learning_rate=1e-6",
    "generator.kv_cache_gib=16",
    "generator.max_num_seqs=128",
    "buffer.max_in_flight=32",
    "trainer.recovery.snapshot_every_steps=null",
)
"""Overrides of qwen3_1.7b_1gpu.yaml that train every weight, as its comment shows."""


class TestBeforeARun:
    """Where the controller asks."""

    def local(
        self,
        smi: Path,
        monkeypatch: pytest.MonkeyPatch,
        *overrides: str,
        num: int = 8,
        name: str = "qwen3_8b",
        memory_mib: int = 81_920,
        free_mib: int = 81_500,
    ) -> tuple[Any, Any]:
        row = f"{{}}, GPU-{{}}, NVIDIA A100-SXM4-80GB, {memory_mib}, {free_mib}, 8.0, Disabled, 580.82.07\n"
        make_smi(smi, "".join(row.format(index, index) for index in range(num)))
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
        monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 29, 7))
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        config = load_config(CONFIGS / f"{name}.yaml", overrides)
        model = SHIPPED_MODELS / config.model.path.replace("/", "--")
        return check_local_gpus(config, read_model_facts(str(model)))

    def test_the_small_gpu_config_fits_eight_gpus(self, smi: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        assert self.local(smi, monkeypatch) == ([], [])

    def test_memory_is_the_plans(self, smi: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        found, _ = self.local(
            smi, monkeypatch, "generator.kv_cache_gib=78", "trainer.activation_checkpointing=none"
        )
        trainer, generator = map(str, found)
        assert trainer.startswith("trainer.parallel.num_procs = 4: the trainer needs ")
        assert generator.startswith("generator.kv_cache_gib = 78.0: the generator needs 94.1 GiB on each GPU")
        assert "of host host-0 has 80; lower it: 16.1 GiB are for the rest" in generator
        assert self.local(smi, monkeypatch, "trainer.parallel.num_procs=1")[0]
        offloaded = self.local(smi, monkeypatch, "trainer.parallel.num_procs=1", "trainer.cpu_offload=true")
        assert offloaded == ([], [])

    @pytest.mark.parametrize(
        ("name", "overrides", "memory_mib", "outcome"),
        [
            ("qwen3_0.6b_1gpu", (), 24_564, "fits"),
            ("qwen3_1.7b_1gpu", (), 24_564, "fits"),
            ("qwen3_1.7b_1gpu", (), 40_960, "fits"),
            ("qwen3_1.7b_1gpu", FULL, 81_920, "fits"),
            ("qwen3_0.6b_1gpu", (), 16_376, "may not"),
            ("qwen3_0.6b_1gpu", (), 12_288, "refused"),
            ("qwen3_1.7b_1gpu", FULL, 40_960, "refused"),
        ],
    )
    def test_one_gpu_has_to_hold_both_roles(
        self,
        name: str,
        overrides: tuple[str, ...],
        memory_mib: int,
        outcome: str,
        smi: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        found, warnings = self.local(
            smi, monkeypatch, *overrides, num=1, name=name, memory_mib=memory_mib, free_mib=memory_mib - 20
        )
        assert (bool(found), bool(warnings)) == (outcome == "refused", outcome == "may not")
        if found:
            message = only(found)
            assert message.startswith("generator.kv_cache_gib = ")
            assert "the trainer with the generator needs " in message and "of host host-0 has " in message
            assert "GiB are the trainer's and " in message and "configs/qwen3_0.6b_1gpu.yaml" in message

    def test_another_process_on_the_gpu_counts(self, smi: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        found, _ = self.local(
            smi, monkeypatch, num=1, name="qwen3_0.6b_1gpu", memory_mib=24_564, free_mib=12_000
        )
        message = only(found)
        assert message.startswith("host host-0: GPU 0 = '11.7 GiB free': must have 15.8 of its 24 GiB free")

    def test_no_gpu_at_all_is_too_few(self, smi: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        found, _ = self.local(smi, monkeypatch, num=0)
        assert "host host-0: GPUs = 0: must be 8 or more" in only(found)

    def test_a_torch_for_cpus_asks_nobody(self, smi: Path) -> None:
        config = load_config(CONFIGS / "qwen3_8b.yaml")
        model = read_model_facts(str(SHIPPED_MODELS / "Qwen--Qwen3-8B"))
        assert check_local_gpus(config, model) == ([], [])

    @pytest.mark.parametrize("num", [8, 7])
    def test_hosts_are_judged_by_role(self, num: int) -> None:
        config = load_config([CONFIGS / "qwen3_30b_a3b.yaml", CONFIGS / "launchers" / "slurm.yaml"])
        assert isinstance(config.launcher, SlurmLauncher)
        model = read_model_facts(str(SHIPPED_MODELS / "Qwen--Qwen3-30B-A3B"))

        class Hosts(LocalHosts):
            async def gpus(self, role: HostRole) -> Mapping[str, GpuFacts]:
                return {f"{role}-{index}": facts(num=num if index else 8) for index in range(2)}

        if num == 8:
            assert asyncio.run(check_gpus_of_hosts(config, model, Hosts())) == []
            return
        with pytest.raises(ConfigError) as refused:
            asyncio.run(check_gpus_of_hosts(config, model, Hosts()))
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


def limits(**changed: object) -> HostLimits:
    return dataclasses.replace(ENOUGH, **changed)


def test_what_just_fits_is_taken() -> None:
    assert list(check_host_limits("trainer-0", ENOUGH, NEEDS)) == []
    assert list(check_host_limits("trainer-0", limits(lockable_bytes=50 * GIB), NEEDS)) == []


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (
            {"shared_free_bytes": 100 * GIB - 1},
            ["host trainer-0 (gpu7): /dev/shm", "'100 GiB free of 120'", "100 GiB free", "--shm-size"],
        ),
        (
            {"available_bytes": 64 * GIB},
            ["host trainer-0 (gpu7): memory", "'64 GiB available'", "200 GiB and more", "launcher.mem"],
        ),
        (
            {"lockable_bytes": 64 * 1024},
            ["host trainer-0 (gpu7): locked memory", "'6.1e-05 GiB for each process'", "50 GiB", "ulimit -l"],
        ),
    ],
)
def test_what_is_too_small_is_named_with_figure_and_remedy(changed: dict[str, int], words: list[str]) -> None:
    (problem,) = check_host_limits("trainer-0", limits(**changed), NEEDS)
    assert all(word in str(problem) for word in words), str(problem)
    assert lock_warning("trainer-0", limits(**changed), NEEDS) is None


def test_all_that_is_too_small_is_named_at_once() -> None:
    bad = limits(shared_free_bytes=0, available_bytes=0, lockable_bytes=0)
    assert len(list(check_host_limits("trainer-0", bad, NEEDS))) == 3


def test_a_low_lock_limit_without_rdma_devices_is_only_told() -> None:
    low = limits(lockable_bytes=8 * 2**20, num_rdma_devices=0)
    assert list(check_host_limits("trainer-0", low, NEEDS)) == []
    words = lock_warning("trainer-0", low, NEEDS)
    assert words is not None and "0.00781 GiB" in words and "50 GiB" in words and "ulimit -l" in words
    assert lock_warning("trainer-0", limits(num_rdma_devices=0), NEEDS) is None


def test_a_host_says_what_it_has() -> None:
    found = gather_host_limits()
    assert found.machine == os.uname().nodename
    disk = shutil.disk_usage("/dev/shm")
    assert found.shared_bytes == disk.total
    assert found.shared_free_bytes == pytest.approx(disk.free, abs=64 * 2**20)
    assert 0 < found.available_bytes


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


class _Hosts:
    """Only what ``check_hosts`` asks of hosts."""

    def __init__(self, trainer: HostLimits, generators: HostLimits) -> None:
        self._limits = {HostRole.TRAINER: trainer, HostRole.GENERATORS: generators}

    def limits(self, role: HostRole) -> dict[str, HostLimits]:
        return {f"{role}-0": self._limits[role]}


def test_each_role_is_held_to_its_own_needs() -> None:
    config = load_config([CONFIGS / "qwen3_30b_a3b.yaml", CONFIGS / "launchers" / "slurm.yaml"])
    model = read_model_facts(config.model.path)
    needs = role_needs(config, model, config.launcher)
    large = limits(shared_free_bytes=2**50, available_bytes=2**50)
    assert check_hosts(config, model, _Hosts(large, large)) == []
    # Two staged versions of 56.9 GiB and two snapshots over two hosts are more than a generator's host has.
    assert needs.trainer.shared_bytes > needs.generators.shared_bytes
    tight = dataclasses.replace(large, shared_free_bytes=needs.generators.shared_bytes)
    assert check_hosts(config, model, _Hosts(large, tight)) == []
    with pytest.raises(ConfigError) as refused:
        check_hosts(config, model, _Hosts(tight, tight))
    (problem,) = refused.value.problems
    assert problem.field == "host trainer-0 (gpu7): /dev/shm"


def test_locked_memory_is_told_of_hosts_with_gpus() -> None:
    config = load_config([CONFIGS / "qwen3_30b_a3b.yaml", CONFIGS / "launchers" / "slurm.yaml"])
    model = read_model_facts(config.model.path)
    low = limits(shared_free_bytes=2**50, available_bytes=2**50, lockable_bytes=2**16, num_rdma_devices=0)
    warnings = check_hosts(config, model, _Hosts(low, low))
    assert [words.split(":")[0] for words in warnings] == [
        "host trainer-0 (gpu7)",
        "host generators-0 (gpu7)",
    ]
