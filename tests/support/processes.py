"""Runs a function on several gloo ranks, each a process of its own."""

import faulthandler
import multiprocessing
import os
import pickle
import socket
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

R = TypeVar("R")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _run_rank(
    rank: int, function: Callable[..., Any], arguments: tuple[Any, ...], world_size: int, port: int, out: str
) -> None:
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
    }
    # A rank that dies of a signal shows where it was.
    faulthandler.enable()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    torch.autograd.set_multithreading_enabled(False)
    try:
        result = function(*arguments)
        Path(out, str(rank)).write_bytes(pickle.dumps(result))
        dist.barrier()
    finally:
        dist.destroy_process_group()


def run_ranks(world_size: int, function: Callable[..., R], *arguments: object) -> list[R]:
    """The results of ``function(*arguments)`` on every rank; any rank's exception is raised."""
    with tempfile.TemporaryDirectory() as out:
        torch.multiprocessing.spawn(
            _run_rank,
            args=(function, arguments, world_size, _free_port(), out),
            nprocs=world_size,
        )
        return [pickle.loads(Path(out, str(rank)).read_bytes()) for rank in range(world_size)]


@contextmanager
def alone_in_this_process(folder: Path) -> Iterator[None]:
    """A group of one gloo rank in this very process, for what is quick and asks for a group."""
    store = dist.FileStore(str(folder / "store"), 1)
    dist.init_process_group("gloo", rank=0, world_size=1, store=store)
    try:
        yield
    finally:
        dist.destroy_process_group()


def run_alone(function: Callable[..., R], *arguments: object) -> R:
    """The result of ``function(*arguments)`` in a process of its own, without torch.distributed."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()
