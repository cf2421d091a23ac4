"""Tests of this folder that are coroutines run in an event loop of their own."""

import asyncio
import inspect
from collections.abc import Generator

import pytest

from forgeasync.testing import HandTime, VirtualTime


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    if inspect.iscoroutinefunction(test := pyfuncitem.obj):
        clock = pyfuncitem.funcargs.get("virtual_time") or pyfuncitem.funcargs.get("hand_time")
        run = asyncio.run if clock is None else clock.run
        pyfuncitem.obj = lambda **arguments: run(test(**arguments))
    return (yield)


@pytest.fixture
def virtual_time() -> VirtualTime:
    """Has the test run in virtual time, where timers expire at once."""
    return VirtualTime()


@pytest.fixture
def hand_time() -> HandTime:
    """Has the test run where timers expire as the test moves this clock."""
    return HandTime()
