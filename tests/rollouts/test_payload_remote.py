"""Payloads read by a proc that shares no memory with their owner: real Monarch procs, real RDMABuffer.

The reader's proc fails as soon as it opens anything in the owner's folder.
"""

import asyncio
import os
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
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

pytestmark = pytest.mark.procs

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
    async def read(self, ref: PayloadRef) -> dict[str, np.ndarray]:
        return await self._reader.read(ref, self._owner.expose.call_one)

    @concurrent_endpoint
    async def read_all(self, refs: list[PayloadRef]) -> list[dict[str, np.ndarray]]:
        return await asyncio.gather(*(self._reader.read(ref, self._owner.expose.call_one) for ref in refs))

    @concurrent_endpoint
    async def read_failing(self, ref: PayloadRef) -> Exception | None:
        return await self._failure(ref, freed_in_between=False)

    @concurrent_endpoint
    async def read_freed_in_between(self, ref: PayloadRef) -> Exception | None:
        return await self._failure(ref, freed_in_between=True)

    async def _failure(self, ref: PayloadRef, *, freed_in_between: bool) -> Exception | None:
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


@dataclass(slots=True, kw_only=True)
class Measured:
    """What the one scenario below saw."""

    one_by_one: list[dict[str, np.ndarray]]
    at_once: list[dict[str, np.ndarray]]
    is_same_registration: bool
    num_mappings_before_and_after_free: tuple[int, int]
    failures: dict[str, Exception | None]
    ids: dict[str, str]
    after_failures: dict[str, np.ndarray]
    num_touched: int
    can_open_directly: bool


def _flip(ref: PayloadRef, position: int) -> None:
    with open(ref.file, "r+b") as file:
        file.seek(ref.offset + position)
        (byte,) = file.read(1)
        file.seek(ref.offset + position)
        file.write(bytes([byte ^ 1]))


async def _scenario(folder: Path) -> Measured:
    owner_mesh = spawn_role(this_host(), "payload_owner", num_procs=1)
    remote_mesh = spawn_role(this_host(), "payload_remote", num_procs=1)
    try:
        owner = owner_mesh.spawn("payload_owner", Owner, folder)
        remote = remote_mesh.spawn("payload_remote", Remote, owner, folder)
        refs = await owner.write_group.call_one(NUM_TOKENS)
        one_by_one = [await remote.read.call_one(ref) for ref in refs]
        at_once = await remote.read_all.call_one(refs[::-1])
        is_same_registration = await owner.is_same_registration.call_one(refs[0])
        num_before = await owner.num_mappings.call_one(refs[0].file)
        await owner.free.call_one(refs[0].file)
        # A thread that has just served a read may hold its mapping a moment longer.
        while num_after := await owner.num_mappings.call_one(refs[0].file):
            await asyncio.sleep(0.1)

        lost = {"freed": refs[0]}
        failures = {"freed": await remote.read_failing.call_one(refs[0])}
        for name, position in (("header", 3), ("body", 200)):
            (lost[name],) = await owner.write_group.call_one((500,))
            _flip(lost[name], position)
            failures[name] = await remote.read_failing.call_one(lost[name])
        (lost["truncated"],) = await owner.write_group.call_one((500,))
        os.truncate(lost["truncated"].file, 100)
        failures["truncated"] = await remote.read_failing.call_one(lost["truncated"])
        (lost["freed in between"],) = await owner.write_group.call_one((500,))
        failures["freed in between"] = await remote.read_freed_in_between.call_one(lost["freed in between"])

        (good,) = await owner.write_group.call_one((700,))
        after_failures = await remote.read.call_one(good)
        num_touched = await remote.num_touched.call_one()
        return Measured(
            one_by_one=one_by_one,
            at_once=at_once,
            is_same_registration=is_same_registration,
            num_mappings_before_and_after_free=(num_before, num_after),
            failures=failures,
            ids={name: ref.payload_id for name, ref in lost.items()},
            after_failures=after_failures,
            num_touched=num_touched,
            can_open_directly=await remote.open_directly.call_one(good),
        )
    finally:
        await remote_mesh.stop()
        await owner_mesh.stop()


@pytest.fixture(scope="module")
def measured() -> Iterator[Measured]:
    folder = create_run_folder(64 * MIB)
    try:
        yield asyncio.run(_scenario(folder))
    finally:
        remove_run_folder(folder)


def test_payloads_arrive_whole_without_the_file(measured: Measured) -> None:
    for index, (num_tokens, found) in enumerate(zip(NUM_TOKENS, measured.one_by_one, strict=True)):
        assert_same(found, make_payload(index, num_tokens))
    assert measured.num_touched == 0
    assert not measured.can_open_directly, "the guard of this test does not work"


def test_concurrent_reads_do_not_mix(measured: Measured) -> None:
    for index, found in enumerate(reversed(measured.at_once)):
        assert_same(found, make_payload(index, NUM_TOKENS[index]))


def test_registrations_are_reused_and_go_with_the_file(measured: Measured) -> None:
    assert measured.is_same_registration
    assert measured.num_mappings_before_and_after_free == (len(NUM_TOKENS), 0)


@pytest.mark.parametrize(
    ("case", "kind", "says"),
    [
        ("freed", PayloadNotFound, "found nothing"),
        ("freed in between", PayloadNotFound, "found nothing"),
        ("header", PayloadTorn, "magic should be"),
        ("body", PayloadTorn, "checksum of the body should be"),
        ("truncated", PayloadTorn, "but is 100"),
    ],
)
def test_lost_payloads_are_named(measured: Measured, case: str, kind: type[Exception], says: str) -> None:
    failure = measured.failures[case]
    assert type(failure) is kind, repr(failure)
    assert says in str(failure) and measured.ids[case] in str(failure)


def test_a_server_shows_no_files_of_other_folders(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    here, elsewhere = (PayloadWriter(folder, HOST, MIB) for folder in (tmp_path, tmp_path / "other"))
    (ref,) = elsewhere.write_group([make_payload(0)])
    with pytest.raises(PayloadNotFound, match=ref.payload_id):
        PayloadServer(here).expose(ref)


def test_reading_goes_on_after_failures(measured: Measured) -> None:
    assert_same(measured.after_failures, make_payload(0, 700))
