"""One profile: every part of a run timed in turn, while the others have nothing to do."""

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import torch

from forgeasync.actors.generator import GeneratorActor
from forgeasync.config.launcher import LocalLauncher
from forgeasync.config.run import RunConfig
from forgeasync.config.serving import ServedSource
from forgeasync.controller.preparation import Prepared
from forgeasync.controller.starting import Roles
from forgeasync.environments.order import weighted_order
from forgeasync.models.sizes import kv_bytes_per_token
from forgeasync.observability.console import StepConsole
from forgeasync.observability.procs_file import ProcEntry
from forgeasync.profile.numbers import Distribution, Estimate
from forgeasync.profile.profile import Cores, Origin, Profile, Setup
from forgeasync.profiling.engine_loads import EngineLoads
from forgeasync.profiling.engine_rest import Load, engine_rest
from forgeasync.profiling.engine_times import (
    NUM_ROUNDS,
    EngineLimits,
    decode_grid,
    time_decoding,
    time_prompts,
)
from forgeasync.profiling.hardware import this_machine
from forgeasync.profiling.loop_times import LoopTimes
from forgeasync.profiling.processor_time import OtherLoad, ProcessorTime
from forgeasync.profiling.sampled_groups import (
    NotProfiled,
    Sampled,
    count_places,
    environment_times,
    lengths_by_source,
    sample_groups,
    sample_until_known,
    score_until,
    time_scoring,
)
from forgeasync.profiling.step_times import NUM_ROUNDS as NUM_STEP_ROUNDS
from forgeasync.profiling.step_times import Beside, step_cases, time_steps, train_beside
from forgeasync.rollouts.task import Task
from forgeasync.schema.problems import Problem, raise_if_any
from forgeasync.scoring.filtering import GroupFiltering
from forgeasync.simulation.engine import engine_cost
from forgeasync.tracing.lanes import Lane
from forgeasync.tracing.proc_trace import SUFFIX
from forgeasync.tracing.states import State

NUM_CALLS = 20
"""Calls that are timed until a group begins."""

LOAD_S = 15.0
"""No further groups are sampled for a load after so long."""

MIN_CORES = 1e-3
"""An engine on a GPU may keep next to no core busy."""

MAX_OTHER_LOAD = 0.1
"""Share of the machine's cores that others may take without a word."""


def check_profiled(config: RunConfig) -> None:
    """Raise ConfigError where a profile would leave out what a run of the config spends time on."""
    problems = []
    if not isinstance(config.launcher, LocalLauncher):
        remedy = "must be local: processor time is read of processes of this machine"
        problems.append(Problem(field="launcher.kind", value=config.launcher.kind, remedy=remedy))
    if config.teachers:
        remedy = "must be left out: a profile does not have teachers"
        problems.append(Problem(field="teachers", value=sorted(config.teachers), remedy=remedy))
    if isinstance(config.data.source, ServedSource):
        remedy = "must be another one: nobody brings a profile its requests"
        problems.append(Problem(field="data.source.kind", value=config.data.source.kind, remedy=remedy))
    raise_if_any(problems)


async def measure(
    prepared: Prepared,
    roles: Roles,
    procs: Sequence[ProcEntry],
    logs: Path,
    console: StepConsole,
    *,
    loops: LoopTimes,
    start_s: float,
) -> Profile:
    """Time everything but the loops; the roles have been started for this, in ``procs``, and have made the
    loops' steps. ``start_s`` is how long starting has taken.

    Raises:
        NotProfiled: something that has to be timed did not work.
    """
    config = prepared.config
    others = OtherLoad()
    engine = roles.generators.pool.replicas[0]
    of_engine, of_scorers = ProcessorTime([engine.pid]), ProcessorTime(_pids(procs, "scorer"))
    of_trainer = ProcessorTime(_pids(procs, "trainer"))
    limits = _limits(prepared)
    grid = decode_grid(limits)
    console.phase("timing decode steps", num_parts=len(grid) * (NUM_ROUNDS + 1))
    decode_start_s = time.perf_counter()
    of_engine.passed_s()
    decode = await time_decoding(engine.actor, grid, config.sampling, console.part_done)
    engine_cores = of_engine.passed_s() / (time.perf_counter() - decode_start_s)

    console.phase("sampling groups until their lengths are known")
    of_engines = EngineLoads(
        roles.generators.pool, _pids(procs, "generator"), engine_cores=max(MIN_CORES, engine_cores)
    )
    of_scorers.passed_s()
    controller_start_s = time.process_time()
    await of_engines.begin()
    tasks, draw_ids = _batches(prepared), itertools.count()
    # Only the first batch has its arrays still.
    batches = await _sample(prepared, roles, tasks, draw_ids)
    sampled, all_sampled = batches[0], list(itertools.chain.from_iterable(batches))
    num_responses = sum(len(one.group.rollouts) for one in all_sampled)
    controller_s = (time.process_time() - controller_start_s) / num_responses
    scorers_s = of_scorers.passed_s()
    loads = [await of_engines.end(batches)]
    lengths = lengths_by_source(all_sampled)
    has_gpus = torch.cuda.is_available()
    if not has_gpus:
        console.phase("sampling one group after the other")
        await of_engines.begin()
        one_by_one = ([task] for task in itertools.chain.from_iterable(tasks))
        loads.append(await of_engines.end(await _sample_load(prepared, roles, one_by_one, draw_ids, console)))
    console.phase("timing prompts and scores")
    num_prompt_tokens = round(max(one.prompt.mean.mean for one in lengths.values()))
    prefill = await time_prompts(
        engine.actor, limits, config.sampling, num_prompt_tokens=max(1, num_prompt_tokens)
    )
    score_s = await time_scoring(roles.scorer, sampled)
    num_places = await count_places(roles.scorer, sampled, alone_s=score_s.mean.mean)

    groups = [one.group for one in sampled]
    num_steps = 2 * (NUM_STEP_ROUNDS * len(step_cases(config, groups)) + 1)
    console.phase("timing optimizer steps, publishing, fetching and swapping", num_parts=num_steps)
    steps = await time_steps(
        config,
        roles.trainer,
        roles.generators,
        groups,
        of_trainer,
        console.part_done,
        first_step=config.max_steps + 1,
    )
    call_s = await _time_calls(roles, engine.actor)
    if not has_gpus:
        console.phase("timing optimizer steps beside an engine and scorers")
        crowded, beside = await _crowd(
            prepared,
            roles,
            sampled,
            lambda: _sample_load(prepared, roles, tasks, draw_ids, console),
            of_engines,
            of_trainer,
            first_step=config.max_steps + 1 + num_steps,
        )
    console.end_phase()
    if (share := others.share()) > MAX_OTHER_LOAD:
        console.message(
            f"other processes took {share:.0%} of this machine's cores meanwhile: without them all of "
            "this takes less time"
        )
    setup = _setup(prepared, roles, (await engine.actor.stats.call_one()).kv_block_tokens)
    profile = Profile(
        origin=Origin.MEASURED,
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
        hardware=this_machine(),
        setup=setup,
        cores=Cores(
            # What computes on a GPU keeps a core busy only with waiting for it.
            trainer=0.0 if has_gpus else steps.cores,
            generator=0.0 if has_gpus else engine_cores,
            scorer=scorers_s / (num_responses * score_s.mean.mean),
        ),
        decode=decode,
        prefill_tokens_per_s=prefill,
        train=steps.points,
        between_steps_s=loops.between_s,
        call_s=call_s,
        weights=steps.weights,
        score_s=score_s,
        score_places=max(config.scorer.num_workers, num_places // config.scorer.num_replicas),
        controller_s=Estimate.of([controller_s]),
        loops_s=Estimate.of([loops.rest_s(controller_s=controller_s, speed=1.0)]),
        step_rest_s=Estimate.stated(0.0),
        response_s=Estimate.stated(0.0),
        lengths=lengths,
        filtered_share=_filtered_share(config, all_sampled),
        environment=environment_times(all_sampled),
        start_s=Estimate.of([start_s]),
        generator_start_s=Estimate.of([_starting_s(logs, "generator-0")]),
        trainer_start_s=Estimate.of([_starting_s(logs, "trainer-0")]),
    )
    return profile if has_gpus else _with_rest(profile, limits, loads, crowded, beside, loops)


def _with_rest(
    profile: Profile,
    limits: EngineLimits,
    loads: Sequence[Load],
    crowded: Load,
    beside: Beside,
    loops: LoopTimes,
) -> Profile:
    """Return the profile with what engines needed for loads besides its steps and prompts, and with what
    sharing cores costs, here and in the loops.

    ``beside`` has the trainer's steps beside the load ``crowded``: the same step again and again, so what it
    takes there by what it takes alone says what sharing costs.
    """
    cost = engine_cost(
        profile,
        max_num_seqs=limits.max_num_seqs,
        max_kv_tokens=limits.max_kv_tokens,
        shares_prefixes=False,
    )
    crowding = beside.crowding
    rest = engine_rest(loads, cost, crowding=crowding, num_replicas=profile.setup.num_replicas)
    # Controller and scorers were measured beside the engines of the first load.
    speed = loads[0].speed(crowding)
    controller_s = profile.controller_s.mean * speed
    loops_s = loops.rest_s(controller_s=controller_s, speed=crowded.speed(crowding))
    cores = {
        "crowding": crowding,
        "scorer": profile.cores.scorer * speed,
        "trainer_share": min(1.0, beside.core_share / crowded.core_share),
    }
    found = {
        "cores": profile.cores.model_copy(update=cores),
        "controller_s": Estimate.of([controller_s]),
        "loops_s": Estimate.of([loops_s]),
        "step_rest_s": Estimate.of([rest.step_s]),
        "response_s": Estimate.of([rest.response_s]),
    }
    return profile.model_copy(update=found)


def _setup(prepared: Prepared, roles: Roles, kv_block_tokens: int) -> Setup:
    config = prepared.config
    return Setup(
        model=config.model.path,
        num_trainer_procs=config.trainer.parallel.num_procs,
        num_data_ranks=roles.trainer.num_data_ranks,
        trainer_dtype=config.trainer.dtype,
        num_replicas=config.generator.num_replicas,
        tensor_parallel=config.generator.tensor_parallel,
        generator_dtype=config.generator.dtype,
        kv_block_tokens=kv_block_tokens,
    )


def _limits(prepared: Prepared) -> EngineLimits:
    config = prepared.config
    num_kv_bytes = int(config.generator.kv_cache_gib * 2**30)
    return EngineLimits(
        max_num_seqs=config.generator.max_num_seqs,
        max_context_length=config.model.max_context_length,
        max_kv_tokens=num_kv_bytes // kv_bytes_per_token(config, prepared.facts),
        max_num_batched_tokens=config.generator.max_num_batched_tokens,
    )


async def _sample(
    prepared: Prepared, roles: Roles, batches: Iterator[list[Task]], draw_ids: Iterator[int]
) -> list[list[Sampled]]:
    """Sample and score batches of the run's data until their lengths are known: a run's own first groups,
    with the seeds that they have in it."""
    seed = prepared.config.seed

    async def sample() -> list[Sampled]:
        return await sample_groups(roles.groups, roles.scorer, next(batches), draw_ids=draw_ids, seed=seed)

    return await sample_until_known(sample, partial(_free, roles))


async def _sample_load(
    prepared: Prepared,
    roles: Roles,
    batches: Iterator[list[Task]],
    draw_ids: Iterator[int],
    console: StepConsole,
) -> list[list[Sampled]]:
    """Sample and score batches one after the other, for ``LOAD_S``.

    Raises:
        NotProfiled: not one could be sampled and scored.
    """
    found, problems, seed = list[list[Sampled]](), list[NotProfiled](), prepared.config.seed
    end_s = time.perf_counter() + LOAD_S
    for tasks in batches:
        try:
            found.append(await sample_groups(roles.groups, roles.scorer, tasks, draw_ids=draw_ids, seed=seed))
        except NotProfiled as problem:
            problems.append(problem)
        else:
            await _free(roles, found[-1])
        if time.perf_counter() > end_s:
            break
    if not found:
        raise problems[0]
    if problems:
        console.message(f"{len(problems)} times no group could be sampled; first {problems[0]}")
    return found


async def _free(roles: Roles, sampled: Sequence[Sampled]) -> None:
    await roles.generators.free_payloads(rollout for one in sampled for rollout in one.group.rollouts)


async def _crowd(
    prepared: Prepared,
    roles: Roles,
    scored: Sequence[Sampled],
    sample: Callable[[], Awaitable[list[list[Sampled]]]],
    of_engines: EngineLoads,
    of_trainer: ProcessorTime,
    *,
    first_step: int,
) -> tuple[Load, Beside]:
    """Sample beside a trainer that makes steps and scorers that score; return the load, and the steps."""

    async def sample_beside_scorers() -> Load:
        # The trainer has made its steps alone by now.
        done = asyncio.Event()
        await of_engines.begin()
        scoring = asyncio.create_task(score_until(done, roles.scorer, scored))
        try:
            return await of_engines.end(await sample())
        finally:
            done.set()
            await scoring

    groups = [one.group for one in scored]
    return await train_beside(
        prepared.config, roles.trainer, groups, sample_beside_scorers, of_trainer, first_step=first_step
    )


def _batches(prepared: Prepared) -> Iterator[list[Task]]:
    """Yield the problems of batch after batch in the run's order, with two of every source that one leaves
    out."""
    by_source: dict[str, list[Task]] = {}
    for task in prepared.train:
        by_source.setdefault(task.source, []).append(task)
    order = weighted_order(prepared.train, dict.fromkeys(by_source, 1.0), seed=prepared.config.seed)
    others = {source: itertools.cycle(tasks) for source, tasks in by_source.items()}
    while True:
        tasks = [order.next() for _ in range(prepared.config.algorithm.groups_per_step)]
        for source in sorted(others.keys() - {task.source for task in tasks}):
            tasks += itertools.islice(others[source], 2)
        yield tasks


def _pids(procs: Sequence[ProcEntry], role: str) -> list[int]:
    return [one.pid for one in procs if one.role == role]


def _filtered_share(config: RunConfig, sampled: Sequence[Sampled]) -> float:
    """Return the share of the groups of which the run's filters leave nothing, below 1."""
    filtering = GroupFiltering(
        config.algorithm.model_copy(update={"max_filtered_in_a_row": len(sampled) + 1}), seed=config.seed
    )
    num_filtered = sum(not filtering.apply(one.group, one.scores).kept for one in sampled)
    return min(num_filtered / len(sampled), 1.0 - 1.0 / (len(sampled) + 1))


async def _time_calls(roles: Roles, engine: GeneratorActor) -> Distribution:
    """Return the time of calls like those until a group begins."""
    took_s = []
    for _ in range(NUM_CALLS):
        start_s = time.perf_counter()
        await roles.buffer.refusal.call_one()
        await engine.kv_usage.call_one()
        took_s.append(time.perf_counter() - start_s)
    return Distribution.of(took_s)


def _starting_s(logs: Path, name: str) -> float:
    """Return how long a process took until it could do what it is for, by its trace."""
    (file,) = logs.glob(f"{name}-*{SUFFIX}")
    lane = Lane()
    for line in file.read_bytes().splitlines():
        lane.add(line)
    return sum(end_s - begin_s for state, begin_s, end_s in lane.stretches() if state is State.STARTING)
