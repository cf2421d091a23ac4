"""Reports of engines, in a module of their own so that readers need not import vLLM."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from forgeasync.process_memory import MemoryPeak
from forgeasync.rollouts import GroupProgress


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeSteps:
    """Steps in which every sequence has decoded one token, at a like number of sequences."""

    num_steps: int = 0
    took_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Counters of one engine since it started."""

    num_generated_tokens: int
    busy_s: float
    """Time with at least one request in flight."""
    steps_s: float = 0.0
    """Time of all steps of the engine core."""
    handing_over_s: float = 0.0
    """Processor time of the thread that takes requests and hands over responses; 0 where not measured."""
    num_log_failures: int = 0
    """How often tokens in flight could not be logged, so that open groups would begin anew after a death."""
    decode_steps: Mapping[int, DecodeSteps] = field(default_factory=dict)
    """By the number of bits of the number of sequences."""
    memory: MemoryPeak | None = None
    """Peak of the generator's largest process so far; None where nobody has measured."""
    kv_block_tokens: int = 1
    """Tokens in a block of its KV cache: not a count, and always the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeTiming:
    """Asks how long decode steps take at a constant number of sequences."""

    num_running: int
    num_prompt_tokens: int
    """Of each sequence, all different, before its first step."""
    num_steps: int
    text: tuple[int, ...]
    """Token ids that prompts are cut from, at least one: which experts they take depends on them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillTiming:
    """Asks how long prompts take, all different and all at once."""

    num_prompts: int
    num_prompt_tokens: int
    """Of each."""
    text: tuple[int, ...]
    """Token ids that prompts are cut from, at least one."""


class GroupCancelled(Exception):
    """The group was given up: its sequences were ended and are lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapReport:
    """One update of one engine's weights."""

    pause_s: float
    """Decoding stood still for the swap itself."""
    waited_s: float
    """Seconds before the swap in which running sequences drained, or decoding stopped for the fetch."""
    num_crossing: int
    """Sequences that were under way and go on where they were."""
    num_resumed: int
    """Sequences that were ended and begin again with what they had as prefix."""
    num_recomputed: int
    """Sequences whose KV cache is computed again under the new weights."""
    progress: tuple[GroupProgress, ...]
    """Progress of the groups under way."""
