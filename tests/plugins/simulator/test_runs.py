"""Runs in simulated time: laws that hold for all of them, and times that can be computed by hand."""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forgeasync.buffer import Start
from forgeasync.config import AgeOf, BufferSection, Interruption, ScorerSection, StaleGroups, WeightsSection
from forgeasync.plugins.simulator import (
    Clock,
    Cores,
    Distribution,
    DrawnRollout,
    EnvironmentTimes,
    Prediction,
    Profile,
    RunSimulation,
    Scorers,
    SimulatedGroup,
    SimulatedRun,
    simulate,
)
from forgeasync.rollouts import Task
from tests.support.profiles import NO_SETUP, simple_profile, small_run

runs = st.builds(
    small_run,
    num_steps=st.integers(1, 8),
    groups_per_step=st.integers(1, 5),
    group_size=st.integers(1, 4),
    max_off_policy_steps=st.integers(0, 4),
    num_replicas=st.integers(1, 3),
    max_num_seqs=st.integers(1, 20),
    num_groups_held=st.just(5),
    payload_capacity_bytes=st.sampled_from([5 * 10**6, 10**9]),
    buffer=st.builds(
        BufferSection,
        stale_groups=st.sampled_from(list(StaleGroups)),
        age_of=st.sampled_from([AgeOf.OLDEST_TOKEN, AgeOf.NEWEST_TOKEN, AgeOf.TOKEN]),
        max_in_flight=st.sampled_from([None, 1, 3]),
        adapt_load=st.booleans(),
    ),
    weights=st.builds(WeightsSection, interruption=st.sampled_from(list(Interruption))),
    scorer=st.builds(ScorerSection, num_workers=st.integers(1, 2), max_queued=st.sampled_from([1, 100])),
    seed=st.integers(0, 100),
)
profiles = st.builds(
    simple_profile,
    decode_per_sequence_s=st.sampled_from([0.0, 0.001]),
    token_s=st.sampled_from([1e-5, 1e-3]),
    score_s=st.sampled_from([0.0, 0.5]),
    controller_s=st.sampled_from([0.0, 0.02]),
    loops_s=st.sampled_from([0.0, 0.03]),
    swap_s=st.sampled_from([0.0, 0.05]),
    fetch_s=st.sampled_from([0.0, 0.7]),
    publish_s=st.sampled_from([0.0, 0.2]),
    num_cores=st.just(2),
    filtered_share=st.sampled_from([0.0, 0.3]),
    cores=st.sampled_from([None, Cores(trainer=2.0, generator=1.0, scorer=1.0)]),
)


@dataclass(slots=True)
class Played:
    """A run, with what its buffer saw of groups in flight."""

    simulation: RunSimulation
    prediction: Prediction
    area_s: float = 0.0
    """Their number, integrated over time."""
    sojourns_s: list[float] = field(default_factory=list)
    """How long each was there that was scored or given up."""


def _played(run: SimulatedRun, profile: Profile) -> Played:
    simulation = RunSimulation(run, profile)
    clock, buffer = simulation.clock, simulation.buffer
    step, start, scored, failed = clock.step, buffer.start, buffer.scored, buffer.failed
    began_s, sojourns_s, area_s = dict[int, float](), list[float](), 0.0

    def counted_step() -> bool:
        nonlocal area_s
        # What happens in a step of the clock happens at its end.
        num, before_s = buffer.num_in_flight, clock.now_s
        is_there = step()
        area_s += num * (clock.now_s - before_s)
        return is_there

    def counted_start() -> Start | None:
        if (started := start()) is not None:
            began_s[started.group_id] = clock.now_s
        return started

    def ended(end: Callable[..., object]) -> Callable[..., object]:
        def counted_end(group_id: int, *arguments: object) -> object:
            sojourns_s.append(clock.now_s - began_s.pop(group_id))
            return end(group_id, *arguments)

        return counted_end

    clock.step = counted_step
    buffer.start, buffer.scored, buffer.failed = counted_start, ended(scored), ended(failed)
    return Played(simulation, simulation.simulate(), area_s, sojourns_s)


def test_groups_start_as_soon_as_a_batch_makes_room_for_them() -> None:
    """Training takes 1 s, and generating the next batch beside it 0.4 s; new weights come later."""
    buffer = BufferSection(max_groups=4, adapt_load=False)
    profile = simple_profile(token_s=0.0, fixed_s=1.0, decode_s=0.01, lengths=(40.0, 40.0), publish_s=0.9)
    found = simulate(small_run(max_off_policy_steps=4, buffer=buffer), profile)
    assert found.step_s == pytest.approx(1.0, rel=0.01)


@pytest.mark.parametrize(("num_ranks", "seconds"), [(1, 1.0), (2, 1.0), (4, 2.0), (6, 3.0)])
def test_a_trainer_with_more_ranks_than_were_measured_takes_more_cores(
    num_ranks: int, seconds: float
) -> None:
    setup = NO_SETUP.model_copy(update={"num_trainer_procs": 2, "num_data_ranks": 2})
    cores = Cores(trainer=2.0, generator=0.0, scorer=0.0)
    profile = simple_profile(token_s=0.0, fixed_s=1.0, decode_s=1e-6, num_cores=2, cores=cores, setup=setup)
    assert simulate(small_run(num_data_ranks=num_ranks), profile).step_s == pytest.approx(seconds, rel=0.01)


def test_a_trainer_of_one_process_waits_for_nobody() -> None:
    """Two ranks keep 1.6 cores busy: each waits for the other for a fifth of the time."""

    def step_s(num_ranks: int, *, num_cores: int = 2, of_rank: int = 1, trainer_cores: float = 1.6) -> float:
        setup = NO_SETUP.model_copy(update={"num_trainer_procs": 2 * of_rank, "num_data_ranks": 2})
        cores = Cores(trainer=trainer_cores, generator=0.0, scorer=0.0)
        profile = simple_profile(
            token_s=0.0, fixed_s=1.0, decode_s=1e-6, num_cores=num_cores, cores=cores, setup=setup
        )
        return simulate(small_run(num_data_ranks=num_ranks), profile).step_s

    assert step_s(1) == pytest.approx(0.8, rel=0.01)
    assert step_s(2) == pytest.approx(1.0, rel=0.01)
    # 3.2 cores are wanted, and there are two.
    assert step_s(4) == pytest.approx(1.6, rel=0.01)
    # One data rank of two processes: these still wait for each other.
    assert step_s(1, of_rank=2) == pytest.approx(1.0, rel=0.01)
    assert step_s(1, trainer_cores=0.0) == pytest.approx(1.0, rel=0.01), "nothing is known of GPUs"


@pytest.mark.parametrize("max_groups", [None, 8])
def test_the_end_of_a_run_does_not_make_it_faster(max_groups: int | None) -> None:
    """Engines that share cores with the trainer have nothing to do for its last steps."""
    base = small_run(groups_per_step=4, max_off_policy_steps=3, buffer=BufferSection(max_groups=max_groups))
    profile = simple_profile(token_s=1e-3, num_cores=1, cores=Cores(trainer=1.0, generator=1.0, scorer=0.0))
    short, long = (simulate(replace(base, num_steps=num), profile) for num in (15, 60))
    assert short.steady == (short.steps[8:12] if max_groups is None else short.steps[7:13]), "whole waves"
    assert short.steps[-1].step_s < 0.8 * long.step_s, "it is faster"
    assert short.step_s == pytest.approx(long.step_s, rel=0.05)


@settings(max_examples=30, deadline=None)
@given(runs, profiles)
def test_littles_law_and_conservation(run: SimulatedRun, profile: Profile) -> None:
    """L = lambda W (Little 1961): groups in flight, by the buffer, are those that come a second times the
    seconds that each is there, by the simulation."""
    played = _played(run, profile)
    prediction, buffer = played.prediction, played.simulation.buffer
    num_dropped, num_ended = sum(buffer.num_dropped.values()), len(played.sojourns_s)
    assert num_ended == buffer.num_trained + num_dropped + buffer.num_complete
    if not buffer.num_in_flight:
        assert played.area_s == pytest.approx(sum(played.sojourns_s), rel=1e-6, abs=1e-6)
    assert buffer.num_trained == run.num_steps * run.groups_per_step
    assert len(prediction.steps) == run.num_steps
    for before, after in zip(prediction.steps, prediction.steps[1:], strict=False):
        assert before.end_s == after.begin_s <= after.end_s
    for step in prediction.steps:
        parts_s = step.wait_s + step.train_s + step.publish_s
        assert parts_s <= step.step_s * (1 + 1e-9) + 1e-9


@settings(max_examples=20, deadline=None)
@given(runs, profiles)
def test_no_token_is_older_than_the_bound_and_all_tokens_are_counted(
    run: SimulatedRun, profile: Profile
) -> None:
    run = replace(run, buffer=run.buffer.model_copy(update={"age_of": AgeOf.OLDEST_TOKEN}))
    prediction = simulate(run, profile)
    assert all(age <= run.max_off_policy_steps for step in prediction.steps for age, _ in step.ages)
    for step in prediction.steps:
        assert step.num_trained_tokens == sum(num for _, num in step.ages)
        lengths = run.groups_per_step * run.group_size
        assert 20 * lengths <= step.num_trained_tokens <= 80 * lengths


@settings(max_examples=8, deadline=None)
@given(runs, profiles)
def test_the_same_run_is_the_same_to_the_last_bit(run: SimulatedRun, profile: Profile) -> None:
    assert simulate(run, profile).steps == simulate(run, profile).steps


def test_another_seed_is_another_run() -> None:
    profile = simple_profile()
    assert simulate(small_run(seed=1), profile).steps != simulate(small_run(seed=2), profile).steps


FIXED = (50.0, 50.0)


def test_a_synchronous_run_takes_the_sum_of_its_parts() -> None:
    """A first token with the prompt, 49 at 0.01 s, scoring, 16 rollouts of 60 tokens in one row, publish,
    fetch, swap, records."""
    profile = simple_profile(
        lengths=FIXED, score_s=0.1, token_s=1e-3, publish_s=0.2, fetch_s=0.3, swap_s=0.04, between_s=0.05
    )
    run = small_run(max_off_policy_steps=0, scorer=ScorerSection(num_workers=16, max_in_flight=64))
    prediction = simulate(run, profile)
    # Rows are padded to 64 tokens; records are written while the version travels.
    train_s = 1e-3 * 960
    expected_s = 0.49 + 0.1 + train_s + 0.2 + 0.3 + 0.04
    assert prediction.step_s == pytest.approx(expected_s, rel=1e-3)
    assert prediction.mean_age == 0.0
    assert prediction.trainer_idle_share == pytest.approx(1 - (train_s + 0.05) / expected_s, rel=1e-3)


def test_a_slow_trainer_never_waits_and_ages_reach_the_bound() -> None:
    prediction = simulate(
        small_run(num_steps=30, buffer=BufferSection(adapt_load=False)),
        simple_profile(lengths=FIXED, token_s=1e-2, between_s=0.4),
    )
    assert prediction.step_s == pytest.approx(9.6 + 0.4)
    assert prediction.trainer_idle_share == 0.0
    assert prediction.mean_age == pytest.approx(2.0)
    assert prediction.generators_idle_share > 0.9


def test_slow_generators_bound_a_run_by_what_they_can_decode() -> None:
    """With 8 at once, 16 rollouts of 50 tokens take two rounds of 49 steps of 0.01 s; twice the
    replicas half of it."""
    profile = simple_profile(lengths=FIXED, token_s=1e-6)
    one = simulate(small_run(num_steps=30, max_num_seqs=8), profile)
    two = simulate(small_run(num_steps=30, max_num_seqs=8, num_replicas=2), profile)
    assert one.step_s == pytest.approx(0.98, rel=0.02)
    assert two.step_s == pytest.approx(0.49, rel=0.02)
    assert one.generators_idle_share == pytest.approx(0.0, abs=0.02)
    assert one.trained_tokens_per_s == pytest.approx(800.0 / 0.98, rel=0.02)


def test_scorers_bound_a_run_by_their_workers() -> None:
    """16 responses a step, 1 s each, 2 workers."""
    profile = simple_profile(lengths=FIXED, token_s=1e-6, score_s=1.0)
    prediction = simulate(small_run(num_steps=30, scorer=ScorerSection(num_workers=2)), profile)
    assert prediction.step_s == pytest.approx(8.0, rel=0.02)


def test_responses_hold_up_their_engine() -> None:
    """16 responses a step, 0.1 s each on the only engine, after the 49 steps of all of them."""
    profile = simple_profile(lengths=FIXED, token_s=1e-6, response_s=0.1)
    run = small_run(num_steps=30, max_off_policy_steps=0)
    assert simulate(run, profile).step_s == pytest.approx(0.49 + 1.6, rel=0.02)
    assert simulate(run, simple_profile(lengths=FIXED, token_s=1e-6)).step_s == pytest.approx(0.49, rel=0.02)


def test_the_controller_bounds_a_run_by_its_one_thread() -> None:
    """16 responses a step, 1 s each, however many scorers there are."""
    profile = simple_profile(lengths=FIXED, token_s=1e-6, controller_s=1.0)
    prediction = simulate(small_run(num_steps=30), profile)
    assert prediction.step_s == pytest.approx(16.0, rel=0.02)


def test_a_controller_that_wants_a_core_slows_the_others() -> None:
    """8 s of the controller, 8 s of a trainer that keeps two cores busy, and two cores."""
    profile = simple_profile(
        lengths=FIXED,
        token_s=0.0,
        fixed_s=8.0,
        controller_s=0.5,
        cores=Cores(trainer=2.0, generator=0.0, scorer=0.0),
        num_cores=2,
    )
    prediction = simulate(small_run(num_steps=30), profile)
    # 3 cores are wanted: at two thirds of the speed both take 12 s.
    assert prediction.step_s == pytest.approx(12.0, rel=0.05)


@pytest.mark.parametrize(("num_workers", "score_places", "step_s"), [(1, 1, 16.0), (4, 1, 4.0), (1, 8, 2.0)])
def test_as_many_responses_are_scored_at_once_as_there_are_places(
    num_workers: int, score_places: int, step_s: float
) -> None:
    """16 responses a step, 1 s each; workers that wait for a server have more than one place."""
    profile = simple_profile(lengths=FIXED, token_s=1e-6, score_s=1.0, score_places=score_places)
    run = small_run(num_steps=30, scorer=ScorerSection(num_workers=num_workers))
    assert simulate(run, profile).step_s == pytest.approx(step_s, rel=0.03)


def test_the_loops_take_cores_and_let_no_response_wait() -> None:
    """8 s of the loops for 16 responses, beside a trainer that takes 8 s on two cores."""
    values = {"lengths": FIXED, "token_s": 0.0, "fixed_s": 8.0, "loops_s": 0.5}
    run = small_run(num_steps=30)
    cores = Cores(trainer=2.0, generator=0.0, scorer=0.0)
    of_two = simulate(run, simple_profile(**values, cores=cores, num_cores=2))
    # 3 cores are wanted: at two thirds of the speed both take 12 s.
    assert of_two.step_s == pytest.approx(12.0, rel=0.05)
    of_three = simulate(run, simple_profile(**values, cores=cores, num_cores=3))
    assert of_three.step_s == pytest.approx(8.0, rel=0.01)


def test_procs_that_share_cores_take_longer() -> None:
    shared = Cores(trainer=1.0, generator=1.0, scorer=0.0)
    values = {"lengths": FIXED, "token_s": 1e-3}
    alone = simulate(small_run(num_steps=30, max_num_seqs=16), simple_profile(**values))
    one_core = simulate(
        small_run(num_steps=30, max_num_seqs=16), simple_profile(**values, cores=shared, num_cores=1)
    )
    # 0.96 s of training and 0.5 s of decoding for every step, on one core and nothing beside each other.
    assert alone.step_s == pytest.approx(0.96, rel=0.02)
    assert one_core.step_s == pytest.approx(1.46, rel=0.05)


@pytest.mark.parametrize(
    ("num_cores", "expected_s"),
    # The steps of two generators, training, publishing, two fetches, swaps.
    [(2, 0.49 + 0.96 + 0.2 + 0.3 + 0.04), (1, 2 * 0.49 + 0.96 + 0.2 + 2 * 0.3 + 0.04)],
)
def test_weights_take_cores_on_their_way(num_cores: int, expected_s: float) -> None:
    profile = simple_profile(
        lengths=FIXED,
        token_s=1e-3,
        publish_s=0.2,
        fetch_s=0.3,
        swap_s=0.04,
        cores=Cores(trainer=1.0, generator=1.0, scorer=0.0),
        num_cores=num_cores,
    )
    prediction = simulate(small_run(max_off_policy_steps=0, num_replicas=2), profile)
    assert prediction.step_s == pytest.approx(expected_s, rel=1e-3)


def test_turns_of_an_environment_take_their_latencies() -> None:
    profile = simple_profile(lengths=FIXED, token_s=1e-6).model_copy(
        update={
            "environment": EnvironmentTimes(
                num_turns=Distribution.point(5.0), latency_s=Distribution.point(0.3)
            )
        }
    )
    run = small_run(max_off_policy_steps=0, has_environment=True, num_steps=4)
    # Each turn's first token comes with its prompt.
    assert simulate(run, profile).step_s == pytest.approx(0.45 + 5 * 0.3, rel=0.02)


def test_group_lengths_are_as_alike_as_the_profile_says() -> None:
    """With all of the variance the prompt's, every group is of one length: batches hold no mixture."""
    lengths = tuple(float(20 + 5 * index) for index in range(13))
    spread = []
    for share in (0.0, 1.0):
        simulation = RunSimulation(small_run(), simple_profile(lengths=lengths, prompt_share=share))
        draws = simulation._draws
        groups = [draws.group(draws.order.next(), draw_id) for draw_id in range(300)]
        tokens = [[rollout.turns[0] for rollout in group] for group in groups]
        mean = sum(map(sum, tokens)) / (300 * 4)
        assert mean == pytest.approx(50.0, abs=2.5), "the same distribution whatever is shared"
        assert len({one[0] for one in tokens}) > 30, "and groups differ from each other"
        spread.append(sum(max(one) - min(one) for one in tokens) / 300)
    assert spread[1] == 0.0 < spread[0]


def test_the_simulator_loads_neither_torch_nor_vllm() -> None:
    code = (
        "import sys, forgeasync.plugins.simulator.run; "
        "print([name for name in ('torch', 'vllm', 'monarch') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("cores", "end_s"),
    [
        (0.0, 2.0),
        # Waits for 1.5 s, and computes for 0.5 s with a third of the core.
        (0.25, 3.0),
        (1.0, 6.0),
        # Four cores are wanted, and there is one.
        (2.0, 8.0),
    ],
)
def test_only_what_a_score_computes_takes_longer_where_cores_are_short(cores: float, end_s: float) -> None:
    clock, ends_s = Clock(1), []
    # Two others want the only core all the time.
    clock.begin(2.0)
    scorers = Scorers(
        ScorerSection(num_workers=1), cores, clock, lambda _: ends_s.append(clock.now_s), num_places=1
    )
    task = Task(task_id="0", prompt="", answer="", source_index=0, source="s")
    rollout = DrawnRollout(num_prompt_tokens=1, turns=(1,), latencies_s=(), score_s=2.0)
    group = SimulatedGroup(Start(group_id=0, draw_id=0, task=task), [rollout])
    scorers.response_ended(group, 0)
    scorers.group_ended(group)
    while clock.step():
        pass
    assert ends_s == pytest.approx([end_s])
