"""Curves against the same thing written plainly."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from forgeasync.viewer import Column, curve_of, downsampled, over

POINTS = st.lists(
    st.tuples(st.integers(0, 500), st.floats(-1e6, 1e6, allow_nan=False)), min_size=1, max_size=120
)


def column(points: list[tuple[int, float]]) -> Column:
    steps, values = zip(*points, strict=True)
    return Column(steps_N=np.array(steps, dtype=np.int64), values_N=np.array(values, dtype=np.float64))


@given(points=POINTS, num_buckets=st.integers(1, 60))
def test_a_bucket_has_the_lowest_highest_and_mean_of_its_points(
    points: list[tuple[int, float]], num_buckets: int
) -> None:
    last = dict(points)  # the last value of a step stands
    steps = sorted(last)
    drawn = downsampled(curve_of([column(points)]), num_buckets)
    assert drawn.num_points == len(steps)
    if len(steps) <= num_buckets:
        assert drawn.x_P.tolist() == steps
        assert drawn.mean_P.tolist() == [last[step] for step in steps]
        return
    buckets: dict[int, list[int]] = {}
    for step in steps:
        place = (step - steps[0]) * (num_buckets / (steps[-1] - steps[0]))
        buckets.setdefault(min(int(place), num_buckets - 1), []).append(step)
    expected = [buckets[one] for one in sorted(buckets)]
    np.testing.assert_allclose(drawn.x_P, [np.mean(one) for one in expected])
    assert drawn.low_P.tolist() == [min(last[step] for step in one) for one in expected]
    assert drawn.high_P.tolist() == [max(last[step] for step in one) for one in expected]
    means = [np.mean([last[step] for step in one]) for one in expected]
    np.testing.assert_allclose(drawn.mean_P, means, atol=1e-9, rtol=1e-9)


@given(points=POINTS, num_buckets=st.integers(1, 60))
def test_no_peak_is_lost(points: list[tuple[int, float]], num_buckets: int) -> None:
    curve = curve_of([column(points)])
    drawn = downsampled(curve, num_buckets)
    assert drawn.low_P.min() == curve.low_P.min()
    assert drawn.high_P.max() == curve.high_P.max()
    assert len(drawn.x_P) <= max(num_buckets, 1)
    assert (drawn.low_P <= drawn.mean_P).all() and (drawn.mean_P <= drawn.high_P).all()


def test_a_band_goes_over_the_steps_that_all_seeds_have() -> None:
    curve = curve_of([column([(1, 1.0), (2, 4.0), (3, 0.0)]), column([(2, 2.0), (3, 6.0), (4, 9.0)])])
    assert curve.x_P.tolist() == [2, 3]
    assert curve.low_P.tolist() == [2.0, 0.0]
    assert curve.high_P.tolist() == [4.0, 6.0]
    assert curve.mean_P.tolist() == [3.0, 3.0]


def test_over_time_steps_without_a_time_are_left_out() -> None:
    curve = over(curve_of([column([(1, 1.0), (2, 4.0), (3, 0.0)])]), column([(1, 10.0), (3, 30.5)]))
    assert curve.x_P.tolist() == [10.0, 30.5]
    assert curve.mean_P.tolist() == [1.0, 0.0]
