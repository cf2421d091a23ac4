"""Publishers and readers that fail in the middle: nothing half-made is ever shown, and the rest goes on."""

import asyncio
import multiprocessing
from pathlib import Path

import pytest
import torch

from forgeasync.testing import VirtualTime
from forgeasync.weights import Manifest, ReceiveBuffer, WeightExchange, WeightLedger
from tests.support.weight_service import constant, make_fetcher, publish_and_die


def _manifest(version: int, slot: int) -> Manifest:
    return Manifest(version=version, slot=slot, layout_digest="", checksums=(), waited_s=0.0, staging_s=0.0)


def test_a_publisher_that_dies_half_way_leaves_the_version_before(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=publish_and_die, args=(tmp_path, there))
    process.start()
    layout, source, manifest = here.recv()
    process.join()
    assert process.exitcode == -9
    receive_buffer = ReceiveBuffer(tmp_path / "receive-buffer", layout)
    report = asyncio.run(make_fetcher(layout, source, receive_buffer).fetch(manifest))
    assert report.is_complete
    assert (receive_buffer.image(0).view(torch.float32) == constant(1)).all()


def test_a_failed_publication_is_not_shown_and_made_up_for() -> None:
    async def scenario() -> None:
        exchange = WeightExchange(WeightLedger(lease_timeout_s=60.0))

        async def stage(slot: int) -> Manifest:
            return _manifest(1, slot)

        async def fail(slot: int) -> Manifest:
            raise ConnectionError("rank 1 is gone")

        await exchange.publish(stage)
        with pytest.raises(ConnectionError):
            await exchange.publish(fail)
        newest = exchange.state.newest
        assert newest is not None and newest.version == 1
        await exchange.until_owed()

    asyncio.run(scenario())


def test_a_skipped_version_is_owed_until_a_lease_ends_or_runs_out() -> None:
    async def scenario(lease_timeout_s: float, *, is_released: bool) -> None:
        exchange = WeightExchange(WeightLedger(lease_timeout_s=lease_timeout_s))
        version = 0

        async def stage(slot: int) -> Manifest:
            nonlocal version
            version += 1
            return _manifest(version, slot)

        await exchange.publish(stage)
        async with exchange.lease(0, newer_than=0):
            await exchange.publish(stage)
            async with exchange.lease(1, newer_than=0):
                assert await exchange.publish(stage) is None
                owed = asyncio.create_task(exchange.until_owed())
                await asyncio.sleep(0)
                assert not owed.done()
                if not is_released:
                    await owed
        await owed
        assert await exchange.publish(stage) is not None

    VirtualTime().run(scenario(60.0, is_released=True))
    VirtualTime().run(scenario(60.0, is_released=False))


def test_a_lease_waits_for_something_newer() -> None:
    async def scenario() -> None:
        exchange = WeightExchange(WeightLedger(lease_timeout_s=60.0))

        async def read() -> int:
            async with exchange.lease(0, newer_than=1) as manifest:
                return manifest.version

        async def stage_first(slot: int) -> Manifest:
            return _manifest(1, slot)

        async def stage_second(slot: int) -> Manifest:
            return _manifest(2, slot)

        await exchange.publish(stage_first)
        reading = asyncio.create_task(read())
        for _ in range(20):
            await asyncio.sleep(0)
        assert not reading.done()
        await exchange.publish(stage_second)
        assert await reading == 2

    asyncio.run(scenario())
