"""What the loops of a run talk to, as plain objects in one process: no Monarch, no engine, no model.

A response's text is its reward, written out, so that a test can follow a reward from the text to what trains.
"""

import asyncio
import dataclasses
import functools
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Generic, ParamSpec, TypeVar

import numpy as np

from apps.grpo import GrpoRun
from forgeasync.buffer import (
    FORMAT,
    START,
    Batch,
    BufferSnapshot,
    Checkpointed,
    CheckpointedBuffer,
    LedgerState,
    Opened,
    ReplayBuffer,
    Resumed,
)
from forgeasync.config import RunConfig, SamplingSection
from forgeasync.controller import Prepared, Roles, RunFiles, StepRecord, StepTimes, problem_sets
from forgeasync.environments import Response
from forgeasync.files import JsonLines, Refusal
from forgeasync.generator import EngineStats, SwapReport
from forgeasync.observability import FaultLog, HeldOutScores, RunDir
from forgeasync.rollouts import (
    EpisodeOutcome,
    FinishReason,
    SampledTurn,
    Score,
    StoredRollout,
    Task,
)
from forgeasync.runtime import (
    CANCELLED,
    BufferReport,
    GroupSampler,
    GroupScoring,
    Proc,
    RefusedGroup,
    ReplicaTable,
    ResponseGroups,
    ScoredResponses,
    ScoreQueue,
    Teachers,
)
from forgeasync.trainer import StepResult, TrainingItem
from forgeasync.waiting import Monitor
from forgeasync.weights import FetchReport, Manifest
from tests.support.buffer_world import make_task
from tests.support.config_samples import FACTS, minimal_config
from tests.support.rollouts import make_stored_rollout

P = ParamSpec("P")
R = TypeVar("R")

MAX_STEPS = 3


def make_manifest(version: int, slot: int = 0) -> Manifest:
    """Of a version without tensors."""
    return Manifest(version=version, slot=slot, layout_digest="", checksums=())


SWAP = SwapReport(pause_s=0.0, waited_s=0.0, num_crossing=0, num_resumed=0, num_recomputed=0, progress=())


def make_fetch(
    version: int,
    *,
    is_complete: bool,
    moved: int = 0,
    needed: int = 0,
    fetch_s: float = 0.0,
    failure: str | None = None,
) -> FetchReport:
    """Of a version's fetch, which moved some of the bytes that it needed."""
    return FetchReport(
        version=version,
        is_complete=is_complete,
        num_bytes_moved=moved,
        num_bytes_needed=needed,
        num_bad_blocks=int(not is_complete),
        fetch_s=fetch_s,
        failure=failure,
    )


class Endpoint(Generic[P, R]):
    """A coroutine function under the call of an actor's endpoint."""

    def __init__(self, function: Callable[P, Awaitable[R]]) -> None:
        self._function = function

    async def call_one(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return await self._function(*args, **kwargs)


def endpoint(method: Callable[..., Awaitable[R]]) -> "functools.cached_property[Endpoint[..., R]]":
    """Decorates a method that is called as an actor's endpoint."""
    return functools.cached_property(lambda self: Endpoint(functools.partial(method, self)))


class BookedBuffer(Monitor[ReplayBuffer]):
    """A buffer whose changes go into a ledger's book, which would contradict."""

    def __init__(self, state: ReplayBuffer) -> None:
        super().__init__(state)
        self.book: LedgerState | None = None

    def open_book(self, groups_per_step: int, batches: Sequence[tuple[int, ...]] = ()) -> None:
        """Begin with what the buffer holds now, as a run that was resumed here if steps are made again."""
        now = self.state.snapshot()
        self.book = LedgerState()
        self.book.apply(
            Opened(
                format=FORMAT,
                run="run",
                seed=0,
                groups_per_step=groups_per_step,
                step=now.trainer_version,
                next_group=now.next_group_id,
                num_submitted=now.num_submitted,
                waiting=tuple((one.submission_id, one.attempt) for one in now.pending),
            )
        )
        if batches:
            self.book.apply(Checkpointed(step=now.trainer_version))
            self.book.apply(
                Resumed(step=now.trainer_version, line=2, groups_per_step=groups_per_step, batches=batches)
            )

    def change(self, act: Callable[[ReplayBuffer], R]) -> R:
        result = super().change(act)
        self._note()
        return result

    async def until(self, attempt: Callable[[ReplayBuffer], R | None], **named: Any) -> R:
        result = await super().until(attempt, **named)
        self._note()
        return result

    def _note(self) -> None:
        assert self.book is not None
        for event in self.state.take_events():
            self.book.apply(event)


class LocalBuffer:
    """A ``RemoteBuffer`` around a real buffer in this process."""

    def __init__(self, config: RunConfig) -> None:
        algorithm = config.algorithm
        state = ReplayBuffer(
            groups_per_step=algorithm.groups_per_step,
            group_size=algorithm.group_size,
            max_off_policy_steps=config.max_off_policy_steps,
            num_groups_in_run=config.max_steps * algorithm.groups_per_step,
            section=config.buffer,
            accounting=config.accounting,
        )
        self._groups_per_step = algorithm.groups_per_step
        self.local = BookedBuffer(state)
        self.local.open_book(self._groups_per_step)
        self.instead: dict[str, Callable[..., Awaitable[Any]]] = {}
        """What is called instead of methods of the buffer, by their names."""

    async def change(self, act: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if (other := self.instead.get(act.__name__)) is not None:
            return await other(*args, **kwargs)
        return self.local.change(lambda buffer: act(buffer, *args, **kwargs))

    async def until(self, attempt: Callable[..., Any], *args: Any) -> Any:
        if (other := self.instead.get(attempt.__name__)) is not None:
            return await other(*args)
        return await self.local.until(lambda buffer: attempt(buffer, *args))

    def restore(
        self, snapshot: BufferSnapshot, *, batches: Sequence[tuple[int, ...]] = (), num_groups: int = 0
    ) -> None:
        """Continue from a snapshot, as in a run that is resumed."""
        self.local.state.restore(snapshot, batches=batches, num_groups=num_groups)
        self.local.open_book(self._groups_per_step, batches)

    @property
    def book(self) -> LedgerState:
        """What became of the prompts."""
        assert self.local.book is not None
        return self.local.book

    async def refusal(self) -> Refusal | None:
        return None

    async def checkpoint(self) -> CheckpointedBuffer:
        return CheckpointedBuffer(snapshot=self.local.state.snapshot(), ledger=START)

    async def report(self) -> BufferReport:
        state = self.local.state
        return BufferReport(metrics=state.metrics(), num_dropped=state.num_dropped)


class Generators:
    """A router over generators that answer at once, by default each on a host of its own.

    ``is_complete`` says of a host's n-th fetch how it ends; groups in ``endless`` end when cancelled; with
    ``refuses`` no group can be trained on.
    """

    def __init__(
        self,
        num_replicas: int = 1,
        *,
        is_complete: Callable[[int, int], bool] = lambda replica, number: True,
        endless: Sequence[int] = (),
        refuses: bool = False,
        hosts: Sequence[Sequence[int]] | None = None,
    ) -> None:
        self._refuses = refuses
        self.num_replicas = num_replicas
        self.hosts = hosts or [(replica,) for replica in range(num_replicas)]
        self.num_hosts = len(self.hosts)
        self.table = Monitor(ReplicaTable())
        """Numbers are ranks: none is ever lost."""
        for rank in range(num_replicas):
            host = next(index for index, ranks in enumerate(self.hosts) if rank in ranks)
            self.table.state.ready(self.table.state.start(rank, str(host)))
        self._is_complete = is_complete
        self._endless = {group_id: asyncio.Event() for group_id in endless}
        self.num_fetches = [0] * len(self.hosts)
        self.num_sleeps = 0
        self.swapped: list[tuple[int, int]] = []
        """Replica and version."""
        self.prompts: list[int] = []
        """Of the groups, as they were started."""
        self.cancelled: list[int] = []
        self.freed: list[StoredRollout] = []
        self.seeds: list[int | None] = []
        self.sampled_as: list[SamplingSection] = []
        """Of responses that are not trained on."""
        self._fetched = [0] * num_replicas
        self._rng = np.random.default_rng(0)

    async def sample_group(
        self,
        group_id: int,
        prompt_ids_P: np.ndarray,
        *,
        num_samples: int,
        sampling: SamplingSection,
        seed: int,
        on_finished: Callable[[int, Response], None] | None = None,
    ) -> tuple[StoredRollout, ...] | RefusedGroup:
        self.prompts.append(prompt_ids_P.item())
        if self._refuses:
            return RefusedGroup(problem=f"group {group_id} has no experts")
        if group_id in self._endless:
            await self._endless[group_id].wait()
            return CANCELLED
        version = min(self._fetched)
        rewards = self._rng.normal(0.5, 3.0, num_samples)
        return tuple(
            make_stored_rollout((version, 0, 4), num_prompt_tokens=1, text=f"{reward:.3f}")
            for reward in rewards
        )

    async def respond(
        self, prompt_ids_P: np.ndarray, *, num_samples: int, sampling: SamplingSection, seed: int
    ) -> tuple[SampledTurn, ...]:
        """The prompt's only token is the reward in tenths."""
        self.seeds.append(seed)
        self.sampled_as.append(sampling)
        turn = SampledTurn(
            turn=0,
            ids_T=np.zeros(3, np.int32),
            text=str(prompt_ids_P.item() / 10),
            finish_reason=FinishReason.STOP,
            first_version=min(self._fetched),
            version=max(self._fetched),
        )
        return (turn,) * num_samples

    async def begin_update(self, host: int, manifest: Manifest) -> FetchReport:
        number = self.num_fetches[host]
        self.num_fetches[host] += 1
        for replica in self.hosts[host]:
            self.table.state.begin_update(replica, manifest.version)
        is_complete = self._is_complete(host, number)
        if is_complete:
            for replica in self.hosts[host]:
                self._fetched[replica] = manifest.version
        return make_fetch(manifest.version, is_complete=is_complete)

    async def finish_update(self, host: int, version: int) -> dict[int, SwapReport]:
        for replica in self.hosts[host]:
            assert version == self._fetched[replica]
            self.swapped.append((replica, version))
        return dict.fromkeys(self.hosts[host], SWAP)

    def record_swap(self, number: int, swap: SwapReport) -> None:
        self.table.change(lambda table: table.updated(number))

    def published(self, version: int) -> None:
        self.table.change(lambda table: table.published(version))

    @asynccontextmanager
    async def asleep(self) -> AsyncIterator[None]:
        self.num_sleeps += 1
        yield

    def lowest_version(self, host: int) -> int:
        return self.table.state.lowest_version(str(host))

    async def until_behind(self, host: int) -> None:
        await self.table.until(lambda table: table.is_behind(str(host)))

    async def until_all_have(self, version: int) -> None:
        await self.table.until(lambda table: table.all_have(version))

    async def until_served(self, newer_than: int) -> int:
        return await self.table.until(lambda table: table.served if table.served > newer_than else None)

    def metrics(self) -> dict[str, float]:
        return {}

    async def cancel_groups(self, group_ids: Sequence[int]) -> None:
        self.cancelled += group_ids
        for group_id in group_ids:
            self._endless[group_id].set()

    async def free_payloads(self, rollouts: Iterable[StoredRollout]) -> None:
        self.freed += rollouts

    async def stats(self) -> list[EngineStats]:
        return [EngineStats(num_generated_tokens=0, busy_s=0.0)] * self.num_replicas


async def score_by_text(task: Task, responses: Sequence[Response], first: int) -> ScoredResponses:
    """Reads the reward out of a response; 1 and more are correct."""
    values = [float(response.text) for response in responses]
    scores = tuple(Score(value, value >= 1.0) for value in values)
    return ScoredResponses(scores=scores, counts=Counter())


def make_scoring(config: RunConfig) -> GroupScoring:
    return GroupScoring(ScoreQueue([score_by_text], config.scorer))


class Console:
    """Shows nothing."""

    def phase(self, *_: object, **__: object) -> None:
        return None

    part_done = end_phase = message = alarm = now = phase


class Trainer:
    """Remembers what it trains on; each step makes a version."""

    is_stuck = False
    members = ()
    num_data_ranks = 2

    def __init__(
        self,
        *,
        skipped: Sequence[int] = (),
        rolled_back: Sequence[int] = (),
        ends_run: int | None = None,
    ) -> None:
        """Steps in ``skipped`` are not made, those in ``rolled_back`` undone; ``ends_run`` is the last."""
        self._bad = {*skipped, *rolled_back} | ({ends_run} if ends_run is not None else set())
        self._rolled_back = rolled_back
        self._ends_run = ends_run
        self.steps: list[list[TrainingItem]] = []
        self.num_staged = 0
        self.checkpoints: list[tuple[str, bytes]] = []
        """Name and controller's part of each."""

    async def start(self) -> None:
        """It is never lost, so nobody looks after it."""

    async def train_items(
        self, minibatches: Sequence[Sequence[Sequence[Sequence[TrainingItem]]]], *, step: int
    ) -> StepResult:
        assert all(len(rows) == self.num_data_ranks for rows in minibatches)
        assert step == len(self.steps) + 1
        self.steps.append(
            [item for rows in minibatches for of_rank in rows for row in of_rank for item in row]
        )
        return StepResult(
            policy_version=len(self.steps),
            num_targets=1,
            num_padding_tokens=0,
            train_s=0.0,
            metrics={},
            skip_reason="nan" if step in self._bad else None,
            is_rolled_back=step in self._rolled_back,
            ends_run=step == self._ends_run,
        )

    async def stage_weights(self, slot: int, *, when_begun: Callable[[], None] = lambda: None) -> Manifest:
        self.num_staged += 1
        when_begun()
        return make_manifest(len(self.steps), slot)

    async def connect(self, generators: Generators) -> None:
        return None

    async def policy_version(self) -> int:
        return len(self.steps)

    async def begin_checkpoint(self, folder: Path, *, run_state: bytes, keep: int) -> None:
        self.checkpoints.append((folder.name, run_state))

    async def finish_checkpoint(self) -> None:
        return None

    async def is_writing_checkpoint(self) -> bool:
        return False

    async def watch(self) -> None:
        await asyncio.Event().wait()

    async def until_safe(self, step: int) -> None:
        assert step <= len(self.steps)

    def when_buffers_are_new(self, act: Callable[[], None]) -> None:
        """They never are."""

    def metrics(self) -> dict[str, float]:
        return {}


class Recorder:
    """Keeps what it is told."""

    elapsed_s = 0.0
    console = Console()
    files: Sequence[JsonLines] = ()

    def __init__(self) -> None:
        self.batches: list[Batch] = []
        self.times: list[StepTimes] = []
        self.accuracies: list[float | None] = []
        self.counters: list[Mapping[str, float]] = []
        self.rewards: list[float] = []
        self.num_published = 0
        self.fetches: list[FetchReport] = []
        self.problems: list[str] = []
        self.outcomes: list[EpisodeOutcome] = []
        self.live_records: set[int] = set()
        """Groups whose episodes are held."""
        self.kept_records: list[int] = []
        self.forgotten_records: set[int] = set()

    def record_initial(self, held_out: HeldOutScores, eval_s: float, engines: Sequence[EngineStats]) -> None:
        self.accuracies.append(held_out.accuracy)

    def picks(self, step: int, groups: Sequence[object]) -> None:
        """Nothing is written."""

    def record_scored(self, scores: Sequence[Score], lengths: Sequence[int]) -> None:
        self.rewards += [score.value for score in scores]

    def keep_records(self, group_id: int, outcomes: Sequence[EpisodeOutcome]) -> None:
        if outcomes:
            self.live_records.add(group_id)
            self.kept_records.append(group_id)

    def forget_records(self, group_ids: Iterable[int]) -> None:
        forgotten = set(group_ids)
        self.live_records -= forgotten
        self.forgotten_records |= forgotten

    def record_episodes(self, outcomes: Sequence[EpisodeOutcome]) -> None:
        self.outcomes += outcomes

    def record_publish(self, manifest: object, publish_s: float) -> None:
        self.num_published += 1

    def record_fetch(self, fetched: FetchReport) -> None:
        self.fetches.append(fetched)

    def record_swap(self, swap: SwapReport) -> None:
        """Nothing is kept."""

    def warn(self, problem: str) -> None:
        self.problems.append(problem)

    def record(self, record: StepRecord) -> None:
        self.batches.append(record.batch)
        self.times.append(record.times)
        self.forget_records(group.group_id for group in record.batch.groups)
        self.counters.append(record.counters)
        if record.held_out is not None:
            self.accuracies.append(record.held_out.accuracy)


class Prompts:
    """Encodes a prompt as one token: the number that it is."""

    def encode(self, prompt: str) -> np.ndarray:
        return np.array([int(prompt)], np.int32)


class Fleet:
    """Procs that never fail."""

    def __init__(self) -> None:
        self.procs: list[Proc] = []
        self.generators = None

    async def watch(self) -> None:
        await asyncio.Event().wait()


def make_problem(number: int) -> Task:
    """Its prompt is its number."""
    return dataclasses.replace(make_task(number), prompt=str(number))


def make_config(*overrides: str) -> RunConfig:
    """A run of ``MAX_STEPS`` steps with two groups of four rollouts each, whose arrays lie nowhere."""
    return minimal_config(f"max_steps={MAX_STEPS}", "buffer.keep_groups=false", *overrides)


def make_prepared(
    config: RunConfig, held_out: Sequence[Task] = (), sets: Mapping[str, list[Task]] | None = None
) -> Prepared:
    """64 problems of a model that is not there."""
    return Prepared(
        config=config,
        facts=FACTS,
        model_path=Path(),
        prompts=Prompts(),
        train=[make_problem(index) for index in range(64)],
        sets=problem_sets(config, list(held_out), list((sets or {}).values())),
        resumed=None,
    )


def make_roles(
    prepared: Prepared,
    trainer: Trainer | None,
    generators: Generators,
    buffer: LocalBuffer,
    groups: GroupSampler | None = None,
    teaching: Teachers | None = None,
) -> Roles:
    """The generators sample single responses unless ``groups`` are given."""
    config, scorer = prepared.config, make_scoring(prepared.config)
    groups = groups or ResponseGroups(
        generators,
        scorer,
        prepared.prompts,
        group_size=config.algorithm.group_size,
        sampling=config.sampling,
    )
    return Roles(
        trainer=trainer,
        generators=generators,
        scorer=scorer,
        buffer=buffer,
        groups=groups,
        teaching=teaching or Teachers(),
        faults=FaultLog(),
    )


def make_run(
    config: RunConfig,
    *,
    generators: Generators | None = None,
    trainer: Trainer | None = None,
    recorder: Recorder | None = None,
    held_out: Sequence[Task] | None = None,
    sets: Mapping[str, list[Task]] | None = None,
    groups: GroupSampler | None = None,
    teaching: Teachers | None = None,
) -> GrpoRun:
    """A run whose loops are the real ones; without ``held_out`` that is one problem, always solved."""
    prepared = make_prepared(config, [make_problem(10)] if held_out is None else held_out, sets)
    buffer = LocalBuffer(config)
    return GrpoRun(
        config,
        prepared,
        make_roles(prepared, trainer or Trainer(), generators or Generators(), buffer, groups, teaching),
        recorder=recorder or Recorder(),
        files=make_files(Path()),
    )


def run_loops(run: GrpoRun, beside: Callable[[], Awaitable[None]] | None = None) -> None:
    """Run to the end, with ``beside`` beside it."""

    async def both() -> None:
        loops = asyncio.create_task(run.run(Fleet()))
        try:
            if beside is not None:
                await beside()
            await loops
        finally:
            loops.cancel()

    asyncio.run(both())


async def let_others_run() -> None:
    """After so many turns of the loop all that can happen has happened."""
    for _ in range(1000):
        await asyncio.sleep(0)


def make_files(folder: Path) -> RunFiles:
    """Where a run would write, if it kept groups."""
    return RunFiles(run_dir=RunDir(path=folder), checkpoints=folder, messages=())
