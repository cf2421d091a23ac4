"""What one host says of its GPUs, driver and CUDA libraries, read before anything uses them.

nvidia-smi is asked, not CUDA: a process that has initialised CUDA holds memory on a GPU, and one whose driver
does not answer hangs, which a program with a time limit does not pass on.
"""

import csv
import importlib.util
import os
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

Version = tuple[int, ...]

FLASH_ATTENTION_PACKAGES = {3: "flash_attn_interface", 4: "flash_attn.cute.interface"}
"""What torch 2.13 imports for newer FlashAttention; version 2 is its own."""

ASK_S = 60.0
"""Seconds that nvidia-smi may take: without persistence mode the driver wakes every GPU first."""

_QUERY = (
    "index",
    "uuid",
    "name",
    "memory.total",
    "memory.free",
    "compute_cap",
    "mig.mode.current",
    "driver_version",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU that the run may use."""

    index: int
    """Its number in nvidia-smi."""
    name: str
    memory_bytes: int
    free_bytes: int
    """What no process holds."""
    capability: tuple[int, int]
    """CUDA's compute capability, such as (9, 0) for Hopper."""
    is_sliced: bool
    """Whether it is in MIG mode."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFacts:
    """The GPUs of one host that its environment lets the run see, and the software below it."""

    gpus: tuple[Gpu, ...]
    """In the order of CUDA_VISIBLE_DEVICES."""
    trouble: str | None
    """Why nothing could be learnt of GPUs; None: it could."""
    driver: str | None
    """Version of the driver, such as 550.54.15; None: there is none."""
    driver_cuda: Version | None
    """Newest CUDA that the driver supports."""
    torch: str
    """Version of torch."""
    torch_cuda: Version | None
    """CUDA that torch was built for; None: for CPUs."""
    nccl: Version | None
    """NCCL that torch has loaded; None: it has none."""
    flash_attention: frozenset[int]
    """Newer versions of FlashAttention whose package is installed."""
    compiler: str | None
    """The C compiler that Triton calls for the launchers of its kernels; None: there is none."""
    python_header: str
    """Where Triton's launchers include Python.h from."""
    has_python_header: bool


def gather_gpu_facts(visible: str | None) -> GpuFacts:
    """This host's facts; ``visible`` is CUDA_VISIBLE_DEVICES as the host's processes inherit it."""
    # Imported here: an agent answers its first call before it has to load torch.
    import torch
    import torch.distributed

    driver, driver_cuda, trouble = None, None, None
    gpus: tuple[Gpu, ...] = ()
    try:
        table = _ask(f"--query-gpu={','.join(_QUERY)}", "--format=csv,noheader,nounits")
        driver, found = parse_gpus(table)
        driver_cuda = parse_cuda_version(_ask())
        gpus = visible_gpus(found, visible)
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
    )


def _compiler() -> str | None:
    """The program that triton 3.7.1 chooses (``triton/runtime/build.py``)."""
    names = (os.environ.get("CC"),) if "CC" in os.environ else ("gcc", "clang")
    return next((path for name in names if name and (path := shutil.which(name.split()[0]))), None)


def _python_header() -> Path:
    """The file that triton 3.7.1 includes; the scheme is chosen as there."""
    scheme = sysconfig.get_default_scheme()
    # Debian's own scheme names a folder of local packages.
    scheme = "posix_prefix" if scheme == "posix_local" else scheme
    return Path(sysconfig.get_paths(scheme=scheme)["include"]) / "Python.h"


def _ask(*arguments: str) -> str:
    """What nvidia-smi prints.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it failed, or took longer than ``ASK_S``.
    """
    try:
        done = subprocess.run(
            ["nvidia-smi", *arguments],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=ASK_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ValueError(f"nvidia-smi did not answer within {ASK_S:.0f} s; the driver may be stuck") from None
    except PermissionError as error:
        raise ValueError(f"nvidia-smi cannot be run: {error}") from None
    if done.returncode:
        words = " ".join((done.stdout + " " + done.stderr).split())
        raise ValueError(f"nvidia-smi failed with exit code {done.returncode}: {words[:300]}")
    return done.stdout


def parse_gpus(table: str) -> tuple[str | None, list[tuple[str, Gpu]]]:
    """The driver's version, and the GPUs by UUID, in the order that nvidia-smi numbers them.

    ``table`` is its answer to ``_QUERY`` as CSV, memory in MiB.

    Raises:
        ValueError: a line is none that nvidia-smi writes.
    """
    driver: str | None = None
    found: list[tuple[str, Gpu]] = []
    for line in csv.reader(table.splitlines(), skipinitialspace=True):
        if not line or line[0].startswith("No devices"):
            continue
        try:
            index, uuid, name, total, free, capability, mig, driver = (cell.strip() for cell in line)
            major, minor = map(int, capability.split("."))
            gpu = Gpu(
                index=int(index),
                name=name,
                memory_bytes=int(total) * 2**20,
                free_bytes=int(free) * 2**20,
                capability=(major, minor),
                is_sliced=mig == "Enabled",
            )
        except ValueError:
            raise ValueError(
                f"nvidia-smi describes a GPU in a way that is not understood: {line!r:.300}"
            ) from None
        found.append((uuid, gpu))
    return driver, found


def parse_cuda_version(header: str) -> Version | None:
    """The newest CUDA that the driver supports, which nvidia-smi writes above its table of GPUs."""
    match = re.search(r"CUDA (?:UMD )?Version\s*:\s*(\d+\.\d+)", header)
    return None if match is None else _version(match[1])


def visible_gpus(found: Sequence[tuple[str, Gpu]], visible: str | None) -> tuple[Gpu, ...]:
    """Those of a host's GPUs that CUDA_VISIBLE_DEVICES names, in its order; None: all.

    Which GPU a slice (``MIG-...``) belongs to is not known here: it stands for all GPUs in MIG mode.
    As CUDA does, names after one that is not known are ignored.
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
