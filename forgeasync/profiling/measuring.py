"""One profile: every part of a run timed in turn, while the others have nothing to do."""

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import torch

from forgeasync.actors import GeneratorActor, LiveReplica
from forgeasync.config import LocalLauncher, RunConfig, ServedSource
from forgeasync.controller import Prepared, Roles
from forgeasync.models import kv_bytes_per_token
from forgeasync.observability import ProcEntry, StepConsole
from forgeasync.profile import Cores, Distribution, Estimate, Origin, Profile, Setup
from forgeasync.profiling.engine_fit import Load, fit_engines
from forgeasync.profiling.engine_loads import EngineLoads
from forgeasync.profiling.engine_times import DecodeTimer, EngineLimits, decode_grid, time_prompts
from forgeasync.profiling.hardware import this_machine
from forgeasync.profiling.loop_times import NUM_WARMUP_STEPS, LoopTimes
from forgeasync.profiling.processor_time import OtherLoad, ProcessorTime
from forgeasync.profiling.run_batches import RunBatches
from forgeasync.profiling.run_match import simulated_s
from forgeasync.profiling.sampled_groups import (
    Sampled,
    count_places,
    environment_times,
    lengths_by_source,
    time_scoring,
)
from forgeasync.profiling.shared_cores import SharedCores, share_cores
from forgeasync.profiling.step_times import StepTimer
from forgeasync.schema import Problem, raise_if_any
from forgeasync.scoring import GroupFiltering
from forgeasync.simulation import engine_cost, of_config
from forgeasync.tracing import SUFFIX, Lane, State

NUM_CALLS = 20
"""Calls that are timed until a group begins."""

TEXT_TOKENS = 10_000
"""Tokens that the prompts of timed engines are cut from."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class _SampledRun:
    """The groups that lengths are known by, and what they took."""

    first_batch: Sequence[Sampled]
    """The only ones that still have their arrays."""
    everything: Sequence[Sampled]
    load: Load
    controller_s: float
    """Processor seconds of the controller for each response."""


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
    has_gpus = torch.cuda.is_available()
    others = OtherLoad()
    engine = roles.generators.pool.replicas[0]
    of_trainer = ProcessorTime(_pids(procs, "trainer"))
    limits = _limits(prepared)
    text = _text(prepared, console)
    decoding = DecodeTimer(engine.actor, decode_grid(limits, text), config.sampling)
    engine_cores = await _warm_up(engine, decoding, console)
    of_engines = EngineLoads(
        roles.generators.pool, _pids(procs, "generator"), engine_cores=max(MIN_CORES, engine_cores)
    )
    batches = RunBatches(prepared, roles)
    run = await _sample(batches, of_engines, console)
    numbers = itertools.count(config.max_steps + 1)
    groups = [one.group for one in run.first_batch]
    training = StepTimer(config, roles.trainer, roles.generators, groups, of_trainer, numbers=numbers)
    await _time_steps(decoding, training, console)
    if not has_gpus:
        console.phase("sampling one group after the other")
        await of_engines.begin()
        one_by_one = await of_engines.end(await batches.load(console, one_by_one=True))
    lengths = lengths_by_source(run.everything)
    console.phase("timing prompts and scores")
    num_prompt_tokens = round(max(one.prompt.mean.mean for one in lengths.values()))
    prefill = await time_prompts(
        engine.actor, limits, config.sampling, text=text, num_prompt_tokens=max(1, num_prompt_tokens)
    )
    score_s = await time_scoring(roles.scorer, run.first_batch)
    num_places = await count_places(roles.scorer, run.first_batch, alone_s=score_s.mean.mean)
    await _time_steps(decoding, training, console)
    call_s = await _time_calls(roles, engine.actor)
    if not has_gpus:
        console.phase("timing what procs cost each other")
        shared = await share_cores(
            config,
            roles.trainer,
            run.first_batch,
            lambda: batches.load(console),
            of_engines,
            of_trainer,
            numbers=numbers,
        )
    await _time_steps(decoding, training, console)
    steps = training.times()
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
            scorer=loops.score_s / score_s.mean.mean,
        ),
        decode=decoding.points(),
        prefill_tokens_per_s=prefill,
        train=steps.points,
        between_steps_s=loops.between_s,
        call_s=call_s,
        weights=steps.weights,
        score_s=score_s,
        score_places=max(config.scorer.num_workers, num_places // config.scorer.num_replicas),
        controller_s=Estimate.of([run.controller_s]),
        loops_s=Estimate.of([loops.rest_s(controller_s=run.controller_s)]),
        step_rest_s=Estimate.stated(0.0),
        response_s=Estimate.of([run.load.response_s]),
        lengths=lengths,
        filtered_share=_filtered_share(config, run.everything),
        environment=environment_times(run.everything),
        start_s=Estimate.of([start_s]),
        generator_start_s=Estimate.of([_starting_s(logs, "generator-0")]),
        trainer_start_s=Estimate.of([_starting_s(logs, "trainer-0")]),
    )
    if not has_gpus:
        profile = _with_sharing(profile, limits, (run.load, one_by_one), shared)
    _compare(prepared, loops, profile, console)
    return profile


async def _warm_up(engine: LiveReplica, decoding: DecodeTimer, console: StepConsole) -> float:
    """Make the first two rounds of decode steps; returns the cores that the engine keeps busy with them."""
    console.phase("timing decode steps", num_parts=2 * decoding.num_points)
    of_engine, start_s = ProcessorTime([engine.pid]), time.perf_counter()
    await decoding.round(console.part_done)
    await decoding.round(console.part_done)
    return of_engine.passed_s() / (time.perf_counter() - start_s)


async def _time_steps(decoding: DecodeTimer, training: StepTimer, console: StepConsole) -> None:
    """Make a round of decode steps and one of optimizer steps, one after the other."""
    console.phase("timing decode steps", num_parts=decoding.num_points)
    await decoding.round(console.part_done)
    console.phase("timing optimizer steps, publishing, fetching and swapping", num_parts=training.num_steps)
    await training.round(console.part_done)


async def _sample(batches: RunBatches, of_engines: EngineLoads, console: StepConsole) -> _SampledRun:
    """Sample and score batches of the run's data until their lengths are known."""
    console.phase("sampling groups until their lengths are known")
    controller_start_s = time.process_time()
    await of_engines.begin()
    known = await batches.until_known()
    everything = list(itertools.chain.from_iterable(known))
    num_responses = sum(len(one.group.rollouts) for one in everything)
    return _SampledRun(
        first_batch=known[0],
        everything=everything,
        controller_s=(time.process_time() - controller_start_s) / num_responses,
        load=await of_engines.end(known),
    )


def _with_sharing(
    profile: Profile, limits: EngineLimits, loads: Sequence[Load], shared: SharedCores
) -> Profile:
    """Return the profile with what engines compute beside steps, prompts and responses, and with what sharing
    cores costs."""
    cost = engine_cost(
        profile,
        max_num_seqs=limits.max_num_seqs,
        max_kv_tokens=limits.max_kv_tokens,
        shares_prefixes=False,
    )
    loads = (*loads, shared.uncrowded, shared.crowded)
    fit = fit_engines(loads, cost, num_replicas=profile.setup.num_replicas)
    cores = {
        "generator_crowding": fit.crowding,
        "trainer_crowding": shared.trainer.crowding,
        "trainer_lag": shared.trainer_lag,
    }
    found = {
        "cores": profile.cores.model_copy(update=cores),
        "step_rest_s": Estimate.of([fit.step_rest_s]),
    }
    return profile.model_copy(update=found)


def _compare(prepared: Prepared, loops: LoopTimes, profile: Profile, console: StepConsole) -> None:
    """Say what the loops' steps took, and what they take in a simulation with the profile."""
    # Their run has the same config, and the lengths that were sampled since.
    same = of_config(prepared.config, prepared.facts, profile)
    found_s = simulated_s(same, profile, num_left_out=NUM_WARMUP_STEPS)
    num_steps = prepared.config.max_steps - NUM_WARMUP_STEPS
    console.message(
        f"{num_steps} steps of this run took {loops.run_s / num_steps:.2f} s each; simulated with this "
        f"profile {found_s / num_steps:.2f} s"
    )


def _text(prepared: Prepared, console: StepConsole) -> tuple[int, ...]:
    """Return token ids of the run's prompts, one after the other, up to ``TEXT_TOKENS``."""
    found: list[int] = []
    for task in prepared.train:
        found += prepared.prompts.encode(task.prompt).tolist()
        if len(found) >= TEXT_TOKENS:
            break
    if not found:
        console.message("problems have no text of their own: engines are timed with tokens at random")
        found = np.random.default_rng(0).integers(0, prepared.facts.vocab_size, TEXT_TOKENS).tolist()
    return tuple(found)


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
