"""The payload store against memcpy of the same bytes: writing, reading here, reading from another proc.

    python benchmarks/payload_store.py [--rounds N] [--remote-rounds N] [--out FILE.json]

A group is 8 rollouts of 32,768 tokens as a model with 48 MoE layers, top-8 of 128 experts, records them:
tokens, log-probabilities, routed experts, kept tokens (20 a token on average). Every round runs all
contenders once, and the next one starts with the next contender; medians over the rounds. GB are 10^9 bytes
of payload, each counted once, however often it is moved.

- memcpy, warm memory: np.copyto of all arrays into memory that was written before
- memcpy, fresh memory: the same into memory that the kernel has to hand out and clear first
- memcpy, fresh shared memory: the same into a new mapped file in /dev/shm
- checksum: xxh3_64 of the same bytes
- write: PayloadWriter.write_group
- read, views / read, copies: PayloadReader.read, of every payload
- read over TCP: RemotePayloadReader.read in another proc, of every payload, handles included
"""

import argparse
import asyncio
import mmap
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import xxhash
from common import RESULTS, machine_facts, write_json
from monarch.actor import Actor, concurrent_endpoint, this_host
from monarch.rdma import RDMABuffer, get_rdma_backend
from rich.console import Console
from rich.table import Table

from forgeasync.launch import spawn_role
from forgeasync.rollouts import (
    SHARED_MEMORY,
    PayloadReader,
    PayloadRef,
    PayloadServer,
    PayloadWriter,
    RemotePayloadReader,
    create_run_folder,
    measure,
    remove_run_folder,
)

NUM_ROLLOUTS = 8
NUM_TOKENS = 32_768
NUM_LAYERS, TOP_K, NUM_EXPERTS = 48, 8, 128
MEAN_KEPT = 20
HOST = "this host"
BASELINE = "memcpy, warm memory"
REMOTE = "read over TCP"
REMOTE_TIMEOUT_S = 60


def make_payload(seed: int) -> dict[str, np.ndarray]:
    """Make the arrays that one rollout records; T tokens, L layers, K experts per token."""
    rng = np.random.default_rng(seed)
    num_kept_T = rng.integers(1, 2 * MEAN_KEPT, NUM_TOKENS)
    kept_offsets = np.concatenate([[0], np.cumsum(num_kept_T)]).astype(np.int64)
    return {
        "tokens_T": rng.integers(0, 150_000, NUM_TOKENS, dtype=np.int32),
        "logprobs_T": rng.normal(size=NUM_TOKENS).astype(np.float32),
        "routed_experts_TLK": rng.integers(0, NUM_EXPERTS, (NUM_TOKENS, NUM_LAYERS, TOP_K), dtype=np.uint8),
        "kept_offsets": kept_offsets,
        "kept_ids": rng.integers(0, 150_000, kept_offsets[-1], dtype=np.int32),
    }


def copy_into(memory: np.ndarray, group: list[dict[str, np.ndarray]]) -> None:
    """One np.copyto per array, one behind the other."""
    position = 0
    for payload in group:
        for array in payload.values():
            target = memory[position : position + array.nbytes].view(array.dtype).reshape(array.shape)
            np.copyto(target, array)
            position += -(-array.nbytes // 64) * 64


def copy_into_new_file(group: list[dict[str, np.ndarray]], num_bytes: int) -> None:
    """The copies alone, of what ``write_group`` does."""
    with tempfile.TemporaryFile(dir=SHARED_MEMORY) as file:
        os.posix_fallocate(file.fileno(), 0, num_bytes)
        mapping = mmap.mmap(file.fileno(), num_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        copy_into(np.frombuffer(mapping, np.uint8), group)


def timed(action: Callable[[], object]) -> float:
    """Seconds that ``action`` takes."""
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def measure_local(
    num_rounds: int, group: list[dict[str, np.ndarray]], folder: Path
) -> dict[str, list[float]]:
    """Seconds per group, by contender; a list item is a round."""
    num_bytes = sum(measure(payload) for payload in group)
    warm = np.ones(num_bytes, np.uint8)
    writer, reader = PayloadWriter(folder, HOST, 3 * num_bytes), PayloadReader(HOST)
    held = writer.write_group(group)

    def write() -> float:
        started = time.perf_counter()
        refs = writer.write_group(group)
        taken_s = time.perf_counter() - started
        writer.free(refs[0].file)
        return taken_s

    def read(*, copy: bool) -> float:
        return timed(lambda: [reader.read(ref, copy=copy) for ref in held])

    contenders: dict[str, Callable[[], float]] = {
        BASELINE: lambda: timed(lambda: copy_into(warm, group)),
        "memcpy, fresh memory": lambda: timed(lambda: copy_into(np.empty(num_bytes, np.uint8), group)),
        "memcpy, fresh shared memory": lambda: timed(lambda: copy_into_new_file(group, num_bytes)),
        "checksum": lambda: timed(lambda: xxhash.xxh3_64_intdigest(warm.data)),
        "write": write,
        "read, views": lambda: read(copy=False),
        "read, copies": lambda: read(copy=True),
    }
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    names = list(contenders)
    for number in range(-1, num_rounds):
        # The first round warms up; each starts with another contender.
        first = number % len(names)
        for name in names[first:] + names[:first]:
            taken_s = contenders[name]()
            if number >= 0:
                seconds[name].append(taken_s)
    writer.free(held[0].file)
    return seconds


class Owner(Actor):
    """Writes the group and serves it."""

    def __init__(self, folder: Path, capacity_bytes: int) -> None:
        self._writer = PayloadWriter(folder, HOST, capacity_bytes)
        self._server = PayloadServer(self._writer)

    @concurrent_endpoint
    async def write(self) -> list[PayloadRef]:
        return self._writer.write_group([make_payload(seed) for seed in range(NUM_ROLLOUTS)])

    @concurrent_endpoint
    async def expose(self, ref: PayloadRef) -> RDMABuffer:
        return self._server.expose(ref)

    @concurrent_endpoint
    async def free(self, file: str) -> None:
        await self._server.free(file)


class Remote(Actor):
    """Reads what the owner serves."""

    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        self._reader = RemotePayloadReader(REMOTE_TIMEOUT_S)

    @concurrent_endpoint
    async def read_s(self, refs: list[PayloadRef]) -> float:
        """Seconds for all of them, one after the other."""
        started = time.perf_counter()
        for ref in refs:
            await self._reader.read(ref, self._owner.expose.call_one)
        return time.perf_counter() - started


async def measure_remote(num_rounds: int, folder: Path, capacity_bytes: int) -> list[float]:
    """Seconds per group; every round registers a new file, the first is not counted."""
    meshes = [spawn_role(this_host(), role, num_procs=1) for role in ("payload_owner", "payload_reader")]
    try:
        owner = meshes[0].spawn("payload_owner", Owner, folder, capacity_bytes)
        remote = meshes[1].spawn("payload_reader", Remote, owner)
        seconds = []
        for _ in range(num_rounds + 1):
            refs = await owner.write.call_one()
            seconds.append(await remote.read_s.call_one(refs))
            await owner.free.call_one(refs[0].file)
        return seconds[1:]
    finally:
        for mesh in reversed(meshes):
            await mesh.stop()


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """One contender; ``gb_per_s`` from the median, ``relative`` to memcpy into warm memory."""

    ms_per_rollout: float
    gb_per_s: float
    relative: float


def summarize(seconds: Mapping[str, list[float]], num_bytes: int) -> dict[str, Summary]:
    """Medians over the rounds; ``num_bytes`` is a group's."""
    medians = {name: statistics.median(rounds) for name, rounds in seconds.items()}
    return {
        name: Summary(
            ms_per_rollout=median_s / NUM_ROLLOUTS * 1e3,
            gb_per_s=num_bytes / median_s / 1e9,
            relative=medians[BASELINE] / median_s,
        )
        for name, median_s in medians.items()
    }


def report(summaries: Mapping[str, Summary], bytes_per_token: float, backend: str) -> Table:
    """A row per contender."""
    table = Table(title=f"payloads of {NUM_TOKENS:,} tokens, {bytes_per_token:.1f} bytes a token")
    table.add_column("contender")
    for column in ("ms a rollout", "GB/s", "of memcpy, warm"):
        table.add_column(column, justify="right")
    for name, one in summaries.items():
        table.add_row(name, f"{one.ms_per_rollout:.2f}", f"{one.gb_per_s:.2f}", f"x{one.relative:.2f}")
    table.caption = f"RDMABuffer's backend: {backend}"
    return table


def main() -> None:
    """Measure, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--remote-rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS / "payload_store.json")
    arguments = parser.parse_args()
    group = [make_payload(seed) for seed in range(NUM_ROLLOUTS)]
    num_bytes = sum(measure(payload) for payload in group)
    capacity_bytes = 3 * num_bytes
    folder = create_run_folder(capacity_bytes)
    try:
        seconds = measure_local(arguments.rounds, group, folder)
        seconds[REMOTE] = asyncio.run(measure_remote(arguments.remote_rounds, folder, capacity_bytes))
    finally:
        remove_run_folder(folder)
    bytes_per_token = num_bytes / (NUM_ROLLOUTS * NUM_TOKENS)
    summaries = summarize(seconds, num_bytes)
    Console(width=100).print(report(summaries, bytes_per_token, get_rdma_backend()))
    write_json(
        arguments.out,
        {
            "machine": machine_facts(),
            "load_average": os.getloadavg()[0],
            "backend": get_rdma_backend(),
            "bytes_per_token": bytes_per_token,
            "bytes_of_a_group": num_bytes,
            "contenders": {name: asdict(summary) for name, summary in summaries.items()},
            "seconds_of_rounds": seconds,
        },
    )


if __name__ == "__main__":
    main()
