"""Runs in simulated time: laws that hold for all of them, and times that can be computed by hand."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forgeasync.config import AgeOf, BufferSection, KvAfterSwap, ScorerSection, StaleGroups, WeightsSection
from forgeasync.plugins.simulator import (
    Profile,
    RandomDraws,
    RunSimulation,
    SimulatedRun,
    simulate,
    what_if,
)
from forgeasync.rollouts import padded_length
from tests.support.profiles import simple_profile, small_run


@pytest.mark.parametrize("share", [False, True])
def test_training_takes_what_the_rows_of_a_batch_compute(share: bool) -> None:
    """4 groups of 4 sequences of 10 + 20 tokens; a token also costs a part for each that it sees."""
    num_copies = 1 if share else 4
    num_tokens = 4 * (num_copies * 10 + 4 * 20)
    num_pairs = 4 * (num_copies * 10 * 11 // 2 + 4 * sum(range(11, 31)))
    run = small_run(share_prefixes=share, pair_cost=0.05)
    steps = simulate(run, simple_profile(lengths=(20.0, 20.0), token_s=1e-3)).steps
    expected_s = 1e-3 * (padded_length(num_tokens) + 0.05 * num_pairs)
    assert [step.train_s for step in steps] == pytest.approx([expected_s] * 12)


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
    weights=st.builds(WeightsSection, kv_cache=st.sampled_from(list(KvAfterSwap))),
    scorer=st.builds(ScorerSection, num_workers=st.integers(1, 2)),
    seed=st.integers(0, 100),
)
profiles = st.builds(
    simple_profile,
    decode_per_sequence_s=st.sampled_from([0.0, 0.001]),
    token_s=st.sampled_from([1e-5, 1e-3]),
    score_s=st.sampled_from([0.0, 0.5]),
    swap_s=st.sampled_from([0.0, 0.05]),
    fetch_s=st.sampled_from([0.0, 0.7]),
    publish_s=st.sampled_from([0.0, 0.2]),
    filtered_share=st.sampled_from([0.0, 0.3]),
)


@pytest.mark.parametrize("max_groups", [None, 8])
def test_the_last_steps_of_a_run_do_not_count(max_groups: int | None) -> None:
    """Generators run out of prompts before the trainer runs out of groups."""
    base = small_run(
        num_steps=15, groups_per_step=4, max_off_policy_steps=3, buffer=BufferSection(max_groups=max_groups)
    )
    prediction = simulate(base, simple_profile(token_s=1e-3))
    whole_waves = prediction.steps[8:12] if max_groups is None else prediction.steps[7:13]
    assert prediction.steady == whole_waves


@settings(max_examples=30, deadline=None)
@given(runs, profiles)
def test_laws_of_all_runs(run: SimulatedRun, profile: Profile) -> None:
    """Steps follow each other, ages are bounded, every token counts, and a repetition is equal."""
    run = replace(run, buffer=run.buffer.model_copy(update={"age_of": AgeOf.OLDEST_TOKEN}))
    simulation = RunSimulation(run, profile)
    steps = simulation.simulate().steps
    assert len(steps) == run.num_steps
    assert simulation.buffer.num_trained == run.num_steps * run.groups_per_step
    for before, after in itertools.pairwise(steps):
        assert before.end_s == after.begin_s <= after.end_s
    num_rollouts = run.groups_per_step * run.group_size
    for step in steps:
        assert step.wait_s + step.train_s + step.publish_s <= step.step_s * (1 + 1e-9) + 1e-9
        assert all(age <= run.max_off_policy_steps for age, _ in step.ages)
        assert step.num_trained_tokens == sum(num for _, num in step.ages)
        assert 20 * num_rollouts <= step.num_trained_tokens <= 80 * num_rollouts
    assert simulate(run, profile).steps == steps


def test_another_seed_is_another_run() -> None:
    profile = simple_profile()
    assert simulate(small_run(seed=1), profile).steps != simulate(small_run(seed=2), profile).steps


FIXED = (50.0, 50.0)


def test_a_synchronous_run_takes_the_sum_of_its_parts() -> None:
    """A first token with the prompt, 49 at 0.01 s, scoring, 16 rollouts of 60 tokens in one row, publish,
    fetch, swap, records."""
    times = {"score_s": 0.1, "publish_s": 0.2, "fetch_s": 0.3, "swap_s": 0.04, "between_s": 0.05}
    profile = simple_profile(lengths=FIXED, token_s=1e-3, **times)
    run = small_run(max_off_policy_steps=0, scorer=ScorerSection(num_workers=16, max_in_flight=64))
    prediction = simulate(run, profile)
    # Rows are padded to 64 tokens; records are written while the version travels.
    train_s = 1e-3 * 960
    expected_s = 0.49 + 0.1 + train_s + 0.2 + 0.3 + 0.04
    assert prediction.step_s == pytest.approx(expected_s, rel=1e-3)
    assert prediction.mean_age == 0.0
    assert prediction.trainer_idle_share == pytest.approx(1 - (train_s + 0.05) / expected_s, rel=1e-3)


def test_a_slow_trainer_never_waits_and_ages_reach_the_bound() -> None:
    run = small_run(num_steps=30, buffer=BufferSection(adapt_load=False))
    prediction = simulate(run, simple_profile(lengths=FIXED, token_s=1e-2, between_s=0.4))
    assert prediction.step_s == pytest.approx(9.6 + 0.4)
    assert prediction.trainer_idle_share == 0.0
    assert prediction.mean_age == pytest.approx(2.0)
    assert prediction.generators_idle_share > 0.9


FAST = {"token_s": 1e-6}
WEIGHTS = {"token_s": 1e-3, "publish_s": 0.2, "fetch_s": 0.3, "swap_s": 0.04}
SYNCHRONOUS_PAIR = {"max_off_policy_steps": 0, "num_replicas": 2}
SMALL_BUFFER = BufferSection(max_groups=4, adapt_load=False)


def _workers(num: int) -> dict[str, Any]:
    return {"scorer": ScorerSection(num_workers=num)}


@pytest.mark.parametrize(
    ("run", "profile", "step_s"),
    [
        # Groups start as soon as a batch makes room for them: training takes 1 s, and generating the next
        # batch beside it 0.4 s; new weights come later.
        (
            {"max_off_policy_steps": 4, "buffer": SMALL_BUFFER},
            {"token_s": 0.0, "fixed_s": 1.0, "lengths": (40.0, 40.0), "publish_s": 0.9},
            1.0,
        ),
        # 16 responses a step, 1 s each; workers that wait for a server have more than one place.
        (_workers(1), FAST | {"score_s": 1.0}, 16.0),
        (_workers(2), FAST | {"score_s": 1.0}, 8.0),
        (_workers(4), FAST | {"score_s": 1.0}, 4.0),
        (_workers(1), FAST | {"score_s": 1.0, "score_places": 8}, 2.0),
        ({"max_off_policy_steps": 0}, FAST, 0.49),
        # With 8 sequences at once, 16 rollouts take two rounds.
        ({"max_num_seqs": 8}, FAST, 0.98),
        ({"max_num_seqs": 8, "num_replicas": 2}, FAST, 0.49),
        # 0.96 s of training beside 0.5 s of decoding.
        ({"max_num_seqs": 16}, {"token_s": 1e-3}, 0.96),
        # Decoding on two generators at once, training, publishing, fetching, swapping.
        (SYNCHRONOUS_PAIR, WEIGHTS, 0.49 + 0.96 + 0.2 + 0.3 + 0.04),
    ],
)
def test_steps_take_what_is_computed_by_hand(
    run: dict[str, Any], profile: dict[str, Any], step_s: float
) -> None:
    prediction = simulate(small_run(num_steps=30, **run), simple_profile(**({"lengths": FIXED} | profile)))
    assert prediction.step_s == pytest.approx(step_s, rel=0.02)


def test_keys_are_computed_again_after_a_swap_on_request() -> None:
    profile = simple_profile(token_s=1e-6, lengths=(80.0, 80.0))
    profile = profile.model_copy(update={"prefill_tokens_per_s": 1e3})
    weights = [WeightsSection(kv_cache=kind) for kind in (KvAfterSwap.KEEP, KvAfterSwap.RECOMPUTE)]
    keep, recompute = (simulate(small_run(weights=one, max_num_seqs=6), profile) for one in weights)
    assert recompute.step_s > keep.step_s


def test_group_lengths_are_as_alike_as_the_profile_says() -> None:
    """With all of the variance the prompt's, every group is of one length: batches hold no mixture."""
    lengths = tuple(float(20 + 5 * index) for index in range(13))
    spread = []
    for share in (0.0, 1.0):
        draws = RandomDraws(small_run(), simple_profile(lengths=lengths, prompt_share=share))
        groups = [draws.group(draws.order.next(), draw_id) for draw_id in range(300)]
        tokens = [[rollout.num_tokens for rollout in group] for group in groups]
        mean = sum(map(sum, tokens)) / (300 * 4)
        assert mean == pytest.approx(50.0, abs=2.5), "the same distribution whatever is shared"
        assert len({one[0] for one in tokens}) > 30, "and groups differ from each other"
        spread.append(sum(max(one) - min(one) for one in tokens) / 300)
    assert spread[1] == 0.0 < spread[0]


# --- what a change brings: the right cause with its number ---

FIXED_FAST = {"lengths": FIXED, "token_s": 1e-6}
TWO_SCORERS = ScorerSection(num_workers=2)
SYNCHRONOUS = {"max_off_policy_steps": 0, "buffer": BufferSection(adapt_load=False)}
TWO_IN_FLIGHT = BufferSection(max_in_flight=2, adapt_load=False)


@pytest.mark.parametrize(
    ("run", "profile", "change", "least"),
    [
        ({"max_num_seqs": 8}, FIXED_FAST, "one more replica", 0.5),
        ({}, {"lengths": FIXED, "token_s": 1e-2}, "a trainer twice as fast", 0.5),
        ({"scorer": TWO_SCORERS}, FIXED_FAST | {"score_s": 1.0}, "one more scorer", 0.5),
        ({"buffer": TWO_IN_FLIGHT}, FIXED_FAST, "a buffer twice as large", 0.5),
        ({"max_off_policy_steps": 0}, FIXED_FAST | {"swap_s": 4.0}, "weights twice as fast", 0.3),
        # Half of a step trains and half of it generates: one version ahead does both at once.
        (SYNCHRONOUS, {"lengths": FIXED, "token_s": 5e-4}, "max_off_policy_steps 1", 0.5),
    ],
)
def test_the_change_that_helps_is_found(
    run: dict[str, Any], profile: dict[str, Any], change: str, least: float
) -> None:
    found = what_if(small_run(num_steps=20, **run), simple_profile(**profile))
    assert found.best is not None
    assert found.best.change == change, found.gains
    assert found.best.share >= least - 0.05
    steps = f"{found.base.step_s:.3g} -> {found.best.after_s:.3g} s a step"
    assert found.verdict == f"{found.best.bound}; {change}: {steps}"


def test_where_nothing_helps_it_says_so() -> None:
    run = small_run(num_steps=10)
    found = what_if(run, simple_profile(lengths=FIXED, token_s=1e-6, between_s=100.0))
    assert found.best is None
    assert found.verdict.startswith("no change that was tried saves 2%")
