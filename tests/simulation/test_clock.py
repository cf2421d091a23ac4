"""Two timelines: what waits, and what computes on cores that are shared."""

import pytest

from forgeasync.simulation.clock import Clock
from forgeasync.simulation.thread import Thread


def _ends(num_cores: int, works: list[tuple[float, float]], *, crowding: float = 0.0) -> list[float]:
    """When procs end that begin to compute at once, each with its work and its cores."""
    clock = Clock(num_cores, crowding=crowding)
    ends = [0.0] * len(works)
    for index, (work_s, cores) in enumerate(works):
        clock.compute(work_s, cores, lambda index=index: ends.__setitem__(index, clock.now_s))
    while clock.step():
        pass
    return ends


def test_procs_with_cores_of_their_own_take_as_long_as_alone() -> None:
    assert _ends(2, [(1.0, 1.0), (3.0, 1.0)]) == pytest.approx([1.0, 3.0])


def test_procs_that_share_cores_slow_down_alike_while_they_do() -> None:
    """Two procs on one core: at half speed until the first ends at 2 s, the other has 2 s left then."""
    assert _ends(1, [(1.0, 1.0), (3.0, 1.0)]) == pytest.approx([2.0, 4.0])


@pytest.mark.parametrize(
    ("num_cores", "others", "ends"),
    [
        # 3 cores are wanted, and 2 if ranks in lockstep get half of theirs: these are half as fast, and done
        # after 1 s; the other has a core to itself all the time.
        (2, [(4.0, 1.0)], [1.0, 4.0]),
        # At half their share they want 1 core of 3: 2 / 3 of the speed for the others until 1.5 s.
        (2, [(4.0, 1.0), (4.0, 1.0)], [1.5, 4.5, 4.5]),
        # The other wants 0.5 of a core, and the rest is for the ranks, though that is more than their share.
        (2, [(4.0, 0.5)], [2 / 3, 4.0]),
        # Alone, or with cores for all.
        (1, [], [1.0]),
        (3, [(4.0, 1.0)], [0.5, 4.0]),
    ],
)
def test_procs_in_lockstep_get_less_where_cores_are_short(
    num_cores: int, others: list[tuple[float, float]], ends: list[float]
) -> None:
    """Two ranks that want a core each for 0.5 s, and others with their work and their cores."""
    clock = Clock(num_cores, lockstep_share=0.5)
    found = [0.0] * (1 + len(others))
    clock.compute_in_lockstep(0.5, 2.0, lambda: found.__setitem__(0, clock.now_s))
    for index, (work_s, cores) in enumerate(others, 1):
        clock.compute(work_s, cores, lambda index=index: found.__setitem__(index, clock.now_s))
    while clock.step():
        pass
    assert found == pytest.approx(ends)


def test_what_computes_on_a_gpu_shares_nothing() -> None:
    assert _ends(1, [(1.0, 0.0), (3.0, 0.0), (1.0, 1.0)]) == pytest.approx([1.0, 3.0, 1.0])


def test_sharing_itself_costs_something() -> None:
    """Others have half of the core: 0.5 / (1 + 0.5 * 0.5) of the speed until 2.5 s; two thirds: 1 / 4 of it.
    With a core for each, or one on a GPU, nothing is slower."""
    assert _ends(1, [(1.0, 1.0), (3.0, 1.0)], crowding=0.5) == pytest.approx([2.5, 4.5])
    assert _ends(1, [(1.0, 1.0)] * 3, crowding=0.5) == pytest.approx([4.0] * 3)
    assert _ends(2, [(1.0, 1.0), (3.0, 1.0)], crowding=0.5) == pytest.approx([1.0, 3.0])
    assert _ends(1, [(2.0, 1.0), (1.0, 0.0)], crowding=0.5) == pytest.approx([2.0, 1.0])


@pytest.mark.parametrize(
    ("lockstep_share", "lockstep_crowding", "ends"),
    [
        # All have the half: 0.5 / 1.25 of the speed until 1.25 s.
        (1.0, 0.5, [1.25, 4.75, 4.75]),
        # The others have two thirds, 4 / 7 of the speed; the ranks one third, a quarter of it, until 2 s.
        (0.5, 0.5, [2.0, 2.0 + 20 / 7, 2.0 + 20 / 7]),
        # The ranks take no more for the same, and have half of the speed until 1 s; the others 0.4 of it.
        (1.0, 0.0, [1.0, 4.6, 4.6]),
    ],
)
def test_what_sharing_costs_procs_in_lockstep_is_their_own(
    lockstep_share: float, lockstep_crowding: float, ends: list[float]
) -> None:
    clock = Clock(2, crowding=0.5, lockstep_share=lockstep_share, lockstep_crowding=lockstep_crowding)
    found = [0.0] * 3
    clock.compute_in_lockstep(0.5, 2.0, lambda: found.__setitem__(0, clock.now_s))
    for index in (1, 2):
        clock.compute(4.0, 1.0, lambda index=index: found.__setitem__(index, clock.now_s))
    while clock.step():
        pass
    assert found == pytest.approx(ends)


def test_one_proc_that_wants_more_cores_than_there_are_is_slow() -> None:
    assert _ends(2, [(1.0, 4.0)]) == pytest.approx([2.0])


def test_a_wait_takes_as_long_whoever_computes() -> None:
    clock = Clock(1)
    seen = []
    clock.compute(1.0, 2.0, lambda: seen.append(("computed", clock.now_s)))
    clock.wall.after(1.5, lambda: seen.append(("waited", clock.now_s)))
    while clock.step():
        pass
    assert seen == [("waited", pytest.approx(1.5)), ("computed", pytest.approx(2.0))]


def test_what_was_cancelled_does_not_happen_and_times_that_tie_keep_their_order() -> None:
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
