"""Work of one actor in the order of its calls: on every rank the same, whatever a call waits for before."""

import asyncio
import threading
import traceback

import pytest
import torch
import torch.distributed as dist

from forgeasync.runtime import OrderedThread
from tests.support.processes import run_ranks

NUM_CALLS = 12


async def until(begun: threading.Event) -> None:
    """Wait for something that a thread does."""
    while not begun.is_set():
        await asyncio.sleep(0)


async def test_calls_run_one_after_the_other_in_one_thread() -> None:
    thread, log = OrderedThread("trains"), []

    async def call(number: int) -> None:
        async with thread.turn():
            # Those that come first take the longest to get ready.
            for _ in range(NUM_CALLS - number):
                await asyncio.sleep(0)
            await thread.run(lambda: log.append((number, threading.current_thread().name)))

    await asyncio.gather(*(call(number) for number in range(NUM_CALLS)))
    assert log == [(number, "trains") for number in range(NUM_CALLS)]


async def test_the_event_loop_is_free_while_the_thread_works() -> None:
    thread, begun, let_go = OrderedThread("trains"), threading.Event(), threading.Event()

    def work() -> bool:
        begun.set()
        return let_go.wait()

    working = asyncio.create_task(thread.call(work))
    await until(begun)
    let_go.set()
    assert await working


async def test_an_error_has_its_traceback_and_the_next_call_runs() -> None:
    def step() -> None:
        raise ValueError("the loss of row 3")

    thread = OrderedThread("trains")
    with pytest.raises(ValueError, match="the loss of row 3") as caught:
        await thread.call(step)
    assert "step" in [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert await thread.call(lambda: 7) == 7


async def test_what_comes_after_a_cancelled_call_runs_behind_its_work() -> None:
    thread, log = OrderedThread("trains"), []
    begun, let_go = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        let_go.wait()
        log.append("cancelled")

    first = asyncio.create_task(thread.call(work))
    await until(begun)
    first.cancel()
    second = asyncio.create_task(thread.call(lambda: log.append("second")))
    for _ in range(NUM_CALLS):
        await asyncio.sleep(0)
    assert log == []
    let_go.set()
    await second
    assert log == ["cancelled", "second"]


def _call_back_to_back() -> list[tuple[int, float]]:
    """The number of every call as it ran, and the mean over the ranks of those that met in its collective."""
    sums = []

    async def scenario() -> None:
        thread = OrderedThread("trains")

        def collective(number: int) -> None:
            found = torch.tensor([float(number)])
            dist.all_reduce(found)
            sums.append((number, float(found) / dist.get_world_size()))

        async def call(number: int) -> None:
            async with thread.turn():
                # As a rank that has to wait for payloads of another host before it trains.
                if (number + dist.get_rank()) % 3 == 0:
                    await asyncio.sleep(0.01)
                await thread.run(lambda: collective(number))

        await asyncio.gather(*(call(number) for number in range(NUM_CALLS)))

    asyncio.run(scenario())
    return sums


def test_collectives_of_calls_back_to_back_meet_on_every_rank() -> None:
    for sums in run_ranks(3, _call_back_to_back):
        assert sums == [(number, float(number)) for number in range(NUM_CALLS)]
