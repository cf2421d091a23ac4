"""Settings of all tests: what they are marked with, and in which order they run."""

import os
import sys
from collections.abc import Generator, Iterator

import pytest
from hypothesis import settings

from forgeasync.faults import RUN_MARK
from tests.support import tiers

# On a busy machine any example may take long: tests judge behaviour, not time.
settings.register_profile("no_deadline", deadline=None)
settings.load_profile("no_deadline")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests that start processes, and let their files come first: two workers then end together."""
    for item in items:
        if isinstance(item, pytest.Function):
            for mark in tiers.started_by(item):
                item.add_marker(mark.value)
    starting = {item.path for item in items if any(item.get_closest_marker(mark) for mark in tiers.Starts)}
    items.sort(key=lambda item: item.path not in starting)


def pytest_collection_finish() -> None:
    """Monarch's procs are started by the product itself, not by a helper of the tests."""
    if "monarch.actor" in sys.modules:
        from monarch.actor import HostMesh

        if not hasattr(HostMesh.spawn_procs, "starts"):
            HostMesh.spawn_procs = tiers.starts(tiers.Starts.PROCS)(HostMesh.spawn_procs)


@pytest.fixture(autouse=True)
def mark_of_a_run_ends_with_its_test() -> Iterator[None]:
    """Who makes a run's folder marks its process: programs that later tests start must not inherit that."""
    before = os.environ.get(RUN_MARK)
    yield
    if before is None:
        os.environ.pop(RUN_MARK, None)
    else:
        os.environ[RUN_MARK] = before


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    with tiers.running(item):
        return (yield)
