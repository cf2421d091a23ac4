"""A measured number with its interval, and a measured distribution."""

import bisect
import math
import statistics
from collections.abc import Sequence
from typing import Annotated, Self

from pydantic import Field, model_validator

from forgeasync.schema import MAX_COUNT, Section

MAX_NUMBER = 1e18

Number = Annotated[float, Field(ge=0.0, le=MAX_NUMBER)]

NUM_QUANTILES = 101

_NORMAL_95 = 1.959964


class Estimate(Section):
    """A mean with its 95 % confidence interval.

    A figure that was stated and not measured has ``num_samples: 0`` and an interval that its source allows.
    """

    mean: Number
    low: Number
    high: Number
    num_samples: int = Field(ge=0, le=MAX_COUNT)

    @model_validator(mode="after")
    def _is_interval(self) -> Self:
        if not self.low <= self.mean <= self.high:
            raise ValueError(
                f"low = {self.low:g}, mean = {self.mean:g}, high = {self.high:g}: must ascend in this order"
            )
        return self

    @classmethod
    def of(cls, samples: Sequence[float]) -> Self:
        """Return the mean of at least one sample; its interval is normal, of one sample it is a point.

        Raises ValueError without samples.
        """
        if not samples:
            raise ValueError("an estimate needs at least one sample")
        # A mean may be off by a last bit.
        mean = min(max(statistics.fmean(samples), min(samples)), max(samples))
        half = 0.0
        if len(samples) > 1:
            half = _NORMAL_95 * statistics.stdev(samples) / math.sqrt(len(samples))
        return cls(mean=mean, low=max(0.0, mean - half), high=mean + half, num_samples=len(samples))

    @classmethod
    def median_of(cls, samples: Sequence[float]) -> Self:
        """Return the median of at least one sample in place of the mean, with its normal interval.

        The standard error of the median of many normal samples is sqrt(pi / 2) times that of their mean
        (Kendall and Stuart 1977, "The Advanced Theory of Statistics", vol. 1, 10.10).
        Raises ValueError without samples.
        """
        mean = cls.of(samples)
        median = statistics.median(samples)
        half = math.sqrt(math.pi / 2.0) * (mean.high - mean.mean)
        return cls(mean=median, low=max(0.0, median - half), high=median + half, num_samples=mean.num_samples)

    @classmethod
    def stated(cls, value: float, *, error: float = 0.0) -> Self:
        """Return a figure that nobody has measured, which may be off by the share ``error``."""
        return cls(mean=value, low=value * max(0.0, 1.0 - error), high=value * (1.0 + error), num_samples=0)


class Distribution(Section):
    """What a time or a length can be: its mean, and quantiles at equal steps of probability from 0 to 1."""

    mean: Estimate
    quantiles: tuple[Number, ...] = Field(min_length=2, max_length=10_001)

    @model_validator(mode="after")
    def _ascends(self) -> Self:
        for index, (one, other) in enumerate(zip(self.quantiles, self.quantiles[1:], strict=False)):
            if one > other:
                raise ValueError(
                    f"quantiles[{index}] = {one:g} is more than quantiles[{index + 1}] = {other:g}: they "
                    "must ascend"
                )
        if not self.quantiles[0] <= self.mean.mean <= self.quantiles[-1]:
            raise ValueError(
                f"mean = {self.mean.mean:g} must lie between the lowest quantile, {self.quantiles[0]:g}, and "
                f"the highest, {self.quantiles[-1]:g}"
            )
        return self

    @classmethod
    def of(cls, samples: Sequence[float], *, num_quantiles: int = NUM_QUANTILES) -> Self:
        """Return the empirical distribution of at least one sample. Raises ValueError without samples."""
        mean = Estimate.of(samples)
        ordered = sorted(samples)
        quantiles = [_between(ordered, index / (num_quantiles - 1)) for index in range(num_quantiles)]
        return cls(mean=mean, quantiles=tuple(quantiles))

    @classmethod
    def point(cls, value: float) -> Self:
        """Return the distribution of something that always is the same, as stated and not measured."""
        return cls(mean=Estimate.stated(value), quantiles=(value, value))

    def at(self, probability: float) -> float:
        """Return the quantile of a probability in [0, 1], linear between those that are known."""
        return _between(self.quantiles, probability)

    def share_below(self, value: float) -> float:
        """Return the probability of less than ``value``: the inverse of ``at``."""
        index = bisect.bisect_left(self.quantiles, value)
        if index == 0:
            return 0.0
        if index == len(self.quantiles):
            return 1.0
        low, high = self.quantiles[index - 1], self.quantiles[index]
        return (index - 1 + (value - low) / (high - low)) / (len(self.quantiles) - 1)


def _between(ordered: Sequence[float], probability: float) -> float:
    place = probability * (len(ordered) - 1)
    index = min(int(place), len(ordered) - 2) if len(ordered) > 1 else 0
    if len(ordered) == 1:
        return ordered[0]
    low, high = ordered[index], ordered[index + 1]
    # Rounding must not lead beyond the higher one.
    return min(low + (high - low) * (place - index), high)
