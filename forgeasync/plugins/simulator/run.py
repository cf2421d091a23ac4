"""Simulates one run: the loops of ``apps/grpo.py`` as events around the real state machines.

These are the real ones: the buffer with its accounting and load control, the table that chooses generators,
the dispatcher of scorers, the payload budget, the weight ledger, the data order and the packing of rows. Only
the times between their events are simulated, from a profile. docs/simulation.md lists what is not modeled.

``RunSimulation`` has the loops that start groups and train. ``Generators`` samples, ``Scorers`` scores, and
``WeightUpdates`` brings new versions to the generators.
"""

import functools
import math
import random
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from statistics import NormalDist

from forgeasync.buffer import Batch, DropReason, ReplayBuffer, Start
from forgeasync.config import KvAfterSwap, ScorerSection
from forgeasync.environments import sampling_seed, weighted_order
from forgeasync.plugins.simulator.engine import (
    Clock,
    DrawnRollout,
    Engine,
    EngineCost,
    SimulatedGroup,
)
from forgeasync.plugins.simulator.engine import Sequence as OneRollout
from forgeasync.plugins.simulator.profile import DecodeTable, Distribution, Profile, TrainTable
from forgeasync.plugins.simulator.shape import Prediction, SimulatedRun, SimulatedStep
from forgeasync.rollouts import (
    Group,
    GroupProgress,
    PayloadBudget,
    Prefixes,
    StoredBranch,
    Task,
    largest_excess,
    num_row_tokens,
    padded_length,
    plan_rows,
    row_cost,
)
from forgeasync.runtime import ReplicaTable
from forgeasync.scoring import Assignment, Dispatcher
from forgeasync.weights import Manifest, WeightLedger

_PROMPTS_KEY = 1_000_003
_NORMAL = NormalDist()


def simulate(run: SimulatedRun, profile: Profile) -> Prediction:
    """Simulate a whole run. The result is deterministic for a given run and profile."""
    return RunSimulation(run, profile).simulate()


def simulate_seeds(run: SimulatedRun, profile: Profile, *, num_seeds: int) -> list[Prediction]:
    """Simulate a run with several seeds, because the mean response length varies by seed.

    Runs with different ``seed`` use disjoint sets of seeds.
    """
    seeds = range(num_seeds * run.seed, num_seeds * (run.seed + 1))
    return [simulate(replace(run, seed=seed), profile) for seed in seeds]


class RandomDraws:
    """Draws the tasks in the order of the data, the rollouts of their groups, and service times.

    The draws of a group depend only on the seed and on the task or draw. Two runs that differ in one number
    of their config therefore have the same prompts and lengths. A difference between their predictions comes
    from that number, not from chance (common random numbers).
    """

    def __init__(self, run: SimulatedRun, profile: Profile) -> None:
        self._run = run
        self._profile = profile
        per_source = max(1, run.num_prompts // len(run.source_weights))
        tasks = [
            Task(task_id=str(index), prompt="", answer="", source_index=index, source=name)
            for name in run.source_weights
            for index in range(per_source)
        ]
        self._source_numbers = {name: number for number, name in enumerate(run.source_weights)}
        self.order = weighted_order(tasks, run.source_weights, seed=run.seed)
        self._times = random.Random(run.seed)

    def group(self, task: Task, draw_id: int) -> tuple[DrawnRollout, ...]:
        """Return the rollouts of a group.

        Lengths have the distribution of their source; within a group they are correlated by a Gaussian copula
        (Nelsen, "An Introduction to Copulas", 2006, section 2.3) with ``prompt_share``.
        """
        lengths = self._profile.lengths[task.source]
        source = self._run.seed * _PROMPTS_KEY + self._source_numbers[task.source]
        prompt_draws = random.Random(source * _PROMPTS_KEY + task.source_index)
        of_prompt = math.sqrt(lengths.prompt_share) * prompt_draws.gauss(0.0, 1.0)
        num_prompt = max(1, round(lengths.prompt.at(prompt_draws.random())))
        spread = math.sqrt(1.0 - lengths.prompt_share)
        draws = random.Random(sampling_seed(self._run.seed, draw_id))
        rollouts = []
        for _ in range(self._run.group_size):
            probability = _NORMAL.cdf(of_prompt + spread * draws.gauss(0.0, 1.0))
            num_tokens = min(max(1, round(lengths.response.at(probability))), self._run.max_response_tokens)
            score_s = self._profile.score_s.at(draws.random())
            rollouts.append(
                DrawnRollout(num_prompt_tokens=num_prompt, num_tokens=num_tokens, score_s=score_s)
            )
        return tuple(rollouts)

    def is_filtered(self, draw_id: int) -> bool:
        """Return whether the filters remove a whole group."""
        share = self._profile.filtered_share
        return share > 0.0 and random.Random(sampling_seed(self._run.seed, draw_id) + 1).random() < share

    def time_s(self, distribution: Distribution) -> float:
        """Draw a service time. The draws depend on the order of the calls."""
        return distribution.at(self._times.random())


class RunSimulation:
    """The loops of one run and their shared state."""

    def __init__(self, run: SimulatedRun, profile: Profile) -> None:
        self._run = run
        self._profile = profile
        self.clock = Clock()
        self._draws = RandomDraws(run, profile)
        self.buffer = ReplayBuffer(
            groups_per_step=run.groups_per_step,
            group_size=run.group_size,
            max_off_policy_steps=run.max_off_policy_steps,
            num_groups_in_run=run.num_steps * run.groups_per_step,
            section=run.buffer,
            accounting=run.accounting,
        )
        self._payloads = _payload_budget(run)
        self.generators = Generators(run, profile, self.clock, on_response=self._response_ended)
        self._scorers = Scorers(run.scorer, self.clock, self._scored, num_places=profile.score_places)
        self._weights = WeightUpdates(
            run,
            profile,
            self.generators,
            self.clock,
            self._draws.time_s,
            on_progress=lambda progress: self.buffer.progressed([progress]),
            on_served=self._served,
        )
        self._refused: Start | None = None
        """A started group that waits for payload memory."""
        self._held: list[Group] = []
        """Trained groups whose arrays the trainer may have to read again."""
        self._is_updating = False
        self._step_times = TrainTable(profile.train)
        self._is_training = False
        self._version = 0
        self._steps: list[SimulatedStep] = []

    def simulate(self) -> Prediction:
        """Run the simulation to its last step."""
        for _ in range(self._run.groups_per_step):
            self.buffer.submit([self._draws.order.next()])
        self._update()
        while len(self._steps) < self._run.num_steps:
            has_event = self.clock.step()
            assert has_event, "nothing will ever happen again"
        return Prediction(
            steps=tuple(self._steps),
            steady_steps=self._run.steady_steps,
            num_replicas=self._run.num_replicas,
            num_preempted=self.generators.num_preempted,
            num_beyond_decode=self.generators.decode.num_beyond,
        )

    def _update(self) -> None:
        """Let the trainer take a batch if possible, and start all groups that the buffer allows."""
        if self._is_updating:
            # The outer call sees the changes.
            return
        self._is_updating = True
        self._train()
        while self._start_one():
            pass
        self._is_updating = False

    def _start_one(self) -> bool:
        start = self._refused
        if start is None:
            start = self.buffer.start()
            if start is None:
                return False
            for _ in range(self.buffer.num_wanted):
                self.buffer.submit([self._draws.order.next()])
        # Later groups must not overtake one that waits for memory.
        is_refused = not self._payloads.reserve(start.group_id, self._run.largest_group_bytes)
        self._refused = start if is_refused else None
        if is_refused:
            return False
        group = SimulatedGroup(start, self._draws.group(start.task, start.draw_id))
        self.generators.sample(group)
        return True

    # ---- groups

    def _response_ended(self, group: SimulatedGroup, index: int) -> None:
        self._scorers.response_ended(group, index)
        if group.num_finished < self._run.group_size:
            return
        is_settled = self._payloads.settle(group.group_id, self._num_bytes(group))
        assert is_settled, "a group takes no more than its reservation"
        self.buffer.finished(group.stored())

    def _num_bytes(self, group: SimulatedGroup) -> int:
        """Return the bytes of a group's arrays: the reservation times its share of the maximum tokens."""
        longest = max(1, self._run.longest_group_tokens)
        return round(self._run.largest_group_bytes * min(1.0, group.num_tokens / longest))

    def _scored(self, group: SimulatedGroup) -> None:
        group.sequences.clear()
        if self._draws.is_filtered(group.start.draw_id):
            self._payloads.release(group.group_id)
            self.buffer.failed(group.group_id, DropReason.FILTERED)
        else:
            size = self._run.group_size
            for lost in self.buffer.scored(group.group_id, [0.0] * size, range(size)):
                self._payloads.release(lost.group_id)
        self._update()

    # ---- steps

    def _train(self) -> None:
        """Train on the next batch if the trainer is idle and a batch is ready."""
        if self._is_training or self._version == self._run.num_steps:
            return
        batch = self.buffer.take()
        if batch is None:
            return
        self._is_training = True
        wait_begin_s = self._steps[-1].end_s if self._steps else 0.0
        begin_s = self.clock.now_s
        wait_s = begin_s - wait_begin_s

        def trained() -> None:
            train_s = self.clock.now_s - begin_s
            ages = _ages(batch)
            self._commit(batch, wait_s / (wait_s + train_s))
            self._version += 1
            self._weights.publish(self._version, lambda: published(train_s, ages))

        def published(train_s: float, ages: Counter[int]) -> None:
            publish_s = self.clock.now_s - begin_s - train_s
            between_s = self._draws.time_s(self._profile.between_steps_s)
            self.clock.after(between_s, lambda: ended(train_s, publish_s, ages))

        def ended(train_s: float, publish_s: float, ages: Counter[int]) -> None:
            self._steps.append(
                SimulatedStep(
                    begin_s=wait_begin_s,
                    end_s=self.clock.now_s,
                    wait_s=wait_s,
                    train_s=train_s,
                    publish_s=publish_s,
                    num_trained_tokens=ages.total(),
                    ages=tuple(sorted(ages.items())),
                    generators_busy_s=self.generators.busy_s,
                )
            )
            self._is_training = False
            # Taking the next batch makes room for new groups.
            self._update()

        self.clock.after(self._train_s(batch), trained)

    def _train_s(self, batch: Batch) -> float:
        """Return the seconds of a batch's optimizer steps."""
        steps = step_sizes(
            [
                [(branch.num_prompt_tokens, branch.num_response_tokens) for branch in _branches([group])]
                for group in batch.groups
            ],
            steps_per_batch=self._run.steps_per_batch,
            tokens_per_row=self._run.tokens_per_row,
            num_ranks=self._run.num_data_ranks,
            share_prefixes=self._run.share_prefixes,
            pair_cost=self._run.pair_cost,
        )
        return sum(self._step_times.step_s(*step) for step in steps)

    def _commit(self, batch: Batch, trainer_wait_share: float) -> None:
        committed = self.buffer.committed(trainer_wait_share=trainer_wait_share)
        # A simulated run has no ledger file; discard the events.
        self.buffer.take_events()
        self._held += batch.groups
        for group in committed.lost:
            self._payloads.release(group.group_id)
        if len(self._held) >= self._run.num_groups_held:
            for group in self._held:
                self._payloads.release(group.group_id)
            self._held.clear()
        self._update()

    def _served(self, version: int) -> None:
        self.buffer.set_served_version(version)
        self._update()


def step_sizes(
    groups: Sequence[Sequence[tuple[int, int]]],
    *,
    steps_per_batch: int,
    tokens_per_row: int,
    num_ranks: int,
    share_prefixes: bool,
    pair_cost: float,
) -> list[tuple[int, float]]:
    """Return ``num_rows`` and ``cost`` of a ``TrainPoint`` for each optimizer step of a batch.

    ``groups`` has the tokens of each sequence's prompt and response; the sequences of a group have one
    prompt.
    """
    size, found = len(groups) // steps_per_batch, []
    for start in range(0, len(groups), size):
        of_step = [(index, *one) for index in range(start, start + size) for one in groups[index]]
        lengths = [prompt + response for _, prompt, response in of_step]
        paths = [[((index, prompt), prompt)] for index, prompt, _ in of_step] if share_prefixes else None
        plan = plan_rows(
            lengths, tokens_per_row=tokens_per_row, num_ranks=num_ranks, prefixes=paths, pair_cost=pair_cost
        )
        costs = ([_padded_cost(row, lengths, paths, pair_cost) for row in rows] for rows in plan)
        found.append((len(plan), sum(map(max, costs))))
    return found


def _padded_cost(
    row: Sequence[int], lengths: Sequence[int], paths: Sequence[Prefixes] | None, pair_cost: float
) -> float:
    num_tokens = num_row_tokens(row, lengths, paths)
    return row_cost(row, lengths, paths, pair_cost=pair_cost) + padded_length(num_tokens) - num_tokens


def _branches(groups: Iterable[Group]) -> Iterator[StoredBranch]:
    return (branch for group in groups for rollout in group.rollouts for branch in rollout.branches)


def _ages(batch: Batch) -> Counter[int]:
    ages: Counter[int] = Counter()
    for branch in _branches(batch.groups):
        for span in branch.version_spans:
            ages[batch.trainer_version - span.version] += span.end - span.start
    return ages


def _payload_budget(run: SimulatedRun) -> PayloadBudget:
    """Return the memory budget for the arrays of the run's groups.

    Raises:
        ValueError: the capacity is too small for the groups that are held at once.
    """
    excess = largest_excess(run.payload_capacity_bytes, run.num_groups_held, run.largest_group_bytes)
    if excess < 0:
        raise ValueError(
            f"payload_capacity_bytes = {run.payload_capacity_bytes:,} must be at least "
            f"{run.num_groups_held} groups held x {run.largest_group_bytes:,} bytes"
        )
    return PayloadBudget(run.payload_capacity_bytes, excess_bytes=excess)


class Generators:
    """The engines by number, and the groups on them. They are healthy for the whole run."""

    def __init__(
        self,
        run: SimulatedRun,
        profile: Profile,
        clock: Clock,
        *,
        on_response: Callable[[SimulatedGroup, int], None],
    ) -> None:
        """``on_response`` is called when a response has ended, with its group and its index in the group."""
        self._run = run
        self._on_response = on_response
        self.decode = DecodeTable(profile.decode)
        cost = EngineCost(
            decode=self.decode,
            prefill_s_per_token=1.0 / profile.prefill_tokens_per_s,
            kv_block_tokens=profile.kv_block_tokens,
            max_num_seqs=run.max_num_seqs,
            max_kv_tokens=run.max_kv_tokens,
            shares_prefixes=run.weights.prefix_cache_across_versions,
        )
        self.table = ReplicaTable()
        self._engines: dict[int, Engine] = {}
        self._groups: dict[int, dict[int, SimulatedGroup]] = {}
        """Groups by generator and group id."""
        per_host = run.num_replicas // run.num_generator_hosts
        for rank in range(run.num_replicas):
            number = self.table.start(rank, str(rank // per_host))
            self._engines[number] = Engine(number, cost, clock, self._ended)
            self._groups[number] = {}
            self.table.ready(number)

    @property
    def busy_s(self) -> float:
        """Seconds in which a generator had a sequence, summed over generators."""
        return sum(engine.total_busy_s for engine in self._engines.values())

    @property
    def num_preempted(self) -> int:
        """Number of sequences that generators had to recompute."""
        return sum(engine.num_preempted for engine in self._engines.values())

    def sample(self, group: SimulatedGroup) -> None:
        """Sample a group on the generator with the fewest rollouts."""
        number = self.table.assign(self._run.group_size)
        assert number is not None, "generators are healthy"
        group.engine = number
        self._groups[number][group.group_id] = group
        self._engines[number].add(group.sequences)

    def swap(self, number: int, version: int, stall_s: float, *, recompute: bool) -> list[GroupProgress]:
        """Let a generator sample with a new version; return the progress of its groups."""
        running = self._engines[number].swap(version, stall_s, recompute=recompute)
        return [
            GroupProgress(
                group_id=group_id,
                version=version,
                num_running=self._run.group_size - group.num_finished,
                num_tokens=running[group_id] + sum(one.num_sampled for one in group.sequences),
            )
            for group_id, group in self._groups[number].items()
        ]

    def _ended(self, sequence: OneRollout) -> None:
        group = sequence.group
        group.num_finished += 1
        if group.num_finished == self._run.group_size:
            assert group.engine is not None
            del self._groups[group.engine][group.group_id]
            self.table.ended(group.engine, self._run.group_size)
        self._on_response(group, sequence.index)


class WeightUpdates:
    """Publishes versions and lets the generators load them, as ``forgeasync.controller`` does.

    One version is staged at a time, each host fetches the newest one whenever it is behind, and its
    generators swap together. At a swap, ``on_progress`` is called with each group that crosses it, and then
    ``on_served`` with the version that all generators have. ``draw_s`` draws a service time.
    """

    def __init__(
        self,
        run: SimulatedRun,
        profile: Profile,
        generators: Generators,
        clock: Clock,
        draw_s: Callable[[Distribution], float],
        *,
        on_progress: Callable[[GroupProgress], None],
        on_served: Callable[[int], None],
    ) -> None:
        self._times = profile.weights
        self._recomputes = run.weights.kv_cache is KvAfterSwap.RECOMPUTE
        self._generators = generators
        self._clock = clock
        self._draw_s = draw_s
        self._on_progress = on_progress
        self._on_served = on_served
        self._ledger = WeightLedger(lease_timeout_s=run.weights.lease_timeout_s)
        self._is_updating = [False] * run.num_generator_hosts
        self._requests: list[Callable[[], None]] = []
        """Requested publications; each is called when the training loop may continue."""
        self._is_publishing = False
        self._version = 0
        self._served = 0
        self._num_swapping = [0] * run.num_generator_hosts
        """By host, the number of generators that have fetched a version but do not sample with it yet."""

    def publish(self, version: int, begun: Callable[[], None]) -> None:
        """Stage the trainer's weights as this version; call ``begun`` when training may continue."""
        self._version = version
        self._requests.append(begun)
        self._publish_next()

    def _publish_next(self) -> None:
        if self._is_publishing or not self._requests:
            return
        begun = self._requests.pop(0)
        slot = self._ledger.begin(self._clock.now_s)
        if slot is None:
            # Skip this version and publish later: generators read both staging buffers.
            begun()
            self._publish_next()
            return
        self._is_publishing = True
        version = self._version

        def wait_ended() -> None:
            # Scheduled before ``begun``, which may publish again.
            publish_s = self._draw_s(self._times.publish_s)
            self._clock.after(publish_s, lambda: self._staged(version, slot))
            begun()

        self._clock.after(self._draw_s(self._times.wait_s), wait_ended)

    def _staged(self, version: int, slot: int) -> None:
        manifest = Manifest(version=version, slot=slot, layout_digest="", checksums=())
        self._ledger.commit(manifest)
        self._generators.table.published(version)
        self._is_publishing = False
        self._publish_next()
        for host in range(len(self._is_updating)):
            self._fetch_if_behind(host)
        self._catch_up()

    def _catch_up(self) -> None:
        """Publish a version that had to be skipped."""
        if self._ledger.is_owing and not self._is_publishing and self._ledger.can_begin(self._clock.now_s):
            self.publish(self._version, lambda: None)

    def _fetch_if_behind(self, host: int) -> None:
        """Let a host that is behind fetch the newest version."""
        table = self._generators.table
        if self._is_updating[host] or not table.is_behind(str(host)):
            return
        older = table.lowest_version(str(host))
        manifest = self._ledger.acquire(host, newer_than=older, now_s=self._clock.now_s)
        if manifest is None:
            return
        version = manifest.version
        numbers = table.behind(str(host), version)
        for number in numbers:
            table.begin_update(number, version)
        self._is_updating[host] = True
        self._clock.after(self._draw_s(self._times.fetch_s), lambda: self._fetched(host, numbers, version))

    def _fetched(self, host: int, numbers: tuple[int, ...], version: int) -> None:
        self._ledger.release(host)
        self._num_swapping[host] = len(numbers)
        for number in numbers:
            self._swap(host, number, version)
        self._catch_up()

    def _swap(self, host: int, number: int, version: int) -> None:
        stall_s = self._draw_s(self._times.swap_s)
        progress = self._generators.swap(number, version, stall_s, recompute=self._recomputes)
        self._clock.after(stall_s, lambda: self._swapped(host, number, progress))

    def _swapped(self, host: int, number: int, progress: list[GroupProgress]) -> None:
        # Progress comes first: it makes running groups younger than their start suggests.
        for one in progress:
            self._on_progress(one)
        table = self._generators.table
        table.updated(number)
        self._num_swapping[host] -= 1
        if not self._num_swapping[host]:
            self._is_updating[host] = False
            self._fetch_if_behind(host)
        if table.served > self._served:
            self._served = table.served
            self._on_served(self._served)


class Scorers:
    """Scores each response when it ends; ``on_scored`` is called when all responses of a group are scored.

    Each scorer scores up to ``max(num_places, section.num_workers)`` responses at once. The queue of
    responses is unbounded.
    """

    def __init__(
        self,
        section: ScorerSection,
        clock: Clock,
        on_scored: Callable[[SimulatedGroup], None],
        *,
        num_places: int,
    ) -> None:
        self._clock = clock
        self._on_scored = on_scored
        self._dispatcher = Dispatcher(section.num_replicas, section, retry_wait_s=0.0)
        self._free = [max(num_places, section.num_workers)] * section.num_replicas
        self._queues: list[deque[Assignment]] = [deque() for _ in range(section.num_replicas)]
        self._responses: dict[int, tuple[SimulatedGroup, float]] = {}
        """Group and scoring time in seconds of each item."""

    def response_ended(self, group: SimulatedGroup, index: int) -> None:
        """Score a response. The rest of its group may still be sampled."""
        item = self._dispatcher.submit(self._clock.now_s)
        self._responses[item] = group, group.sequences[index].rollout.score_s
        self._assign()

    def _assign(self) -> None:
        while (assignment := self._dispatcher.next(self._clock.now_s)) is not None:
            self._queues[assignment.replica].append(assignment)
            self._work(assignment.replica)

    def _work(self, replica: int) -> None:
        while self._queues[replica] and self._free[replica]:
            assignment = self._queues[replica].popleft()
            _, score_s = self._responses[assignment.item]
            self._free[replica] -= 1
            self._clock.after(score_s, functools.partial(self._scored, assignment))

    def _scored(self, assignment: Assignment) -> None:
        group, _ = self._responses.pop(assignment.item)
        self._free[assignment.replica] += 1
        self._dispatcher.scored(assignment)
        self._work(assignment.replica)
        group.num_scored += 1
        if group.num_scored == len(group.sequences):
            self._on_scored(group)
        self._assign()
