"""Rollout accounting: the ledger by hand, and whole runs in simulated time around the real buffer."""

import math
from collections import Counter

import numpy as np
import pytest

from forgeasync.buffer import (
    AccountingLedger,
    DropReason,
    LoadController,
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
from tests.support.buffer_simulation import LengthModel, Outcome, SimulatedRun, compare
from tests.support.buffer_world import make_task

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
