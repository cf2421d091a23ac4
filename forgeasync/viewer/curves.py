"""Curves as they are drawn: cut down to the pixels that there are, and of several seeds at once.

Shape suffixes: N points of a run, P points that are drawn, R runs.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from forgeasync.viewer.metric_table import Column


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """A line with a band around it; all arrays float64, of the same length, ``x_P`` ascending."""

    x_P: np.ndarray
    mean_P: np.ndarray
    low_P: np.ndarray
    high_P: np.ndarray
    num_points: int
    """Points before they were put together."""


def curve_of(columns: Sequence[Column]) -> Curve:
    """The mean over runs at every step, between their lowest and their highest value.

    A step counts where all runs have a value. With one run the three are the same.
    """
    by_step = [_last_of_each_step(column) for column in columns]
    steps_N, _ = by_step[0]
    for others_N, _ in by_step[1:]:
        steps_N = np.intersect1d(steps_N, others_N, assume_unique=True)
    values_RN = np.array([values_N[np.searchsorted(own_N, steps_N)] for own_N, values_N in by_step])
    # The mean may leave the band by a rounding.
    low_N, high_N = values_RN.min(axis=0), values_RN.max(axis=0)
    mean_N = np.clip(values_RN.mean(axis=0), low_N, high_N)
    return Curve(
        x_P=steps_N.astype(np.float64), mean_P=mean_N, low_P=low_N, high_P=high_N, num_points=len(steps_N)
    )


def over(curve: Curve, x_of_steps: Column) -> Curve:
    """The same curve over another quantity, such as elapsed seconds, by its value at every step."""
    steps_N, x_N = _last_of_each_step(x_of_steps)
    kept_P = np.isin(curve.x_P, steps_N)
    found_P = x_N[np.searchsorted(steps_N, curve.x_P[kept_P])]
    order_P = np.argsort(found_P, kind="stable")
    return Curve(
        x_P=found_P[order_P],
        mean_P=curve.mean_P[kept_P][order_P],
        low_P=curve.low_P[kept_P][order_P],
        high_P=curve.high_P[kept_P][order_P],
        num_points=int(kept_P.sum()),
    )


def downsampled(curve: Curve, num_buckets: int) -> Curve:
    """Put the points of equal parts of the x axis together: lowest, highest and mean of each part.

    No peak is lost. A point's x is the mean of those in its part; parts without points are left out. A curve
    with no more points than ``num_buckets`` stays as it is.
    """
    num = len(curve.x_P)
    if num <= num_buckets:
        return curve
    first, span = curve.x_P[0], curve.x_P[-1] - curve.x_P[0]
    if span > 0:
        bucket_N = np.minimum((curve.x_P - first) * (num_buckets / span), num_buckets - 1).astype(np.int64)
    else:
        bucket_N = np.zeros(num, np.int64)
    starts_P = np.flatnonzero(np.concatenate([[True], bucket_N[1:] != bucket_N[:-1]]))
    sizes_P = np.diff(np.append(starts_P, num))
    low_P, high_P = np.minimum.reduceat(curve.low_P, starts_P), np.maximum.reduceat(curve.high_P, starts_P)
    return Curve(
        x_P=np.add.reduceat(curve.x_P, starts_P) / sizes_P,
        mean_P=np.clip(np.add.reduceat(curve.mean_P, starts_P) / sizes_P, low_P, high_P),
        low_P=low_P,
        high_P=high_P,
        num_points=num,
    )


def _last_of_each_step(column: Column) -> tuple[np.ndarray, np.ndarray]:
    """Steps ascending and without repetition, with the value that was written last for each."""
    steps_N, index_N = np.unique(column.steps_N[::-1], return_index=True)
    return steps_N, column.values_N[::-1][index_N]
