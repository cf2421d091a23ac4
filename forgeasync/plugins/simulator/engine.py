"""Simulates one generator with continuous batching, with one event per sequence instead of one per token.

While n sequences run, each gets one token per decode step. The profile gives the duration of a step for n and
the mean context. One step counter therefore serves all sequences: a sequence that starts at counter s and
needs t more tokens ends at s + t. The duration of a step is computed again when a sequence starts or ends,
and every ``MAX_STEPS`` steps.

Prompt computation and weight swaps stop the counter. A sequence has its first token when its prompt is
computed.
"""

import heapq
import itertools
from collections import Counter, deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import InitVar, dataclass, field

from forgeasync.buffer import Start
from forgeasync.plugins.simulator.profile import DecodeTable
from forgeasync.rollouts import FinishReason, Group, PayloadRef, StoredBranch, StoredRollout, VersionSpan

_EPSILON = 1e-6
"""Tolerance for rounding of the step counter, which is a sum of floats; far less than one step."""

MAX_STEPS = 32.0
"""Maximum number of steps with one duration, since contexts grow with every step."""


class Event:
    """A scheduled callback, which can be canceled."""

    __slots__ = ("act",)

    def __init__(self, act: Callable[[], None]) -> None:
        self.act: Callable[[], None] | None = act

    def cancel(self) -> None:
        """Cancel the event; no effect if its callback already ran."""
        self.act = None


class Clock:
    """Runs callbacks at simulated times; callbacks of the same time run in the order of their scheduling."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._numbers = itertools.count()
        self._events: list[tuple[float, int, Event]] = []
        """Heap of (time, number, event)."""

    def after(self, delay_s: float, act: Callable[[], None]) -> Event:
        """Call ``act`` once ``delay_s`` simulated seconds have passed."""
        assert delay_s >= 0.0
        event = Event(act)
        heapq.heappush(self._events, (self.now_s + delay_s, next(self._numbers), event))
        return event

    def step(self) -> bool:
        """Advance to the next event and run its callback; return whether there was one."""
        while self._events:
            at_s, _, event = heapq.heappop(self._events)
            if (act := event.act) is not None:
                self.now_s = at_s
                event.cancel()
                act()
                return True
        return False


Counts = tuple[float, float, float]
"""Work of an engine: prompt tokens, sum over decode steps of their running sequences, and decode steps."""

_NO_PAYLOAD = PayloadRef(host_id="", file="", payload_id="", offset=0, num_bytes=0, checksum=0)
"""Placeholder for the arrays of a rollout; simulated rollouts have none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnRollout:
    """The random draws of one rollout."""

    num_prompt_tokens: int
    num_tokens: int
    """Number of tokens of the response."""
    score_s: float


@dataclass(slots=True, eq=False)
class Sequence:
    """One rollout while it is sampled."""

    group: "SimulatedGroup"
    index: int
    rollout: DrawnRollout
    spans: list[tuple[int, int]] = field(default_factory=list)
    """Pairs of version and number of tokens, oldest first."""
    num_sampled: int = 0
    """Number of tokens when the sequence last started or stopped running."""
    num_in_spans: int = 0
    """Number of tokens after ``num_sampled`` that are already in ``spans``."""
    start: float = 0.0
    """Step counter of the engine when the sequence started to run."""
    cached_at: tuple[int, int] | None = None
    """Engine and version that hold the sequence's keys and values."""
    counts: Counts = (0, 0.0, 0.0)
    """Work of the engine up to the end of the sequence."""

    @property
    def num_left(self) -> int:
        """Number of tokens left, counted from ``num_sampled``."""
        return self.rollout.num_tokens - self.num_sampled

    @property
    def num_context_tokens(self) -> int:
        """Prompt and response tokens when the sequence last started or stopped running."""
        return self.rollout.num_prompt_tokens + self.num_sampled

    def add(self, version: int, num_tokens: int) -> None:
        """Add tokens to ``spans``."""
        if num_tokens <= 0:
            return
        if self.spans and self.spans[-1][0] == version:
            self.spans[-1] = (version, self.spans[-1][1] + num_tokens)
        else:
            self.spans.append((version, num_tokens))

    def stored(self) -> StoredRollout:
        """Return the finished rollout."""
        spans, start = [], 0
        for version, num_tokens in self.spans:
            spans.append(VersionSpan(version=version, start=start, end=start + num_tokens))
            start += num_tokens
        branch = StoredBranch(
            prompt=_NO_PAYLOAD,
            response=_NO_PAYLOAD,
            num_prompt_tokens=self.rollout.num_prompt_tokens,
            num_response_tokens=start,
            version_spans=tuple(spans),
            text="",
        )
        return StoredRollout(
            generator_rank=0,
            branches=(branch,),
            finish_reason=FinishReason.STOP,
            episode=self.index,
        )


@dataclass(slots=True, eq=False)
class SimulatedGroup:
    """A group from its start to the end of its scoring."""

    start: Start
    rollouts: InitVar[SequenceOf[DrawnRollout]]
    sequences: list[Sequence] = field(init=False)
    engine: int | None = None
    """Number of the generator that samples the group."""
    prompt_cached_at: tuple[int, int] | None = None
    """Engine and version that hold the keys and values of the prompt."""
    num_finished: int = 0
    num_scored: int = 0

    def __post_init__(self, rollouts: SequenceOf[DrawnRollout]) -> None:
        self.sequences = [Sequence(self, index, rollout) for index, rollout in enumerate(rollouts)]

    @property
    def group_id(self) -> int:
        """Id of the group."""
        return self.start.group_id

    @property
    def num_tokens(self) -> int:
        """Prompt and response tokens of all rollouts."""
        return sum(one.rollout.num_prompt_tokens + one.rollout.num_tokens for one in self.sequences)

    def stored(self) -> Group:
        """Return the group in the form that the buffer stores."""
        return Group(
            group_id=self.start.group_id,
            draw_id=self.start.draw_id,
            task=self.start.task,
            rollouts=tuple(one.stored() for one in self.sequences),
        )


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


class Engine:
    """The sequences of one generator. ``on_end`` is called with each sequence that has ended."""

    def __init__(
        self, number: int, cost: EngineCost, clock: Clock, on_end: Callable[[Sequence], None]
    ) -> None:
        self.number = number
        self.version = 0
        self.num_preempted = 0
        """Number of preemptions because the KV cache was full."""
        self._cost = cost
        self._clock = clock
        self._on_end = on_end
        self._running: list[tuple[float, int, Sequence]] = []
        """Heap of (step counter at its end, number, sequence)."""
        self._waiting: deque[Sequence] = deque()
        self._numbers = itertools.count()
        self._steps = 0.0
        self._num_sequence_steps = 0.0
        self._num_prompt_tokens = 0
        self._updated_s = clock.now_s
        """Time up to which ``_steps`` is computed."""
        self._stalled_until_s = 0.0
        self._step_s = 1.0
        """Seconds of a step until the next event."""
        self._sum_base = 0.0
        """Sum over running sequences of the context at their start minus the counter at their start."""
        self._num_pauses = 0
        self._event: Event | None = None
        self._busy_s = 0.0
        """Wall seconds with at least one sequence, up to the end of the last busy period."""
        self._busy_since_s: float | None = None

    def counts(self) -> Counts:
        """Return the work so far. Exact if only prompts stall the engine and prompts take time."""
        self._advance()
        left_s = max(0.0, self._stalled_until_s - self._clock.now_s)
        num_left = left_s / self._cost.prefill_s_per_token if left_s else 0.0
        return self._num_prompt_tokens - num_left, self._num_sequence_steps, self._steps

    @property
    def num_running(self) -> int:
        """Number of running sequences."""
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
        self._update()

    def pause(self) -> None:
        """Stop decoding until the matching ``resume``."""
        self._advance()
        self._num_pauses += 1
        self._update()

    def resume(self) -> None:
        """End one pause."""
        self._advance()
        self._num_pauses -= 1
        self._update()

    def swap(self, version: int, stall_s: float, *, recompute: bool) -> Counter[int]:
        """Switch to a new policy version after a stall of ``stall_s`` seconds.

        Returns, by group id, the tokens that running sequences sampled since they last started to run.
        """
        self._advance()
        tokens: Counter[int] = Counter()
        for _, _, sequence in self._running:
            tokens[sequence.group.group_id] += self._record_tokens(sequence)
        self.version = version
        if recompute:
            for _, _, sequence in self._running:
                context = sequence.num_context_tokens + self._steps - sequence.start
                stall_s += context * self._cost.prefill_s_per_token
                sequence.cached_at = self._cache_key
        self._stall(stall_s)
        self._update()
        return tokens

    # ---- inside

    @property
    def _cache_key(self) -> tuple[int, int]:
        return self.number, 0 if self._cost.shares_prefixes else self.version

    def _advance(self) -> None:
        """Advance the step counter to the current time."""
        begin_s = max(self._updated_s, self._stalled_until_s)
        now_s = self._clock.now_s
        if now_s > begin_s and self._running and not self._num_pauses:
            num_steps = (now_s - begin_s) / self._step_s
            self._steps += num_steps
            self._num_sequence_steps += num_steps * len(self._running)
        self._updated_s = now_s

    def _stall(self, stall_s: float) -> None:
        self._stalled_until_s = max(self._clock.now_s, self._stalled_until_s) + stall_s

    def _update(self) -> None:
        """Remove ended sequences, start waiting ones, and schedule the next event."""
        ended = []
        while self._running and self._running[0][0] <= self._steps + _EPSILON:
            _, number, sequence = heapq.heappop(self._running)
            self._stop(sequence)
            sequence.counts = self._num_prompt_tokens, self._num_sequence_steps, self._steps
            ended.append((number, sequence))
        self._start_waiting()
        self._schedule()
        # Sequences that end with the same step are delivered in the order in which they started.
        for _, sequence in sorted(ended, key=lambda one: one[0]):
            self._on_end(sequence)

    def _record_tokens(self, sequence: Sequence) -> int:
        """Assign new tokens to the current version; return the tokens since the sequence started to run."""
        num_tokens = min(sequence.num_left, int(self._steps - sequence.start + _EPSILON))
        sequence.add(self.version, num_tokens - sequence.num_in_spans)
        sequence.num_in_spans = num_tokens
        return num_tokens

    def _stop(self, sequence: Sequence) -> None:
        """Update the token counts for a sequence that stops running."""
        self._sum_base -= sequence.num_context_tokens - sequence.start
        sequence.num_sampled += self._record_tokens(sequence)

    def _start_waiting(self) -> None:
        while self._waiting and len(self._running) < self._cost.max_num_seqs:
            sequence = self._waiting[0]
            # Requires room for one more step of all, so that a preempted sequence is not readmitted at once.
            needed = self._num_kv_tokens + sequence.num_context_tokens + len(self._running) + 1
            if self._running and needed > self._cost.max_kv_tokens:
                return
            self._start(self._waiting.popleft())

    @property
    def _num_kv_tokens(self) -> float:
        return len(self._running) * self._steps + self._sum_base

    def _start(self, sequence: Sequence) -> None:
        group, context = sequence.group, sequence.num_context_tokens
        cached_at = sequence.cached_at if sequence.num_sampled else group.prompt_cached_at
        # An engine shares whole blocks, and always computes the last token, from which it samples.
        num_cached = (context - 1) // self._cost.kv_block_tokens * self._cost.kv_block_tokens
        num_to_compute = context - num_cached if cached_at == self._cache_key else context
        group.prompt_cached_at = sequence.cached_at = self._cache_key
        self._num_prompt_tokens += num_to_compute
        self._stall(num_to_compute * self._cost.prefill_s_per_token)
        # The first token is sampled by the prompt computation.
        sequence.start = self._steps - 1.0
        sequence.num_in_spans = 0
        self._sum_base += context - sequence.start
        heapq.heappush(self._running, (sequence.start + sequence.num_left, next(self._numbers), sequence))

    def _schedule(self) -> None:
        """Schedule the end of the first sequence, or the time when the KV cache is full."""
        if self._event is not None:
            self._event.cancel()
            self._event = None
        self._note_busy()
        if not self._running or self._num_pauses:
            return
        num = len(self._running)
        num_steps, act = self._running[0][0] - self._steps, self._tick
        num_to_full = (self._cost.max_kv_tokens - self._num_kv_tokens) / num
        if num > 1 and num_to_full < num_steps:
            num_steps, act = max(0.0, num_to_full), self._preempt
        if num_steps > MAX_STEPS:
            num_steps, act = MAX_STEPS, self._tick
        # The mean over these steps: contexts grow by one token per step.
        self._step_s = self._cost.decode.step_s(num, self._num_kv_tokens / num + num_steps / 2)
        # Time too short for the clock would never pass.
        self._steps += num_steps * (self._clock.now_s + num_steps * self._step_s == self._clock.now_s)
        stalled_s = max(0.0, self._stalled_until_s - self._clock.now_s)
        self._event = self._clock.after(stalled_s + num_steps * self._step_s, act)

    def _tick(self) -> None:
        self._advance()
        self._update()

    def _preempt(self) -> None:
        """Preempt the newest sequence because the KV cache is full; its keys are recomputed later."""
        self._advance()
        if self._running[0][0] > self._steps + _EPSILON:
            newest = max(self._running, key=lambda entry: entry[1])
            self._running.remove(newest)
            heapq.heapify(self._running)
            sequence = newest[2]
            self._stop(sequence)
            sequence.cached_at = None
            self._waiting.appendleft(sequence)
            self.num_preempted += 1
        self._update()

    def _note_busy(self) -> None:
        is_busy = bool(self._running or self._waiting)
        if is_busy and self._busy_since_s is None:
            self._busy_since_s = self._clock.now_s
        elif not is_busy and self._busy_since_s is not None:
            self._busy_s += self._clock.now_s - self._busy_since_s
            self._busy_since_s = None
