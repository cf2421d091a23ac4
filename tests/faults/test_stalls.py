"""When a run is said to stand still: random healthy histories, and silences of any length after them."""

from hypothesis import given
from hypothesis import strategies as st

from forgeasync.faults import (
    ALL_FACTOR,
    ALL_FLOOR_S,
    FIRST_FLOOR_S,
    NUM_STEPS,
    STEP_FACTOR,
    STEP_FLOOR_S,
    Progress,
    Resumed,
    Stall,
    StallPolicy,
)


class Run:
    """A run that is looked at once a second."""

    def __init__(self) -> None:
        self.policy = StallPolicy()
        self._marks = dict.fromkeys(Progress, 0)
        assert self.policy.look(0.0, self._marks) is None

    def moves(self, *kinds: Progress) -> Stall | Resumed | None:
        for kind in kinds:
            self._marks[kind] += 1
        return self.policy.look(1.0, self._marks)

    def quiet(self, seconds: int) -> list[Stall | Resumed]:
        """What was found in so many looks without progress."""
        looks = (self.policy.look(1.0, self._marks) for _ in range(seconds))
        return [found for found in looks if found is not None]

    def steps(self, num: int, every_s: int) -> None:
        for _ in range(num):
            assert self.quiet(every_s - 1) == []
            assert self.moves(*Progress) is None


OTHERS = st.sampled_from([Progress.TOKENS, Progress.SCORES, Progress.WEIGHTS])


@given(st.lists(st.tuples(st.integers(0, int(ALL_FLOOR_S) - 2), st.booleans(), OTHERS), max_size=40))
def test_no_run_whose_quiet_times_are_below_the_floors_is_said_to_stand_still(
    moves: list[tuple[int, bool, Progress]],
) -> None:
    run, since_step_s = Run(), 0
    for quiet_s, is_step, other in moves:
        since_step_s += quiet_s + 1
        is_step = is_step or since_step_s > STEP_FLOOR_S - ALL_FLOOR_S
        assert run.quiet(quiet_s) == []
        assert run.moves(other, *([Progress.STEP] if is_step else [])) is None
        since_step_s = 0 if is_step else since_step_s
    assert run.policy.num_found == 0


@given(st.integers(1, 50), st.integers(0, 10))
def test_a_silence_is_told_once_and_when_it_is_far_longer_than_all_before(step_s: int, num_more: int) -> None:
    run = Run()
    run.steps(NUM_STEPS + 1 + num_more, step_s)
    limit_s = int(max(ALL_FLOOR_S, ALL_FACTOR * step_s))
    assert run.quiet(limit_s) == []
    (stall,) = run.quiet(1)
    assert isinstance(stall, Stall) and stall.is_whole and stall.longest_s == step_s
    assert set(stall.since_s.values()) == {stall.quiet_s} == {limit_s + 1.0}
    assert run.quiet(5 * limit_s) == [], "once"
    resumed = run.moves(Progress.TOKENS)
    assert isinstance(resumed, Resumed) and resumed.quiet_s == 6 * limit_s + 2
    run.moves(Progress.STEP)
    assert run.quiet(2 * limit_s) == [], "so long a silence is known by now"
    assert run.policy.num_found == 1


def test_steps_that_do_not_come_are_told_while_all_else_moves() -> None:
    run = Run()
    run.steps(NUM_STEPS + 5, 30)
    found = [run.moves(Progress.TOKENS, Progress.SCORES) for _ in range(1000)]
    (stall,) = [one for one in found if one is not None]
    assert isinstance(stall, Stall) and not stall.is_whole and stall.longest_s == 30
    assert stall.quiet_s == STEP_FACTOR * 30 + 1 and stall.since_s[Progress.TOKENS] == 0
    assert run.moves(Progress.TOKENS) is None, "tokens are no step"
    assert isinstance(run.moves(Progress.STEP), Resumed)


def test_the_first_steps_may_take_long_and_say_nothing_of_those_to_come() -> None:
    run = Run()
    assert run.quiet(int(FIRST_FLOOR_S) - 2) == []
    run.steps(NUM_STEPS, 2)
    run.steps(1, 2)
    assert run.quiet(int(ALL_FLOOR_S)) == [] and len(run.quiet(1)) == 1, "as if nothing had been slow"
    late = Run()
    assert len(late.quiet(int(FIRST_FLOOR_S) + 1)) == 1, "a run that never begins is told of too"


def test_time_in_which_a_fault_is_seen_to_does_not_count() -> None:
    run = Run()
    run.steps(NUM_STEPS + 1, 2)
    for _ in range(10):
        assert run.quiet(int(ALL_FLOOR_S) - 1) == []
        run.policy.rest()
    assert run.policy.num_found == 0
