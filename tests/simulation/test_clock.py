"""What waits, and what computes on cores that are shared."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forgeasync.simulation import Clock, Thread, lagging


def _ends(num_cores: int, works: list[tuple[float, float]]) -> list[float]:
    """When procs end that begin to compute at once, each with its work and its cores."""
    clock = Clock(num_cores)
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
    ("num_ranks", "num_cores", "others", "ends"),
    [
        # Others have half of their cores, so one other proc wants each: 2 * 0.5 + 4 * 0.25 = 2 cores. The
        # ranks are done after 2 s, and the others have 3 s left then.
        (4, 2, [(4.0, 1.0), (4.0, 1.0)], [2.0, 5.0, 5.0]),
        # 4 / 5 of it, and 16 / 25 for the ranks.
        (5, 4, [(4.0, 1.0)], [25 / 32, 25 / 32 + 4.0 - 5 / 8]),
        # Alone, or with cores for all.
        (2, 1, [], [1.0]),
        (2, 3, [(4.0, 1.0)], [0.5, 4.0]),
    ],
)
def test_procs_in_lockstep_get_less_where_cores_are_short(
    num_ranks: int, num_cores: int, others: list[tuple[float, float]], ends: list[float]
) -> None:
    """Ranks that want a core each for 0.5 s, and others with their work and their cores."""
    clock = Clock(num_cores, lockstep_lag=1.0)
    found = [0.0] * (1 + len(others))
    clock.compute_in_lockstep(0.5, float(num_ranks), lambda: found.__setitem__(0, clock.now_s))
    for index, (work_s, cores) in enumerate(others, 1):
        clock.compute(work_s, cores, lambda index=index: found.__setitem__(index, clock.now_s))
    while clock.step():
        pass
    assert found == pytest.approx(ends)


@given(
    others=st.floats(0.1, 50.0),
    lockstep=st.floats(0.1, 50.0),
    num_cores=st.integers(1, 64),
    lag=st.floats(0.0, 10.0),
)
def test_all_cores_are_taken_where_they_are_short(
    others: float, lockstep: float, num_cores: int, lag: float
) -> None:
    clock = Clock(num_cores, lockstep_lag=lag)
    clock.begin(others)
    clock.compute_in_lockstep(1.0, lockstep, lambda: None)
    in_lockstep, each = clock.shares()
    taken = others * each + lockstep * in_lockstep
    assert taken == pytest.approx(min(num_cores, others + lockstep))
    assert 0.0 < in_lockstep <= each * (1.0 + 1e-9) <= 1.0 + 1e-6
    assert in_lockstep == pytest.approx(each * lagging(each, lag))


def test_what_computes_on_a_gpu_shares_nothing() -> None:
    assert _ends(1, [(1.0, 0.0), (3.0, 0.0), (1.0, 1.0)]) == pytest.approx([1.0, 3.0, 1.0])


@pytest.mark.parametrize(
    ("num_cores", "engine_cores", "works", "engine_end", "ends"),
    [
        # Others have half of the core: 0.5 / (1 + 0.5 * 0.5) of the speed until 2 s; then 0.2 s are left.
        (1, 1.0, [1.0], 2.2, [2.0]),
        # Two thirds of it: 1 / 4 of the speed, and the others a third of theirs.
        (1, 1.0, [2.0, 2.0], 4.0, [16 / 3, 16 / 3]),
        # A core for each, or a GPU: nothing is slower.
        (2, 1.0, [3.0], 1.0, [3.0]),
        (1, 0.0, [3.0], 1.0, [3.0]),
    ],
)
def test_sharing_itself_costs_engines_something(
    num_cores: int, engine_cores: float, works: list[float], engine_end: float, ends: list[float]
) -> None:
    """An engine that has a second to compute, and others with their work."""
    clock = Clock(num_cores, engine_crowding=0.5)
    found = [0.0] * (1 + len(works))

    def engine_ends() -> None:
        clock.end(engine_cores)
        found[0] = clock.now_s

    clock.begin(engine_cores)
    clock.of_engine(engine_cores).after(1.0, engine_ends)
    for index, work_s in enumerate(works, 1):
        clock.compute(work_s, 1.0, lambda index=index: found.__setitem__(index, clock.now_s))
    while clock.step():
        pass
    assert found == pytest.approx([engine_end, *ends])


@pytest.mark.parametrize(
    ("lockstep_lag", "lockstep_crowding", "ends"),
    [
        # All have the half: 0.5 / 1.25 of the speed for the ranks until 1.25 s.
        (0.0, 0.5, [1.25, 4.625, 4.625]),
        # The others have two thirds, so half a proc more wants each core. The ranks have one third: a quarter
        # of the speed, until 2 s.
        (2.0, 0.5, [2.0, 2.0 + 8 / 3, 2.0 + 8 / 3]),
        # The ranks take no more for the same, and have half of the speed until 1 s.
        (0.0, 0.0, [1.0, 4.5, 4.5]),
    ],
)
def test_what_sharing_costs_procs_in_lockstep_is_their_own(
    lockstep_lag: float, lockstep_crowding: float, ends: list[float]
) -> None:
    clock = Clock(2, engine_crowding=0.7, lockstep_lag=lockstep_lag, lockstep_crowding=lockstep_crowding)
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
