"""Rules between the interruption of running sequences and the rest of a run."""

from collections.abc import Iterator

from forgeasync.config.buffer_schema import StaleGroups
from forgeasync.config.problems import Problem
from forgeasync.config.schema import RunConfig
from forgeasync.config.weights_schema import Interruption, KvAfterSwap


def check_interruption(config: RunConfig) -> Iterator[Problem]:
    """What of the weights section cannot go together."""
    weights = config.weights
    if (
        weights.interruption is Interruption.CANCEL_STALE
        and config.buffer.stale_groups is not StaleGroups.DROP
    ):
        yield Problem(
            field="weights.interruption",
            value=weights.interruption.value,
            remedy=f"needs buffer.stale_groups = {StaleGroups.DROP.value!r}: with "
            f"{config.buffer.stale_groups.value!r} the trainer waits for every group and none becomes stale",
        )
    if weights.prefix_cache_across_versions and weights.kv_cache is KvAfterSwap.RECOMPUTE:
        yield Problem(
            field="weights.prefix_cache_across_versions",
            value=weights.prefix_cache_across_versions,
            remedy=f"must be false with weights.kv_cache = {KvAfterSwap.RECOMPUTE.value!r}, "
            "which leaves no prefix of an older version",
        )
