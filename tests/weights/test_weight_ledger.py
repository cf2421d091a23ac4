"""Two staging buffers, a publisher that never waits and readers that lease: no history tears a version."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forgeasync.testing import VirtualTime
from forgeasync.weights import Manifest, WeightExchange, WeightLedger

TIMEOUT_S = 10.0


def manifest(version: int, slot: int) -> Manifest:
    return Manifest(version=version, slot=slot, layout_digest="", checksums=(), waited_s=0.0, staging_s=0.0)


def publish(ledger: WeightLedger, version: int, now_s: float = 0.0) -> int | None:
    slot = ledger.begin(now_s)
    if slot is not None:
        ledger.commit(manifest(version, slot))
    return slot


def test_publishing_alternates_while_nobody_reads() -> None:
    ledger = WeightLedger(lease_timeout_s=TIMEOUT_S)
    slots = [publish(ledger, version) for version in range(1, 5)]
    assert slots in ([0, 1, 0, 1], [1, 0, 1, 0])
    assert ledger.newest is not None and ledger.newest.version == 4


def test_a_slow_reader_keeps_its_slot_and_the_other_is_used_twice() -> None:
    ledger = WeightLedger(lease_timeout_s=TIMEOUT_S)
    first = publish(ledger, 1)
    assert ledger.acquire(0, newer_than=0, now_s=0.0) is not None
    assert publish(ledger, 2) == publish(ledger, 3) == 1 - first
    assert ledger.num_skipped == 0


def test_with_both_slots_read_a_version_is_skipped_and_owed_until_one_is_free() -> None:
    ledger = WeightLedger(lease_timeout_s=TIMEOUT_S)
    publish(ledger, 1)
    ledger.acquire(0, newer_than=0, now_s=0.0)
    publish(ledger, 2)
    ledger.acquire(1, newer_than=0, now_s=0.0)
    assert publish(ledger, 3) is None and ledger.num_skipped == 1 and ledger.is_owing
    assert publish(ledger, 4) is None and ledger.num_skipped == 2
    assert not ledger.can_begin(1.0)
    ledger.release(0)
    assert ledger.can_begin(1.0)
    assert publish(ledger, 3) is not None and ledger.is_owing is False


def test_of_new_buffers_no_version_can_be_read_and_the_newest_is_owed() -> None:
    ledger = WeightLedger(lease_timeout_s=TIMEOUT_S)
    ledger.forget_committed()
    assert not ledger.is_owing, "before the first version nothing is owed"
    publish(ledger, 1)
    publish(ledger, 2)
    leased = ledger.acquire(0, newer_than=0, now_s=0.0)
    assert leased is not None
    writing = ledger.begin(0.0)
    assert writing is not None and not ledger.is_owing
    ledger.forget_committed()
    assert ledger.newest is None and ledger.is_owing and ledger.can_begin(0.0)
    assert ledger.acquire(1, newer_than=0, now_s=0.0) is None, "nobody reads what was in the old ones"
    ledger.release(0)
    ledger.commit(manifest(3, writing))
    assert ledger.newest is not None and ledger.newest.version == 3, "written to the new ones"
    assert publish(ledger, 3) == leased.slot and not ledger.is_owing


def test_a_reader_that_died_loses_its_lease_at_the_deadline() -> None:
    ledger = WeightLedger(lease_timeout_s=TIMEOUT_S)
    publish(ledger, 1)
    assert ledger.next_deadline_s() is None
    ledger.acquire(0, newer_than=0, now_s=0.0)
    publish(ledger, 2, now_s=1.0)
    ledger.acquire(1, newer_than=0, now_s=1.0)
    assert ledger.next_deadline_s() == TIMEOUT_S
    assert publish(ledger, 3, now_s=TIMEOUT_S - 0.1) is None
    assert publish(ledger, 3, now_s=TIMEOUT_S) is not None
    assert ledger.num_expired_leases == 1


def test_a_publisher_that_fails_half_way_shows_nothing() -> None:
    ledger = WeightLedger(lease_timeout_s=TIMEOUT_S)
    publish(ledger, 1)
    slot = ledger.begin(0.0)
    assert slot is not None
    ledger.abandon(slot)
    newest = ledger.acquire(0, newer_than=0, now_s=0.0)
    assert newest is not None and newest.version == 1
    assert ledger.is_owing


def test_one_that_comes_late_gets_the_newest_and_only_a_newer_one() -> None:
    ledger = WeightLedger(lease_timeout_s=TIMEOUT_S)
    for version in (1, 2, 3):
        publish(ledger, version)
    newest = ledger.acquire(0, newer_than=0, now_s=0.0)
    assert newest is not None and newest.version == 3
    assert ledger.acquire(1, newer_than=3, now_s=0.0) is None


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("begin")),
        st.tuples(st.just("commit")),
        st.tuples(st.just("abandon")),
        st.tuples(st.just("acquire"), st.integers(0, 3)),
        st.tuples(st.just("release"), st.integers(0, 3)),
        st.tuples(st.just("wait"), st.floats(0.0, TIMEOUT_S)),
    ),
    max_size=60,
)


@settings(max_examples=300, deadline=None)
@given(EVENTS)
def test_no_history_lets_a_writer_into_a_leased_slot(events: list[tuple[object, ...]]) -> None:
    """Against a model that keeps every lease with its deadline: what a reader holds is never written."""
    ledger = WeightLedger(lease_timeout_s=TIMEOUT_S)
    now_s, version, writing = 0.0, 0, None
    held: dict[int, tuple[Manifest, float]] = {}
    seen = dict.fromkeys(range(4), 0)
    for event, *arguments in events:
        if event == "wait":
            now_s += float(arguments[0])  # type: ignore[arg-type]
        elif event == "begin" and writing is None:
            alive = {m.slot for m, end_s in held.values() if end_s > now_s}
            writing = ledger.begin(now_s)
            assert writing not in alive
            assert (writing is None) == (len(alive) == 2), "skipped although a slot was free"
        elif event == "commit" and writing is not None:
            version += 1
            ledger.commit(manifest(version, writing))
            writing = None
            assert ledger.newest is not None and ledger.newest.version == version
        elif event == "abandon" and writing is not None:
            ledger.abandon(writing)
            writing = None
        elif event == "acquire" and arguments[0] not in held:
            reader = int(arguments[0])  # type: ignore[call-overload]
            found = ledger.acquire(reader, newer_than=seen[reader], now_s=now_s)
            if found is not None:
                assert found.version > seen[reader] and found.slot != writing
                held[reader], seen[reader] = (found, now_s + TIMEOUT_S), found.version
        elif event == "release":
            reader = int(arguments[0])  # type: ignore[call-overload]
            ledger.release(reader)
            held.pop(reader, None)


def test_a_reader_gets_the_version_that_it_prefers_while_a_slot_has_it() -> None:
    ledger = WeightLedger(lease_timeout_s=TIMEOUT_S)
    publish(ledger, 1)
    publish(ledger, 2)

    def leased(**wish: int) -> int | None:
        found = ledger.acquire(0, now_s=0.0, **wish)
        ledger.release(0)
        return None if found is None else found.version

    assert leased(newer_than=0, preferred=1) == 1
    assert leased(newer_than=0, preferred=7) == leased(newer_than=0) == 2
    assert leased(newer_than=2, preferred=1) is None, "it has a newer one already"
    publish(ledger, 3)
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
