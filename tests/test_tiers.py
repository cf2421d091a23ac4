"""The marks by which ``make test-fast`` and ``make test`` leave tests out."""

from collections.abc import Iterator

import pytest

from tests.support.processes import run_alone, run_ranks
from tests.support.tiers import MarkMissing, Starts, check, started_by, starts


@starts(Starts.PROCESSES)
def start_processes() -> str:
    return "started"


def helper() -> str:
    return next(start_processes() for _ in range(1))


@pytest.fixture
def through_a_fixture() -> Iterator[str]:
    yield "a string that names start_processes"
    (lambda: start_processes)()


def test_a_helper_of_a_helper(request: pytest.FixtureRequest) -> None:
    assert helper() == "started"
    assert request.node.get_closest_marker("processes") is not None


def test_a_fixture(request: pytest.FixtureRequest, through_a_fixture: str) -> None:
    assert request.node.get_closest_marker("processes") is not None


def test_names_in_strings_start_nothing(request: pytest.FixtureRequest) -> None:
    """Like helper or start_processes."""
    assert started_by(request.node) == set() and request.node.get_closest_marker("processes") is None


def test_a_test_without_its_mark_is_stopped(request: pytest.FixtureRequest) -> None:
    hidden = globals()["start" + "_processes"]
    with pytest.raises(MarkMissing, match=r"test_tiers\.py::test_a_test_without.*pytest\.mark\.processes"):
        hidden()
    assert request.node.get_closest_marker("processes") is None


def test_another_mark_is_not_enough(request: pytest.FixtureRequest) -> None:
    request.node.add_marker(pytest.mark.processes)
    check(Starts.PROCESSES)
    with pytest.raises(MarkMissing, match=r"pytest\.mark\.engine"):
        check(Starts.ENGINE)


@pytest.mark.parametrize(("start", "mark"), [(run_ranks, Starts.PROCESSES), (run_alone, Starts.ENGINE)])
def test_what_starts_processes_says_so(start: object, mark: Starts) -> None:
    assert start.starts is mark
