"""Rollout accounting: the ledger by hand, and whole runs in simulated time around the real buffer."""

import bisect
import heapq
import itertools
import math
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import pytest

from forgeasync.buffer import (
    AccountingLedger,
    DropReason,
    LoadController,
    ReplayBuffer,
    Start,
    StepLoad,
    WaitingSide,
    length_bucket,
)
from forgeasync.config import (
    AccountingPolicy,
    AccountingSection,
    AgeOf,
    BatchOrder,
    BufferSection,
    Replacement,
    StaleGroups,
)
from forgeasync.rollouts import (
    Group,
    GroupProgress,
    StoredRollout,
    Task,
)
from tests.support.buffer_world import make_task
from tests.support.rollouts import make_stored_rollout


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
        spans: list[tuple[int, int, int]] = []
        start = 0
        for version in range(first, len(self._swap_times)):
            is_last = version + 1 == len(self._swap_times)
            end = length if is_last else min(length, math.floor(self._swap_times[version + 1] - begun))
            if end > start:
                spans.append((version, start, end))
                start = end
        return make_stored_rollout(*spans, num_prompt_tokens=0)

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


WEIGHT = AccountingSection(replacement=Replacement.WEIGHT, max_weight=3.0, metric_groups=100)
K, GROUPS_PER_STEP, NUM_STEPS = 8, 24, 500
LONGEST = 1024
"""64 times the shortest, 16 tokens."""


def test_length_buckets_are_powers_of_two() -> None:
    assert [length_bucket(length) for length in (0, 1, 2, 3, 4, 7, 8, 1023, 1024)] == [
        -1,
        0,
        1,
        1,
        2,
        2,
        3,
        9,
        10,
    ]


def test_weights_carry_the_deficit_of_their_stratum() -> None:
    ledger = AccountingLedger(WEIGHT)
    task, other = make_task(0), make_task(1, source="other")
    for _ in range(3):
        ledger.lose(task, (20, 30))
    assert ledger.metrics()["accounting/outstanding_deficit"] == 3
    assert ledger.train(other, (20, 30), submitted=(20, 30)) == 1.0, "another source"
    assert ledger.train(task, (20, 40), submitted=(20, 40)) == 1.0, "a longer stratum"
    assert ledger.train(task, (16, 17), submitted=(16, 17)) == 3.0, "max_weight"
    assert ledger.train(task, (31, 1), submitted=(31, 1)) == 2.0, "what was left over"
    assert ledger.train(task, (16, 16), submitted=(16, 16)) == 1.0
    assert ledger.metrics()["accounting/outstanding_deficit"] == 0


def test_distances_by_hand() -> None:
    ledger = AccountingLedger(AccountingSection(policy=AccountingPolicy.NONE, metric_groups=4))
    task, other = make_task(0), make_task(1, source="other")
    ledger.train(task, (1, 4), submitted=(1, 4))
    ledger.train(task, (1, 4), submitted=(1, 4))
    ledger.lose(other, (4, 4))
    metrics = ledger.metrics()
    # Submitted: 2 of 1 token, 4 of 4 to 7; trained: 2 and 2.
    assert metrics["accounting/length_distance"] == pytest.approx(1 / 2 - 1 / 3)
    assert metrics["accounting/source_distance"] == pytest.approx(1 / 3)
    assert metrics["accounting/mean_length_ratio"] == pytest.approx(2.5 / 3)
    assert metrics["accounting/length_share_ratio_1"] == pytest.approx((1 / 2) / (1 / 3))
    assert metrics["accounting/length_share_ratio_4"] == pytest.approx((1 / 2) / (2 / 3))
    assert metrics["accounting/effective_groups_share"] == pytest.approx(2 / 3)
    ledger.train(task, (0,), submitted=(0,))
    assert "accounting/length_share_ratio_0" in ledger.metrics(), "responses without a token"
    for _ in range(4):
        ledger.train(task, (8,), submitted=(8,))
    assert ledger.metrics()["accounting/length_distance"] == pytest.approx(0.0), "the window moved on"


def test_what_is_lost_counts_for_its_own_source() -> None:
    ledger = AccountingLedger(AccountingSection())
    ledger.train(make_task(0), (1, 4), submitted=(1, 4))
    ledger.lose(make_task(1), (1, 4))
    assert ledger.metrics()["accounting/source_distance"] == 0.0
    assert ledger.metrics()["accounting/effective_groups_share"] == 0.5


def test_a_reissued_prompt_counts_with_what_was_submitted_first() -> None:
    ledger = AccountingLedger(AccountingSection())
    ledger.train(make_task(0), (1,), submitted=(64,))
    assert ledger.metrics()["accounting/length_distance"] == 1.0
    assert ledger.metrics()["accounting/source_distance"] == 0.0


def test_a_restored_ledger_makes_up_for_what_the_other_had_left() -> None:
    ledger, resumed = AccountingLedger(WEIGHT), AccountingLedger(WEIGHT)
    task, other = make_task(0), make_task(1, source="other")
    for lost, lengths in ((task, (20, 30)), (task, (20, 30)), (other, (5,)), (other, None)):
        ledger.lose(lost, lengths)
    ledger.train(other, (7,), submitted=(7,))
    assert [(one.source, one.length_bucket, one.weight) for one in ledger.deficits] == [("s", 4, 2.0)]
    resumed.restore(ledger.deficits, ledger.num_censored)
    assert resumed.metrics() == {"accounting/outstanding_deficit": 2.0, "accounting/num_censored": 1}
    assert resumed.train(task, (16, 17), submitted=(16, 17)) == 3.0


def test_weights_tend_to_the_inverse_of_the_surviving_share() -> None:
    rng = np.random.default_rng(0)
    ledger = AccountingLedger(AccountingSection(replacement=Replacement.WEIGHT, max_weight=20.0))
    surviving = {16: 0.9, 256: 0.25}
    weights: dict[int, list[float]] = {length: [] for length in surviving}
    for index in range(4000):
        length = (16, 256)[index % 2]
        if rng.random() < surviving[length]:
            weights[length].append(ledger.train(make_task(index), (length,), submitted=(length,)))
        else:
            ledger.lose(make_task(index), (length,))
    for length, share in surviving.items():
        assert np.mean(weights[length]) == pytest.approx(1 / share, rel=0.05)
    assert ledger.metrics()["accounting/length_distance"] < 0.02


def test_load_goes_up_where_the_bound_starves_the_trainer_and_down_where_batches_lie_ready() -> None:
    load = LoadController(groups_per_step=8, max_groups=40)

    def step(wait: float, ready: int, *, bound: bool) -> int:
        load.step(StepLoad(trainer_wait_share=wait, num_ready=ready, is_bound=bound))
        return load.bound

    assert [step(0.0, 20, bound=True) for _ in range(6)] == [40, 40, 39, 39, 39, 38]
    assert load.waiting_side is WaitingSide.GENERATORS
    assert step(0.5, 0, bound=False) == 38, "more groups would not help"
    assert step(0.5, 0, bound=True) == 40
    assert load.waiting_side is WaitingSide.TRAINER
    for _ in range(400):
        step(0.0, 20, bound=True)
    assert load.bound == 8, "one batch"
    assert step(0.0, 7, bound=False) == 8
    assert load.waiting_side is WaitingSide.NONE


def make_run(train_time: float, *, num_steps: int = NUM_STEPS, seed: int = 0) -> SimulatedRun:
    return SimulatedRun(
        sources={
            name: LengthModel(median=median, sigma=1.0, shortest=16, longest=LONGEST)
            for name, median in (("easy", 64.0), ("hard", 160.0))
        },
        num_steps=num_steps,
        groups_per_step=GROUPS_PER_STEP,
        group_size=8,
        max_off_policy_steps=K,
        max_num_seqs=100_000,
        train_time=train_time,
        publish_time=10.0,
        seed=seed,
    )


DROP = StaleGroups.DROP
NONE = (
    BufferSection(stale_groups=DROP, order=BatchOrder.COMPLETION, adapt_load=False),
    AccountingSection(policy=AccountingPolicy.NONE),
)
EXACT = (BufferSection(stale_groups=DROP), AccountingSection())


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Outcome]:
    """The longest rollout takes 6.4 of the 8 steps."""
    windowed = AccountingSection(policy=AccountingPolicy.WINDOWED_FIFO, window_groups=4 * GROUPS_PER_STEP)
    return compare(
        make_run(LONGEST / 6.4), {"none": NONE, "windowed_fifo": (NONE[0], windowed), "exact": EXACT}
    )


def test_without_accounting_short_rollouts_train_more_often(outcomes: dict[str, Outcome]) -> None:
    assert outcomes["none"].num_dropped[DropReason.STALE] > 1000
    assert outcomes["none"].length_distance() > 0.06
    assert outcomes["none"].source_distance() > 0.04
    ratio = outcomes["none"].metrics["accounting/mean_length_ratio"]
    assert ratio < 0.9


def test_exact_accounting_keeps_the_composition_at_the_same_speed(outcomes: dict[str, Outcome]) -> None:
    assert outcomes["exact"].length_distance() < 0.02
    assert outcomes["exact"].source_distance() < 0.02
    assert outcomes["exact"].end_time < 1.03 * outcomes["none"].end_time
    assert outcomes["windowed_fifo"].length_distance() < outcomes["none"].length_distance()
    assert max(outcome.largest_age for outcome in outcomes.values()) <= K


def test_the_ledger_sees_what_the_simulation_counts(outcomes: dict[str, Outcome]) -> None:
    # The ledger's window is the last 1,000 groups, the simulation's count is of the whole run.
    for outcome in outcomes.values():
        seen = outcome.metrics["accounting/length_distance"]
        assert seen == pytest.approx(outcome.length_distance(), abs=0.03)


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_where_the_longest_take_more_than_k_steps_waiting_and_token_ages_stay_exact(seed: int) -> None:
    run = make_run(LONGEST / 9.3, num_steps=150, seed=seed)
    outcomes = compare(
        run,
        {
            "none": NONE,
            "wait": (BufferSection(), AccountingSection()),
            "weight": (BufferSection(stale_groups=DROP), AccountingSection(replacement=Replacement.WEIGHT)),
            "token": (BufferSection(age_of=AgeOf.TOKEN), AccountingSection()),
        },
    )
    assert outcomes["wait"].length_distance() == outcomes["token"].length_distance() == 0.0
    assert outcomes["wait"].num_dropped.total() == outcomes["token"].num_dropped.total() == 0
    assert max(outcomes[name].largest_age for name in ("none", "wait", "weight")) <= K
    assert outcomes["wait"].trainer_waited > outcomes["token"].trainer_waited
    assert outcomes["token"].end_time < 1.03 * outcomes["none"].end_time
    assert outcomes["weight"].length_distance() < 0.7 * outcomes["none"].length_distance()


def test_a_length_model_has_the_asked_for_median_and_spread() -> None:
    rng = np.random.default_rng(0)
    model = LengthModel(median=160.0, sigma=1.0, shortest=16, longest=1024)
    lengths = np.array([model.sample(model.of_prompt(rng), 1, rng)[0] for _ in range(20_000)])
    assert np.median(lengths) == pytest.approx(160, rel=0.05)
    quartiles = np.log(np.quantile(lengths, [0.25, 0.75]))
    assert quartiles[1] - quartiles[0] == pytest.approx(2 * 0.6745, rel=0.05)
    assert Counter(lengths.tolist())[1024] == pytest.approx(
        20_000 * 0.5 * math.erfc(math.log(1024 / 160) / math.sqrt(2)), rel=0.15
    )
