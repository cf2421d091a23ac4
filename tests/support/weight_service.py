"""One proc's worth of publishing and reading, without Monarch: a folder's weights, staged by this process."""

import inspect
import os
import signal
import textwrap
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors.torch import load_file

from forgeasync.models import dequantized, read_model_facts, untrained_tensors
from forgeasync.schema import PythonCode
from forgeasync.weights import (
    ALONE,
    Arrived,
    Box,
    ByteRange,
    HostShare,
    Manifest,
    NamedWeight,
    Piece,
    RankLayout,
    RankSource,
    ReceiveBuffer,
    SharedMemoryTransport,
    StagingBuffers,
    StagingSource,
    Transport,
    WeightFetcher,
    WeightLayout,
    lay_out,
)

if TYPE_CHECKING:
    from forgeasync.generator import GeneratorEngine, WeightReceiver


def connected(
    transport: type[SharedMemoryTransport], rank: RankLayout, source: StagingSource
) -> SharedMemoryTransport:
    """A generator's side of a transport, on the host of the buffers."""
    made = transport()
    made.connect(
        RankSource(
            rank=rank.rank,
            num_bytes=rank.buffer_bytes,
            staging=source,
            generator_host=source.host_id,
            lease_timeout_s=60.0,
        )
    )
    return made


class FolderPublisher:
    """Publishes versions of a Hugging Face folder's tensors from this process, without a vision tower's."""

    def __init__(self, folder: Path, staging: Path, dtype: torch.dtype = torch.float32) -> None:
        left_out = untrained_tensors(folder, read_model_facts(str(folder)))
        tensors = dequantized(load_file(folder / "model.safetensors").items())
        self.tensors = {name: tensor for name, tensor in tensors if name not in left_out}
        weights = [NamedWeight(names=(name,), tensor=tensor) for name, tensor in self.tensors.items()]
        rank = lay_out(weights, range(len(weights)), rank=0, host_id="h", itemsize=dtype.itemsize)
        self.layout = WeightLayout(dtype=dtype, ranks=(rank,))
        self.buffers = StagingBuffers(staging, rank, dtype)

    @property
    def source(self) -> StagingSource:
        return StagingSource(host_id="h", paths=self.buffers.paths)

    async def connect(
        self, engine: "GeneratorEngine", receive_buffer: Path, **memory: Any
    ) -> "WeightReceiver":
        """Let an engine of this process receive; ``memory``: further fields of its ``HostMemory``."""
        from forgeasync.generator import HostMemory, WeightReceiver

        return await WeightReceiver.connect(
            engine,
            layout=self.layout,
            transports={0: connected(SharedMemoryTransport, self.layout.ranks[0], self.source)},
            host_memory=HostMemory(receive_buffer=receive_buffer, **memory),
            delta=False,
        )

    def stage(self, slot: int, version: int, tensors: dict[str, torch.Tensor]) -> Manifest:
        """Stage tensors of the folder's names and shapes."""
        staged = self.buffers.begin(slot, [tensors[name] for name in self.tensors]).finish()
        return make_manifest(self.layout, version, slot, staged)


def make_manifest(layout: WeightLayout, version: int, slot: int, *staged: Any) -> Manifest:
    """``staged``: what ``SlotWrite.finish`` or ``Publication.finished`` of each rank has returned."""
    return Manifest(
        version=version,
        slot=slot,
        layout_digest=layout.digest,
        checksums=tuple(blocks.checksums for blocks in staged),
        patches=tuple(blocks.patches for blocks in staged),
    )


def constant(version: int) -> float:
    """f(v): what every weight of a version is; tells 251 versions apart, exact in float32."""
    return (version % 251 + 1) / 1024


class FailingTransport(SharedMemoryTransport):
    """Fails once it is told to, with the bytes copied and not reported."""

    is_failing = False

    async def read(
        self, slot: int, ranges: Sequence[ByteRange], received: torch.Tensor, arrived: Arrived
    ) -> None:
        if not FailingTransport.is_failing:
            return await super().read(slot, ranges, received, arrived)
        await super().read(slot, ranges, received, lambda part: None)
        raise ConnectionResetError("the host is gone")


def make_fetcher(
    layout: WeightLayout,
    sources: Sequence[StagingSource],
    receive_buffer: ReceiveBuffer,
    *,
    transport: type[SharedMemoryTransport] = SharedMemoryTransport,
    unneeded: int | None = None,
    delta: bool = False,
    share: HostShare = ALONE,
) -> WeightFetcher:
    """Reads from all ranks, which have a source each; ``unneeded`` is a block that is taken of no rank."""
    ranks = zip(layout.ranks, sources, strict=True)
    return WeightFetcher(
        layout=layout,
        needed=[np.arange(rank.num_blocks) != unneeded for rank in layout.ranks],
        num_bytes_needed=layout.num_bytes,
        receive_buffer=receive_buffer,
        transports={rank.rank: connected(transport, rank, source) for rank, source in ranks},
        delta=delta,
        share=share,
    )


def read_versions(layout: WeightLayout, source: StagingSource, buffer_file: Path, link: Connection) -> None:
    """A reader in a process of its own: fetches each manifest that it is sent, and says what it has got.

    Answers (version, whether the fetch was complete, whether all of it was ``constant(version)``).
    """
    import asyncio

    torch.set_num_threads(1)
    receive_buffer = ReceiveBuffer(buffer_file, layout)
    fetcher = make_fetcher(layout, [source], receive_buffer)
    values = receive_buffer.image(0).view(torch.float32)
    is_weight = np.zeros(len(values), bool)
    for piece in layout.ranks[0].pieces:
        is_weight[piece.offset // 4 : piece.offset // 4 + piece.num_elements] = True
    while True:
        manifest = link.recv()
        report = asyncio.run(fetcher.fetch(manifest))
        found = values.numpy()[is_weight]
        link.send((manifest.version, report.is_complete, bool((found == constant(manifest.version)).all())))


def publish_and_die(staging: Path, link: Connection) -> None:
    """Publishes version 1, then dies in the middle of copying version 2."""
    num_elements = 2**20
    box = Box(start=(0,), size=(num_elements,))
    piece = Piece(names=("w",), shape=box.size, box=box, offset=0)
    rank = RankLayout(rank=0, host_id="h", pieces=(piece,), num_bytes=4 * num_elements)
    layout = WeightLayout(dtype=torch.float32, ranks=(rank,))
    buffers = StagingBuffers(staging, rank, torch.float32)
    staged = buffers.begin(0, [torch.full(box.size, constant(1))]).finish()
    source = StagingSource(host_id="h", paths=buffers.paths)
    link.send((layout, source, make_manifest(layout, 1, 0, staged)))
    half_way = buffers.bytes(1).view(torch.float32)
    half_way[: num_elements // 2] = constant(2)
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def write_own_transport(folder: Path, module: str) -> PythonCode:
    """Write the example into ``folder`` as a module; returns the section that asks for it.

    Its files go into ``folder`` too.
    """
    assert Transport.__doc__ is not None
    _, code = inspect.getdoc(Transport).split("a folder that all hosts mount:\n")
    code, _ = code.split("\nRules for a transport:")
    (folder / f"{module}.py").write_text(textwrap.dedent(code))
    return PythonCode(factory=f"{module}.FolderTransport", options={"folder": str(folder)})
