"""Runs a function in processes of its own: on several gloo ranks, or alone."""

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from tests.support.fork_server import ForkServer
from tests.support.tiers import Starts, starts

R = TypeVar("R")

_TRAINERS = ForkServer(
    "forgeasync.trainer.policy_trainer",
    # What TorchTitan and transformers import with their first model.
    "torchtitan.trainer",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
    "pytest",
)
_ENGINES = ForkServer(
    "vllm.model_executor.models.qwen3_moe",
    "vllm.v1.worker.cpu_worker",
    "forgeasync.generator.engine",
    "pytest",
)
"""A server of their own: vLLM changes torch for whoever imports it."""


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _run_rank(function: Callable[..., Any], arguments: tuple[Any, ...]) -> object:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.autograd.set_multithreading_enabled(False)
    try:
        result = function(*arguments)
        dist.barrier()
        return result
    finally:
        dist.destroy_process_group()


@starts(Starts.PROCS)
def run_ranks(world_size: int, function: Callable[..., R], *arguments: object) -> list[R]:
    """The results of ``function(*arguments)`` on every rank; any rank's exception is raised."""
    shared = os.environ | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        "WORLD_SIZE": str(world_size),
    }
    environments = [shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world_size)]
    return _TRAINERS.run(_run_rank, (function, arguments), environments=environments)


@starts(Starts.ENGINE)
def run_alone(function: Callable[..., R], *arguments: object) -> R:
    """The result of ``function(*arguments)`` in a process that has imported vLLM, without a process group."""
    return _ENGINES.run(function, arguments, environments=[dict(os.environ)])[0]


@starts(Starts.PROCS)
def run_apart(function: Callable[..., R], *arguments: object) -> R:
    """The same in a process that has imported TorchTitan."""
    return _TRAINERS.run(function, arguments, environments=[dict(os.environ)])[0]


@contextmanager
def alone_in_this_process(folder: Path) -> Iterator[None]:
    """A group of one gloo rank in this very process, for what is quick and asks for a group."""
    store = dist.FileStore(str(folder / "store"), 1)
    dist.init_process_group("gloo", rank=0, world_size=1, store=store)
    try:
        yield
    finally:
        dist.destroy_process_group()
