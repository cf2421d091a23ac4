"""What an engine counts, apart from vLLM, so that whoever reads it need not import vLLM."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Counters of one engine since it started."""

    num_generated_tokens: int
    busy_s: float
    """Time with at least one request in flight."""
