"""The plain parts of profiling: what is timed, in which sizes, and what is made of samples."""

import asyncio
import dataclasses
import itertools
import random
import statistics
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forgeasync.actors import GeneratorActor, GroupScoring
from forgeasync.config import SamplingSection, load_config
from forgeasync.environments import weighted_order
from forgeasync.generator import DecodeTiming
from forgeasync.profile import (
    MOST_CROWDING,
    MOST_LAG,
    DecodePoint,
    DecodeTable,
    Distribution,
    Estimate,
    alikeness,
    fit_lengths,
    mean_of_groups,
)
from forgeasync.profiling import (
    FIRST_EXTRA,
    NUM_STEPS,
    Beside,
    DecodeTimer,
    EngineFit,
    EngineLimits,
    Load,
    OtherLoad,
    ProcessGone,
    ProcessorTime,
    Sampled,
    SharedCores,
    batches_of,
    count_places,
    decode_grid,
    environment_times,
    fit_engines,
    lengths_are_known,
    lengths_by_source,
    mean_of,
    num_steps_of,
    sample_until_known,
    sampled_groups,
    size_of,
    step_cases,
    together,
)
from forgeasync.rollouts import Group
from forgeasync.simulation import STALL_SHARE, EngineCost
from forgeasync.testing import VirtualTime, tiny_config
from forgeasync.trainer import assign_rows, training_items
from tests.support.buffer_world import make_task
from tests.support.rollouts import make_stored_rollout


def make_group(*lengths: int, number: int = 0, num_prompt_tokens: int = 6, source: str = "x") -> Group:
    rollouts = tuple(
        make_stored_rollout((0, 0, length), num_prompt_tokens=num_prompt_tokens) for length in lengths
    )
    return Group(
        group_id=number,
        draw_id=number,
        task=dataclasses.replace(make_task(number), source=source),
        rollouts=rollouts,
        rewards=tuple(float(index) for index in range(len(lengths))),
    )


@given(
    max_num_seqs=st.integers(1, 300),
    max_context_length=st.integers(64, 4096),
    spare=st.floats(0.2, 4.0),
)
def test_the_grid_is_whole_and_fits_the_cache(
    max_num_seqs: int, max_context_length: int, spare: float
) -> None:
    max_kv_tokens = max(64 * max_num_seqs, int(spare * max_num_seqs * max_context_length))
    limits = EngineLimits(
        max_num_seqs=max_num_seqs,
        max_context_length=max_context_length,
        max_kv_tokens=max_kv_tokens,
        max_num_batched_tokens=512,
    )
    grid = decode_grid(limits, (1, 2, 3))
    numbers = sorted({one.num_running for one in grid})
    lengths = {one.num_prompt_tokens for one in grid}
    assert numbers[0] == 1 and numbers[-1] == max_num_seqs and len(grid) == len(numbers) * len(lengths)
    assert len(set(grid)) == len(grid)
    for one in grid:
        assert one.num_prompt_tokens + NUM_STEPS < max_context_length
        assert one.num_running * (one.num_prompt_tokens + NUM_STEPS) <= max_kv_tokens


@pytest.mark.parametrize("share", [0.0, 0.3, 0.8])
def test_alikeness_finds_what_lengths_were_drawn_with(share: float) -> None:
    """Against draws whose correlation within a group is known, through a monotone map that ranks undo."""
    rng = random.Random(3)
    groups = []
    for _ in range(3000):
        of_prompt = share**0.5 * rng.gauss(0.0, 1.0)
        groups.append([2.0 ** (of_prompt + (1 - share) ** 0.5 * rng.gauss(0.0, 1.0)) for _ in range(4)])
    assert alikeness(groups) == pytest.approx(share, abs=0.03)


def test_the_longest_response_of_a_batch_is_as_long_as_among_the_samples() -> None:
    rng = random.Random(0)
    samples = [1.0 + float(round(rng.expovariate(1 / 17))) for _ in range(4_800)]
    fitted = fit_lengths([5.0], [samples[at : at + 8] for at in range(0, 4_800, 8)]).response
    drawn = [[fitted.at(rng.random()) for _ in range(192)] for _ in range(400)]
    real = [rng.choices(samples, k=192) for _ in range(400)]
    longest = statistics.fmean(max(batch) for batch in drawn)
    assert longest == pytest.approx(statistics.fmean(max(batch) for batch in real), rel=0.03)
    mean = statistics.fmean(itertools.chain.from_iterable(drawn))
    assert mean == pytest.approx(statistics.fmean(samples), rel=0.01)


def test_alikeness_without_anything_to_compare() -> None:
    assert alikeness([]) == alikeness([[1.0, 2.0]]) == alikeness([[3.0], [4.0]]) == 0.0
    assert alikeness([[5.0, 5.0], [5.0, 5.0]]) == 0.0
    assert alikeness([[1.0, 1.0], [9.0, 9.0]]) == 1.0
    assert alikeness([[1.0, 9.0], [1.0, 9.0], [1.0, 9.0]]) == 0.0


def test_lengths_are_kept_apart_by_source() -> None:
    groups = [make_group(3, 5, source="a"), make_group(30, number=1, source="b", num_prompt_tokens=9)]
    sampled = [Sampled(group=one, scores=(), turn_latencies_s=(), num_turns=()) for one in groups]
    found = lengths_by_source(sampled)
    assert {name: one.response.mean.mean for name, one in found.items()} == {"a": 4.0, "b": 30.0}
    assert {name: one.prompt.mean.mean for name, one in found.items()} == {"a": 6.0, "b": 9.0}
    assert environment_times(sampled) is None
    episodes = [dataclasses.replace(sampled[0], turn_latencies_s=(0.5, 1.5), num_turns=(2, 4))]
    times = environment_times(episodes)
    assert times is not None
    assert times.num_turns == Distribution.of([2.0, 4.0]) and times.latency_s == Distribution.of([0.5, 1.5])


def plain(*groups: Group) -> list[Sampled]:
    return [Sampled(group=one, scores=(), turn_latencies_s=(), num_turns=()) for one in groups]


def test_the_interval_of_a_mean_length_is_that_of_groups() -> None:
    """Eight equal responses of each prompt say no more than one of each."""
    alike = [[float(length)] * 8 for length in (10, 20, 30)]
    mean = mean_of_groups(alike)
    assert mean.mean == 20.0 and mean.num_samples == 3
    assert mean.high - mean.mean == pytest.approx(1.959964 * 10.0 / 3**0.5)
    assert fit_lengths([5.0], alike).response.mean == mean
    # Of groups of unlike sizes the mean is still that of all values.
    assert mean_of_groups([[1.0, 1.0, 1.0], [5.0]]).mean == 2.0


def test_lengths_are_known_once_every_source_has_a_narrow_interval() -> None:
    even = [make_group(20, 22, number=number) for number in range(2)]
    wild = [make_group(4, 4, number=0, source="y"), make_group(40, 40, number=1, source="y")]
    assert lengths_are_known(plain(*even))
    assert not lengths_are_known(plain(*even, *wild))
    assert not lengths_are_known(plain(even[0])), "one group has no interval"


@pytest.mark.parametrize("limit_s", [1e9, 0.0])
def test_batches_are_sampled_until_lengths_are_known(limit_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampled_groups, "SAMPLING_LIMIT_S", limit_s)
    rng, num_sampled, freed = random.Random(0), 0, list[Sampled]()

    async def sample() -> list[Sampled]:
        nonlocal num_sampled
        num_sampled += 1
        return plain(*(make_group(rng.randrange(10, 30), number=number) for number in range(8)))

    async def free(sampled: list[Sampled]) -> None:
        freed.extend(sampled)

    batches = asyncio.run(sample_until_known(sample, free))
    assert len(batches) == num_sampled and freed == [one for batch in batches[1:] for one in batch]
    if not limit_s:
        assert num_sampled == 1
        return
    # Standard deviation 5.8 of 20: (1.96 * 5.8 / 1.0) ** 2 = 129 groups.
    assert 10 < num_sampled < 24
    everything = [one for batch in batches for one in batch]
    assert lengths_are_known(everything) and not lengths_are_known(everything[:-8])


def test_a_profile_samples_the_first_groups_of_the_run_with_their_seeds() -> None:
    tasks = [make_task(number) for number in range(40)]
    order = weighted_order(tasks, {tasks[0].source: 1.0}, seed=7)
    batches = batches_of(tasks, groups_per_step=6, seed=7)
    found = list(itertools.chain.from_iterable(itertools.islice(batches, 10)))
    assert [one.draw_id for one in found] == list(range(60))
    assert [one.task for one in found] == [order.next() for _ in range(60)]


def test_two_problems_of_every_source_are_sampled_that_a_batch_leaves_out() -> None:
    tasks = [dataclasses.replace(make_task(number), source=f"of {number % 3}") for number in range(30)]
    for batch in itertools.islice(batches_of(tasks, groups_per_step=1, seed=7), 10):
        first, *others = batch
        assert Counter(one.task.source for one in others) == {
            f"of {number}": 2 for number in range(3) if f"of {number}" != first.task.source
        }
        assert first.draw_id < 10 and all(one.draw_id >= FIRST_EXTRA for one in others)


def engine_cost(*, step_s: float, prefill_s: float, cores: float) -> EngineCost:
    """An engine whose steps all take as long, with room for everything."""
    return EngineCost(
        decode=DecodeTable(
            [DecodePoint(num_running=1, num_context_tokens=0, step_s=Estimate.stated(step_s))]
        ),
        prefill_s_per_token=prefill_s,
        kv_block_tokens=128,
        # What is looked for is not part of what is known.
        step_rest_s=7.0,
        response_s=9.0,
        response_stall_s=9.0,
        max_num_seqs=64,
        max_kv_tokens=10**6,
        cores=cores,
        shares_prefixes=False,
    )


def make_load(*batches: list[Sampled], work_s: float, core_share: float, crowding: float) -> Load:
    """Engines that take ``work_s`` alone for the batches, with half a second for all responses besides."""
    computed_s = work_s * (1.0 + crowding * (1.0 - core_share))
    busy_s = computed_s / core_share + STALL_SHARE * 0.5
    return Load(batches=batches, computed_s=computed_s, handing_over_s=0.5, busy_s=busy_s, engine_cores=1.0)


def test_of_rounds_of_decode_steps_the_first_one_does_not_count_and_medians_do() -> None:
    limits = EngineLimits(
        max_num_seqs=2, max_context_length=64, max_kv_tokens=4096, max_num_batched_tokens=512
    )
    grid = decode_grid(limits, (1, 2, 3))
    # The same of every point: the round that warms up, then three.
    took_s = iter([step_s for step_s in (0.9, 0.1, 0.5, 0.2) for _ in grid])

    async def call_one(timing: DecodeTiming, sampling: SamplingSection, seed: int) -> float:
        return next(took_s)

    engine = cast(GeneratorActor, SimpleNamespace(time_engine=SimpleNamespace(call_one=call_one)))
    timer, done = DecodeTimer(engine, grid, SamplingSection(max_response_tokens=4)), list[None]()
    for _ in range(4):
        asyncio.run(timer.round(lambda: done.append(None)))
    assert len(done) == 4 * timer.num_points
    assert [one.step_s.mean for one in timer.points()] == [0.2] * len(grid)
    assert {one.num_running for one in timer.points()} == {1, 2}


@pytest.mark.parametrize(("step_s", "crowding"), [(0.0, 0.0), (0.02, 0.0), (0.0, 0.5), (0.02, 0.75)])
@pytest.mark.parametrize("num_replicas", [1, 2])
def test_what_engines_need_for_steps_and_sharing_is_told_from_loads(
    step_s: float, crowding: float, num_replicas: int
) -> None:
    """6 prompt tokens for each response, then as many steps as the longest has, but for its first token."""
    cost = engine_cost(step_s=0.01, prefill_s=0.001, cores=1.0)
    first, second = plain(make_group(3, 5), make_group(4, 9, number=1)), plain(make_group(21))
    # On two engines every group is decoded alone.
    num_steps = 8 + 20 if num_replicas == 1 else 4 + 8 + 20
    work_s = 5 * 0.006 + num_steps * (0.01 + step_s)
    loads = [
        make_load(first, second, work_s=work_s, core_share=share, crowding=crowding)
        for share in (0.9, 0.95, 0.5)
    ]
    found = fit_engines(loads, cost, num_replicas=num_replicas)
    assert found.crowding == pytest.approx(crowding, abs=0.011)
    assert found.step_rest_s == pytest.approx(step_s, abs=2e-4)


def test_what_engines_need_is_never_negative() -> None:
    cost = engine_cost(step_s=0.01, prefill_s=0.0, cores=1.0)
    batch = plain(make_group(11))
    loads = [make_load(batch, work_s=0.05, core_share=share, crowding=0.0) for share in (0.9, 0.5)]
    assert fit_engines(loads, cost, num_replicas=1) == EngineFit(step_rest_s=0.0, crowding=0.0)


def test_crowding_is_at_most_what_may_be() -> None:
    cost = engine_cost(step_s=0.01, prefill_s=0.0, cores=1.0)
    batch = plain(make_group(11))
    alone = make_load(batch, work_s=0.1, core_share=1.0, crowding=0.0)
    crowded = make_load(batch, work_s=0.1, core_share=0.5, crowding=4.0)
    assert fit_engines([alone, crowded], cost, num_replicas=1).crowding == MOST_CROWDING


def test_what_responses_take_is_by_turns_and_engines_want_no_core_for_a_part_of_it() -> None:
    load = make_load(plain(make_group(3, 5)), work_s=1.0, core_share=0.8, crowding=0.0)
    assert load.core_share == pytest.approx(0.8)
    assert load.response_s == pytest.approx(0.25)
    episodes = [dataclasses.replace(one, num_turns=(4, 6)) for one in load.batches[0]]
    assert dataclasses.replace(load, batches=[episodes]).response_s == pytest.approx(0.05)
    two_cores = dataclasses.replace(load, engine_cores=2.0)
    assert two_cores.core_share == pytest.approx(0.4)
    assert dataclasses.replace(load, busy_s=0.1).core_share == 1.0, "more than they can have wanted"


def test_loads_can_be_put_together() -> None:
    halves = [
        make_load(plain(make_group(length)), work_s=part, core_share=1.0, crowding=0.0)
        for length, part in ((11, 0.5), (21, 0.7))
    ]
    both = together(halves)
    assert (both.computed_s, both.handing_over_s, both.num_turns) == pytest.approx((1.2, 1.0, 2))
    assert both.busy_s == pytest.approx(sum(one.busy_s for one in halves))
    assert both.batches == [one.batches[0] for one in halves]


def test_the_trainers_lag_is_by_the_cores_that_engines_had() -> None:
    """Engines had 0.8 of their cores, so a quarter of a proc wanted each besides; the trainer had 0.5."""
    trainer = Beside(alone_s=0.6, alone_processor_s=0.96, beside_s=1.0, beside_processor_s=0.8)
    load = make_load(plain(make_group(11)), work_s=1.0, core_share=0.8, crowding=0.5)
    shared = SharedCores(crowded=load, uncrowded=load, trainer=trainer)
    assert shared.trainer_lag == pytest.approx((0.8 / 0.5 - 1.0) / 0.25)
    alone = make_load(plain(make_group(11)), work_s=1.0, core_share=0.97, crowding=0.0)
    assert dataclasses.replace(shared, crowded=alone).trainer_lag == 0.0, "nothing to tell it from"
    less = make_load(plain(make_group(11)), work_s=1.0, core_share=0.4, crowding=0.0)
    assert dataclasses.replace(shared, crowded=less).trainer_lag == 0.0, "never negative"
    most = dataclasses.replace(trainer, beside_processor_s=0.08)
    assert dataclasses.replace(shared, trainer=most).trainer_lag == MOST_LAG


def test_what_sharing_costs_the_trainer_is_told_from_one_step_alone_and_beside_others() -> None:
    """Two ranks keep 1.6 cores busy alone. Beside others they had 1.2 cores for a second: three quarters of
    theirs, and they took 1.25 times as much for the same, so with all of the time lost 2 times."""
    beside = Beside(alone_s=0.6, alone_processor_s=0.96, beside_s=1.0, beside_processor_s=1.2)
    assert beside.core_share == pytest.approx(0.75)
    assert beside.crowding == pytest.approx(1.0)
    half = dataclasses.replace(beside, beside_s=1.32, beside_processor_s=1.056)
    assert (half.core_share, half.crowding) == pytest.approx((0.5, 0.2))
    assert dataclasses.replace(half, beside_s=0.5).crowding == 0.0, "nobody had its cores"
    assert dataclasses.replace(half, beside_processor_s=0.9).crowding == 0.0, "noise"
    assert dataclasses.replace(half, beside_processor_s=1.6).crowding == MOST_CROWDING
    both = mean_of([beside, half])
    assert dataclasses.astuple(both) == pytest.approx((0.6, 0.96, 1.16, 1.128))


def test_steps_are_timed_on_parts_of_a_batch_and_in_more_rows(tmp_path: Path) -> None:
    config = tiny_config(tmp_path)
    groups = [make_group(10, 20, 30, 40, number=number) for number in range(4)]
    cases = step_cases(config, groups)
    assert [(one.num_groups, one.tokens_per_row) for one in cases] == [
        *((1, 256), (1, 46)),  # the longest sequence has 46 tokens
        *((2, 256), (2, 46)),
        *((4, 256), (4, 62)),
    ]
    assert [one.num_timed for one in cases] == [1, 1, 1, 1, 3, 1], "most often what the run has"
    assert num_steps_of(cases) == 6 + 8, "each once more than it is timed"
    sizes = set()
    for case in cases:
        part = groups[: case.num_groups]
        items = training_items(part, [1.0] * len(part), config.algorithm)
        sizes.add(size_of(assign_rows(items, tokens_per_row=case.tokens_per_row, num_ranks=2)))
    # Two ranks; 124 tokens a group, filled up to 64 in each row.
    assert (1, 64) in sizes and (1, 256) in sizes
    assert len({num_rows for num_rows, _ in sizes}) > 1, "the time of a row can be told from that of a token"


def test_processor_time_is_that_of_a_process_and_its_children() -> None:
    program = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'while True: pass'])"
    child = subprocess.Popen([sys.executable, "-c", program], start_new_session=True)
    try:
        processors = ProcessorTime([child.pid])
        total_s = 0.0
        while total_s < 0.3:
            time.sleep(0.05)
            total_s += processors.passed_s()
        assert 0.0 <= OtherLoad().share() <= 1.0
    finally:
        subprocess.run(["pkill", "-9", "-s", str(child.pid)], check=False)
        child.wait()
    # What it has computed is not known any more: to go on would count that as nothing.
    with pytest.raises(ProcessGone, match=f"process {child.pid} has ended"):
        processors.passed_s()


@pytest.mark.parametrize("num_places", [1, 5, 40])
def test_places_are_counted_by_how_long_many_take_together(
    num_places: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scorer in which so many responses wait at once, 10 ms each."""
    groups = [make_group(*[5] * 8, number=number) for number in range(20)]
    sampled = [Sampled(group=group, scores=(), turn_latencies_s=(), num_turns=()) for group in groups]

    class Waiting:
        async def score(self, name: str, task: object, responses: list[object]) -> None:
            async with places:
                await asyncio.sleep(0.01)

    async def count() -> int:
        return await count_places(cast(GroupScoring, Waiting()), sampled, alone_s=0.01)

    places = asyncio.Semaphore(num_places)
    clock = VirtualTime()
    monkeypatch.setattr(sampled_groups.time, "perf_counter", clock.now_s)
    assert clock.run(count()) == num_places


def test_what_a_profile_would_leave_out_is_refused(tmp_path: Path) -> None:
    from forgeasync.profiling import check_profiled
    from forgeasync.schema import ConfigError

    check_profiled(tiny_config(tmp_path))
    with pytest.raises(ConfigError, match=r"launcher\.kind = 'process': must be local") as refused:
        config = load_config(["configs/distill_cpu.yaml"], ["launcher={kind: process}"])
        check_profiled(config)
    assert "teachers = " in str(refused.value)
    with pytest.raises(ConfigError, match=r"data\.source\.kind = 'served': .*nobody brings"):
        check_profiled(load_config(["configs/serve_cpu.yaml"], []))
