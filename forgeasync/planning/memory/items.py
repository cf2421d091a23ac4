"""One line of a memory plan, and what machine a plan is for."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

FLOAT32_BYTES = 4

PLAN_ERROR = 0.1
"""Error of the memory plan (``planning.memory.plan.NOTE``): what it may overstate refuses no GPU."""


class Machine(StrEnum):
    """Kind of machine that a run's ranks compute on."""

    GPU = "GPU"
    CPU = "CPU"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryItem:
    """One thing a rank holds; ``how`` says in a few words how the number comes about."""

    name: str
    num_bytes: int
    how: str


def least_bytes(num_bytes: int) -> int:
    """Bytes that a rank takes for certain where the plan says ``num_bytes``: the plan less its error."""
    return int(num_bytes * (1.0 - PLAN_ERROR))


def total_bytes(items: Sequence[MemoryItem]) -> int:
    """Sum up the bytes that a rank holds."""
    return sum(item.num_bytes for item in items)
