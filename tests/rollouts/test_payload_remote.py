"""Payloads read by a proc that shares no memory with their owner: real Monarch processes, real RDMABuffer.

The reader's proc fails as soon as it opens anything in the owner's folder.
"""

import asyncio
import os
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
from monarch.actor import Actor, concurrent_endpoint, this_host
from monarch.rdma import RDMABuffer

from forgeasync.rollouts import (
    PayloadNotFound,
    PayloadReader,
    PayloadRef,
    PayloadServer,
    PayloadTorn,
    PayloadWriter,
    RemotePayloadReader,
    create_run_folder,
    remove_run_folder,
)
from forgeasync.runtime import spawn_role
from tests.support.payloads import HOST, MIB, assert_same, make_payload

pytestmark = pytest.mark.processes

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
        self._num_touched = 0

        def forbid(event: str, arguments: tuple[object, ...]) -> None:
            if event == "open" and str(folder) in str(arguments[0]):
                self._num_touched += 1
                raise PermissionError(f"{arguments[0]} is on another host")

        sys.addaudithook(forbid)

    @concurrent_endpoint
    async def read(self, *refs: PayloadRef) -> list[dict[str, np.ndarray]]:
        """All of them at once."""
        return await asyncio.gather(*(self._reader.read(ref, self._owner.expose.call_one) for ref in refs))

    @concurrent_endpoint
    async def failure(self, ref: PayloadRef, freed_in_between: bool) -> Exception | None:
        """What reading raises; the owner may free the file after it has exposed it."""

        async def expose(asked: PayloadRef) -> RDMABuffer:
            handle = await self._owner.expose.call_one(asked)
            if freed_in_between:
                await self._owner.free.call_one(asked.file)
            return handle

        try:
            await self._reader.read(ref, expose)
        except Exception as error:
            return error
        return None

    @concurrent_endpoint
    async def open_directly(self, ref: PayloadRef) -> bool:
        """Whether the file of ``ref`` can be opened here."""
        try:
            PayloadReader(HOST).read(ref)
        except PermissionError:
            return False
        return True

    @concurrent_endpoint
    async def num_touched(self) -> int:
        return self._num_touched


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

        async def check_failure(
            ref: PayloadRef, kind: type[Exception], says: str, *, freed_in_between: bool = False
        ) -> None:
            failure = await remote.failure.call_one(ref, freed_in_between)
            assert type(failure) is kind, repr(failure)
            assert says in str(failure) and ref.payload_id in str(failure)

        await check_failure(refs[0], PayloadNotFound, "found nothing")
        header, body, short, freed = [(await owner.write_group.call_one((500,)))[0] for _ in range(4)]
        _flip(header, 3)
        await check_failure(header, PayloadTorn, "magic should be")
        _flip(body, 200)
        await check_failure(body, PayloadTorn, "checksum of the body should be")
        os.truncate(short.file, 100)
        await check_failure(short, PayloadTorn, "but is 100")
        await check_failure(freed, PayloadNotFound, "found nothing", freed_in_between=True)

        (good,) = await owner.write_group.call_one((700,))
        (found,) = await remote.read.call_one(good)
        assert_same(found, make_payload(0, 700))
        assert await remote.num_touched.call_one() == 0
        assert not await remote.open_directly.call_one(good), "the guard of this test does not work"
    finally:
        await remote_mesh.stop()
        await owner_mesh.stop()


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
