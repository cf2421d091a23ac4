"""Checks of a host's GPUs, driver and CUDA software, memory and lock limits against the run's plan.

Each host gathers its own facts (``gather_gpu_facts``, ``gather_host_limits``). The checks are pure: they take
facts and a plan, and return problems and warnings.

GPUs are read from nvidia-smi, with a time limit. A process that initializes CUDA would hold memory on a GPU,
and would hang if the driver does not answer.
"""

import csv
import importlib.util
import os
import re
import resource
import shutil
import socket
import subprocess
import sysconfig
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from forgeasync.config import FLASH_ATTENTION_PACKAGES, FlashAttention
from forgeasync.files import SHARED_MEMORY
from forgeasync.planning import HostNeeds, least_bytes
from forgeasync.processes import available_host_bytes
from forgeasync.schema import Problem

Version = tuple[int, ...]

NVIDIA_SMI_S = 60.0
"""Time limit of nvidia-smi, in seconds. Without persistence mode the driver wakes every GPU first."""

_QUERY = (
    "index",
    "uuid",
    "name",
    "memory.total",
    "memory.free",
    "compute_cap",
    "mig.mode.current",
    "compute_mode",
    "driver_version",
)

_BFLOAT16_CAPABILITY = (8, 0)
"""Ampere, which FlashAttention 2, grouped matrix products and vLLM's MoE kernels in bfloat16 need."""

_VERSIONS = {FlashAttention.FA3: 3, FlashAttention.FA4: 4}

_MAJORS_OF = {3: (9,), 4: (9, 10)}
"""Major compute capabilities of each version of FlashAttention (torch 2.13: ``_fa3.py``, ``_fa4.py``)."""

_PREFERRED = {9: 3, 10: 4, 11: 4, 12: 4}
"""Version of FlashAttention that TorchTitan 0.3.0 prefers on a major compute capability."""

_WHY_ALIKE = "ranks wait for the slowest one, and kernels of different architectures round differently"
_SAME_LOCK = "install the same requirements/gpu.lock on every host"

_MPS_PIPES = "/tmp/nvidia-mps"
"""Default folder of the pipes of nvidia-cuda-mps-control."""

_RDMA_DEVICES = Path("/sys/class/infiniband")
"""Folder in which Linux lists the devices that ibverbs can use."""

_CAP_IPC_LOCK = 14
"""Capability of a process to lock memory without a limit (capabilities(7))."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU that the run may use."""

    index: int
    """Number in nvidia-smi."""
    name: str
    memory_bytes: int
    free_bytes: int
    """Memory that no process uses."""
    capability: tuple[int, int]
    """CUDA's compute capability, such as (9, 0) for Hopper."""
    is_sliced: bool
    """Whether it is in MIG mode."""
    compute_mode: str = "Default"
    """How many processes may use it: Default, Exclusive_Process (one) or Prohibited (none)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFacts:
    """GPUs of one host that are visible to the run, and the software that they need."""

    gpus: tuple[Gpu, ...]
    """Visible GPUs, in the order of CUDA_VISIBLE_DEVICES."""
    trouble: str | None
    """Why the GPUs could not be read; None if they could."""
    driver: str | None
    """Version of the driver, such as 550.54.15; None without a driver."""
    driver_cuda: Version | None
    """Newest CUDA that the driver supports."""
    torch: str
    """Version of torch."""
    torch_cuda: Version | None
    """CUDA version that torch was built for; None if it was built for CPUs."""
    nccl: Version | None
    """Version of NCCL in torch; None if torch was built without it."""
    flash_attention: frozenset[int]
    """Versions of FlashAttention (3, 4) whose package is installed."""
    compiler: str | None
    """C compiler that Triton calls to build the launchers of its kernels; None without one."""
    python_header: str
    """Path of Python.h, which the launchers of Triton's kernels include."""
    has_python_header: bool
    has_mps: bool = False
    """Whether NVIDIA's Multi-Process Service runs: it alone then uses a GPU, for all processes."""


def gather_gpu_facts(visible: str | None) -> GpuFacts:
    """Gather the facts of this host; ``visible`` is the CUDA_VISIBLE_DEVICES that its processes inherit."""
    import torch
    import torch.distributed

    driver, driver_cuda, trouble = None, None, None
    gpus: tuple[Gpu, ...] = ()
    try:
        table = _ask(f"--query-gpu={','.join(_QUERY)}", "--format=csv,noheader,nounits")
        driver, found = _parse_gpus(table)
        driver_cuda = _cuda_version(_ask())
        gpus = _visible_gpus(found, visible)
    except FileNotFoundError:
        trouble = "there is no nvidia-smi, which comes with NVIDIA's driver"
    except ValueError as error:
        trouble = str(error)
    header = _python_header()
    return GpuFacts(
        gpus=gpus,
        trouble=trouble,
        driver=driver,
        driver_cuda=driver_cuda,
        torch=torch.__version__,
        torch_cuda=None if torch.version.cuda is None else _version(torch.version.cuda),
        nccl=torch.cuda.nccl.version() if torch.distributed.is_nccl_available() else None,
        flash_attention=frozenset(
            version for version, package in FLASH_ATTENTION_PACKAGES.items() if _is_installed(package)
        ),
        compiler=_compiler(),
        python_header=str(header),
        has_python_header=header.is_file(),
        has_mps=(Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", _MPS_PIPES)) / "control").exists(),
    )


def _compiler() -> str | None:
    """Return the compiler that triton 3.7.1 chooses (``triton/runtime/build.py``), if it is installed."""
    names = (os.environ.get("CC"),) if "CC" in os.environ else ("gcc", "clang")
    return next((path for name in names if name and (path := shutil.which(name.split()[0]))), None)


def _python_header() -> Path:
    """Return the path of Python.h by the rules of triton 3.7.1."""
    scheme = sysconfig.get_default_scheme()
    # Debian's own scheme is for locally installed packages.
    scheme = "posix_prefix" if scheme == "posix_local" else scheme
    return Path(sysconfig.get_paths(scheme=scheme)["include"]) / "Python.h"


def _ask(*arguments: str) -> str:
    """Run nvidia-smi and return its output.

    Raises:
        FileNotFoundError: nvidia-smi is not installed.
        ValueError: it failed, or took longer than ``NVIDIA_SMI_S``.
    """
    try:
        done = subprocess.run(
            ["nvidia-smi", *arguments],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=NVIDIA_SMI_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ValueError(
            f"nvidia-smi did not answer within {NVIDIA_SMI_S:.0f} s; the driver may be stuck"
        ) from None
    except PermissionError as error:
        raise ValueError(f"nvidia-smi cannot be run: {error}") from None
    if done.returncode:
        words = " ".join((done.stdout + " " + done.stderr).split())
        raise ValueError(f"nvidia-smi failed with exit code {done.returncode}: {words[:300]}")
    return done.stdout


def _parse_gpus(table: str) -> tuple[str | None, list[tuple[str, Gpu]]]:
    """Return the driver's version, and UUID and GPU in nvidia-smi's order.

    ``table`` is nvidia-smi's answer to ``_QUERY`` as CSV, with memory in MiB.

    Raises:
        ValueError: a line cannot be parsed.
    """
    driver: str | None = None
    found: list[tuple[str, Gpu]] = []
    for line in csv.reader(table.splitlines(), skipinitialspace=True):
        if not line or line[0].startswith("No devices"):
            continue
        try:
            index, uuid, name, total, free, capability, mig, mode, driver = (cell.strip() for cell in line)
            major, minor = map(int, capability.split("."))
            gpu = Gpu(
                index=int(index),
                name=name,
                memory_bytes=int(total) * 2**20,
                free_bytes=int(free) * 2**20,
                capability=(major, minor),
                is_sliced=mig == "Enabled",
                compute_mode=mode,
            )
        except ValueError:
            raise ValueError(
                f"nvidia-smi describes a GPU in a way that is not understood: {line!r:.300}"
            ) from None
        found.append((uuid, gpu))
    return driver, found


def _cuda_version(header: str) -> Version | None:
    """Return the newest CUDA version that the driver supports, from the header that nvidia-smi prints."""
    match = re.search(r"CUDA (?:UMD )?Version\s*:\s*(\d+\.\d+)", header)
    return None if match is None else _version(match[1])


def _visible_gpus(found: Sequence[tuple[str, Gpu]], visible: str | None) -> tuple[Gpu, ...]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES names, in its order; all if it is None.

    A slice (``MIG-...``) selects every GPU in MIG mode, because its name does not say which GPU it is on.
    Names after the first unknown one are ignored, as CUDA does.
    """
    if visible is None:
        return tuple(gpu for _, gpu in found)
    by_index = {gpu.index: gpu for _, gpu in found}
    chosen: list[Gpu] = []
    for name in (part.strip() for part in visible.split(",")):
        if name.isdecimal():
            named = [by_index[int(name)]] if int(name) in by_index else []
        elif name.startswith("MIG-"):
            named = [gpu for _, gpu in found if gpu.is_sliced]
        else:
            named = [gpu for uuid, gpu in found if name and uuid.startswith(name)]
        if not named:
            break
        chosen += named
    return tuple(chosen)


def _version(text: str) -> Version:
    return tuple(int(part) for part in text.split("."))


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:
        # A parent package is missing.
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class RolePlan:
    """Memory that one process of a role needs on its GPU."""

    role: str
    num_bytes: int
    """Number of bytes, by the memory plan."""
    field: str
    """Config key with the most direct influence on it."""
    value: object
    remedy: str
    """Advice on how to lower it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostGpus:
    """The GPUs of one host, and the run's plans for them."""

    host: str
    """Name of the host in the run."""
    facts: GpuFacts
    num_needed: int
    """Number of GPUs that the run uses; these are the first ones."""
    plans: tuple[RolePlan, ...]
    """Plan of each role that has processes on the host."""
    is_trainer: bool
    is_shared: bool = False
    """Whether several processes use a GPU at once."""

    @property
    def used(self) -> tuple[Gpu, ...]:
        """GPUs that the run uses, the first ones of the host."""
        return self.facts.gpus[: self.num_needed]


def check_hosts_gpus(hosts: Sequence[HostGpus], flash_attention: FlashAttention) -> Iterator[Problem]:
    """Yield what prevents a run on the GPUs of these hosts, and on the software that they need."""
    usable = []
    for host in hosts:
        problems = [*_check_software(host), *_check_count(host)]
        yield from problems
        if not problems:
            usable.append(host)
            yield from _check_kinds(host)
            yield from _check_memory(host)
            if host.is_trainer:
                yield from _check_flash_attention(host, flash_attention)
    for is_trainer in (True, False):
        of_role = [host for host in usable if host.is_trainer is is_trainer]
        yield from _check_alike(of_role)


def gpu_warnings(hosts: Sequence[HostGpus], flash_attention: FlashAttention) -> list[str]:
    """Return warnings about slower attention kernels and about plans that may not fit into memory."""
    warnings: list[str] = []
    for host in hosts:
        for plan, gpu in ((plan, gpu) for plan in host.plans for gpu in _smallest(host)):
            if least_bytes(plan.num_bytes) <= gpu.memory_bytes < plan.num_bytes:
                warnings.append(
                    f"host {host.host}: the {plan.role}'s plan of {_gib(plan.num_bytes)} GiB is more than "
                    f"the {_gib(gpu.memory_bytes)} GiB of GPU {gpu.index} ({gpu.name}), by less than its own "
                    f"error; if memory runs out, see {plan.field} = {plan.value}: {plan.remedy}"
                )
        if host.is_trainer and flash_attention is FlashAttention.AUTO and host.used:
            version = _PREFERRED.get(host.used[0].capability[0])
            if version is not None and version not in host.facts.flash_attention:
                warnings.append(
                    f"host {host.host}: attention in the trainer is computed by FlashAttention 2; "
                    f"{host.used[0].name} can run version {version}, for which the package "
                    f"{FLASH_ATTENTION_PACKAGES[version]} is missing"
                )
    return warnings


def _check_software(host: HostGpus) -> Iterator[Problem]:
    facts = host.facts
    if facts.torch_cuda is None:
        yield Problem(
            field=f"host {host.host}: torch",
            value=facts.torch,
            remedy=f"is built for CPUs, and the run needs {host.num_needed} GPUs there; install what "
            "requirements/gpu.lock names (make setup-gpu)",
        )
    if facts.trouble is not None:
        yield Problem(
            field=f"host {host.host}: GPUs",
            remedy=f"{facts.trouble}; the run needs {host.num_needed} there: install NVIDIA's driver, or "
            "give the container its GPUs (docker run --gpus all)",
        )
    elif facts.torch_cuda is not None and (facts.driver_cuda or (0,))[0] < facts.torch_cuda[0]:
        # Within a major version an older driver runs newer CUDA ("CUDA Compatibility", NVIDIA, section 2).
        supports = "no CUDA" if facts.driver_cuda is None else f"CUDA {_dotted(facts.driver_cuda)} at most"
        yield Problem(
            field=f"host {host.host}: NVIDIA driver",
            value=facts.driver,
            remedy=f"supports {supports}, and torch {facts.torch} is built for CUDA "
            f"{_dotted(facts.torch_cuda)}; must support CUDA {facts.torch_cuda[0]}.0 or later: update it",
        )
    if facts.nccl is None and facts.torch_cuda is not None and host.num_needed > 1:
        yield Problem(
            field=f"host {host.host}: NCCL",
            remedy=f"torch {facts.torch} was built without it, and {host.num_needed} GPUs exchange data "
            "through it; install the torch of requirements/gpu.lock",
        )
    if facts.torch_cuda is not None and facts.compiler is None:
        yield Problem(
            field=f"host {host.host}: C compiler",
            remedy="there is neither gcc nor clang, nor a program that the environment variable CC names; "
            "Triton compiles the launchers of its kernels with it: install gcc (Debian, Ubuntu: apt-get "
            "install gcc)",
        )
    if facts.torch_cuda is not None and not facts.has_python_header:
        yield Problem(
            field=f"host {host.host}: Python.h",
            value=facts.python_header,
            remedy="is not there; Triton compiles the launchers of its kernels with it: install Python's "
            "headers (Debian, Ubuntu: apt-get install python3.11-dev)",
        )


def _check_count(host: HostGpus) -> Iterator[Problem]:
    facts = host.facts
    if facts.trouble is None and len(facts.gpus) < host.num_needed:
        yield Problem(
            field=f"host {host.host}: GPUs",
            value=len(facts.gpus),
            remedy=f"must be {host.num_needed} or more, which the run uses there; CUDA_VISIBLE_DEVICES, the "
            "scheduler or the container may hide some, else give the role more hosts (launcher.hosts) or "
            "fewer processes",
        )


def _check_kinds(host: HostGpus) -> Iterator[Problem]:
    for gpu in host.used:
        if gpu.is_sliced:
            yield Problem(
                field=f"host {host.host}: GPU {gpu.index}",
                value=gpu.name,
                remedy="is in MIG mode: a process sees one slice of it, and NCCL does not connect slices; "
                f"use whole GPUs (nvidia-smi -i {gpu.index} -mig 0, as root and with no process on it)",
            )
        elif gpu.capability < _BFLOAT16_CAPABILITY:
            yield Problem(
                field=f"host {host.host}: GPU {gpu.index}",
                value=gpu.name,
                remedy=f"has compute capability {_dotted(gpu.capability)}; must have 8.0 (A100) or more, "
                "which bfloat16 and FlashAttention 2 need",
            )
        elif gpu.compute_mode == "Prohibited" or (
            gpu.compute_mode == "Exclusive_Process" and host.is_shared and not host.facts.has_mps
        ):
            yield Problem(
                field=f"host {host.host}: GPU {gpu.index}",
                value=f"compute mode {gpu.compute_mode}",
                remedy="keeps a process of the run off the GPU: must be Default "
                f"(nvidia-smi -i {gpu.index} -c DEFAULT, as root)",
            )
    kinds = Counter((gpu.name, gpu.capability) for gpu in host.used)
    if len(kinds) > 1:
        found = ", ".join(
            f"{count} x {name} ({_dotted(capability)})" for (name, capability), count in kinds.items()
        )
        yield Problem(
            field=f"host {host.host}: GPUs",
            value=found,
            remedy=f"must be of one kind: {_WHY_ALIKE}; let CUDA_VISIBLE_DEVICES name GPUs of one kind, by "
            "UUID or with CUDA_DEVICE_ORDER=PCI_BUS_ID",
        )


def _check_memory(host: HostGpus) -> Iterator[Problem]:
    for gpu in _smallest(host):
        for plan in host.plans:
            if gpu.memory_bytes < least_bytes(plan.num_bytes):
                yield Problem(
                    field=plan.field,
                    value=plan.value,
                    remedy=f"the {plan.role} needs {_gib(plan.num_bytes)} GiB on each GPU (--dry-run shows "
                    f"what for), and GPU {gpu.index} ({gpu.name}) of host {host.host} has "
                    f"{_gib(gpu.memory_bytes)}; {plan.remedy}",
                )
    # Other processes may use memory of a GPU that is large enough.
    for gpu in host.used:
        largest = max((least_bytes(plan.num_bytes) for plan in host.plans), default=0)
        if gpu.free_bytes < largest <= gpu.memory_bytes:
            yield Problem(
                field=f"host {host.host}: GPU {gpu.index}",
                value=f"{_gib(gpu.free_bytes)} GiB free",
                remedy=f"must have {_gib(largest)} of its {_gib(gpu.memory_bytes)} GiB free: processes that "
                "nvidia-smi lists hold the rest; end them, or hide this GPU by CUDA_VISIBLE_DEVICES",
            )


def _check_flash_attention(host: HostGpus, choice: FlashAttention) -> Iterator[Problem]:
    gpu = host.used[0]
    major = gpu.capability[0]
    field = "trainer.flash_attention"
    if choice is FlashAttention.AUTO:
        version = _PREFERRED.get(major)
        if version in host.facts.flash_attention and major not in _MAJORS_OF[version]:
            yield Problem(
                field=field,
                value=choice.value,
                remedy=f"would take FlashAttention {version}, which host {host.host} has and which does not "
                f"support its {gpu.name} (compute capability {_dotted(gpu.capability)}); must be FA2 there",
            )
        return
    if choice is FlashAttention.FA2:
        return
    version = _VERSIONS[choice]
    if major not in _MAJORS_OF[version]:
        needed = " or ".join(f"{each}.0" for each in _MAJORS_OF[version])
        yield Problem(
            field=field,
            value=choice.value,
            remedy=f"needs compute capability {needed}, and {gpu.name} of host {host.host} has "
            f"{_dotted(gpu.capability)}; must be auto or FA2",
        )
    elif version not in host.facts.flash_attention:
        yield Problem(
            field=field,
            value=choice.value,
            remedy=f"needs the package {FLASH_ATTENTION_PACKAGES[version]}, which host {host.host} lacks; "
            "install it there, or leave it at auto, which then takes FlashAttention 2 and says so",
        )


def _check_alike(hosts: Sequence[HostGpus]) -> Iterator[Problem]:
    """Yield differences of each host of a role from the first one."""
    for host in hosts[1:]:
        first = hosts[0]
        kinds = [sorted({gpu.name for gpu in one.used}) for one in (first, host)]
        if kinds[0] != kinds[1]:
            yield Problem(
                field=f"host {host.host}: GPUs",
                value=", ".join(kinds[1]),
                remedy=f"must be of the kind of host {first.host}, {', '.join(kinds[0])}: {_WHY_ALIKE}",
            )
        if (
            first.facts.nccl is not None
            and host.facts.nccl is not None
            and first.facts.nccl != host.facts.nccl
        ):
            yield Problem(
                field=f"host {host.host}: NCCL",
                value=_dotted(host.facts.nccl),
                remedy=f"must be {_dotted(first.facts.nccl)} as on host {first.host}: ranks with different "
                f"versions may not connect; {_SAME_LOCK}, and look at LD_PRELOAD and LD_LIBRARY_PATH",
            )
        if first.facts.torch != host.facts.torch:
            yield Problem(
                field=f"host {host.host}: torch",
                value=host.facts.torch,
                remedy=f"must be {first.facts.torch} as on host {first.host}; {_SAME_LOCK}",
            )


def _smallest(host: HostGpus) -> tuple[Gpu, ...]:
    return (min(host.used, key=lambda gpu: gpu.memory_bytes),) if host.used else ()


def _dotted(version: Version) -> str:
    return ".".join(map(str, version))


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLimits:
    """Memory and limits of one host, as seen by its agent's process."""

    machine: str
    """Host name of the machine."""
    shared_bytes: int
    """Size of /dev/shm."""
    shared_free_bytes: int
    available_bytes: int
    """Free memory of the host, within the limit of its container."""
    lockable_bytes: int | None
    """Memory that one process may lock (RLIMIT_MEMLOCK); None: no limit."""
    num_rdma_devices: int


def gather_host_limits() -> HostLimits:
    """Gather the limits of this host."""
    shared = os.statvfs(SHARED_MEMORY)
    return HostLimits(
        machine=socket.gethostname(),
        shared_bytes=shared.f_blocks * shared.f_frsize,
        shared_free_bytes=shared.f_bavail * shared.f_frsize,
        available_bytes=available_host_bytes(),
        lockable_bytes=_lockable_bytes(),
        num_rdma_devices=len(list(_RDMA_DEVICES.iterdir())) if _RDMA_DEVICES.is_dir() else 0,
    )


def _lockable_bytes() -> int | None:
    status = Path("/proc/self/status").read_text(encoding="ascii")
    (effective,) = re.findall(r"^CapEff:\s*([0-9a-f]+)$", status, re.MULTILINE)
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if int(effective, 16) >> _CAP_IPC_LOCK & 1 or limit == resource.RLIM_INFINITY:
        return None
    return limit


def check_host_limits(host: str, limits: HostLimits, needs: HostNeeds) -> Iterator[Problem]:
    """Yield problems of one host, ``host`` in the run, with the needs of its role.

    The allowance for the memory of processes is left out: a host is refused only for memory that the config
    and the model are certain to use.
    """
    name = _named(host, limits)
    if limits.shared_free_bytes < needs.shared_bytes:
        yield Problem(
            field=f"host {name}: {SHARED_MEMORY}",
            value=f"{_gib(limits.shared_free_bytes)} GiB free of {_gib(limits.shared_bytes)}",
            remedy=f"must have {_gib(needs.shared_bytes)} GiB free for weights and payloads; enlarge it "
            "(mount -o remount,size=..., docker run --shm-size=..., launcher.shared_memory_size on "
            "Kubernetes), or lower payload.capacity_gib",
        )
    if limits.available_bytes < needs.buffer_bytes:
        yield Problem(
            field=f"host {name}: memory",
            value=f"{_gib(limits.available_bytes)} GiB available",
            remedy=f"must be {_gib(needs.buffer_bytes)} GiB and more for weights, payloads and copies for "
            "checkpoints alone; request more (launcher.mem, launcher.resources), or spread the role over "
            "more hosts (launcher.hosts)",
        )
    if limits.num_rdma_devices and _is_lock_too_small(limits, needs):
        yield Problem(
            field=f"host {name}: locked memory",
            value=_locked(limits),
            remedy=f"{_lock_remedy(needs)}: its RDMA devices use locked memory only",
        )


def lock_warning(host: str, limits: HostLimits, needs: HostNeeds) -> str | None:
    """Return a warning if a host with GPUs has a low limit of locked memory, else None.

    NVIDIA's open driver for Linux pins pages without counting them (``os_lock_user_pages`` in
    ``kernel-open/nvidia/os-mlock.c``), so a host without RDMA devices is not refused for a low limit.
    """
    if limits.num_rdma_devices or not _is_lock_too_small(limits, needs):
        return None
    limit = f"host {_named(host, limits)}: locked memory = {_locked(limits)}"
    return f"{limit}: {_lock_remedy(needs)}, if CUDA refuses to lock it"


def _is_lock_too_small(limits: HostLimits, needs: HostNeeds) -> bool:
    """Return whether one process may lock less memory than it must."""
    return limits.lockable_bytes is not None and limits.lockable_bytes < needs.locked_bytes


def _named(host: str, limits: HostLimits) -> str:
    return host if limits.machine == host else f"{host} ({limits.machine})"


def _locked(limits: HostLimits) -> str:
    assert limits.lockable_bytes is not None
    return f"{_gib(limits.lockable_bytes)} GiB for each process"


def _lock_remedy(needs: HostNeeds) -> str:
    return (
        f"one process locks {_gib(needs.locked_bytes)} GiB for weights and payloads; raise the limit "
        "(ulimit -l unlimited, LimitMEMLOCK=infinity of slurmd or sshd, docker run --ulimit memlock=-1)"
    )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.3g}"
