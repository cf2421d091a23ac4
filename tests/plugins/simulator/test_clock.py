"""What waits, and what computes on cores that are shared."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forgeasync.plugins.simulator import Clock, Thread


def _ends(num_cores: int, works: list[tuple[float, float]]) -> list[float]:
    """When processes end that begin to compute at once, each with its work and its cores."""
    clock = Clock(num_cores)
    ends = [0.0] * len(works)
    for index, (work_s, cores) in enumerate(works):
        clock.compute(work_s, cores, lambda index=index: ends.__setitem__(index, clock.now_s))
    while clock.step():
        pass
    return ends


def test_processes_with_cores_of_their_own_take_as_long_as_alone() -> None:
    assert _ends(2, [(1.0, 1.0), (3.0, 1.0)]) == pytest.approx([1.0, 3.0])


def test_processes_that_share_cores_slow_down_alike_while_they_do() -> None:
    """Two processes on one core: at half speed until the first ends at 2 s, the other has 2 s left then."""
    assert _ends(1, [(1.0, 1.0), (3.0, 1.0)]) == pytest.approx([2.0, 4.0])


@given(
    num_cores=st.integers(1, 8),
    works=st.lists(st.tuples(st.floats(0.01, 10.0), st.floats(0.1, 4.0)), min_size=1, max_size=6),
)
def test_shared_cores_do_all_of_the_work_and_no_more(
    num_cores: int, works: list[tuple[float, float]]
) -> None:
    """The last end is no earlier than the longest work and than all work on all cores. It is no later than
    their sum."""
    last_s = max(_ends(num_cores, works))
    longest_s = max(work_s for work_s, _ in works)
    of_all_s = sum(work_s * cores for work_s, cores in works) / num_cores
    assert max(longest_s, of_all_s) <= last_s * (1.0 + 1e-6)
    assert last_s <= (longest_s + of_all_s) * (1.0 + 1e-6)


def test_what_computes_on_a_gpu_shares_nothing() -> None:
    assert _ends(1, [(1.0, 0.0), (3.0, 0.0), (1.0, 1.0)]) == pytest.approx([1.0, 3.0, 1.0])


def test_one_process_that_wants_more_cores_than_there_are_is_slow() -> None:
    assert _ends(2, [(1.0, 4.0)]) == pytest.approx([2.0])


def test_an_engine_s_timeline_is_that_of_the_cores_or_of_the_wall() -> None:
    clock, ends = Clock(1), dict[str, float]()
    clock.begin(2.0)
    clock.timeline(1.0).after(1.0, lambda: ends.__setitem__("on cores", clock.now_s))
    clock.timeline(0.0).after(1.0, lambda: ends.__setitem__("on a GPU", clock.now_s))
    while clock.step():
        pass
    assert ends == {"on a GPU": pytest.approx(1.0), "on cores": pytest.approx(2.0)}


def test_a_wait_takes_as_long_whoever_computes() -> None:
    clock = Clock(1)
    seen = []
    clock.compute(1.0, 2.0, lambda: seen.append(("computed", clock.now_s)))
    clock.wall.after(1.5, lambda: seen.append(("waited", clock.now_s)))
    while clock.step():
        pass
    assert seen == [("waited", pytest.approx(1.5)), ("computed", pytest.approx(2.0))]


def test_what_was_canceled_does_not_happen_and_times_that_tie_keep_their_order() -> None:
    clock = Clock(1)
    seen = []
    for name in "abc":
        event = clock.wall.after(1.0, lambda name=name: seen.append(name))
        if name == "b":
            event.cancel()
    while clock.step():
        pass
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
    while clock.step():
        pass
    assert done == [("first", 0.0), ("long", 1.0), ("short", 1.0), ("last", 3.0)]
