"""Settings of all tests: what they are marked with, and in which order they run."""

import asyncio
import inspect
import os
import sys
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

from forgeasync.files import RUN_MARK
from tests.support import tiers
from tests.support.warm_python import session_folder, wait_until_imported, warm_python
from tests.support.warm_python.executable import kind_of_role

if TYPE_CHECKING:
    from forgeasync.testing import HandTime, VirtualTime

# On a busy machine any example may take long: tests judge behavior, not time. The same examples are tried
# every time, so that a failure is the code's; --hypothesis-profile=search tries others.
settings.register_profile("same_examples", deadline=None, derandomize=True)
settings.register_profile("search", deadline=None)
settings.load_profile("same_examples")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests that start processes, and let their files come first: two workers then end together."""
    for item in items:
        if isinstance(item, pytest.Function):
            for mark in tiers.started_by(item):
                item.add_marker(mark.value)
    starting = {item.path for item in items if any(item.get_closest_marker(mark) for mark in tiers.Starts)}
    items.sort(key=lambda item: item.path not in starting)


def pytest_configure(config: pytest.Config) -> None:
    """Workers of xdist share one server of warm processes: it belongs to the process that starts them."""
    if getattr(config.option, "numprocesses", None):
        session_folder()


def pytest_collection_finish() -> None:
    """Monarch's processes are started by the product itself, not by a helper of the tests."""
    if "monarch.actor" in sys.modules:
        from monarch.actor import HostMesh

        if not hasattr(spawn := HostMesh.spawn_procs, "starts"):

            @tiers.starts(tiers.Starts.PROCESSES)
            def spawn_warm(hosts: HostMesh, *arguments: Any, name: str | None = None, **named: Any) -> object:
                wait_until_imported(kind_of_role(name or ""))
                return spawn(hosts, *arguments, name=name, **named)

            HostMesh.spawn_procs = spawn_warm


@pytest.fixture(autouse=True)
def mark_of_a_run_ends_with_its_test() -> Iterator[None]:
    """Who makes a run's folder marks its process: programs that later tests start must not inherit that."""
    before = os.environ.get(RUN_MARK)
    yield
    if before is None:
        os.environ.pop(RUN_MARK, None)
    else:
        os.environ[RUN_MARK] = before


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine function on an event loop of its own, in the time that it asks for."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    given = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}
    clock = pyfuncitem.funcargs.get("virtual_time") or pyfuncitem.funcargs.get("hand_time")
    run = asyncio.run if clock is None else clock.run
    run(pyfuncitem.obj(**given))
    return True


@pytest.fixture
def virtual_time() -> "VirtualTime":
    """The time of a coroutine test in which timers expire at once."""
    from forgeasync.testing import VirtualTime

    return VirtualTime()


@pytest.fixture
def hand_time() -> "HandTime":
    """The time of a coroutine test in which timers expire as the test moves this clock."""
    from forgeasync.testing import HandTime

    return HandTime()


@pytest.fixture
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A group of one gloo rank in this very process, for what is quick and asks for a group."""
    import torch.distributed as dist

    store = dist.FileStore(str(tmp_path_factory.mktemp("group") / "store"), 1)
    dist.init_process_group("gloo", rank=0, world_size=1, store=store)
    yield
    dist.destroy_process_group()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    python = sys.executable
    if item.get_closest_marker(tiers.Starts.PROCESSES) is not None:
        # What starts with this process's Python has imported its libraries.
        sys.executable = warm_python()
    try:
        with tiers.running(item):
            return (yield)
    finally:
        sys.executable = python
