"""Shared by the parts of gpu_probe.py: the device with its clock, and the report of a part.

Imports torch (2.4 or newer) and the standard library (Python 3.10 or newer) alone.
"""

import contextlib
import importlib
import json
import math
import os
import re
import statistics
import sys
import time
import traceback
import types
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

REPOSITORY = Path(__file__).resolve().parent.parent
SHARED_MEMORY = Path("/dev/shm")
GB = 1e9

TOLERANCE = 0.03
"""Limit of the largest error divided by the largest value. Rounding in bfloat16 gives 0.01, a wrong mask
1."""

TRACEBACK_LINES = 12


class Skipped(Exception):
    """This machine cannot run a part or a case. The message says what is missing."""


class Device:
    """The device of a part."""

    def __init__(self, kind: str) -> None:
        """``kind`` is "cuda" or "cpu".

        Raises:
            RuntimeError: there is no such device.
        """
        if kind == "cuda" and not torch.cuda.is_available():
            why: object = "it does not say why"
            try:
                torch.cuda.init()
            except Exception as error:  # of many types: no CUDA build, no driver, no device
                why = error
            raise RuntimeError(f"torch {torch.__version__} sees no CUDA GPU: {why}")
        self.kind = kind
        self.is_gpu = kind == "cuda"

    def synchronize(self) -> None:
        if self.is_gpu:
            torch.cuda.synchronize()

    def randn(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(shape, dtype=dtype, device=self.kind)

    def free_bytes(self) -> int:
        return torch.cuda.mem_get_info()[0] if self.is_gpu else free_host_bytes()

    def once_s(self, function: Callable[[], object]) -> float:
        """Return the seconds of a call with the device's work."""
        self.synchronize()
        start_s = time.perf_counter()
        function()
        self.synchronize()
        return time.perf_counter() - start_s

    def time_s(self, function: Callable[[], object], *, repeats: int = 5) -> float:
        """Return the median seconds of a call with the device's work, after a call that does not count."""
        return statistics.median([self.once_s(function) for _ in range(repeats + 1)][1:])

    def time_beside(
        self,
        report: "Report",
        name: str,
        begin: Callable[[], Callable[[], object]],
        begun_s: float,
        work: Callable[[], object],
    ) -> None:
        """Report the seconds of repeated ``work`` on the current stream, alone and beside something.

        ``begin`` starts what runs beside it, and returns a function that waits for that. It takes ``begun_s``
        alone, and so do the repetitions.
        """
        num = max(1, min(10_000, round(begun_s / self.time_s(work))))

        def repeat() -> None:
            for _ in range(num):
                work()

        report.put(name, repetitions=num, alone_s=self.time_s(repeat, repeats=2))
        self.synchronize()
        start_s = time.perf_counter()
        wait = begin()
        repeat()
        if self.is_gpu:
            torch.cuda.current_stream().synchronize()
        report.put(name, beside_s=time.perf_counter() - start_s)
        wait()
        report.put(name, both_s=time.perf_counter() - start_s)

    def measure_peak(self, function: Callable[[], object]) -> float | None:
        """Return the largest growth of the device's memory during a call in GiB; None without a GPU."""
        if not self.is_gpu:
            function()
            return None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        function()
        torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated() - before) / 2**30


class Report:
    """The results of a part. Each is on disk at once, for parts that hang."""

    def __init__(self, file: Path | None = None) -> None:
        self.figures: dict[str, object] = {}
        self.checks: dict[str, bool] = {}
        self.errors: dict[str, str] = {}
        self.skipped: dict[str, str] = {}
        self._file = file

    def put(self, prefix: str = "", /, **figures: object) -> None:
        """Add figures, whose names end in their units, with a prefix and "_" before their names."""
        self.figures |= {f"{prefix}_{name}" if prefix else name: one for name, one in figures.items()}
        self._write()

    def check(self, name: str, is_right: bool) -> None:
        """Add a statement that has to hold."""
        self.checks[name] = bool(is_right)
        self._write()

    def compare(
        self, name: str, names: Iterable[str], found: Iterable[torch.Tensor], expected: Iterable[torch.Tensor]
    ) -> None:
        """Report the relative errors of tensors with ``names``, and check that they are small."""
        pairs = zip(names, found, expected, strict=True)
        errors = {of: relative_error(one, other) for of, one, other in pairs}
        self.put(name, relative_errors=errors)
        self.check(name, max(errors.values()) < TOLERANCE)

    @contextlib.contextmanager
    def case(self, name: str) -> Iterator[None]:
        """Catch the errors of one case of a part, so that the next ones run."""
        try:
            yield
        except Skipped as reason:
            self.skipped[name] = str(reason)
        except Exception as error:
            self.errors[name] = describe(error)
        self._write()

    def content(self) -> dict[str, object]:
        """Return the report in JSON's types. It is ok if nothing failed and something was tried."""
        is_ok = not self.errors and all(self.checks.values()) and bool(self.figures or self.checks)
        parts = {"figures": self.figures, "checks": self.checks, "errors": self.errors}
        return plain({"ok": is_ok, **parts, "skipped": self.skipped})

    def _write(self) -> None:
        if self._file is not None:
            partial = self._file.with_suffix(".partial")
            partial.write_text(json.dumps(self.content()), encoding="utf-8")
            partial.replace(self._file)


def describe(error: BaseException) -> str:
    """Return the last lines of an exception's traceback, the message last."""
    lines = "".join(traceback.format_exception(type(error), error, error.__traceback__)).splitlines()
    return "\n".join(lines[-TRACEBACK_LINES:])


def plain(value: Any) -> Any:
    """Return a value in JSON's types: floats with five digits, or as text if they are not finite."""
    if isinstance(value, dict):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    if isinstance(value, float):
        return float(f"{value:.5g}") if math.isfinite(value) else str(value)
    return value if value is None or isinstance(value, (bool, int, str)) else str(value)


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference divided by the largest expected number; infinite without finite
    numbers."""
    if found.numel() == expected.numel() == 0:
        return 0.0
    found, expected = found.detach(), expected.detach()
    if not bool(torch.isfinite(found).all()):
        return math.inf
    scale = max(float(expected.abs().max()), 1e-30)
    return float((found.double() - expected.double()).abs().max()) / scale


def free_host_bytes() -> int:
    """Return the memory that is available without swapping."""
    table = Path("/proc/meminfo").read_text(encoding="utf-8")
    return 1024 * int(re.findall(r"^MemAvailable: +(\d+) kB", table, re.MULTILINE)[0])


def open_trainer_package(device: Device, report: Report) -> None:
    """Make modules of ``forgeasync.trainer`` importable that need torch alone, without TorchTitan.

    Their package imports TorchTitan, and all packages import lazy_loader. A package that cannot be imported
    is replaced by its front, and the report names it. Modules that need TorchTitan fail when they are
    imported.
    """
    missing = {}
    fronts = sorted((REPOSITORY / "forgeasync").glob("*/__init__.pyi"))
    for name in ("forgeasync", *(f"forgeasync.{file.parent.name}" for file in fronts)):
        try:
            importlib.import_module(name)
        except Exception as error:
            missing[name] = f"{type(error).__name__}: {error}"
            sys.modules[name] = _front_alone(name)
    if missing:
        report.put(packages_without_their_init=missing)
    if "forgeasync.trainer" in missing:
        # The one name in it that others import.
        device_type = types.ModuleType("forgeasync.models.workarounds.titan_utils")
        device_type.DEVICE_TYPE = device.kind
        sys.modules["forgeasync.models.workarounds.titan_utils"] = device_type


def _front_alone(name: str) -> types.ModuleType:
    """Return a package with the names that ``__init__.pyi`` lists, without running its ``__init__.py``."""
    package = types.ModuleType(name)
    folder = REPOSITORY.joinpath(*name.split("."))
    stub = (folder / "__init__.pyi").read_text(encoding="utf-8")
    modules = {
        attribute: module
        for module, attribute in re.findall(r"^from \.([\w.]+) import (\w+) as", stub, re.MULTILINE)
    }

    def find(attribute: str) -> object:
        if attribute not in modules:
            raise AttributeError(f"module {name!r} has no attribute {attribute!r}")
        return getattr(importlib.import_module(f"{name}.{modules[attribute]}"), attribute)

    package.__path__ = [str(folder)]
    package.__getattr__ = find  # type: ignore[method-assign]
    return package


@contextlib.contextmanager
def group_of_one(backend: str) -> Iterator[None]:
    """A process group of this process alone."""
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
    dist.init_process_group(backend, store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def trainer_process() -> Iterator[None]:
    """This process as the only one of a run's trainer. Needs TorchTitan."""
    from forgeasync.models import DEVICE_TYPE

    os.environ.setdefault("LOCAL_RANK", "0")
    if DEVICE_TYPE == "cuda":
        torch.cuda.set_device(0)
    backend = "gloo" if DEVICE_TYPE == "cpu" else "cpu:gloo,cuda:nccl"
    # Recomputation in the backward pass needs the mesh context of this thread.
    with group_of_one(backend), torch.autograd.set_multithreading_enabled(False):
        yield
