"""Simulates one generator with continuous batching, with one event per sequence instead of one per token.

While n sequences run, each gets one token per step. The profile gives the duration of a step for n and the
mean context. One step counter therefore serves all sequences: a sequence that began at counter s and needs t
more tokens ends at s + t. The speed of the counter changes only when a sequence begins or ends. In between,
contexts grow by one token per step, and the step time grows linearly. This is exact as long as the profile
is linear there.

Prompt computation and weight swaps stop the counter. A sequence has its first token when its prompt is
computed.
"""

import heapq
import itertools
import math
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from forgeasync.plugins.simulator.clock import Clock, Event
from forgeasync.plugins.simulator.groups import Counts, Sequence
from forgeasync.plugins.simulator.profile import DecodeTable, Profile

_EPSILON = 1e-6
"""Tolerance for rounding of the step counter, which is a sum of floats; far less than one step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCost:
    """Service times and limits of an engine."""

    decode: DecodeTable
    prefill_s_per_token: float
    kv_block_tokens: int
    """Tokens in a block of the KV cache."""
    max_num_seqs: int
    max_kv_tokens: int
    shares_prefixes: bool
    """Whether new requests may use keys and values of older versions."""


def engine_cost(
    profile: Profile, *, max_num_seqs: int, max_kv_tokens: int, shares_prefixes: bool
) -> EngineCost:
    """Return the costs of an engine with the given limits, from a profile."""
    return EngineCost(
        decode=DecodeTable(profile.decode),
        prefill_s_per_token=1.0 / profile.prefill_tokens_per_s.mean,
        kv_block_tokens=profile.kv_block_tokens,
        max_num_seqs=max_num_seqs,
        max_kv_tokens=max_kv_tokens,
        shares_prefixes=shares_prefixes,
    )


class Engine:
    """The sequences of one generator. ``on_end`` is called with each sequence that has ended."""

    def __init__(
        self, number: int, cost: EngineCost, clock: Clock, on_end: Callable[[Sequence], None], version: int
    ) -> None:
        self.number = number
        self.version = version
        self._is_draining = False
        """Whether no new sequence may begin to run."""
        self._busy_s = 0.0
        """Wall seconds with at least one sequence, up to the end of the last busy period."""
        self.num_preempted = 0
        """Number of preemptions because the KV cache was full."""
        self._cost = cost
        self._clock = clock
        self._on_end = on_end
        self._running: list[tuple[float, int, Sequence]] = []
        self._waiting: deque[Sequence] = deque()
        self._numbers = itertools.count()
        self._steps = 0.0
        self._num_sequence_steps = 0.0
        self._num_prompt_tokens = 0
        self._at = clock.now_s
        """Time up to which ``_steps`` is computed."""
        self._stalled_until = 0.0
        self._step_s = 1.0
        """Seconds of a step at the current counter."""
        self._growth_s = 0.0
        """Seconds by which each step takes longer than the one before, as contexts grow."""
        self._sum_base = 0.0
        """Sum over running sequences of the context at their begin minus the counter at their begin."""
        self._num_pauses = 0
        self._event: Event | None = None
        self._busy_since_s: float | None = None
        self._when_empty: Callable[[], None] | None = None

    def counts(self) -> Counts:
        """Return the work so far. Exact if only prompts stall the engine and prompts take time."""
        self._advance()
        left_s = max(0.0, self._stalled_until - self._clock.now_s)
        num_left = left_s / self._cost.prefill_s_per_token if left_s else 0.0
        return self._num_prompt_tokens - num_left, self._num_sequence_steps, self._steps

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def total_busy_s(self) -> float:
        """Wall seconds so far with at least one sequence."""
        since_s = self._busy_since_s
        return self._busy_s + (0.0 if since_s is None else self._clock.now_s - since_s)

    def add(self, sequences: Iterable[Sequence]) -> None:
        """Queue sequences; each runs as soon as there is room."""
        self._advance()
        self._waiting.extend(sequences)
        self._go_on()

    def pause(self) -> None:
        """Stop decoding until the matching ``resume``."""
        self._advance()
        self._num_pauses += 1
        self._go_on()

    def resume(self) -> None:
        """End one pause."""
        self._advance()
        self._num_pauses -= 1
        self._go_on()

    def drain(self, then: Callable[[], None]) -> None:
        """Start no sequence until ``swap``; call ``then`` when none is running."""
        self._advance()
        self._is_draining = True
        self._when_empty = then
        self._go_on()

    def swap(self, version: int, stall_s: float, *, recompute: bool) -> Counter[int]:
        """Switch to a new policy version after a stall of ``stall_s`` seconds.

        Returns, by group id, the tokens that running sequences sampled since they last began to run.
        """
        self._advance()
        tokens: Counter[int] = Counter()
        for _, _, sequence in self._running:
            tokens[sequence.group.group_id] += self._settle(sequence)
        self.version = version
        self._is_draining = False
        if recompute:
            for _, _, sequence in self._running:
                stall_s += self._context(sequence) * self._cost.prefill_s_per_token
                sequence.at = self._key
        self._stall(stall_s)
        self._go_on()
        return tokens

    def remove(self, sequences: Iterable[Sequence]) -> None:
        """Remove sequences and discard their tokens."""
        self._advance()
        going = set(sequences)
        for entry in self._running:
            if entry[2] in going:
                self._leave(entry[2])
        self._running = [entry for entry in self._running if entry[2] not in going]
        heapq.heapify(self._running)
        self._waiting = deque(one for one in self._waiting if one not in going)
        self._go_on()

    # ---- inside

    @property
    def _key(self) -> tuple[int, int]:
        return self.number, 0 if self._cost.shares_prefixes else self.version

    def _context(self, sequence: Sequence) -> float:
        return sequence.rollout.num_prompt_tokens + sequence.num_sampled + self._steps - sequence.start

    def _advance(self) -> None:
        """Advance the step counter to the current time."""
        begin = max(self._at, self._stalled_until)
        now = self._clock.now_s
        if now > begin and self._running and not self._num_pauses:
            elapsed_s, first_s = now - begin, self._step_s
            if self._growth_s:
                # elapsed = first * steps + growth * steps^2 / 2
                last_s = math.sqrt(max(0.0, first_s * first_s + 2.0 * self._growth_s * elapsed_s))
                num_steps = (last_s - first_s) / self._growth_s
                self._step_s = last_s
            else:
                num_steps = elapsed_s / first_s
            self._steps += num_steps
            self._num_sequence_steps += num_steps * len(self._running)
        self._at = now

    def _stall(self, stall_s: float) -> None:
        self._stalled_until = max(self._clock.now_s, self._stalled_until) + stall_s

    def _go_on(self) -> None:
        """Remove ended sequences, start waiting ones, and schedule the next event."""
        ended = []
        while self._running and self._running[0][0] <= self._steps + _EPSILON:
            _, number, sequence = heapq.heappop(self._running)
            self._leave(sequence)
            sequence.counts = self._num_prompt_tokens, self._num_sequence_steps, self._steps
            ended.append((number, sequence))
        self._refill()
        self._plan()
        # Sequences that end with the same step are delivered in the order in which they began.
        for _, sequence in sorted(ended, key=lambda one: one[0]):
            self._on_end(sequence)
        if self._when_empty is not None and not self._running:
            then, self._when_empty = self._when_empty, None
            then()

    def _settle(self, sequence: Sequence) -> int:
        """Assign new tokens to the current version; return the tokens since the sequence began to run."""
        num_tokens = min(sequence.num_left, int(self._steps - sequence.start + _EPSILON))
        sequence.add(self.version, num_tokens - sequence.num_settled)
        sequence.num_settled = num_tokens
        return num_tokens

    def _leave(self, sequence: Sequence) -> None:
        """Update the token counts for a sequence that stops running."""
        self._sum_base -= sequence.rollout.num_prompt_tokens + sequence.num_sampled - sequence.start
        sequence.num_sampled += self._settle(sequence)

    def _refill(self) -> None:
        if self._is_draining:
            return
        while self._waiting and len(self._running) < self._cost.max_num_seqs:
            sequence = self._waiting[0]
            context = sequence.rollout.num_prompt_tokens + sequence.num_sampled
            # Requires room for one more step of all, so that a preempted sequence is not readmitted at once.
            needed = self._num_kv_tokens + context + len(self._running) + 1
            if self._running and needed > self._cost.max_kv_tokens:
                return
            self._run(self._waiting.popleft(), context)

    @property
    def _num_kv_tokens(self) -> float:
        return len(self._running) * self._steps + self._sum_base

    def _run(self, sequence: Sequence, context: int) -> None:
        group = sequence.group
        is_cached = (sequence.at if sequence.num_sampled else group.prompt_at) == self._key
        group.prompt_at = sequence.at = self._key
        # An engine shares whole blocks, and always computes the last token, from which it samples.
        num_cached = (context - 1) // self._cost.kv_block_tokens * self._cost.kv_block_tokens
        num_to_compute = context - num_cached if is_cached else context
        self._num_prompt_tokens += num_to_compute
        self._stall(num_to_compute * self._cost.prefill_s_per_token)
        # The first token is sampled by the prompt computation.
        sequence.start = self._steps - 1.0
        sequence.num_settled = 0
        self._sum_base += context - sequence.start
        heapq.heappush(self._running, (sequence.start + sequence.num_left, next(self._numbers), sequence))

    def _plan(self) -> None:
        if self._event is not None:
            self._event.cancel()
            self._event = None
        self._note_busy()
        if not self._running or self._num_pauses:
            return
        num = len(self._running)
        context = self._num_kv_tokens / num
        num_steps = self._running[0][0] - self._steps
        num_to_full = (self._cost.max_kv_tokens - self._num_kv_tokens) / num
        act = self._tick
        if num > 1 and num_to_full < num_steps:
            num_steps, act = max(0.0, num_to_full), self._preempt
        middle_s = self._cost.decode.step_s(num, context + num_steps / 2)
        self._step_s, self._growth_s = middle_s, 0.0
        if num_steps > 1.0 and self._cost.decode.depends_on_context:
            self._step_s = self._cost.decode.step_s(num, context)
            self._growth_s = (middle_s - self._step_s) / (num_steps / 2)
        stalled_s = max(0.0, self._stalled_until - self._clock.now_s)
        self._event = self._clock.after(stalled_s + num_steps * middle_s, act)

    def _tick(self) -> None:
        self._advance()
        # Rounding may leave the counter slightly below the end of the sequence.
        self._steps = max(self._steps, self._running[0][0])
        self._go_on()

    def _preempt(self) -> None:
        """Preempt the newest sequence because the KV cache is full; its keys are recomputed later."""
        self._advance()
        if self._running[0][0] > self._steps + _EPSILON:
            last = max(self._running, key=lambda entry: entry[1])
            self._running.remove(last)
            heapq.heapify(self._running)
            self._leave(last[2])
            last[2].at = None
            self._waiting.appendleft(last[2])
            self.num_preempted += 1
        self._go_on()

    def _note_busy(self) -> None:
        is_busy = bool(self._running or self._waiting)
        if is_busy and self._busy_since_s is None:
            self._busy_since_s = self._clock.now_s
        elif not is_busy and self._busy_since_s is not None:
            self._busy_s += self._clock.now_s - self._busy_since_s
            self._busy_since_s = None
