"""Shared by the benchmarks: running a command while its memory is measured, facts of the machine, tables,
JSON.

Benchmarks are scripts, started as ``python benchmarks/NAME.py``. The package does not import them. They
report times and never judge them.
"""

import contextlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from forgeasync.config import ModelFacts
    from forgeasync.trainer import PackedRow, PolicyTrainer, StepResult

REPOSITORY = Path(__file__).resolve().parent.parent
CONFIG = REPOSITORY / "configs" / "tiny_moe_cpu.yaml"
"""The embedded default."""
RESULTS = Path(__file__).resolve().parent / "results"
"""Default folder for results, which git ignores."""

MEMORY_INTERVAL_S = 3.0
"""Seconds between two measurements of memory, each of which takes the kernel 10 ms for each process."""

LOG_TAIL_CHARACTERS = 3000


def run_watched(command: Sequence[str], *, environment: Mapping[str, str]) -> float:
    """Run a command in the repository, with ``environment`` added to this process's own.

    Returns its peak memory in MiB: the largest sum of proportional set sizes over the process tree, in which
    shared pages count once.

    Raises:
        RuntimeError: the exit code is not 0. The message ends with the tail of the output.
    """
    peak_bytes, exit_code = 0, None
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
        process = subprocess.Popen(
            list(command),
            cwd=REPOSITORY,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            while exit_code is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    exit_code = process.wait(MEMORY_INTERVAL_S)
                peak_bytes = max(peak_bytes, _tree_bytes(process.pid))
        except KeyboardInterrupt:
            # The terminal interrupts the command too, which then ends its own processes.
            process.wait()
            raise
        if exit_code != 0:
            output.seek(0)
            tail = output.read()[-LOG_TAIL_CHARACTERS:]
            raise RuntimeError(f"{' '.join(command)} ended with exit code {exit_code}:\n{tail}")
    return peak_bytes / 2**20


def run_app(app: str, config: Path, arguments: Sequence[str]) -> float:
    """Run an app with a config and further arguments, as ``run_watched`` does.

    Its processes share the cores, so each has one thread, as in the Makefile.
    """
    command = [sys.executable, "-m", app, "--config", str(config), *arguments]
    return run_watched(command, environment={"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"})


def _tree_bytes(pid: int) -> int:
    """Return the memory of a process and all its descendants."""
    import psutil

    total = 0
    with contextlib.suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        for process in (root, *root.children(recursive=True)):
            # It may have ended since.
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                total += process.memory_full_info().pss
    return total


def machine_facts() -> dict[str, Any]:
    """Describe the machine of a measurement."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "processor": names[0] if names else platform.machine(),
        "usable_cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "system": platform.platform(),
        "python": sys.version.split()[0],
    }


def print_table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], *, num_names: int = 1
) -> None:
    """Print a table, wide if the output is no terminal. The first ``num_names`` columns have no numbers."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title)
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number < num_names else "right")
    for row in rows:
        table.add_row(*row)
    Console(width=140).print(table)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a file of indented JSON, and create its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def write_model(folder: Path, **dimensions: object) -> None:
    """Write a random Qwen3-MoE with the tokenizer of ``write_tiny_model``, and other values in its config."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    from forgeasync.testing import write_tiny_model

    write_tiny_model(folder)
    config = Qwen3MoeConfig.from_pretrained(folder, **dimensions)
    torch.manual_seed(0)
    Qwen3MoeForCausalLM(config).save_pretrained(folder)


def one_rank_trainer(
    facts: "ModelFacts",
    *,
    temperature: float = 1.0,
    checkpoint: Path | None = None,
    resume_from: Path | None = None,
    **options: Any,
) -> "PolicyTrainer":
    """Make a trainer of one rank. Without a checkpoint its weights are random, and always the same.

    ``options`` are those of its ``TrainerSection``. Without an optimizer among them, its steps are too small
    to change anything.
    """
    from forgeasync.algorithms import Loss
    from forgeasync.config import OptimizerSection, TrainerSection
    from forgeasync.trainer import PolicyTrainer, TrainerSetup

    options = {"optimizer": OptimizerSection(learning_rate=1e-12, max_grad_norm=1e9), **options}
    return PolicyTrainer(
        TrainerSetup(
            section=TrainerSection(replay_probe_share=0.0, **options),
            facts=facts,
            temperature=temperature,
            loss=Loss(),
            seed=0,
            checkpoint=checkpoint,
            resume_from=resume_from,
        )
    )


def watched_step(
    trainer: "PolicyTrainer", rows: Sequence["PackedRow"]
) -> tuple["StepResult", list["torch.Tensor"], float]:
    """Take a step; return its result, its gradients, and the seconds until they and their norm were known."""
    from torch.distributed.tensor import DTensor
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    gradients: list[torch.Tensor] = []
    known_s = 0.0

    def before_update(*_: object) -> None:
        nonlocal known_s
        known_s = time.perf_counter()
        for parameter in trainer.model.parameters():
            gradient = parameter.grad
            assert gradient is not None, "nothing is frozen"
            whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
            gradients.append(whole.clone())

    hook = register_optimizer_step_pre_hook(before_update)
    start_s = time.perf_counter()
    result = trainer.train_step(rows)
    hook.remove()
    if result.skip_reason is not None:
        raise RuntimeError(f"a step was not taken: {result.skip_reason}")
    return result, gradients, known_s - start_s
