"""Payloads: what is written comes back or is refused, also between hosts, and what the dying leave behind."""

import asyncio
import errno
import multiprocessing
import os
import random
import signal
import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from monarch.actor import Actor, concurrent_endpoint, this_host
from monarch.rdma import RDMABuffer

from forgeasync.buffer import DropReason
from forgeasync.rollouts import (
    ALIGNMENT,
    FinishReason,
    PayloadNotFound,
    PayloadReader,
    PayloadRef,
    PayloadServer,
    PayloadStoreFull,
    PayloadTorn,
    PayloadWriter,
    RemotePayloadReader,
    create_run_folder,
    group_num_bytes,
    measure,
    read_from,
    remove_run_folder,
    write_into,
)
from forgeasync.runtime import RefusedGroup, SampledRollout, spawn_role, store_group
from tests.support.payloads import HOST, MIB, assert_same, make_payload, read_for_ever, write_and_die
from tests.support.rollouts import make_rollout

PAYLOAD_ID = "0123456789abcdef-000000000007"


def ref_of(num_bytes: int, checksum: int) -> PayloadRef:
    return PayloadRef(
        payload_id=PAYLOAD_ID, host_id=HOST, file="", offset=0, num_bytes=num_bytes, checksum=checksum
    )


def written(arrays: Mapping[str, np.ndarray], *, before: int = 0) -> tuple[bytearray, PayloadRef]:
    """A payload in memory that was full of the byte ``before``."""
    num_bytes = measure(arrays)
    memory = bytearray([before]) * num_bytes
    checksum = write_into(memoryview(memory), arrays, PAYLOAD_ID)
    return memory, ref_of(num_bytes, checksum)


ARRAYS = {name: array for name, array in make_payload(0, 37).items() if array.size}


DTYPES = npst.scalar_dtypes() | npst.byte_string_dtypes(min_len=1) | npst.unicode_string_dtypes(min_len=1)
SHAPES = npst.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5)


@st.composite
def any_array(draw: st.DrawFn) -> np.ndarray:
    array = draw(npst.arrays(DTYPES, SHAPES))
    layouts = [array, array.T, np.asfortranarray(array)]
    if array.ndim:
        layouts += [array[::2], array[..., ::-1]]
    return draw(st.sampled_from(layouts))


@settings(max_examples=150, deadline=None)
@given(arrays=st.dictionaries(st.text(max_size=12), any_array(), max_size=6), copy=st.booleans())
def test_any_arrays_come_back_as_they_went_in(arrays: dict[str, np.ndarray], copy: bool) -> None:
    memory, ref = written(arrays, before=0xAB)
    result = read_from(memoryview(memory), ref, copy=copy)
    assert list(result) == list(arrays)
    for name, array in arrays.items():
        assert result[name].dtype == array.dtype and result[name].shape == array.shape
        # Bytes, because NaN is not equal to itself and -0.0 is equal to 0.0.
        assert result[name].tobytes() == array.tobytes()


def test_bytes_depend_on_the_arrays_alone_and_the_checksum_is_xxh3_of_the_body() -> None:
    memory, ref = written(ARRAYS, before=0)
    assert written(ARRAYS, before=0xFF)[0] == memory
    assert ref.checksum == xxhash.xxh3_64_intdigest(bytes(memory[64:]))


def test_arrays_are_aligned_and_views_do_not_copy() -> None:
    raw = np.zeros(4096 + ALIGNMENT, np.uint8)
    memory = memoryview(raw)[-raw.ctypes.data % ALIGNMENT :]
    ref = ref_of(measure(ARRAYS), write_into(memory, ARRAYS, PAYLOAD_ID))
    views = read_from(memory, ref, copy=False)
    copies = read_from(memory, ref, copy=True)
    for name, array in views.items():
        assert array.ctypes.data % ALIGNMENT == 0, name
        assert np.shares_memory(array, raw) and not np.shares_memory(copies[name], raw), name
        assert copies[name].flags.owndata, name


HEADER = {8: "magic", 16: "format version", 48: "payload id", 56: "body length", 64: "checksum in the header"}
"""Fields by where they end."""


def test_every_flipped_bit_is_noticed_and_its_field_named_with_both_values() -> None:
    memory, ref = written(ARRAYS)
    for position in [*range(64), *range(64, len(memory), 7), len(memory) - 1]:
        damaged = bytearray(memory)
        damaged[position] ^= 1 << position % 8
        field = next((name for end, name in HEADER.items() if position < end), "checksum of the body")
        with pytest.raises(PayloadTorn, match=f"{field} should be .* but is ") as caught:
            read_from(memoryview(damaged), ref, copy=True)
        assert PAYLOAD_ID in str(caught.value)


def test_short_memory_is_torn() -> None:
    memory, ref = written(ARRAYS)
    for length in (0, 10, 64, len(memory) - 1):
        with pytest.raises(PayloadTorn, match=f"should be {len(memory)} but is {length}"):
            read_from(memoryview(memory)[:length], ref, copy=True)


@pytest.mark.parametrize("dtype", [object, np.dtype([("a", "i4"), ("b", "f4")])])
def test_dtypes_that_would_not_come_back_are_refused(dtype: np.dtype) -> None:
    with pytest.raises(ValueError, match="'bad' has dtype"):
        measure({"good": np.zeros(1), "bad": np.zeros(3, dtype)})


@pytest.fixture
def folder() -> Iterator[Path]:
    folder = create_run_folder(64 * MIB)
    yield folder
    if folder.exists():
        remove_run_folder(folder)


@pytest.fixture
def writer(folder: Path) -> PayloadWriter:
    return PayloadWriter(folder, HOST, MIB)


@pytest.fixture
def one_group(writer: PayloadWriter) -> int:
    """Bytes of a group of one payload; its file stays."""
    return group_num_bytes(writer.write_group([make_payload(0)]))


def test_a_group_is_one_file_and_payloads_are_read_by_reference(folder: Path, writer: PayloadWriter) -> None:
    payloads = [make_payload(seed, num_tokens=100 * seed) for seed in range(5)]
    refs = writer.write_group(payloads)
    (file,) = folder.iterdir()
    assert {ref.file for ref in refs} == {str(file)} and {ref.host_id for ref in refs} == {HOST}
    assert writer.num_bytes_held == group_num_bytes(refs) == file.stat().st_blocks * 512
    for copy in (True, False):
        for ref, payload in zip(reversed(refs), reversed(payloads), strict=True):
            assert_same(PayloadReader(HOST).read(ref, copy=copy), payload)


def test_ids_are_unique_across_groups_and_writers(folder: Path) -> None:
    writers = [PayloadWriter(folder, HOST, MIB) for _ in range(2)]
    refs = [ref for writer in writers * 2 for ref in writer.write_group([make_payload(0)] * 3)]
    assert len({ref.payload_id for ref in refs}) == 12 and len({ref.file for ref in refs}) == 4


def test_freed_and_never_written_are_gone_but_views_stay(folder: Path, writer: PayloadWriter) -> None:
    payload = make_payload(1)
    (ref,) = writer.write_group([payload])
    views = PayloadReader(HOST).read(ref, copy=False)
    writer.free(ref.file)
    assert writer.num_bytes_held == 0 and not list(folder.iterdir())
    assert_same(views, payload)
    assert not any(view.flags.writeable for view in views.values())
    for lost in (ref, replace(ref, file=str(folder / "never"))):
        words = f"payload {ref.payload_id}: file .*{lost.file}.*found nothing"
        with pytest.raises(PayloadNotFound, match=words):
            PayloadReader(HOST).read(lost)


def test_a_payload_of_another_host_is_refused(writer: PayloadWriter) -> None:
    (ref,) = writer.write_group([make_payload(1)])
    with pytest.raises(ValueError, match=r"is on host host-a, this is host host-b.*RemotePayloadReader"):
        PayloadReader("host-b").read(ref)


def test_a_damaged_payload_is_torn_and_its_neighbours_are_not(writer: PayloadWriter) -> None:
    refs = writer.write_group([make_payload(seed) for seed in range(3)])
    file, reader = Path(refs[0].file), PayloadReader(HOST)
    damaged = bytearray(file.read_bytes())
    damaged[refs[1].offset + refs[1].num_bytes - 1] ^= 4
    file.write_bytes(damaged)
    with pytest.raises(PayloadTorn, match=refs[1].payload_id):
        reader.read(refs[1])
    assert_same(reader.read(refs[2]), make_payload(2))
    os.truncate(file, len(damaged) - 1)
    with pytest.raises(PayloadTorn, match=f"should be 'at least {len(damaged)}' but is {len(damaged) - 1}"):
        reader.read(refs[2])
    assert_same(reader.read(refs[0]), make_payload(0))


def test_threads_cannot_exceed_the_capacity_together(folder: Path, one_group: int) -> None:
    writer = PayloadWriter(folder, HOST, 3 * one_group)
    with ThreadPoolExecutor(12) as threads:
        written = [threads.submit(writer.write_group, [make_payload(0)]) for _ in range(12)]
    failures = [one.exception() for one in written if one.exception() is not None]
    assert [type(one) for one in failures] == [PayloadStoreFull] * 9
    for number in (3 * one_group, one_group):
        assert f"{number:,}" in str(failures[0])
    assert writer.num_bytes_held == 3 * one_group and len(list(folder.iterdir())) == 4
    # What is freed can be written again.
    (ref,) = next(one.result() for one in written if one.exception() is None)
    writer.free(ref.file)
    writer.write_group([make_payload(0)])


@pytest.mark.parametrize(
    ("failing", "error", "kind"),
    [
        ("forgeasync.rollouts.payloads.write_into", RuntimeError("in the middle"), RuntimeError),
        # Filling the real filesystem would take the memory of everything else on the machine.
        ("os.posix_fallocate", OSError(errno.ENOSPC, "full"), PayloadStoreFull),
    ],
)
def test_a_failed_write_is_an_error_and_leaves_nothing(
    writer: PayloadWriter, folder: Path, failing: str, error: Exception, kind: type[Exception]
) -> None:
    with mock.patch(failing, side_effect=error), pytest.raises(kind, match=r"the middle|another program"):
        writer.write_group([make_payload(0)])
    assert writer.num_bytes_held == 0 and not list(folder.iterdir())


SPAWN = multiprocessing.get_context("spawn")
"""A fork would copy the locks of other tests' threads."""


def test_a_writer_killed_in_mid_write_leaves_no_file_with_a_final_name(folder: Path) -> None:
    process = SPAWN.Process(target=write_and_die, args=(folder,))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert not list(folder.glob("*.group")) and len(list(folder.iterdir())) == 1


def test_readers_killed_at_random_harm_neither_writer_nor_other_readers(folder: Path) -> None:
    rng = random.Random(0)
    writer = PayloadWriter(folder, HOST, 64 * MIB)
    held: list[list[tuple[int, PayloadRef]]] = []
    for round_number in range(4):
        seeds = range(10 * round_number, 10 * round_number + 4)
        refs = writer.write_group([make_payload(seed) for seed in seeds])
        held.append(list(zip(seeds, refs, strict=True)))
        known = [pair for group in held for pair in group]
        links, readers = [], []
        for _ in range(2):
            here, there = SPAWN.Pipe(duplex=False)
            readers.append(SPAWN.Process(target=read_for_ever, args=(known, there)))
            readers[-1].start()
            there.close()
            links.append(here)
        for link in links:
            assert link.recv() == "reading"
        if len(held) > 2:
            writer.free(held.pop(0)[0][1].file)
        time.sleep(rng.uniform(0.0, 0.05))
        for reader, link in zip(readers, links, strict=True):
            reader.kill()
            reader.join()
            # Its end of the pipe is closed: what comes now is what it said before, then the end.
            with pytest.raises(EOFError):
                pytest.fail(f"a reader failed: {link.recv()}")
            link.close()
    for group in held:
        for seed, ref in group:
            assert_same(PayloadReader(HOST).read(ref), make_payload(seed))
        writer.free(group[0][1].file)
    assert writer.num_bytes_held == 0 and not list(folder.iterdir())


def test_a_group_that_its_writer_has_no_room_for_is_refused_alone(folder: Path) -> None:
    rollouts = [
        SampledRollout(branches=(make_rollout(seed, 5, 40),), finish_reason=FinishReason.STOP, episode=seed)
        for seed in range(3)
    ]
    writer = PayloadWriter(folder, HOST, 2**14)
    stored = store_group(writer, rollouts, group_id=6, generator_rank=3)
    assert isinstance(stored, tuple) and {one.generator_rank for one in stored} == {3}
    held = writer.num_bytes_held
    refused = store_group(writer, rollouts * 9, group_id=7, generator_rank=3)
    assert isinstance(refused, RefusedGroup) and refused.reason is DropReason.OVERSIZED
    assert "group 7: a group needs 65,536 bytes; payloads of this generator" in refused.problem
    assert writer.num_bytes_held == held, "nothing of it stays"
    assert isinstance(store_group(writer, rollouts[:1], group_id=8, generator_rank=3), tuple)


NUM_TOKENS = (500, 0, 60_000, 1)
"""Of the payloads of the first group; the reader's memory grows and is reused."""


class Owner(Actor):
    """A generator, as far as its payloads go."""

    def __init__(self, folder: Path) -> None:
        warnings.simplefilter("ignore")  # that there is no RDMA hardware
        self._writer = PayloadWriter(folder, HOST, 64 * MIB)
        self._server = PayloadServer(self._writer)

    @concurrent_endpoint
    async def write_group(self, num_tokens: tuple[int, ...]) -> list[PayloadRef]:
        return self._writer.write_group([make_payload(i, num) for i, num in enumerate(num_tokens)])

    @concurrent_endpoint
    async def expose(self, ref: PayloadRef) -> RDMABuffer:
        return self._server.expose(ref)

    @concurrent_endpoint
    async def free(self, file: str) -> None:
        await self._server.free(file)

    @concurrent_endpoint
    async def num_mappings(self, file: str) -> int:
        """How often ``file`` (freed or not) is mapped in this process."""
        return Path("/proc/self/maps").read_text(encoding="utf-8").count(file)

    @concurrent_endpoint
    async def is_same_registration(self, ref: PayloadRef) -> bool:
        return self._server.expose(ref) is self._server.expose(ref)


class Remote(Actor):
    """A trainer rank on another host."""

    def __init__(self, owner: Owner, folder: Path) -> None:
        self._owner = owner
        self._reader = RemotePayloadReader(timeout_s=250)

        def forbid(event: str, arguments: tuple[object, ...]) -> None:
            if event == "open" and str(folder) in str(arguments[0]):
                raise PermissionError(f"{arguments[0]} is on another host")

        sys.addaudithook(forbid)

    @concurrent_endpoint
    async def read(
        self, *refs: PayloadRef, freed_in_between: bool = False
    ) -> list[dict[str, np.ndarray] | BaseException]:
        """All of them at once; the owner may free files after it has exposed them."""

        async def expose(asked: PayloadRef) -> RDMABuffer:
            handle = await self._owner.expose.call_one(asked)
            if freed_in_between:
                await self._owner.free.call_one(asked.file)
            return handle

        return await asyncio.gather(*(self._reader.read(ref, expose) for ref in refs), return_exceptions=True)

    @concurrent_endpoint
    async def open_directly(self, ref: PayloadRef) -> bool:
        """Whether the file of ``ref`` can be opened here."""
        try:
            PayloadReader(HOST).read(ref)
        except PermissionError:
            return False
        return True


def _flip(ref: PayloadRef, position: int) -> None:
    with open(ref.file, "r+b") as file:
        file.seek(ref.offset + position)
        (byte,) = file.read(1)
        file.seek(ref.offset + position)
        file.write(bytes([byte ^ 1]))


async def read_remotely(folder: Path) -> None:
    owner_mesh = spawn_role(this_host(), "payload_owner", num_procs=1)
    remote_mesh = spawn_role(this_host(), "payload_remote", num_procs=1)
    try:
        owner = owner_mesh.spawn("payload_owner", Owner, folder)
        remote = remote_mesh.spawn("payload_remote", Remote, owner, folder)
        refs = await owner.write_group.call_one(NUM_TOKENS)
        payloads = [make_payload(index, num_tokens) for index, num_tokens in enumerate(NUM_TOKENS)]
        one_by_one = [found for ref in refs for found in await remote.read.call_one(ref)]
        at_once = await remote.read.call_one(*refs[::-1])
        for found, payload in zip([*one_by_one, *at_once], [*payloads, *payloads[::-1]], strict=True):
            assert_same(found, payload)

        # Registrations are reused, and go with the file.
        assert await owner.is_same_registration.call_one(refs[0])
        assert await owner.num_mappings.call_one(refs[0].file) == len(NUM_TOKENS)
        await owner.free.call_one(refs[0].file)
        # A thread that has just served a read may hold its mapping a moment longer.
        while await owner.num_mappings.call_one(refs[0].file):
            await asyncio.sleep(0.1)

        header, body, short, freed = [(await owner.write_group.call_one((500,)))[0] for _ in range(4)]
        _flip(header, 3)
        _flip(body, 200)
        os.truncate(short.file, 100)
        for ref, kind, says in (
            (refs[0], PayloadNotFound, "found nothing"),
            (header, PayloadTorn, "magic should be"),
            (body, PayloadTorn, "checksum of the body should be"),
            (short, PayloadTorn, "but is 100"),
            (freed, PayloadNotFound, "found nothing"),
        ):
            (failure,) = await remote.read.call_one(ref, freed_in_between=ref is freed)
            assert type(failure) is kind, repr(failure)
            assert says in str(failure) and ref.payload_id in str(failure)

        (good,) = await owner.write_group.call_one((700,))
        (found,) = await remote.read.call_one(good)
        assert_same(found, make_payload(0, 700))
        assert not await remote.open_directly.call_one(good), "the guard of this test does not work"
    finally:
        await remote_mesh.stop()
        await owner_mesh.stop()


@pytest.mark.processes
def test_payloads_arrive_whole_without_the_file_and_lost_ones_are_named() -> None:
    folder = create_run_folder(64 * MIB)
    try:
        asyncio.run(read_remotely(folder))
    finally:
        remove_run_folder(folder)


def test_a_server_shows_no_files_of_other_folders(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    here, elsewhere = (PayloadWriter(folder, HOST, MIB) for folder in (tmp_path, tmp_path / "other"))
    (ref,) = elsewhere.write_group([make_payload(0)])
    with pytest.raises(PayloadNotFound, match=ref.payload_id):
        PayloadServer(here).expose(ref)
