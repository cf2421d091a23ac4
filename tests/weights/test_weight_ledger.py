"""Two staging buffers, a publisher that never waits and readers that lease: no history tears a version."""

import asyncio
import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forgeasync.testing import VirtualTime
from forgeasync.weights import Manifest, WeightExchange, WeightLedger

TIMEOUT_S = 10.0


def manifest(version: int, slot: int) -> Manifest:
    return Manifest(version=version, slot=slot, layout_digest="", checksums=())


NUM_READERS = 3
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["publish", "begin", "commit", "abandon", "forget"])),
        # Which version a reader prefers: the newest or one before it.
        st.tuples(st.just("acquire"), st.integers(0, NUM_READERS - 1), st.integers(0, 2)),
        st.tuples(st.just("release"), st.integers(0, NUM_READERS - 1)),
        st.tuples(st.just("wait"), st.sampled_from([0.5, TIMEOUT_S / 2, TIMEOUT_S])),
    ),
    max_size=60,
)


@settings(max_examples=300, deadline=None)
@given(EVENTS)
def test_every_history_is_that_of_versions_and_leases_kept_by_hand(events: list[tuple[Any, ...]]) -> None:
    """What a reader holds is never written, and no version is skipped while a slot is free."""
    ledger = WeightLedger(lease_timeout_s=TIMEOUT_S)
    now_s, published, writing = 0.0, 0, None
    is_owing, num_skipped, num_expired = False, 0, 0
    versions: dict[int, int] = {}
    """By slot, of those that can be read."""
    leases: dict[int, tuple[int, float]] = {}
    """Slot and deadline, by reader."""
    seen = dict.fromkeys(range(NUM_READERS), 0)
    whole = {("publish",): [("begin",), ("commit",)]}
    for event, *arguments in itertools.chain.from_iterable(whole.get(one, [one]) for one in events):
        newest = max(versions.values(), default=0)
        if event == "wait":
            now_s += arguments[0]
        elif event == "begin" and writing is None:
            late = [reader for reader, (_, end_s) in leases.items() if end_s <= now_s]
            num_expired += len(late)
            for reader in late:
                del leases[reader]
            free = {0, 1} - {slot for slot, _ in leases.values()}
            assert ledger.can_begin(now_s) == bool(free)
            writing = ledger.begin(now_s)
            assert (writing in free) if free else writing is None
            assert len(free) == 1 or not newest or versions.get(writing) != newest, "late readers lease it"
            is_owing, num_skipped = not free, num_skipped + (not free)
            versions.pop(writing, None)
        elif event == "commit" and writing is not None:
            published += 1
            ledger.commit(manifest(published, writing))
            versions[writing], writing = published, None
        elif event == "abandon" and writing is not None:
            ledger.abandon(writing)
            is_owing, writing = True, None
        elif event == "forget":
            ledger.forget_committed()
            is_owing = is_owing or bool(versions)
            versions.clear()
            leases.clear()
        elif event == "acquire" and arguments[0] not in leases:
            reader, wish = arguments[0], newest - arguments[1]
            found = ledger.acquire(reader, newer_than=seen[reader], now_s=now_s, preferred=wish)
            version = wish if wish in versions.values() and wish > seen[reader] else newest
            assert (found.version if found else None) == (version if version > seen[reader] else None)
            if found is not None:
                assert versions[found.slot] == found.version
                leases[reader], seen[reader] = (found.slot, now_s + TIMEOUT_S), found.version
        elif event == "release":
            ledger.release(arguments[0])
            leases.pop(arguments[0], None)
        assert (ledger.newest.version if ledger.newest else 0) == max(versions.values(), default=0)
        assert ledger.next_deadline_s() == min((end_s for _, end_s in leases.values()), default=None)
        assert (ledger.is_owing, ledger.num_skipped) == (is_owing, num_skipped)
        assert ledger.num_expired_leases == num_expired


def test_a_reader_gets_the_version_that_it_prefers_while_a_slot_has_it() -> None:
    ledger = WeightLedger(lease_timeout_s=TIMEOUT_S)

    def publish(version: int) -> None:
        slot = ledger.begin(0.0)
        assert slot is not None
        ledger.commit(manifest(version, slot))

    def leased(**wish: int) -> int | None:
        found = ledger.acquire(0, now_s=0.0, **wish)
        ledger.release(0)
        return None if found is None else found.version

    publish(1)
    publish(2)
    assert leased(newer_than=0, preferred=1) == 1
    assert leased(newer_than=0, preferred=7) == leased(newer_than=0) == leased(newer_than=1, preferred=1) == 2
    assert leased(newer_than=2, preferred=1) is None, "it has a newer one already"
    publish(3)
    assert leased(newer_than=0, preferred=1) == leased(newer_than=2, preferred=2) == 3


def test_a_failed_publication_is_not_shown_and_made_up_for() -> None:
    async def scenario() -> None:
        exchange = WeightExchange(WeightLedger(lease_timeout_s=TIMEOUT_S))

        async def stage(slot: int) -> Manifest:
            return manifest(1, slot)

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
    async def scenario(*, is_released: bool) -> None:
        exchange = WeightExchange(WeightLedger(lease_timeout_s=TIMEOUT_S))
        version = 0

        async def stage(slot: int) -> Manifest:
            nonlocal version
            version += 1
            return manifest(version, slot)

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

    VirtualTime().run(scenario(is_released=True))
    VirtualTime().run(scenario(is_released=False))


def test_a_lease_waits_for_something_newer() -> None:
    async def scenario() -> None:
        exchange = WeightExchange(WeightLedger(lease_timeout_s=TIMEOUT_S))

        async def read() -> int:
            async with exchange.lease(0, newer_than=1) as found:
                return found.version

        async def publish(version: int) -> None:
            async def stage(slot: int) -> Manifest:
                return manifest(version, slot)

            await exchange.publish(stage)

        await publish(1)
        reading = asyncio.create_task(read())
        for _ in range(20):
            await asyncio.sleep(0)
        assert not reading.done()
        await publish(2)
        assert await reading == 2

    asyncio.run(scenario())
