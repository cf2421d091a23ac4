"""What tasks wait for, as their coroutines say it."""

import asyncio
from typing import Any

from forgeasync.faults import MAX_CALLS, awaited_calls
from forgeasync.waiting import Monitor, comes_within


def test_a_call_is_named_with_its_line_and_with_how_many_wait_for_it() -> None:
    async def go() -> str:
        room: Monitor[list[int]] = Monitor([])
        never = asyncio.Event()
        tasks = [asyncio.ensure_future(room.until(lambda state: None)) for _ in range(3)]
        tasks.append(asyncio.ensure_future(comes_within(60, never.wait())))
        await asyncio.sleep(0)
        words = awaited_calls(tasks)
        assert awaited_calls(tasks, ["monitor"]) == words.split("; ")[0]
        assert awaited_calls(tasks, ["nothing of this"]) == words, "better too much than nothing"
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert awaited_calls(tasks) == "", "those that have ended wait for nothing"
        return words

    monitor, within = asyncio.run(go()).split("; ")
    assert monitor.startswith("Monitor.until (forgeasync/waiting.py:")
    assert monitor.endswith(": await changed) (3 of these)")
    assert within.startswith("comes_within (forgeasync/waiting.py:") and within.endswith(": await event)")


def test_tasks_that_sleep_and_code_of_others_are_left_out() -> None:
    async def go() -> str:
        tasks = [
            asyncio.ensure_future(comes_within(60, asyncio.sleep(60))),
            asyncio.ensure_future(asyncio.Event().wait()),
        ]
        await asyncio.sleep(0)
        words = awaited_calls(tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return words

    assert asyncio.run(go()) == ""


def test_the_number_of_calls_has_a_bound() -> None:
    async def go() -> str:
        namespace: dict[str, Any] = {}
        from forgeasync import waiting

        for number in range(MAX_CALLS + 3):
            # Code that says that it is in a file of the run.
            code = compile(f"async def call{number}(event): await event.wait()", waiting.__file__, "exec")
            exec(code, namespace)
        event = asyncio.Event()
        tasks = [asyncio.ensure_future(namespace[f"call{number}"](event)) for number in range(MAX_CALLS + 3)]
        await asyncio.sleep(0)
        words = awaited_calls(tasks)
        event.set()
        await asyncio.gather(*tasks)
        return words

    assert asyncio.run(go()).split("; ")[MAX_CALLS:] == ["3 more"]
