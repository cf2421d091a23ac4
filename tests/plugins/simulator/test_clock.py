"""What waits, and what computes on cores that are shared."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forgeasync.plugins.simulator import Clock, Thread
from tests.plugins.simulator.made_engines import play


def _ends(num_cores: int, works: list[tuple[float, float]]) -> list[float]:
    """When processes end that begin to compute at once, each with its work and its cores."""
    clock = Clock(num_cores)
    ends = [0.0] * len(works)
    for index, (work_s, cores) in enumerate(works):
        clock.compute(work_s, cores, lambda index=index: ends.__setitem__(index, clock.now_s))
    play(clock)
    return ends


@pytest.mark.parametrize(
    ("num_cores", "works", "ends"),
    [
        (2, [(1.0, 1.0), (3.0, 1.0)], [1.0, 3.0]),
        # At half speed until the first ends at 2 s; the other has 2 s left then.
        (1, [(1.0, 1.0), (3.0, 1.0)], [2.0, 4.0]),
        # On a GPU nothing is shared.
        (1, [(1.0, 0.0), (3.0, 0.0), (1.0, 1.0)], [1.0, 3.0, 1.0]),
        (2, [(1.0, 4.0)], [2.0]),
    ],
)
def test_processes_that_share_cores_slow_down_alike_while_they_do(
    num_cores: int, works: list[tuple[float, float]], ends: list[float]
) -> None:
    assert _ends(num_cores, works) == pytest.approx(ends)


@given(
    num_cores=st.integers(1, 8),
    works=st.lists(st.tuples(st.floats(0.01, 10.0), st.floats(0.1, 4.0)), min_size=1, max_size=6),
)
def test_shared_cores_do_all_work_and_no_more(num_cores: int, works: list[tuple[float, float]]) -> None:
    """The last end is no earlier than the longest work and than all work on all cores. It is no later than
    their sum."""
    last_s = max(_ends(num_cores, works))
    longest_s = max(work_s for work_s, _ in works)
    of_all_s = sum(work_s * cores for work_s, cores in works) / num_cores
    assert max(longest_s, of_all_s) <= last_s * (1.0 + 1e-6)
    assert last_s <= (longest_s + of_all_s) * (1.0 + 1e-6)


def test_what_was_canceled_does_not_happen_and_times_that_tie_keep_their_order() -> None:
    clock = Clock(1)
    seen = []
    for name in "abc":
        event = clock.wall.after(1.0, lambda name=name: seen.append(name))
        if name == "b":
            event.cancel()
    play(clock)
    assert seen == ["a", "c"]


def test_a_thread_does_one_thing_after_the_other_also_what_takes_no_time() -> None:
    clock, done = Clock(1), list[tuple[str, float]]()
    thread = Thread(clock)

    def note(what: str) -> None:
        done.append((what, clock.now_s))

    thread.do(0.0, lambda: note("first"))
    thread.do(1.0, lambda: note("long"))
    thread.do(0.0, lambda: note("short"))
    clock.wall.after(0.5, lambda: thread.do(2.0, lambda: note("last")))
    play(clock)
    assert done == [("first", 0.0), ("long", 1.0), ("short", 1.0), ("last", 3.0)]
