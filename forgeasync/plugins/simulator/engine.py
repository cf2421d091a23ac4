"""One generator with continuous batching, by events and not by tokens.

While n sequences run, each gets one token in every step, and a step takes as long as the profile says for n
and their mean context. So one counter of steps serves all of them, at a speed that changes only when a
sequence begins or ends: one that began when the counter was at s and lacks t tokens ends when it is at s + t.
Between two such changes, contexts grow by one token a step, and each step takes longer than the one before by
the same time. This is exact as long as the profile is linear there.

Computing a prompt stops the counter, and so does a swap of the weights. A sequence has its first token when
its prompt is computed.

One thread of an engine decodes; another one prepares and hands over responses, one after the other. Python
runs one of them at a time, except while a thread waits for a kernel, so decoding stands still for a part of
the time that handing over takes.
"""

import functools
import heapq
import itertools
import math
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from forgeasync.plugins.simulator.clock import Clock, Event, Thread
from forgeasync.plugins.simulator.groups import Counts, Sequence
from forgeasync.plugins.simulator.profile import DecodeTable, Profile

_EPSILON = 1e-6
"""The counter of steps is a sum of floats; its error is far less than one step."""

STALL_SHARE = 0.45
"""Share of the time for handing over responses in which an engine decodes nothing. It is the time in which
the decoding thread was in a step but neither computed nor waited for a core, divided by what the other
threads of the process computed: 0.42, 0.45 and 0.49 in three runs of ``configs/tiny_moe_cpu.yaml``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCost:
    """Service times and limits of an engine."""

    decode: DecodeTable
    prefill_s_per_token: float
    kv_block_tokens: int
    """Tokens in a block of the KV cache."""
    response_s: float
    """Seconds that the thread that hands over needs for each turn that ends."""
    response_stall_s: float
    """Part of ``response_s`` in which the other sequences stand still."""
    max_num_seqs: int
    max_kv_tokens: int
    cores: float
    shares_prefixes: bool
    """Whether new requests may use keys and values of older versions."""


def engine_cost(
    profile: Profile, *, max_num_seqs: int, max_kv_tokens: int, shares_prefixes: bool
) -> EngineCost:
    """Return the cost of an engine with these limits, by a profile."""
    return EngineCost(
        decode=DecodeTable(profile.decode),
        prefill_s_per_token=1.0 / profile.prefill_tokens_per_s.mean,
        kv_block_tokens=profile.setup.kv_block_tokens,
        response_s=profile.response_s.mean,
        response_stall_s=STALL_SHARE * profile.response_s.mean,
        max_num_seqs=max_num_seqs,
        max_kv_tokens=max_kv_tokens,
        cores=profile.cores.generator,
        shares_prefixes=shares_prefixes,
    )


class Engine:
    """The sequences of one generator. ``on_turn`` gets each one whose turn has ended and was handed over."""

    def __init__(
        self, number: int, cost: EngineCost, clock: Clock, on_turn: Callable[[Sequence], None], version: int
    ) -> None:
        self.number = number
        self.version = version
        self._is_draining = False
        """No new sequence may run."""
        self._busy_s = 0.0
        """Wall seconds with a sequence, until it last had none."""
        self.num_preempted = 0
        """Sequences that lost their place because the KV cache was full."""
        self._cost = cost
        self._clock = clock
        self._line = clock.timeline(cost.cores)
        self._on_turn = on_turn
        self._handing_over = Thread(clock)
        self._ended: dict[Sequence, None] = {}
        """Sequences that wait to be handed over, in their order."""
        self._running: list[tuple[float, int, Sequence]] = []
        self._waiting: deque[Sequence] = deque()
        self._numbers = itertools.count()
        self._steps = 0.0
        self._num_sequence_steps = 0.0
        self._num_prompt_tokens = 0
        self._at = self._line.now
        """Time on its line for which ``_steps`` is known."""
        self._stalled_until = 0.0
        self._step_s = 1.0
        """Seconds of a step at the present counter."""
        self._growth_s = 0.0
        """Seconds by which each step takes longer than the one before, as contexts grow."""
        self._sum_base = 0.0
        """Sum over running sequences of their context when they began, minus the counter then."""
        self._num_pauses = 0
        self._event: Event | None = None
        self._is_computing = False
        self._busy_since_s: float | None = None
        self._when_empty: Callable[[], None] | None = None

    def counts(self) -> Counts:
        """Return what it has computed so far, if it stands still for prompts alone and these take time."""
        self._advance()
        left_s = max(0.0, self._stalled_until - self._line.now)
        num_left = left_s / self._cost.prefill_s_per_token if left_s else 0.0
        return self._num_prompt_tokens - num_left, self._num_sequence_steps, self._steps

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def total_busy_s(self) -> float:
        """Wall seconds with a sequence so far."""
        since_s = self._busy_since_s
        return self._busy_s + (0.0 if since_s is None else self._clock.now_s - since_s)

    def add(self, sequences: Iterable[Sequence]) -> None:
        """Add sequences, which run as soon as there is room."""
        self._advance()
        self._waiting.extend(sequences)
        self._go_on()

    def pause(self) -> None:
        """Stop decoding until ``resume``."""
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
        """Sample under a new version, after a pause of ``stall_s``.

        Returns the tokens that the running sequences of each group have so far.
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
        """Give up sequences, with what they have sampled."""
        self._advance()
        going = set(sequences)
        for entry in self._running:
            if entry[2] in going:
                self._leave(entry[2])
        self._running = [entry for entry in self._running if entry[2] not in going]
        heapq.heapify(self._running)
        self._waiting = deque(one for one in self._waiting if one not in going)
        for sequence in going:
            self._ended.pop(sequence, None)
        self._go_on()

    # ---- inside

    @property
    def _key(self) -> tuple[int, int]:
        return self.number, 0 if self._cost.shares_prefixes else self.version

    def _context(self, sequence: Sequence) -> float:
        return sequence.rollout.num_prompt_tokens + sequence.num_sampled + self._steps - sequence.start

    def _advance(self) -> None:
        """Bring the counter of steps to the present."""
        begin = max(self._at, self._stalled_until)
        now = self._line.now
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
        self._stalled_until = max(self._line.now, self._stalled_until) + stall_s

    def _go_on(self) -> None:
        """End what has ended, let others run, and plan the next event."""
        ended = []
        while self._running and self._running[0][0] <= self._steps + _EPSILON:
            _, number, sequence = heapq.heappop(self._running)
            self._leave(sequence)
            sequence.counts = self._num_prompt_tokens, self._num_sequence_steps, self._steps
            ended.append((number, sequence))
        self._refill()
        stall_s = self._cost.response_stall_s if self._running else 0.0
        self._stall(len(ended) * stall_s)
        self._plan()
        # Those that end with the same step in the order in which they began.
        for _, sequence in sorted(ended, key=lambda one: one[0]):
            self._ended[sequence] = None
            work_s = self._cost.response_s - stall_s
            self._handing_over.do(work_s, functools.partial(self._hand_over, sequence))
        if self._when_empty is not None and not self._running:
            then, self._when_empty = self._when_empty, None
            then()

    def _hand_over(self, sequence: Sequence) -> None:
        # Otherwise it was given up.
        if sequence in self._ended:
            del self._ended[sequence]
            self._on_turn(sequence)

    def _settle(self, sequence: Sequence) -> int:
        """Count its tokens under the present version; return all that it has got since it began to run."""
        num_tokens = min(sequence.num_left, int(self._steps - sequence.start + _EPSILON))
        sequence.add(self.version, num_tokens - sequence.num_settled)
        sequence.num_settled = num_tokens
        return num_tokens

    def _leave(self, sequence: Sequence) -> None:
        """Take note of the tokens of a sequence that stops running."""
        self._sum_base -= sequence.rollout.num_prompt_tokens + sequence.num_sampled - sequence.start
        sequence.num_sampled += self._settle(sequence)

    def _refill(self) -> None:
        if self._is_draining:
            return
        while self._waiting and len(self._running) < self._cost.max_num_seqs:
            sequence = self._waiting[0]
            context = sequence.rollout.num_prompt_tokens + sequence.num_sampled
            # With room for one step of all of them, or a sequence that has just lost its place gets it back.
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
        # An engine shares whole blocks, and computes at least the last token, from which it samples.
        num_cached = (context - 1) // self._cost.kv_block_tokens * self._cost.kv_block_tokens
        num_to_compute = context - num_cached if is_cached else context
        self._num_prompt_tokens += num_to_compute
        self._stall(num_to_compute * self._cost.prefill_s_per_token)
        # Computing what comes before it has sampled its first token.
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
        stalled_s = max(0.0, self._stalled_until - self._line.now)
        self._event = self._line.after(stalled_s + num_steps * middle_s, act)

    def _tick(self) -> None:
        self._advance()
        # The sum of many steps may lack a last bit of what ends now.
        self._steps = max(self._steps, self._running[0][0])
        self._go_on()

    def _preempt(self) -> None:
        """The KV cache is full: the newest sequence waits, and is computed again later."""
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
        is_computing = bool(self._running) and not self._num_pauses
        if is_computing != self._is_computing:
            self._is_computing = is_computing
            change = self._clock.begin if is_computing else self._clock.end
            change(self._cost.cores)
