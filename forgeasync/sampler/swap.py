"""What a change of weights did to running sequences."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapReport:
    """One update of an engine."""

    version: int
    pause_s: float
    """For which decoding stood still."""
