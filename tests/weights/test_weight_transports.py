"""Transports: all carry versions bit for bit, a user's own like built-in ones; and what is refused."""

import asyncio
import contextlib
import dataclasses
import pickle
import re
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torchstore
from monarch.actor import Actor, concurrent_endpoint

from forgeasync.config import BUILT_IN_TRANSPORTS, TransportChoice, WeightsSection
from forgeasync.controller import check
from forgeasync.models import check_config
from forgeasync.runtime import LocalHosts, ProcessManager
from forgeasync.schema import ConfigError, PythonCode
from forgeasync.weights import (
    BLOCK_BYTES,
    SEGMENT_BYTES,
    Arrived,
    AutoTransport,
    ByteRange,
    FetchReport,
    NamedWeight,
    RankSource,
    RankStaging,
    RdmaTransport,
    ReceiveBuffer,
    SharedMemoryTransport,
    StagingSource,
    TcpAddress,
    TcpTransport,
    Transport,
    WeightFetcher,
    WeightLayout,
    WeightPublisher,
    build_transport,
    check_transport,
    connect_transports,
    received_images,
    whole_tensors,
)
from tests.support.config_samples import FACTS, minimal_config, only
from tests.support.weight_service import make_manifest, write_own_transport

HOST = "here"

NUM_ROWS = SEGMENT_BYTES // 2048 + 40
"""Rows of 2048 bytes."""


def make_weights(version: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Bits of all kinds, also those of nan, inf and subnormal numbers; more than one segment.

    Versions differ in some rows in the middle and in the norm.
    """
    bits = np.random.default_rng(0).integers(0, 2**32, size=(NUM_ROWS, 512), dtype=np.uint32)
    bits[400 * version : 400 * version + 10] ^= 1
    big = torch.from_numpy(bits).view(torch.int32).view(dtype)
    return {"big": big, "norm": torch.full((7,), float(version), dtype=dtype)}


def named(weights: dict[str, torch.Tensor]) -> list[NamedWeight]:
    return [NamedWeight(names=(name,), tensor=tensor) for name, tensor in weights.items()]


async def open_ends(
    choice: TransportChoice,
    folder: Path,
    *,
    through: Callable[[StagingSource], StagingSource] = lambda one: one,
    dtype: torch.dtype = torch.float32,
) -> tuple[WeightPublisher, WeightFetcher, WeightLayout, Path]:
    """A publisher, and the fetcher and receive buffer of a generator on its host."""
    publisher = WeightPublisher(named(make_weights(0, dtype)), dtype, host_id=HOST, has_patches=True)
    layout = WeightLayout(dtype=dtype, ranks=(publisher.layout,))
    source = await publisher.open(folder, build_transport(choice), generator_hosts=frozenset({HOST}))
    section = WeightsSection(transport=choice)
    receive_buffer = folder / "receive-buffer"
    fetcher = WeightFetcher(
        layout=layout,
        needed=[np.ones(publisher.layout.num_blocks, bool)],
        num_bytes_needed=layout.num_bytes,
        receive_buffer=ReceiveBuffer(receive_buffer, layout),
        transports=connect_transports(
            section, layout, [through(pickle.loads(pickle.dumps(source)))], generator_host=HOST
        ),
        delta=True,
    )
    return publisher, fetcher, layout, receive_buffer


async def carry(
    choice: TransportChoice, folder: Path, num_versions: int, dtype: torch.dtype = torch.float32
) -> list[dict[str, torch.Tensor]]:
    """What a generator on the trainer's host has after each version."""
    publisher, fetcher, layout, receive_buffer = await open_ends(choice, folder, dtype=dtype)
    received = []
    for version in range(1, num_versions + 1):
        slot = version % 2
        staged = await publisher.begin(slot, version, named(make_weights(version, dtype))).finished()
        report = await fetcher.fetch(make_manifest(layout, version, slot, staged))
        assert report.is_complete and report.num_bad_blocks == 0
        # Later reads are asked for ranges that start in the middle of the buffer.
        assert (report.num_bytes_moved >= publisher.layout.num_bytes) is (version == 1)
        found = whole_tensors(layout, received_images(receive_buffer, layout))
        received.append({name: tensor.clone() for name, tensor in found})
    return received


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("name", ["shared_memory", "tcp", "auto", "own"])
def test_versions_arrive_bit_for_bit(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    choice: TransportChoice = name
    if name == "own":
        monkeypatch.syspath_prepend(tmp_path)
        choice = write_own_transport(tmp_path, "own_transport_in_process")
    received = asyncio.run(carry(choice, tmp_path, num_versions=3))
    for version, found in enumerate(received, start=1):
        for tensor_name, tensor in make_weights(version).items():
            assert torch.equal(found[tensor_name].view(torch.int32), tensor.view(torch.int32)), version
    if name == "own":
        assert len(list(tmp_path.glob("rank-0-slot-*"))) == 2, "the bytes went another way"


class Carrier(Actor):
    """Both ends in one actor, where RDMA handles and torchstore's clients work."""

    @concurrent_endpoint
    async def carry(self, choice: str, folder: Path) -> None:
        dist.init_process_group("gloo", rank=0, world_size=1, store=dist.FileStore(str(folder / "store"), 1))
        received = await carry(choice, folder, num_versions=3, dtype=torch.bfloat16)
        for version, found in enumerate(received, start=1):
            for name, tensor in make_weights(version, torch.bfloat16).items():
                assert torch.equal(found[name].view(torch.int16), tensor.view(torch.int16)), version


@pytest.mark.processes
@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["rdma", "torchstore"])
async def test_bfloat16_patches_arrive_through_segments(name: str, tmp_path: Path) -> None:
    """Whole segments move, so only the one behind the changed elements does, which has their patches."""
    processes = ProcessManager(tmp_path, LocalHosts())
    try:
        await build_transport(name).start(processes.spawn_here)
        carrier = processes.spawn_here("carrier").spawn("carrier", Carrier)
        await carrier.carry.call_one(name, tmp_path)
        if name == "torchstore":
            # A process has one store, and another test may start it too.
            await torchstore.shutdown()
    finally:
        await processes.close()


class Cut:
    """A way to a port of this host that is cut after ``num_bytes`` have arrived, ``times`` times."""

    def __init__(self, num_bytes: int, times: int) -> None:
        self.num_bytes, self.times = num_bytes, times
        self._server = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self._accept, daemon=True).start()

    def __call__(self, source: StagingSource) -> StagingSource:
        assert isinstance(source.address, TcpAddress)
        self._port = source.address.port
        address = dataclasses.replace(
            source.address, addresses=("127.0.0.1",), port=self._server.getsockname()[1]
        )
        return dataclasses.replace(source, address=address)

    def _accept(self) -> None:
        while True:
            near, _ = self._server.accept()
            far = socket.create_connection(("localhost", self._port))
            self.times -= 1
            left = self.num_bytes if self.times >= 0 else None
            for pair, limit in (((near, far), None), ((far, near), left)):
                threading.Thread(target=self._pass_on, args=(*pair, limit), daemon=True).start()

    @staticmethod
    def _pass_on(start: socket.socket, end: socket.socket, left: int | None) -> None:
        # Either side may be closed while the other direction still waits for bytes.
        with contextlib.suppress(OSError):
            while (left is None or left > 0) and (some := start.recv(65536)):
                end.sendall(some)
                left = None if left is None else left - len(some)
        for one in (start, end):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(("times", "is_complete"), [(0, True), (2, True), (100, False)])
def test_what_a_cut_connection_lost_is_fetched_again(times: int, is_complete: bool, tmp_path: Path) -> None:
    async def fetch() -> FetchReport:
        publisher, fetcher, layout, _ = await open_ends("tcp", tmp_path, through=Cut(3 * BLOCK_BYTES, times))
        staged = await publisher.begin(0, 1, named(make_weights(1))).finished()
        return await fetcher.fetch(make_manifest(layout, 1, 0, staged))

    report = asyncio.run(fetch())
    assert report.is_complete is is_complete and report.num_bad_blocks == 0
    if times:
        assert report.failure is not None and "trainer rank" in report.failure
        assert report.num_bytes_moved > report.num_bytes_needed, "arrived blocks are not asked for again"
        assert report.num_bytes_moved < 3 * report.num_bytes_needed
    else:
        # The last block is fetched up to its end.
        assert report.failure is None
        assert 0 <= report.num_bytes_moved - report.num_bytes_needed < BLOCK_BYTES


def test_tcp_serves_nothing_without_the_token(tmp_path: Path) -> None:
    file = tmp_path / "buffer"
    file.write_bytes(bytes(BLOCK_BYTES))
    staging = RankStaging(rank=0, host_id="a", paths=(file, file), buffers=(), generator_hosts=frozenset("b"))
    address = asyncio.run(TcpTransport().open(staging))
    assert address.token.hex() not in repr(address) and str(address.token) not in repr(address)
    for token, num_bytes in ((address.token, 64), (bytes(len(address.token)), 0)):
        with socket.create_connection(("localhost", address.port), timeout=60) as connection:
            received = b""
            # A refusal leaves the request unread, which resets the connection at any moment.
            with contextlib.suppress(OSError):
                connection.sendall(token + struct.pack("!BQQ", 0, 0, 64))
                connection.shutdown(socket.SHUT_WR)
                while some := connection.recv(1024):
                    received += some
        assert len(received) == num_bytes


def test_auto_is_shared_memory_on_one_host_and_rdma_or_tcp_between_two(tmp_path: Path) -> None:
    file = tmp_path / "buffer"
    file.write_bytes(bytes(64))
    local = RankSource(
        rank=0,
        num_bytes=64,
        staging=StagingSource(host_id="a", paths=(file, file), address=((), ())),
        generator_host="a",
        lease_timeout_s=60.0,
    )
    for source, chosen, granularity in (
        (local, SharedMemoryTransport, BLOCK_BYTES),
        (dataclasses.replace(local, generator_host="b"), RdmaTransport, SEGMENT_BYTES),
        (
            dataclasses.replace(
                local,
                generator_host="b",
                staging=StagingSource(
                    host_id="a", paths=(), address=TcpAddress(addresses=("::1",), port=1, token=b"")
                ),
            ),
            TcpTransport,
            BLOCK_BYTES,
        ),
    ):
        transport = AutoTransport()
        transport.connect(source)
        assert type(transport.chosen) is chosen and transport.granularity == granularity


def test_auto_serves_other_hosts_only_over_tcp_without_rdma_hardware() -> None:
    staging = RankStaging(
        rank=0,
        host_id="a",
        paths=(),
        buffers=(torch.zeros(8), torch.zeros(8)),
        generator_hosts=frozenset("a"),
    )
    assert asyncio.run(AutoTransport().open(staging)) is None
    far = dataclasses.replace(staging, generator_hosts=frozenset("ab"))
    assert isinstance(asyncio.run(AutoTransport().open(far)), TcpAddress), "no machine here has such hardware"


@pytest.mark.processes
def test_torchstore_is_imported_only_where_it_is_used() -> None:
    code = (
        "import sys; import apps.grpo; "
        "from forgeasync.weights import build_transport; "
        f"[build_transport(name) for name in {[*BUILT_IN_TRANSPORTS]} if name != 'torchstore']; "
        "assert 'torchstore' not in sys.modules; "
        "build_transport('torchstore'); assert 'torchstore' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


class NearTransport(Transport):
    """Reads in units of half a block, on one host."""

    crosses_hosts = False
    granularity = BLOCK_BYTES // 2

    async def open(self, staging: RankStaging) -> None:
        return None

    def connect(self, source: RankSource) -> None:
        return None

    async def read(
        self, slot: int, ranges: Sequence[ByteRange], received: torch.Tensor, arrived: Arrived
    ) -> None:
        raise AssertionError("is never asked")


class Half(Transport):
    """Lacks ``connect`` and ``read``."""

    async def open(self, staging: RankStaging) -> None:
        return None


@pytest.mark.parametrize(
    ("transport", "words"),
    [
        (
            "carrier_pigeon",
            r"weights.transport = 'carrier_pigeon'.*auto, shared_memory, rdma, tcp, torchstore",
        ),
        ("3", r"weights.transport = 3.*expected text, got a whole number"),
        ("{kind: python}", r"weights.transport.factory.*required key is missing"),
        ("{kind: python, factory: a.b, option: {}}", r"weights.transport.option.*did you mean"),
    ],
)
def test_what_is_no_transport_is_refused_on_loading(transport: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as refused:
        minimal_config(f"weights.transport={transport}")
    assert len(refused.value.problems) == 1, refused.value


@pytest.mark.parametrize(
    ("factory", "words"),
    [
        ("nowhere.at_all.Transport", r"= 'nowhere.at_all.Transport'.*cannot be imported"),
        ("math.pi", r"weights.transport = 'math.pi'.*is a float"),
        ("collections.OrderedDict", r"makes a OrderedDict.*transport.Transport"),
        (f"{__name__}.Half", r"cannot be built.*TypeError.*connect.*read"),
        (
            f"{RdmaTransport.__module__}.RdmaTransport, options: {{speed: 3}}",
            r"options {'speed': 3}.*TypeError",
        ),
    ],
)
def test_a_transport_that_cannot_be_made_is_refused_before_a_run(factory: str, words: str) -> None:
    config = minimal_config(f"weights.transport={{kind: python, factory: {factory}}}")
    assert not check_config(config, FACTS)
    assert re.search(words, only(list(check_transport(config))))
    with pytest.raises(ConfigError, match=r"weights\.transport"):
        check(config)


@pytest.mark.parametrize(
    "transport", ["shared_memory", f"{{kind: python, factory: {__name__}.NearTransport}}"]
)
def test_one_that_stays_on_a_host_is_refused_between_hosts(transport: str) -> None:
    override = f"weights.transport={transport}"
    assert not list(check_transport(minimal_config(override)))
    message = only(list(check_transport(minimal_config(override, "launcher.kind=process"))))
    for words in ("weights.transport = '", "auto, rdma, tcp or torchstore", "launcher.kind = 'process'"):
        assert words in message


@pytest.mark.usefixtures("one_rank")
def test_units_smaller_than_a_block_are_refused() -> None:
    publisher = WeightPublisher(named(make_weights(0)), torch.float32, host_id=HOST)
    layout = WeightLayout(dtype=torch.float32, ranks=(publisher.layout,))
    section = WeightsSection(transport=PythonCode(factory=f"{__name__}.NearTransport"))
    with pytest.raises(
        ValueError, match=r"NearTransport\.granularity = 131072; must be a multiple of 262144"
    ):
        connect_transports(section, layout, [StagingSource(host_id=HOST, paths=())], generator_host=HOST)
