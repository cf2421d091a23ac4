"""Judges whether a run can use the GPUs of its hosts. Pure: facts and plan in, problems and warnings out."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from forgeasync.config import FlashAttention
from forgeasync.launch.gpu_facts import FLASH_ATTENTION_PACKAGES, Gpu, GpuFacts, Version
from forgeasync.planning import least_bytes
from forgeasync.schema import Problem

BFLOAT16_CAPABILITY = (8, 0)
"""Ampere's: FlashAttention 2, grouped products and vLLM's MoE kernels in bfloat16 need it."""

_VERSIONS = {FlashAttention.FA3: 3, FlashAttention.FA4: 4}

_MAJORS_OF = {3: (9,), 4: (9, 10)}
"""Major compute capabilities for a version of FlashAttention, by torch 2.13 (``_fa3.py``, ``_fa4.py``)."""

_PREFERRED = {9: 3, 10: 4, 11: 4, 12: 4}
"""What TorchTitan 0.3.0 takes on a major compute capability if it is installed."""


_WHY_ALIKE = "ranks wait for the slowest one, and kernels of different architectures round differently"
_SAME_LOCK = "install the same requirements/gpu.lock on every host"


@dataclass(frozen=True, slots=True, kw_only=True)
class RolePlan:
    """What one proc of a role needs of its GPU."""

    role: str
    num_bytes: int
    """By the memory plan."""
    field: str
    """Key of the config that decides on it most directly."""
    value: object
    remedy: str
    """What makes it less."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostGpus:
    """One host's GPUs, and what the run puts on them."""

    host: str
    """Its name in the run."""
    facts: GpuFacts
    num_needed: int
    """The run takes the first ones."""
    plans: tuple[RolePlan, ...]
    """Of every role that has procs there."""
    is_trainer: bool

    @property
    def used(self) -> tuple[Gpu, ...]:
        return self.facts.gpus[: self.num_needed]


def check_hosts_gpus(hosts: Sequence[HostGpus], flash_attention: FlashAttention) -> Iterator[Problem]:
    """Find what the GPUs of all hosts, and the software below them, lack for a run."""
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
    """Words about what a run on these GPUs does without, or may have no room for; none of it ends the run."""
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
            "fewer procs",
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
        elif gpu.capability < BFLOAT16_CAPABILITY:
            yield Problem(
                field=f"host {host.host}: GPU {gpu.index}",
                value=gpu.name,
                remedy=f"has compute capability {_dotted(gpu.capability)}; must have 8.0 (A100) or more, "
                "which bfloat16 and FlashAttention 2 need",
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
    # A GPU that is large enough may be held by others.
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
    """Compare the hosts of a role with its first one."""
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


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.3g}"
