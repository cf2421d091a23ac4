"""Means over a run's newest steps, by hand: without the first ones, evaluations and earlier starts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forgeasync.observability import (
    KEYS,
    NUM_GENERATORS,
    WINDOW_STEPS,
    MeasuredWindow,
    num_first_steps,
    num_steps_ahead,
    steady_steps,
)


def line(step: int, elapsed_s: float, **values: float) -> dict[str, float]:
    """A step of 4 s, of which 1 s is waited for a batch and 2 s train, on 40 tokens; one generator, always
    busy."""
    found = {
        "step": step,
        "time/elapsed_s": elapsed_s,
        "time/step_s": 4.0,
        "time/eval_s": 0.0,
        "time/wait_for_batch_s": 1.0,
        "time/train_s": 2.0,
        "time/publish_weights_s": 0.5,
        "throughput/train_tokens_per_s": 10.0,
        "generator/busy_s": elapsed_s,
        NUM_GENERATORS: 1.0,
        "time/controller_s": 0.25,
        "time/wait_for_disk_s": 1.0,
    }
    changed = {key: values.pop(key.rpartition("/")[2]) for key in found if key.rpartition("/")[2] in values}
    assert not values
    return found | changed


def measured(lines: list[dict[str, float]], *, num_left_out: int = 0, last_step: int = 10**6):
    window = MeasuredWindow(num_left_out=num_left_out, last_step=last_step)
    for one in lines:
        window.add(one)
    return window.measured()


def test_shares_and_rates_are_of_the_time_without_evaluations() -> None:
    third = line(3, 25.0, eval_s=10.0, busy_s=20.0) | {"time/checkpoint_s": 0.5}
    found = measured([line(1, 5.0), line(2, 10.0), third])
    assert found is not None and found.num_steps == 2
    assert found.step_s == pytest.approx(5.0), "10 s were an evaluation's"
    assert found.trained_tokens_per_s == pytest.approx(80.0 / 10.0)
    assert (found.wait_share, found.train_share, found.publish_share) == pytest.approx((0.2, 0.4, 0.1))
    between = (found.controller_share, found.disk_share, found.checkpoint_share)
    assert between == pytest.approx((0.05, 0.2, 0.05))
    assert found.eval_share == pytest.approx(1.0)
    assert found.busy_share == pytest.approx(15.0 / 20.0), "evaluations keep generators busy too"


def test_busy_time_is_that_of_all_generators_and_unknown_without_their_number() -> None:
    two = [line(1, 5.0, num_healthy=2.0), line(2, 10.0, num_healthy=2.0)]
    found = measured(two)
    assert found is not None and found.busy_share == pytest.approx(0.5)
    found = measured([{key: one[key] for key in KEYS} for one in two])
    assert found is not None and found.busy_share is None and found.step_s == 5.0


def test_the_first_steps_are_left_out() -> None:
    slow_first = [line(1, 100.0), line(2, 200.0), line(3, 205.0), line(4, 210.0)]
    assert measured(slow_first[:2], num_left_out=2) is None
    found = measured(slow_first, num_left_out=2)
    assert found is not None and (found.num_steps, found.step_s) == (2, 5.0)
    assert [num_first_steps(num) for num in (1, 4, 30, 1000)] == [0, 1, 10, 10]


def test_the_last_steps_of_a_run_are_left_out_as_it_has_ever_less_to_sample() -> None:
    fast_last = [line(1, 5.0), line(2, 10.0), line(3, 15.0), line(4, 15.1), line(5, 15.2)]
    found = measured(fast_last, last_step=3)
    assert found is not None and (found.num_steps, found.step_s) == (2, 5.0)
    window = MeasuredWindow.of_run(30, num_steps_ahead=3)
    for step in range(1, 31):
        window.add(line(step, 5.0 * min(step, 27) + 0.1 * max(0, step - 27)))
    found = window.measured()
    assert found is not None and (found.num_steps, found.step_s) == (17, pytest.approx(5.0))


def test_a_short_run_keeps_half_of_its_steps() -> None:
    for num_steps in range(1, 40):
        for num_first in range(num_steps):
            for num_ahead in range(40):
                steady = steady_steps(num_steps, num_first=num_first, num_ahead=num_ahead)
                assert steady.start >= num_first and num_steps - steady.stop <= num_ahead
                num_between = steady.stop - num_first
                assert 2 * num_between >= num_steps - num_first
                num_waves = num_between // (num_ahead + 1)
                assert len(steady) == (num_waves * (num_ahead + 1) if num_waves else num_between)


def test_how_far_a_run_samples_ahead() -> None:
    assert num_steps_ahead(max_off_policy_steps=4, max_groups=None, groups_per_step=24) == 4
    assert num_steps_ahead(max_off_policy_steps=4, max_groups=72, groups_per_step=24) == 3
    assert num_steps_ahead(max_off_policy_steps=4, max_groups=73, groups_per_step=24) == 4
    assert num_steps_ahead(max_off_policy_steps=0, max_groups=72, groups_per_step=24) == 0


def test_a_start_in_between_begins_anew() -> None:
    """The clock of a resumed run goes on; its generators' busy time begins at 0."""
    before = [line(step, 5.0 * step) for step in (1, 2, 3)]
    found = measured([*before, line(4, 500.0, busy_s=1.0), line(5, 504.0, busy_s=5.0)])
    assert found is not None and (found.num_steps, found.step_s) == (1, 4.0)
    # A step that is made again.
    assert measured([*before, line(3, 16.0)]) is None


@given(st.lists(st.floats(0.1, 100.0), min_size=2, max_size=3 * WINDOW_STEPS), st.integers(0, 5))
def test_the_mean_is_that_of_the_newest_steps(seconds: list[float], num_left_out: int) -> None:
    elapsed, lines = 0.0, []
    for step, one in enumerate(seconds, 1):
        elapsed += one
        lines.append(line(step, elapsed))
    found = measured(lines, num_left_out=num_left_out)
    counted = seconds[max(1, num_left_out) :][-WINDOW_STEPS:]
    if not counted:
        assert found is None
    else:
        assert found is not None and found.num_steps == len(counted)
        assert found.step_s == pytest.approx(sum(counted) / len(counted))
