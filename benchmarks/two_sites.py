"""New weights between two sites: a trainer that makes a step a second, and a generator behind a slow link.

    python benchmarks/two_sites.py [--model FOLDER] [--rates 1e-6,1e-5,1e-4] [--seconds N] [--out FILE.json]

The trainer makes AdamW steps with random gradients on float32 weights, and publishes versions in bfloat16.
The generator fetches the newest version over TCP, through a proxy with the delay and the bandwidth of the
link. Without ``--model`` there are 100M random weights.

- moved: bytes that a fetch moved, of those of the version; median
- fetch: median
- behind: how many versions old the generator's weights were when it replaced them; median and maximum
"""

import argparse
import asyncio
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from common import RESULTS, machine_facts, print_table, write_json
from safetensors.torch import load_file

from forgeasync.config import Delta, WeightsSection
from forgeasync.weights import (
    Manifest,
    NamedWeight,
    ReceiveBuffer,
    WeightExchange,
    WeightFetcher,
    WeightLayout,
    WeightLedger,
    WeightPublisher,
    build_transport,
    connect_transports,
)

NUM_RANDOM = 100_000_000
STEP_S = 1.0
BYTES_PER_S = 125e6
DELAY_S = 0.04
"""Delay in each direction."""
CHUNK_BYTES = 65536
NUM_FIRST = 3
"""Fetches that do not count, because both sides start with whole versions."""


def link_to(port: int) -> int:
    """Forward connections to ``port`` of this machine, at the speed of the link; returns the port to use."""
    loop, free_s = asyncio.new_event_loop(), 0.0

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_paced: bool) -> None:
        nonlocal free_s
        chunks: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(64)

        async def deliver() -> None:
            while (due := await chunks.get())[1]:
                await asyncio.sleep(max(0.0, due[0] - loop.time()))
                writer.write(due[1])
                await writer.drain()
            writer.close()

        delivering = asyncio.ensure_future(deliver())
        data = b"-"
        while data:
            data = await reader.read(CHUNK_BYTES)
            free_s = max(free_s, loop.time()) + is_paced * len(data) / BYTES_PER_S
            await chunks.put(((free_s if is_paced else loop.time()) + DELAY_S, data))
        await delivering

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_trainer, to_trainer = await asyncio.open_connection("127.0.0.1", port)
        # The end of a run closes connections in mid-transfer.
        with suppress(ConnectionError):
            await asyncio.gather(
                pump(reader, to_trainer, is_paced=False), pump(from_trainer, writer, is_paced=True)
            )

    threading.Thread(target=loop.run_forever, daemon=True).start()
    serving = asyncio.run_coroutine_threadsafe(asyncio.start_server(accept, "127.0.0.1", 0), loop)
    return serving.result().sockets[0].getsockname()[1]


@dataclass(slots=True)
class Sites:
    """A trainer and a generator, and what was seen of them."""

    weights: list[torch.nn.Parameter]
    optimizer: torch.optim.Optimizer
    publisher: WeightPublisher
    exchange: WeightExchange
    layout: WeightLayout
    version: int = 0
    fetches: list[tuple[float, float, int]] = field(default_factory=list)
    """Seconds, share of the bytes, and age of the replaced version, of each fetch."""

    def named(self) -> list[NamedWeight]:
        return [NamedWeight(names=(str(index),), tensor=one) for index, one in enumerate(self.weights)]

    async def train(self) -> None:
        """Make a step a second, and publish each version. Waits for nobody."""
        while True:
            start_s = time.perf_counter()
            for one in self.weights:
                one.grad = torch.randn_like(one) if one.grad is None else one.grad.roll(1)
            await asyncio.to_thread(self.optimizer.step)
            self.version += 1
            await self.exchange.publish(self._stage)
            await asyncio.sleep(max(0.0, STEP_S - (time.perf_counter() - start_s)))

    async def _stage(self, slot: int, *, when_begun: Callable[[], None] = lambda: None) -> Manifest:
        shard = await self.publisher.begin(slot, self.version, self.named()).finished()
        return Manifest(
            version=shard.version,
            slot=slot,
            layout_digest=self.layout.digest,
            checksums=(shard.checksums,),
            patches=(shard.patches,),
        )

    async def generate(self, fetcher: WeightFetcher) -> None:
        """Fetch each newest version. Waits for a version to be published."""
        newest = 0
        while True:
            async with self.exchange.lease(0, newer_than=newest) as manifest:
                fetched = await fetcher.fetch(manifest)
            assert fetched.is_complete, "nothing fails here"
            share = fetched.num_bytes_moved / self.layout.num_bytes
            self.fetches.append((fetched.fetch_s, share, self.version - newest))
            newest = manifest.version


async def run(
    model: Path | None, delta: Delta, rate: float, seconds: float, folder: Path
) -> dict[str, float]:
    """Let both sites work for some seconds; returns figures by their column."""
    tensors = [torch.randn(NUM_RANDOM) * 0.02]
    if model is not None:
        tensors = [one.float() for file in model.glob("*.safetensors") for one in load_file(file).values()]
    weights = [torch.nn.Parameter(one) for one in tensors]
    named = [NamedWeight(names=(str(index),), tensor=one) for index, one in enumerate(weights)]
    is_exact = delta is Delta.EXACT
    publisher = WeightPublisher(named, torch.bfloat16, host_id="trainer", has_patches=is_exact)
    layout = WeightLayout(dtype=torch.bfloat16, ranks=(publisher.layout,))
    source = await publisher.open(folder, build_transport("tcp"), generator_hosts=frozenset({"generator"}))
    address = replace(source.address, addresses=("127.0.0.1",), port=link_to(source.address.port))
    section = WeightsSection(transport="tcp", delta=delta)
    source = replace(source, address=address)
    fetcher = WeightFetcher(
        layout=layout,
        needed=[np.ones(publisher.layout.num_blocks, bool)],
        num_bytes_needed=layout.num_bytes,
        receive_buffer=ReceiveBuffer(folder / "received", layout),
        transports=connect_transports(section, layout, [source], generator_host="generator"),
        delta=is_exact,
    )
    sites = Sites(
        weights=weights,
        optimizer=torch.optim.AdamW(weights, lr=rate, weight_decay=0.0),
        publisher=publisher,
        exchange=WeightExchange(WeightLedger(lease_timeout_s=60.0)),
        layout=layout,
    )
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds), asyncio.TaskGroup() as both:
            both.create_task(sites.train())
            both.create_task(sites.generate(fetcher))
    times, shares, behind = zip(*sites.fetches[NUM_FIRST:], strict=True)
    return {
        "moved": statistics.median(shares),
        "fetch_s": statistics.median(times),
        "behind": statistics.median(behind),
        "max_behind": max(behind),
        "num_bytes": layout.num_bytes,
    }


def main() -> None:
    """Measure, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, metavar="FOLDER", help="a Hugging Face folder")
    parser.add_argument("--rates", default="1e-6,1e-5,1e-4", help="learning rates, comma-separated")
    parser.add_argument("--seconds", type=float, default=40.0, help="of each row")
    parser.add_argument("--out", type=Path, default=RESULTS / "two_sites.json")
    arguments = parser.parse_args()
    cases = [(Delta.OFF, 1e-6), *((Delta.EXACT, float(rate)) for rate in arguments.rates.split(","))]
    found = []
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        for delta, rate in cases:
            with tempfile.TemporaryDirectory(dir=folder) as own:
                figures = asyncio.run(run(arguments.model, delta, rate, arguments.seconds, Path(own)))
            found.append({"delta": delta.value, "learning_rate": rate, **figures})
        dist.destroy_process_group()
    print_table(
        "new weights over 1 Gbit/s and 80 ms, a step a second",
        ("delta", "learning rate", "moved", "fetch", "behind"),
        (
            [
                one["delta"],
                f"{one['learning_rate']:g}",
                f"{one['moved']:.1%}",
                f"{one['fetch_s']:.2f} s",
                f"{one['behind']:.0f}, at most {one['max_behind']}",
            ]
            for one in found
        ),
        num_names=2,
    )
    write_json(arguments.out, {"machine": machine_facts(), "rows": found})


if __name__ == "__main__":
    main()
