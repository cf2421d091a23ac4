"""How far a group is that is still being sampled."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupProgress:
    """What a generator tells of a group when it goes over to ``version``."""

    group_id: int
    version: int
    num_running: int
    """Rollouts that will sample at least one more token, under ``version`` or a later one."""
    num_tokens: int
    """Sampled so far by these, and by those that have ended."""
