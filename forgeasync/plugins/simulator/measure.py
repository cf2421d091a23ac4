"""Measures a profile on this machine: starts a run's processes and times each part while others are idle."""

import itertools
import os
import statistics
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import psutil
import torch
from rich.console import Console

from forgeasync.config import LocalLauncher, RunConfig, is_served, resolve
from forgeasync.controller import (
    REPORT_COLUMNS,
    Prepared,
    Roles,
    open_files,
    open_hosts,
    open_process_manager,
    prepare,
    run_main,
    start_roles,
    take_over,
)
from forgeasync.models import kv_bytes_per_token
from forgeasync.observability import (
    RUNS_FOLDER,
    ProcessEntry,
    StepConsole,
    configure_controller_logging,
    separate_native_output,
)
from forgeasync.plugins.simulator.profile import (
    Cores,
    Distribution,
    Estimate,
    Origin,
    Profile,
    Setup,
    partial_of,
    this_machine,
    write_profile,
)
from forgeasync.plugins.simulator.run import simulate_seeds
from forgeasync.plugins.simulator.sampled_groups import (
    Sampled,
    batches_of,
    count_places,
    environment_times,
    lengths_by_source,
    sample_groups,
    sample_until_known,
    time_scoring,
)
from forgeasync.plugins.simulator.shape import SimulatedRun, of_config
from forgeasync.plugins.simulator.step_times import (
    NUM_WARMUP_STEPS,
    DecodeTimer,
    LoopTimes,
    MakeLoops,
    OtherLoad,
    ProcessorTime,
    StepTimer,
    decode_grid,
    short_run_of,
    time_loops,
    time_prompts,
)
from forgeasync.plugins.simulator.tables import print_profile
from forgeasync.runtime import GeneratorActor, LiveReplica
from forgeasync.schema import Problem, raise_if_any
from forgeasync.scoring import GroupFiltering

NUM_SIMULATED_STEPS = 30
"""Maximum number of simulated steps in the prediction of changes."""


def profile_config(config: RunConfig, out: Path | None, make_loops: MakeLoops) -> None:
    """Measure a profile of the config on this machine and write it to ``out`` (None: to a new folder in
    runs/).

    Prints the profile, and the simulator's predictions for single changes of the run. ``make_loops`` creates
    the loops of the run, which make a few steps first.

    Raises:
        ConfigError: the config cannot be profiled, or ``out`` cannot be written.
        NotProfiled: a part could not be timed.
    """
    if out is not None and (remedy := _why_not_written(out)) is not None:
        raise_if_any([Problem(field="--out", value=str(out), remedy=remedy)])
    folder = RUNS_FOLDER / f"profile-{config.name}-{datetime.now():%Y%m%d-%H%M%S}"
    config = config.model_copy(update={"run_dir": str(folder)})
    check_profiled(config)
    for line in take_over(config):
        print(line)
    prepared = prepare(short_run_of(config))
    run_main(_profile(prepared, config, folder / "profile.json" if out is None else out, make_loops))


def _why_not_written(out: Path) -> str | None:
    """Return why a file cannot be written there; None if it can."""
    # Path.is_dir raises for names that are too long.
    if not os.path.isdir(out.parent):
        return "its folder does not exist; must be a file in a folder that does"
    if os.path.isdir(out):
        return "is a folder; must be a file"
    partial = partial_of(out)
    try:
        partial.touch()
        partial.unlink()
    except OSError as error:
        return f"cannot be written: {error.strerror}; must be a file in a folder that can be written"
    return None


async def _profile(prepared: Prepared, wanted: RunConfig, out: Path, make_loops: MakeLoops) -> None:
    """Start all processes, make a few steps, time the parts, stop all processes, and write the profile.

    ``wanted`` is the config of the run that the profile is for.
    """
    config = prepared.config
    files = open_files(config, None)
    run_dir = files.run_dir
    separate_native_output(run_dir.log("controller"))
    configure_controller_logging(run_dir.log("controller"))
    with StepConsole(config.max_steps) as console:
        console.message(f"logs are in {run_dir.path}")
        fleet = open_process_manager(config, run_dir, console)
        try:
            async with fleet.naming_deaths():
                await open_hosts(config, prepared.facts, fleet, tell=console.message)
                roles = await start_roles(config, prepared, fleet, console, run_dir)
                start_s = time.time() - psutil.Process().create_time()
                loops = await time_loops(prepared, roles, fleet, files, console, make_loops)
                measured = await measure(
                    prepared, roles, fleet.listing.entries, console, loops=loops, start_s=start_s
                )
        finally:
            console.phase("ending all processes")
            await fleet.close()
            console.end_phase()
    write_profile(measured, out)
    wanted = resolve(wanted, prepared.facts)
    run = of_config(wanted, prepared.facts, measured, num_steps=min(wanted.max_steps, NUM_SIMULATED_STEPS))
    print_profile(measured, run, Console(width=REPORT_COLUMNS))
    print(f"wrote {out}")


NUM_CALLS = 20
"""Number of calls that are timed for ``Profile.call_s``."""

TEXT_TOKENS = 10_000
"""Number of tokens from which the prompts of timed engines are cut."""

MAX_OTHER_LOAD = 0.1
"""Share of the machine's cores above which the load of other processes is reported."""


def check_profiled(config: RunConfig) -> None:
    """Raise ConfigError if a run of the config spends time on parts that a profile does not cover."""
    problems = []
    if not isinstance(config.launcher, LocalLauncher):
        remedy = "must be local: processor time is read of the processes of this machine"
        problems.append(Problem(field="launcher.kind", value=config.launcher.kind, remedy=remedy))
    if config.teachers:
        remedy = "must be left out: a profile has no times of teachers"
        problems.append(Problem(field="teachers", value=sorted(config.teachers), remedy=remedy))
    if is_served(config):
        remedy = "must be another one: there are no clients whose requests could be profiled"
        problems.append(Problem(field="data.source.kind", value="served", remedy=remedy))
    raise_if_any(problems)


async def measure(
    prepared: Prepared,
    roles: Roles,
    processes: Sequence[ProcessEntry],
    console: StepConsole,
    *,
    loops: LoopTimes,
    start_s: float,
) -> Profile:
    """Time all parts except the loops, whose steps were already made, and return the profile.

    ``processes`` are the processes of the roles, and ``start_s`` is the time that their start took.

    Raises:
        NotProfiled: a part could not be timed.
    """
    config = prepared.config
    has_gpus = torch.cuda.is_available()
    others = OtherLoad()
    engine = roles.generators.pool.replicas[0]
    of_trainer = ProcessorTime(one.pid for one in processes if one.role == "trainer")
    max_kv_tokens = int(config.generator.kv_cache_gib * 2**30) // kv_bytes_per_token(config, prepared.facts)
    text = _text(prepared, console)
    grid = decode_grid(
        text,
        max_num_seqs=config.generator.max_num_seqs,
        max_context_length=config.model.max_context_length,
        max_kv_tokens=max_kv_tokens,
    )
    decoding = DecodeTimer(engine.actor, grid, config.sampling)
    engine_cores = await _warm_up(engine, decoding, console)
    console.phase("sampling groups until their lengths are known")
    controller_start_s = time.process_time()
    batches = await _sample(prepared, roles)
    controller_s = time.process_time() - controller_start_s
    first_batch, sampled = batches[0], list(itertools.chain.from_iterable(batches))
    controller_s /= sum(len(one.group.rollouts) for one in sampled)
    numbers = itertools.count(config.max_steps + 1)
    groups = [one.group for one in first_batch]
    training = StepTimer(config, roles.trainer, roles.generators, groups, of_trainer, numbers=numbers)
    await _time_steps(decoding, training, console)
    lengths = lengths_by_source(sampled)
    console.phase("timing prompts and scores")
    num_prompt_tokens = max(1, round(max(one.prompt.mean.mean for one in lengths.values())))
    prefill = await time_prompts(
        engine.actor, config, text, num_prompt_tokens=num_prompt_tokens, max_kv_tokens=max_kv_tokens
    )
    score_s = await time_scoring(roles.scorer, first_batch)
    num_places = await count_places(roles.scorer, first_batch, alone_s=score_s.mean.mean)
    await _time_steps(decoding, training, console)
    call_s = await _time_calls(roles, engine.actor)
    await _time_steps(decoding, training, console)
    console.end_phase()
    if (share := others.share()) > MAX_OTHER_LOAD:
        console.message(
            f"other processes took {share:.0%} of this machine's cores meanwhile: without them, all times "
            "would be shorter"
        )
    stats = await engine.actor.stats.call_one()
    environment = environment_times(sampled)
    num_turns = 1.0 if environment is None else environment.num_turns.mean.mean
    profile = Profile(
        origin=Origin.MEASURED,
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
        hardware=this_machine(),
        setup=Setup.of(config, kv_block_tokens=stats.kv_block_tokens),
        cores=Cores(
            # A process that computes on a GPU keeps a core busy only by waiting for it.
            trainer=0.0 if has_gpus else training.cores(),
            generator=0.0 if has_gpus else engine_cores,
            scorer=loops.score_s / score_s.mean.mean,
        ),
        decode=decoding.points(),
        prefill_tokens_per_s=prefill,
        train=training.points(),
        between_steps_s=loops.between_s,
        call_s=call_s,
        weights=training.weights(),
        score_s=score_s,
        score_places=max(config.scorer.num_workers, num_places // config.scorer.num_replicas),
        controller_s=Estimate.of([controller_s]),
        loops_s=Estimate.of([max(0.0, loops.response_s - controller_s)]),
        response_s=Estimate.of([loops.handing_over_s / num_turns]),
        lengths=lengths,
        filtered_share=_filtered_share(config, sampled),
        environment=environment,
        start_s=Estimate.of([start_s]),
    )
    _compare(prepared, loops, profile, console)
    return profile


async def _warm_up(engine: LiveReplica, decoding: DecodeTimer, console: StepConsole) -> float:
    """Make the first two rounds of decode steps; return the number of cores that the engine keeps busy."""
    console.phase("timing decode steps", num_parts=2 * decoding.num_points)
    of_engine, start_s = ProcessorTime([engine.pid]), time.perf_counter()
    await decoding.round(console.part_done)
    await decoding.round(console.part_done)
    return of_engine.passed_s() / (time.perf_counter() - start_s)


async def _time_steps(decoding: DecodeTimer, training: StepTimer, console: StepConsole) -> None:
    """Make a round of decode steps, then one of optimizer steps."""
    console.phase("timing decode steps", num_parts=decoding.num_points)
    await decoding.round(console.part_done)
    console.phase("timing optimizer steps, publishing, fetching and swapping", num_parts=training.num_steps)
    await training.round(console.part_done)


async def _sample(prepared: Prepared, roles: Roles) -> list[list[Sampled]]:
    """Sample and score batches of the run's data until lengths are known; only the first keeps its arrays."""
    config = prepared.config
    batches = batches_of(prepared.train, groups_per_step=config.algorithm.groups_per_step, seed=config.seed)

    async def sample() -> list[Sampled]:
        return await sample_groups(roles.groups, roles.scorer, next(batches), seed=config.seed)

    async def free(sampled: Sequence[Sampled]) -> None:
        await roles.generators.free_payloads(rollout for one in sampled for rollout in one.group.rollouts)

    return await sample_until_known(sample, free)


def _compare(prepared: Prepared, loops: LoopTimes, profile: Profile, console: StepConsole) -> None:
    """Report the time of the loops' steps, measured and simulated with the profile."""
    same = of_config(prepared.config, prepared.facts, profile)
    found_s = simulated_s(same, profile, num_left_out=NUM_WARMUP_STEPS)
    num_steps = prepared.config.max_steps - NUM_WARMUP_STEPS
    console.message(
        f"{num_steps} steps of this run took {loops.run_s / num_steps:.2f} s each; simulated with this "
        f"profile {found_s / num_steps:.2f} s"
    )


def _text(prepared: Prepared, console: StepConsole) -> tuple[int, ...]:
    """Return the token ids of the run's prompts, concatenated until there are ``TEXT_TOKENS``."""
    found: list[int] = []
    for task in prepared.train:
        found += prepared.prompts.encode(task.prompt).tolist()
        if len(found) >= TEXT_TOKENS:
            break
    if not found:
        console.message("prompts have no text of their own: engines are timed with random tokens")
        found = np.random.default_rng(0).integers(0, prepared.facts.vocab_size, TEXT_TOKENS).tolist()
    return tuple(found)


def _filtered_share(config: RunConfig, sampled: Sequence[Sampled]) -> float:
    """Return the share, below 1, of the groups that the run's filters drop completely."""
    filtering = GroupFiltering(
        config.algorithm.model_copy(update={"max_filtered_in_a_row": len(sampled) + 1}), seed=config.seed
    )
    num_filtered = sum(not filtering.apply(one.group, one.scores).kept for one in sampled)
    return min(num_filtered / len(sampled), 1.0 - 1.0 / (len(sampled) + 1))


async def _time_calls(roles: Roles, engine: GeneratorActor) -> Distribution:
    """Return the time of calls like those before a group's first prompt."""
    took_s = []
    for _ in range(NUM_CALLS):
        start_s = time.perf_counter()
        await roles.buffer.refusal.call_one()
        await engine.kv_usage.call_one()
        took_s.append(time.perf_counter() - start_s)
    return Distribution.of(took_s)


NUM_SEEDS = 8
"""Number of simulated runs that are compared with the loops' steps."""


def simulated_s(run: SimulatedRun, profile: Profile, *, num_left_out: int) -> float:
    """Return the mean over seeds of the seconds of a run's steps after the first ``num_left_out``."""
    found = [one.steps for one in simulate_seeds(run, profile, num_seeds=NUM_SEEDS)]
    return statistics.fmean(steps[-1].end_s - steps[num_left_out - 1].end_s for steps in found)
