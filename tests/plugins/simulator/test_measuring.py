"""Measuring a profile: what is timed, in which sizes, and what is made of samples."""

import asyncio
import dataclasses
import itertools
import random
import statistics
import subprocess
import sys
import time
from collections import Counter
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import cast
from unittest.mock import AsyncMock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forgeasync.config import SamplingSection, load_config
from forgeasync.controller import StepTimes
from forgeasync.environments import weighted_order
from forgeasync.plugins.simulator import (
    FIRST_EXTRA,
    NUM_STEPS,
    DecodeTimer,
    Distribution,
    Mark,
    OtherLoad,
    ProcessExited,
    ProcessorTime,
    Sampled,
    batches_of,
    check_profiled,
    count_places,
    decode_grid,
    environment_times,
    fit_lengths,
    lengths_are_known,
    lengths_by_source,
    loop_times,
    packed_size,
    sample_until_known,
    sampled_groups,
    short_run_of,
    step_cases,
)
from forgeasync.rollouts import Group
from forgeasync.runtime import GeneratorActor, GeneratorRouter, GroupScoring
from forgeasync.schema import ConfigError
from forgeasync.testing import VirtualTime, tiny_config
from forgeasync.trainer import training_items
from tests.support.buffer_world import make_task
from tests.support.rollouts import make_stored_rollout


def make_group(*lengths: int, number: int = 0, num_prompt_tokens: int = 6, source: str = "x") -> Group:
    spans = ((0, 0, length) for length in lengths)
    rollouts = tuple(make_stored_rollout(one, num_prompt_tokens=num_prompt_tokens) for one in spans)
    task = dataclasses.replace(make_task(number), source=source)
    rewards = tuple(map(float, range(len(lengths))))
    return Group(group_id=number, draw_id=number, task=task, rollouts=rollouts, rewards=rewards)


def plain(*groups: Group) -> list[Sampled]:
    return [Sampled(group=one, scores=(), turn_latencies_s=(), num_turns=()) for one in groups]


@given(max_num_seqs=st.integers(1, 300), max_context_length=st.integers(64, 4096), spare=st.floats(0.2, 4.0))
def test_the_grid_is_whole_and_fits_caches(max_num_seqs: int, max_context_length: int, spare: float) -> None:
    max_kv_tokens = max(64 * max_num_seqs, int(spare * max_num_seqs * max_context_length))
    limits = {"max_num_seqs": max_num_seqs, "max_context_length": max_context_length}
    grid = decode_grid((1, 2, 3), max_kv_tokens=max_kv_tokens, **limits)
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
    assert fit_lengths([1.0], groups).prompt_share == pytest.approx(share, abs=0.03)


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
    for groups in ([[1.0, 2.0]], [[3.0], [4.0]], [[5.0, 5.0]] * 2, [[1.0, 9.0]] * 3):
        assert fit_lengths([1.0], groups).prompt_share == 0.0
    assert fit_lengths([1.0], [[1.0, 1.0], [9.0, 9.0]]).prompt_share == 1.0


def test_lengths_are_kept_apart_by_source() -> None:
    sampled = plain(make_group(3, 5, source="a"), make_group(30, number=1, source="b", num_prompt_tokens=9))
    found = lengths_by_source(sampled)
    assert {name: one.response.mean.mean for name, one in found.items()} == {"a": 4.0, "b": 30.0}
    assert {name: one.prompt.mean.mean for name, one in found.items()} == {"a": 6.0, "b": 9.0}
    assert environment_times(sampled) is None
    episodes = [dataclasses.replace(sampled[0], turn_latencies_s=(0.5, 1.5), num_turns=(2, 4))]
    times = environment_times(episodes)
    assert times is not None
    assert times.num_turns == Distribution.of([2.0, 4.0]) and times.latency_s == Distribution.of([0.5, 1.5])


def test_the_interval_of_a_mean_length_is_that_of_groups() -> None:
    """Eight equal responses of each prompt say no more than one of each."""
    alike = [[float(length)] * 8 for length in (10, 20, 30)]
    mean = fit_lengths([5.0], alike).response.mean
    assert mean.mean == 20.0 and mean.num_samples == 3
    assert mean.high - mean.mean == pytest.approx(1.959964 * 10.0 / 3**0.5)
    # Of groups of unlike sizes the mean is still that of all values.
    assert fit_lengths([5.0], [[1.0, 1.0, 1.0], [5.0]]).response.mean.mean == 2.0


def test_lengths_are_known_once_every_source_has_a_narrow_interval() -> None:
    even = [make_group(20, 22, number=number) for number in range(2)]
    wild = [make_group(4, 4, number=0, source="y"), make_group(40, 40, number=1, source="y")]
    assert lengths_are_known(plain(*even))
    assert not lengths_are_known(plain(*even, *wild))
    assert not lengths_are_known(plain(even[0])), "one group has no interval"


@pytest.mark.parametrize("limit_s", [1e9, 0.0])
async def test_batches_come_until_lengths_are_known(limit_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampled_groups, "SAMPLING_LIMIT_S", limit_s)
    rng, freed = random.Random(0), list[Sampled]()

    async def sample() -> list[Sampled]:
        return plain(*(make_group(rng.randrange(10, 30), number=number) for number in range(8)))

    batches = await sample_until_known(sample, AsyncMock(side_effect=freed.extend))
    assert freed == [one for batch in batches[1:] for one in batch]
    if not limit_s:
        assert len(batches) == 1
        return
    # Standard deviation 5.8 of 20: (1.96 * 5.8 / 1.0) ** 2 = 129 groups.
    assert 10 < len(batches) < 24
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
        left_out = {"of 0", "of 1", "of 2"} - {first.task.source}
        assert Counter(one.task.source for one in others) == dict.fromkeys(left_out, 2)
        assert first.draw_id < 10 and all(one.draw_id >= FIRST_EXTRA for one in others)


async def test_of_rounds_of_decode_steps_the_first_one_does_not_count_and_medians_do() -> None:
    grid = decode_grid((1, 2, 3), max_num_seqs=2, max_context_length=64, max_kv_tokens=4096)
    # The same of every point: the round that warms up, then three.
    call_one = AsyncMock(side_effect=[step_s for step_s in (0.9, 0.1, 0.5, 0.2) for _ in grid])
    engine = cast(GeneratorActor, SimpleNamespace(time_engine=SimpleNamespace(call_one=call_one)))
    timer, done = DecodeTimer(engine, grid, SamplingSection(max_response_tokens=4)), list[None]()
    for _ in range(4):
        await timer.round(lambda: done.append(None))
    assert len(done) == 4 * timer.num_points
    assert [one.step_s.mean for one in timer.points()] == [0.2] * len(grid)
    assert {one.num_running for one in timer.points()} == {1, 2}


def test_steps_are_timed_on_parts_of_a_batch_and_in_more_rows(tmp_path: Path) -> None:
    config = tiny_config(tmp_path)
    groups = [make_group(10, 20, 30, 40, number=number) for number in range(4)]
    cases = step_cases(config, groups)
    # The longest sequence has 46 tokens.
    sizes = [(one.num_groups, one.tokens_per_row) for one in cases]
    assert sizes == [(1, 256), (1, 46), (2, 256), (2, 46), (4, 256), (4, 62)]
    assert [one.num_timed for one in cases] == [1, 1, 1, 1, 3, 1], "most often what the run has"
    packed = set()
    for case in cases:
        part = groups[: case.num_groups]
        lengths = [item.num_tokens for item in training_items(part, [1.0] * len(part), config.algorithm)]
        packed.add(packed_size(lengths, tokens_per_row=case.tokens_per_row, num_ranks=2))
    # Two ranks; 124 tokens a group, filled up to 64 in each row.
    assert (1, 64) in packed and (1, 256) in packed
    assert len({num_rows for num_rows, _ in packed}) > 1, "the time of a row can be told from that of a token"


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
    with pytest.raises(ProcessExited, match=f"process {child.pid} has ended"):
        processors.passed_s()


@pytest.mark.parametrize("num_places", [1, 5, 40])
async def test_places_are_counted_by_how_long_many_take(
    num_places: int, monkeypatch: pytest.MonkeyPatch, virtual_time: VirtualTime
) -> None:
    """A scorer in which so many responses wait at once, 10 ms each."""
    sampled = plain(*(make_group(*[5] * 8, number=number) for number in range(20)))

    async def score(name: str, task: object, responses: list[object]) -> None:
        async with places:
            await asyncio.sleep(0.01)

    places = asyncio.Semaphore(num_places)
    monkeypatch.setattr(sampled_groups.time, "perf_counter", virtual_time.now_s)
    scoring = cast(GroupScoring, SimpleNamespace(score=score))
    assert await count_places(scoring, sampled, alone_s=0.01) == num_places


def test_what_a_profile_would_leave_out_is_refused(tmp_path: Path) -> None:
    check_profiled(tiny_config(tmp_path))
    with pytest.raises(ConfigError, match=r"launcher\.kind = 'process': must be local") as refused:
        check_profiled(load_config(["configs/distill_cpu.yaml"], ["launcher={kind: process}"]))
    assert "teachers = " in str(refused.value)
    with pytest.raises(ConfigError, match=r"data\.source\.kind = 'served': .*no clients"):
        check_profiled(load_config(["configs/serve_cpu.yaml"], []))


MODULE = import_module("forgeasync.plugins.simulator.step_times")
CONFIG = Path(__file__).resolve().parents[3] / "configs" / "tiny_moe_cpu.yaml"


def mark(at_s: float, processor_s: float, num_responses: int, *, eval_s: float = 0.0) -> Mark:
    parts_s = {"wait_for_batch_s": 0.5, "train_s": 1.0, "publish_weights_s": 0.25, "eval_s": eval_s}
    times = StepTimes(step_s=2.0 + eval_s, **parts_s)
    others_s = {"scorers_s": 3.0 * processor_s, "handing_over_s": 2.0 * processor_s}
    return Mark(at_s=at_s, processor_s=processor_s, num_responses=num_responses, times=times, **others_s)


def test_processor_time_by_response_and_what_is_left_of_a_step() -> None:
    # Training waited for an evaluation at the end.
    found = loop_times([mark(10.0, 5.0, 100), mark(12.0, 5.2, 110), mark(17.0, 6.0, 120, eval_s=3.0)])
    assert (found.response_s, found.score_s) == pytest.approx((1.0 / 20, 3.0 / 20))
    assert found.handing_over_s == pytest.approx(2.0 / 20)
    assert found.run_s == pytest.approx(4.0), "7 s without the evaluation"
    # 2 s and 5 s of which 1.75 s and 4.75 s are known.
    assert found.between_s.mean.mean == pytest.approx(0.25)
    # Also in a window without responses.
    found = loop_times([mark(0.0, 1.0, 8), mark(1.0, 1.5, 8)])
    assert found.response_s == pytest.approx(0.5) and found.between_s.mean.mean == 0.0


def test_the_short_run_is_the_run_but_for_what_it_leaves_behind() -> None:
    config = load_config([str(CONFIG)], ["checkpoint.folder=elsewhere"])
    short = short_run_of(config)
    assert short.max_steps == MODULE.NUM_LOOP_STEPS > MODULE.NUM_WARMUP_STEPS
    assert (short.checkpoint.every_steps, short.checkpoint.folder) == (None, None)
    assert (short.evaluation.num_problems, short.evaluation.sets) == (1, ())
    assert short.evaluation.every_steps > short.max_steps
    assert short.trainer.optimizer.learning_rate < 1e-6
    changed = {"max_steps": True, "checkpoint": True, "evaluation": True}
    changed |= {"trainer": {"optimizer": {"learning_rate"}}}
    assert short.model_dump(exclude=changed) == config.model_dump(exclude=changed)


async def test_engines_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MODULE, "IDLE_S", 0.0)
    busy = [[SimpleNamespace(busy_s=one), SimpleNamespace(busy_s=0.0)] for one in (1.0, 1.5, 1.5, 1.6, 9.9)]
    stats = AsyncMock(side_effect=busy)
    await MODULE._until_idle(cast(GeneratorRouter, SimpleNamespace(stats=stats)))
    assert stats.call_count == 3, "idle as soon as nothing was added"
