"""Part of gpu_probe.py about the machine: names, versions, limits, bandwidths. Needs torch alone."""

import importlib.metadata
import os
import platform
import resource
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from gpu_probe_common import GB, Device, Report, free_host_bytes, shared_memory_folder

PACKAGES = (
    "torch",
    "torchtitan",
    "vllm",
    "torchmonarch",
    "triton",
    "transformers",
    "pydantic",
    "xxhash",
    "numpy",
    "flash-attn-3",
    "flash-attn-4",
)
DRIVER_QUERIES = (
    "name,driver_version,memory.total",
    "pcie.link.gen.max,pcie.link.width.max,mig.mode.current,ecc.mode.current,compute_mode,power.limit",
    "clocks.max.sm,clocks.max.memory",
)
"""Fields of nvidia-smi. A driver that does not know one of them gives none of its line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineSizes:
    """Bytes of copies, and the width of square products. Defaults are for a GPU, as in all parts."""

    max_bytes: int = 4 * 2**30
    width: int = 8192


MACHINE = {"cuda": MachineSizes(), "cpu": MachineSizes(max_bytes=2**22, width=128)}


def machine(device: Device, report: Report) -> None:
    """Facts, then the best speed of copies and products."""
    report.put(
        python=sys.version.split()[0],
        system=platform.platform(),
        processor=_processor(),
        num_cores=len(os.sched_getaffinity(0)),
        free_host_gib=free_host_bytes() / 2**30,
        free_shared_memory_gib=shutil.disk_usage(shared_memory_folder()).free / 2**30,
        locked_memory_limit=_limit(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]),
        open_files_limit=_limit(resource.getrlimit(resource.RLIMIT_NOFILE)[0]),
        packages={name: _version(name) for name in PACKAGES},
    )
    if device.is_gpu:
        with report.case("gpu"):
            _describe_gpu(report)
        for query in DRIVER_QUERIES:
            with report.case(f"nvidia-smi {query}"):
                _ask_driver(report, query)
    sizes = MACHINE[device.kind]
    num_bytes = min(sizes.max_bytes, device.free_bytes() // 4, free_host_bytes() // 8)
    with report.case("host_copy"):
        source = torch.ones(num_bytes, dtype=torch.uint8)
        target = torch.ones_like(source)
        seconds = device.time_s(lambda: target.copy_(source))
        report.put(host_copy_gb_per_s=num_bytes / GB / seconds, host_copy_threads=torch.get_num_threads())
    if device.is_gpu:
        with report.case("links"):
            _measure_links(device, report, num_bytes)
    with report.case("products"):
        a = device.randn(sizes.width, sizes.width)
        product = torch.empty_like(a)
        seconds = device.time_s(lambda: torch.matmul(a, a, out=product), repeats=20)
        report.put(bfloat16_tflops=2e-12 * sizes.width**3 / seconds)


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _describe_gpu(report: Report) -> None:
    properties = torch.cuda.get_device_properties(0)
    free, total = torch.cuda.mem_get_info()
    report.put(
        gpu=properties.name,
        num_gpus=torch.cuda.device_count(),
        capability=list(torch.cuda.get_device_capability()),
        num_multiprocessors=properties.multi_processor_count,
        gpu_memory_gib=total / 2**30,
        free_gpu_memory_gib=free / 2**30,
        cuda=torch.version.cuda,
    )
    with report.case("libraries"):
        report.put(cudnn=torch.backends.cudnn.version(), nccl=str(torch.cuda.nccl.version()))


def _ask_driver(report: Report, query: str) -> None:
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    if found.returncode != 0:
        raise RuntimeError(f"nvidia-smi ended with {found.returncode}: {found.stdout}{found.stderr}")
    report.put(**dict(zip(query.split(","), found.stdout.splitlines()[0].split(", "), strict=True)))


def _measure_links(device: Device, report: Report, num_bytes: int) -> None:
    on_device = torch.ones(num_bytes, dtype=torch.uint8, device=device.kind)
    other = torch.ones_like(on_device)
    # Read once and written once.
    seconds = device.time_s(lambda: other.copy_(on_device))
    report.put(device_memory_gb_per_s=2 * num_bytes / GB / seconds)
    for kind in ("pageable", "page_locked"):
        with report.case(kind):
            host = torch.ones(num_bytes, dtype=torch.uint8, pin_memory=kind == "page_locked")
            to_host_s = device.time_s(lambda host=host: host.copy_(on_device, non_blocking=True))
            to_device_s = device.time_s(lambda host=host: on_device.copy_(host, non_blocking=True))
            report.put(
                kind,
                to_host_gb_per_s=num_bytes / GB / to_host_s,
                to_device_gb_per_s=num_bytes / GB / to_device_s,
            )
