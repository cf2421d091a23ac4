"""From the sections of a config to the filter that they describe."""

from collections.abc import Sequence

from forgeasync.algorithms import filters
from forgeasync.algorithms.filters import GroupFilter
from forgeasync.config.filter_schema import (
    DynamicSamplingSection,
    FilterSection,
    OverlongFilterSection,
    OverlongPenaltySection,
    ResampleOnCorrectSection,
)


def build_filters(sections: Sequence[FilterSection]) -> GroupFilter:
    """The filters in the order of their sections; without sections everything is kept."""
    return filters.chain(*(_build(section) for section in sections))


def _build(section: FilterSection) -> GroupFilter:
    match section:
        case DynamicSamplingSection():
            return filters.dynamic_sampling(section.min_std)
        case OverlongPenaltySection():
            return filters.overlong_penalty(section.max_length, section.buffer)
        case OverlongFilterSection():
            return filters.overlong_filter()
        case ResampleOnCorrectSection():
            return filters.resample_on_correct(
                section.num_kept,
                min_positive_reward=section.min_positive_reward,
                smoothing=section.smoothing,
            )
