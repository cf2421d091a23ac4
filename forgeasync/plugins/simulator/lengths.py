"""Fits lengths of prompts and responses to sampled groups."""

import math
import statistics
from collections.abc import Sequence

from forgeasync.plugins.simulator.profile import Distribution, Estimate, Lengths

NUM_QUANTILES = 1001
"""Quantiles of responses. Their longest hundredth is not spread evenly, and a synchronous step lasts as long
as the longest response of its batch."""


def fit_lengths(prompts: Sequence[float], groups: Sequence[Sequence[float]]) -> Lengths:
    """Return the lengths of one source, from the tokens of its prompts and of each group's responses.

    Raises ValueError without a prompt or a response.
    """
    response = Distribution.of([length for group in groups for length in group], num_quantiles=NUM_QUANTILES)
    return Lengths(
        prompt=Distribution.of(prompts),
        response=response.model_copy(update={"mean": mean_of_groups(groups)}),
        prompt_share=_alikeness(groups),
    )


def mean_of_groups(groups: Sequence[Sequence[float]]) -> Estimate:
    """Return the mean of all values, with the interval of the groups' means.

    Values of one group are alike, so counting each of them as a sample would make the interval too narrow
    (Kish 1965, "Survey Sampling", ch. 5). ``num_samples`` is the number of groups.
    """
    means = Estimate.of([statistics.fmean(group) for group in groups if group])
    # With groups of different sizes, the mean of their means is not the mean of all values.
    mean = statistics.fmean(value for group in groups for value in group)
    return Estimate(
        mean=mean,
        low=max(0.0, mean - (means.high - means.mean)),
        high=mean + (means.high - means.mean),
        num_samples=means.num_samples,
    )


def _alikeness(groups: Sequence[Sequence[float]]) -> float:
    """Return how alike the values within groups are: the intraclass correlation of their normal scores.

    It is that of one-way analysis of variance (Shrout and Fleiss 1979, ICC(1,1)), from 0 to 1. Normal scores
    are the normal quantiles of mid-ranks (Blom 1958).
    """
    groups = [group for group in groups if len(group) > 1]
    values = sorted(value for group in groups for value in group)
    if len(groups) < 2 or values[0] == values[-1]:
        return 0.0
    scores = _normal_scores(values)
    scored = [[scores[value] for value in group] for group in groups]
    size = statistics.fmean(len(group) for group in scored)
    mean = statistics.fmean(value for group in scored for value in group)
    means = [statistics.fmean(group) for group in scored]
    between = math.fsum(len(group) * (one - mean) ** 2 for group, one in zip(scored, means, strict=True)) / (
        len(scored) - 1
    )
    num_within = sum(len(group) - 1 for group in scored)
    within = (
        math.fsum((value - one) ** 2 for group, one in zip(scored, means, strict=True) for value in group)
        / num_within
    )
    return min(1.0, max(0.0, (between - within) / (between + (size - 1) * within)))


def _normal_scores(ordered: Sequence[float]) -> dict[float, float]:
    """Return the normal score of every value. Equal values have the score of their middle rank."""
    normal, num = statistics.NormalDist(), len(ordered)
    places: dict[float, list[int]] = {}
    for place, value in enumerate(ordered, 1):
        places.setdefault(value, []).append(place)
    return {
        value: normal.inv_cdf((statistics.fmean(ranks) - 0.375) / (num + 0.25))
        for value, ranks in places.items()
    }
