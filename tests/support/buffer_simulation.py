"""A run in simulated time around the real replay buffer: what lengths, staleness and accounting do to it.

The generator decodes every rollout at the same speed, up to a number at once, the others queue; the trainer
takes a fixed time for a step; new weights are served a fixed time after it. Time is in the time of one token.
"""

import bisect
import heapq
import itertools
import math
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from forgeasync.buffer import DropReason, ReplayBuffer, Start, length_bucket
from forgeasync.config import AccountingSection, BufferSection
from forgeasync.rollouts import (
    FinishReason,
    Group,
    GroupProgress,
    PayloadRef,
    StoredBranch,
    StoredRollout,
    Task,
    VersionSpan,
)

NOWHERE = PayloadRef(host_id="", file="", payload_id="", offset=0, num_bytes=0, checksum=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthModel:
    """Lognormal response lengths in tokens, cut to [shortest, longest].

    ``prompt_share`` of the variance of the logarithm is the prompt's, the rest differs from rollout to
    rollout.
    """

    median: float
    sigma: float
    shortest: int
    longest: int
    prompt_share: float = 0.5

    def of_prompt(self, rng: np.random.Generator) -> float:
        """The logarithm of a prompt's median."""
        return np.log(self.median) + self.sigma * np.sqrt(self.prompt_share) * rng.standard_normal()

    def sample(self, log_median: float, num: int, rng: np.random.Generator) -> list[int]:
        """Lengths of a group."""
        noise = self.sigma * np.sqrt(1 - self.prompt_share) * rng.standard_normal(num)
        lengths = np.exp(log_median + noise).round().clip(self.shortest, self.longest)
        return lengths.astype(int).tolist()


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedRun:
    """What a run is like apart from its buffer."""

    sources: Mapping[str, LengthModel]
    """Prompts come from them in turn."""
    num_steps: int
    groups_per_step: int
    group_size: int
    max_off_policy_steps: int
    max_num_seqs: int
    train_time: float
    publish_time: float
    seed: int = 0


@dataclass(slots=True, kw_only=True)
class Outcome:
    """The outcome of a run: weighted numbers of rollouts by source and length bucket, and where time went."""

    submitted: Counter[tuple[str, int]] = field(default_factory=Counter)
    trained: Counter[tuple[str, int]] = field(default_factory=Counter)
    end_time: float = 0.0
    trainer_waited: float = 0.0
    num_dropped: Counter[DropReason] = field(default_factory=Counter)
    largest_age: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)

    def length_distance(self) -> float:
        """Total variation between the submitted and the effectively trained lengths, by bucket."""
        return self._distance(1)

    def source_distance(self) -> float:
        """The same of the sources."""
        return self._distance(0)

    def _distance(self, part: int) -> float:
        shares = []
        for histogram in (self.submitted, self.trained):
            marginal: Counter[object] = Counter()
            for key, number in histogram.items():
                marginal[key[part]] += number
            shares.append({key: number / marginal.total() for key, number in marginal.items()})
        one, other = shares
        return 0.5 * sum(abs(one.get(key, 0) - other.get(key, 0)) for key in one.keys() | other.keys())


@dataclass(slots=True)
class _Running:
    """A group in the generator. ``begun`` and ``ends`` are times, of the rollouts that have a slot so far."""

    start: Start
    lengths: list[int]
    begun: dict[int, float] = field(default_factory=dict)
    rollouts: dict[int, StoredRollout] = field(default_factory=dict)


class BufferSimulation:
    """Drives one replay buffer through one run."""

    def __init__(self, run: SimulatedRun, *, buffer: BufferSection, accounting: AccountingSection) -> None:
        self._run = run
        self._buffer = ReplayBuffer(
            groups_per_step=run.groups_per_step,
            group_size=run.group_size,
            max_off_policy_steps=run.max_off_policy_steps,
            num_groups_in_run=run.num_steps * run.groups_per_step,
            section=buffer,
            accounting=accounting,
        )
        self._rng = np.random.default_rng(run.seed)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._sequence = itertools.count()
        self._now = 0.0
        self._log_medians: dict[str, float] = {}
        self._num_tasks = 0
        self._seen: set[str] = set()
        self._groups: dict[int, _Running] = {}
        self._queue: deque[tuple[int, int]] = deque()
        self._num_free_slots = run.max_num_seqs
        self._swap_times = [0.0]
        self._trainer_version = 0
        self._is_training = False
        self._idle_since = 0.0
        self._outcome = Outcome()

    def simulate(self) -> Outcome:
        """Play the run to its end."""
        self._proceed()
        while self._trainer_version < self._run.num_steps:
            assert self._events, "nothing will ever happen again"
            self._now, _, happen = heapq.heappop(self._events)
            happen()
            self._proceed()
        self._outcome.end_time = self._now
        self._outcome.num_dropped = self._buffer.num_dropped
        self._outcome.metrics = self._buffer.metrics()
        return self._outcome

    def _after(self, delay: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self._now + delay, next(self._sequence), happen))

    def _proceed(self) -> None:
        """Handle all events that take no time."""
        self._train()
        while True:
            for _ in range(self._buffer.num_wanted):
                self._buffer.submit(self._next_task())
            start = self._buffer.start()
            if start is None:
                return
            self._sample(start)

    def _next_task(self) -> Task:
        names = list(self._run.sources)
        source = names[self._num_tasks % len(names)]
        task_id = str(self._num_tasks)
        self._num_tasks += 1
        self._log_medians[task_id] = self._run.sources[source].of_prompt(self._rng)
        return Task(task_id=task_id, prompt="", answer="", source_index=0, source=source)

    def _sample(self, start: Start) -> None:
        task = start.task
        model = self._run.sources[task.source]
        lengths = model.sample(self._log_medians[task.task_id], self._run.group_size, self._rng)
        if task.task_id not in self._seen:
            self._seen.add(task.task_id)
            self._outcome.submitted.update((task.source, length_bucket(length)) for length in lengths)
        self._groups[start.group_id] = _Running(start, lengths)
        self._queue.extend((start.group_id, index) for index in range(self._run.group_size))
        self._fill_slots()

    def _fill_slots(self) -> None:
        while self._queue and self._num_free_slots:
            group_id, index = self._queue.popleft()
            self._num_free_slots -= 1
            running = self._groups[group_id]
            running.begun[index] = self._now
            self._after(running.lengths[index], lambda key=(group_id, index): self._end_rollout(*key))

    def _end_rollout(self, group_id: int, index: int) -> None:
        self._num_free_slots += 1
        running = self._groups[group_id]
        running.rollouts[index] = self._rollout(running.begun[index], running.lengths[index])
        if len(running.rollouts) == self._run.group_size:
            del self._groups[group_id]
            rollouts = tuple(running.rollouts[one] for one in range(self._run.group_size))
            start = running.start
            group = Group(group_id=group_id, draw_id=start.draw_id, task=start.task, rollouts=rollouts)
            self._buffer.finished(group)
            self._buffer.scored(group_id, [0.0] * self._run.group_size, range(self._run.group_size))
        self._fill_slots()

    def _rollout(self, begun: float, length: int) -> StoredRollout:
        """Version v was served from ``_swap_times[v]`` on; token i is sampled at ``begun + i + 1``."""
        first = bisect.bisect_right(self._swap_times, begun) - 1
        spans: list[VersionSpan] = []
        start = 0
        for version in range(first, len(self._swap_times)):
            is_last = version + 1 == len(self._swap_times)
            end = length if is_last else min(length, math.floor(self._swap_times[version + 1] - begun))
            if end > start:
                spans.append(VersionSpan(version=version, start=start, end=end))
                start = end
        branch = StoredBranch(
            prompt=NOWHERE,
            response=NOWHERE,
            num_prompt_tokens=0,
            num_response_tokens=length,
            version_spans=tuple(spans),
            text="",
        )
        return StoredRollout(generator_rank=0, branches=(branch,), finish_reason=FinishReason.STOP)

    def _train(self) -> None:
        if self._is_training or self._trainer_version == self._run.num_steps:
            return
        batch = self._buffer.take()
        if batch is None:
            return
        waited = self._now - self._idle_since
        self._outcome.trainer_waited += waited
        self._is_training = True
        for group, weight in zip(batch.groups, batch.weights, strict=True):
            age = batch.trainer_version - group.first_version
            self._outcome.largest_age = max(self._outcome.largest_age, age)
            for rollout in group.rollouts:
                key = (group.task.source, length_bucket(rollout.num_response_tokens))
                self._outcome.trained[key] += weight
        share = waited / (waited + self._run.train_time)
        self._after(self._run.train_time, lambda: self._end_step(share))

    def _end_step(self, trainer_wait_share: float) -> None:
        self._is_training = False
        self._idle_since = self._now
        self._trainer_version += 1
        self._buffer.committed(trainer_wait_share=trainer_wait_share)
        # Nobody keeps a ledger of this run.
        self._buffer.events.take()
        version = self._trainer_version
        self._after(self._run.publish_time, lambda: self._serve(version))

    def _serve(self, version: int) -> None:
        for group_id, running in self._groups.items():
            num_tokens = sum(
                min(running.lengths[index], math.floor(self._now - begun))
                for index, begun in running.begun.items()
            )
            # Those that end this very moment sample nothing more.
            num_running = self._run.group_size - sum(
                begun + running.lengths[index] <= self._now for index, begun in running.begun.items()
            )
            self._buffer.progressed(
                GroupProgress(
                    group_id=group_id, version=version, num_running=num_running, num_tokens=num_tokens
                )
            )
        self._swap_times.append(self._now)
        self._buffer.set_served_version(version)


def compare(
    run: SimulatedRun, variants: Mapping[str, tuple[BufferSection, AccountingSection]]
) -> dict[str, Outcome]:
    """Simulate the run with each of these buffers."""
    return {
        name: BufferSimulation(run, buffer=buffer, accounting=accounting).simulate()
        for name, (buffer, accounting) in variants.items()
    }


def table_rows(outcomes: Mapping[str, Outcome], *, baseline: str) -> list[Sequence[str]]:
    """Name, distances, throughput against the baseline, drops, largest age, share of time waited."""
    return [
        (
            name,
            f"{outcome.length_distance():.4f}",
            f"{outcome.source_distance():.4f}",
            f"{outcomes[baseline].end_time / outcome.end_time:.3f}",
            str(outcome.num_dropped.total()),
            str(outcome.largest_age),
            f"{outcome.trainer_waited / outcome.end_time:.3f}",
        )
        for name, outcome in outcomes.items()
    ]
