"""Tests of this folder may be coroutines."""

import asyncio
import inspect

import pytest

from forgeasync.testing import HandTime


@pytest.fixture
def hand_time() -> HandTime:
    """The time of the loop on which a coroutine that asks for it runs."""
    return HandTime()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a coroutine on an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    given = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}
    run = given["hand_time"].run if "hand_time" in given else asyncio.run
    run(pyfuncitem.obj(**given))
    return True
