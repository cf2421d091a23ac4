"""Updates of one engine: what is fetched whole is swapped in, what is not leaves the old weights."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from forgeasync.generator import Install, SwapReport, WeightReceiver, WeightRoute
from forgeasync.weights import FetchReport, HostShare, Manifest


def make_manifest(version: int) -> Manifest:
    return Manifest(version=version, slot=0, layout_digest="", checksums=())


class Engine:
    """An engine whose swap waits until it is let go; its core is a list of what was installed."""

    def __init__(self) -> None:
        self.core: list[int] = []
        self.versions: list[int] = []
        self.may_swap = asyncio.Event()
        self.refuses = False

    async def update_weights(
        self, version: int, *, prefetch: Callable[[], Awaitable[None]], install: Callable[[list[int]], None]
    ) -> SwapReport:
        if self.refuses:
            raise ConnectionError("the engine is gone")
        await prefetch()
        await self.may_swap.wait()
        install(self.core)
        self.versions.append(version)
        return SwapReport(
            pause_s=0.5, waited_s=0.0, num_crossing=0, num_resumed=0, num_recomputed=0, progress=()
        )


class Fetcher:
    """Brings versions whole, but for those in ``broken``."""

    def __init__(self, broken: tuple[int, ...] = ()) -> None:
        self._broken = broken

    async def fetch(self, manifest: Manifest) -> FetchReport:
        num_bad = 2 * (manifest.version in self._broken)
        return FetchReport(
            version=manifest.version,
            is_complete=not num_bad,
            num_bytes_moved=1,
            num_bytes_needed=1,
            num_bad_blocks=num_bad,
            fetch_s=0.0,
        )


async def make_ready(version: int, share: HostShare) -> Install:
    if version == 13:
        raise ValueError("version 13 cannot be merged")
    return lambda core: core.append(version)


def make_receiver(broken: tuple[int, ...] = ()) -> tuple[Engine, WeightReceiver]:
    engine = Engine()
    share = HostShare(index=0, count=1)
    return engine, WeightReceiver(engine, Fetcher(broken), make_ready, WeightRoute(), share)


async def test_an_update_begins_with_the_fetch_and_ends_with_the_swap() -> None:
    engine, receiver = make_receiver()
    for version in (1, 2):
        engine.may_swap.clear()
        report = await receiver.begin(make_manifest(version))
        assert report.version == version and report.is_complete
        assert version not in engine.versions, "the trainer need not wait for the swap"
        await receiver.stage()
        engine.may_swap.set()
        assert (await receiver.finish()).pause_s == 0.5
        assert engine.core == engine.versions == list(range(1, version + 1))


async def test_a_version_that_did_not_arrive_whole_is_not_swapped_in() -> None:
    engine, receiver = make_receiver(broken=(1,))
    engine.may_swap.set()
    report = await receiver.begin(make_manifest(1))
    assert not report.is_complete and report.num_bad_blocks == 2
    with pytest.raises(AssertionError, match="finish it first"):
        await receiver.begin(make_manifest(2))
    await receiver.abandon()
    with pytest.raises(AssertionError, match="no update is in progress"):
        await receiver.finish()
    assert (await receiver.begin(make_manifest(2))).is_complete, "the next one may begin at once"
    await receiver.stage()
    await receiver.finish()
    assert engine.core == [2]


async def test_what_goes_wrong_is_raised_by_the_phase_that_it_ends() -> None:
    engine, receiver = make_receiver()
    engine.may_swap.set()
    assert (await receiver.begin(make_manifest(13))).is_complete
    with pytest.raises(ValueError, match="version 13 cannot be merged"):
        await receiver.stage()
    engine, receiver = make_receiver()
    engine.refuses = True
    with pytest.raises(ConnectionError, match="the engine is gone"):
        await receiver.begin(make_manifest(1))
    assert engine.core == []


async def test_no_generator_of_a_host_swaps_before_the_last_has_staged() -> None:
    """Each fetches and stages a part for all of them."""
    engine, receiver = make_receiver()
    engine.may_swap.set()
    await receiver.begin(make_manifest(1))
    await asyncio.sleep(0)
    assert receiver._update.staged.done() is False, "another one may still be fetching its share"
    await receiver.stage()
    await asyncio.sleep(0)
    assert engine.core == [], "another one may still be staging its share"
    await receiver.finish()
    assert engine.core == [1]
