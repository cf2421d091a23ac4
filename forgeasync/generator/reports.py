"""Reports of engines and the clocks behind them. Readers of reports need not import vLLM."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from forgeasync.process_memory import MemoryPeak
from forgeasync.rollouts import GroupProgress

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.request import Request


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
    """Running sequences that continue where they were."""
    num_resumed: int
    """Sequences that were ended and begin again with what they had as prefix."""
    num_recomputed: int
    """Sequences whose KV cache is computed again under the new weights."""
    progress: tuple[GroupProgress, ...]
    """Progress of the groups in flight."""


class BusyClock:
    """Counts the time during which at least one of several requests is running."""

    def __init__(self) -> None:
        self._num_running = 0
        self._since_s = 0.0
        self._before_s = 0.0

    @property
    def total_s(self) -> float:
        """Seconds so far."""
        return self._before_s + (time.perf_counter() - self._since_s if self._num_running else 0.0)

    @contextmanager
    def running(self) -> Iterator[None]:
        """One request is running during the block."""
        if self._num_running == 0:
            self._since_s = time.perf_counter()
        self._num_running += 1
        try:
            yield
        finally:
            self._num_running -= 1
            if self._num_running == 0:
                self._before_s += time.perf_counter() - self._since_s


class StepTimes:
    """How long steps take in which every sequence decodes one token, by how many sequences there are.

    Steps of other kinds would compare badly with those of another engine: some compute a prompt, or what an
    update of the weights has made invalid. So a step counts only if every sequence in it has sampled, and
    each of them in the step before as well. Standing still between two steps does not count.

    The engine's thread counts; others may read at any time.
    """

    def __init__(self) -> None:
        self._before: frozenset[str] = frozenset()
        """Sequences that have sampled in the step before."""
        self._counts: dict[int, DecodeSteps] = {}
        self.total_s = 0.0
        """Of all steps, also those of other kinds."""

    def stepped(
        self, outputs: "EngineCoreOutputs | None", running: "Sequence[Request]", step_s: float
    ) -> None:
        """Take note of a step; ``running`` are the sequences that go on after it."""
        self.total_s += step_s
        sampled = [] if outputs is None else [one.request_id for one in outputs.outputs if one.new_token_ids]
        before, self._before = self._before, frozenset(sampled)
        if not sampled or not before.issuperset(sampled):
            return
        if not self._before.issuperset(one.request_id for one in running):
            return
        load = len(sampled).bit_length()
        known = self._counts.get(load, DecodeSteps())
        self._counts[load] = DecodeSteps(num_steps=known.num_steps + 1, took_s=known.took_s + step_s)

    def counts(self) -> dict[int, DecodeSteps]:
        """All steps so far, by the number of bits of the number of sequences in them."""
        return dict(self._counts)
