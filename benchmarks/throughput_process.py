"""Contenders of ``trainer_throughput.py`` in processes of their own, which step when they are told to."""

import ctypes
import dataclasses
import gc
import multiprocessing
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Protocol

import psutil
import torch

from forgeasync.config import ParallelSection
from forgeasync.trainer import TrainingSequence

PADDED, PADDED_SORTED = "padded", "padded, sorted"
PACKED, PACKED_COMPILED = "packed", "packed, compiled"
PAIR, PAIR_COMPILED = "packed, FSDP2 + EP2", "packed, FSDP2 + EP2, compiled"


class Trainer(Protocol):
    """The interface that is measured: a step at a size, returning loss and gradient norm."""

    def step(self, size: int) -> tuple[float, float]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Everything besides its rank that a contender's process is built from."""

    contender: str
    model: Path
    sequences: list[TrainingSequence]
    port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    step_s: float
    loss: float
    grad_norm: float
    peak_bytes: int
    """Above the size before the model was built, since memory was last trimmed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    size: int
    num_threads: int
    trims: bool = False
    """Give freed memory back and forget the peak first."""


def _build(work: Work, rank: int) -> Trainer:
    # Imported here: a process has its own side only.
    if work.contender in (PADDED, PADDED_SORTED):
        from throughput_padded import PaddedTrainer

        trainer = PaddedTrainer(work.model, work.sequences, is_sorted=work.contender == PADDED_SORTED)
        print(f"{work.contender}: {trainer.implementations()}", flush=True)
        return trainer
    from throughput_packed import PackedTrainer

    parallel = ParallelSection()
    if work.contender in (PAIR, PAIR_COMPILED):
        parallel = ParallelSection(num_procs=2, expert=2)
    compile = work.contender in (PACKED_COMPILED, PAIR_COMPILED)
    return PackedTrainer(work.model, work.sequences, parallel, compile=compile, rank=rank, port=work.port)


def _serve(connection: Connection, work: Work, rank: int) -> None:
    """A contender's process: builds it, then takes steps as told until told None."""
    torch.set_num_threads(1)
    if work.contender in (PADDED, PADDED_SORTED):
        import throughput_padded  # noqa: F401
    else:
        import throughput_packed  # noqa: F401
    before_bytes = psutil.Process().memory_info().rss
    trainer = _build(work, rank)
    connection.send(None)
    while (command := connection.recv()) is not None:
        torch.set_num_threads(command.num_threads)
        if command.trims:
            _trim_memory()
        start_s = time.perf_counter()
        loss, grad_norm = trainer.step(command.size)
        step_s = time.perf_counter() - start_s
        peak_bytes = _peak_resident_bytes() - before_bytes
        connection.send(Step(step_s=step_s, loss=loss, grad_norm=grad_norm, peak_bytes=peak_bytes))


def _trim_memory() -> None:
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")


def _peak_resident_bytes() -> int:
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    (line,) = (line for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


class Contender:
    """The processes of a contender, as one."""

    def __init__(self, work: Work, *, num_procs: int, sizes: Sequence[int]) -> None:
        self.name = work.contender
        self.num_procs = num_procs
        self._sizes = sizes
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(num_procs):
            mine, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, work, rank), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(mine)
            self._processes.append(process)
        for pipe in self._pipes:
            pipe.recv()

    def step(self, command: Command) -> Step:
        """One step of all processes, which together take as long as the slowest."""
        for pipe in self._pipes:
            pipe.send(command)
        steps = [pipe.recv() for pipe in self._pipes]
        return dataclasses.replace(
            steps[0],
            step_s=max(step.step_s for step in steps),
            peak_bytes=sum(step.peak_bytes for step in steps),
        )

    def best_size(self, num_threads: int) -> int:
        """The fastest of the sizes, by the best of three steps: the first may compile."""

        def fastest(size: int) -> float:
            return min(self.step(Command(size=size, num_threads=num_threads)).step_s for _ in range(3))

        return min(self._sizes, key=fastest)

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join()
