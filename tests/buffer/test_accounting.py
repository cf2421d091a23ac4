"""Rollout accounting: the ledger by hand, and whole runs in simulated time around the real buffer."""

import math
from statistics import NormalDist, fmean

import pytest

from forgeasync.buffer import (
    AccountingLedger,
    LoadController,
    WaitingSide,
)
from forgeasync.config import (
    AccountingPolicy,
    AccountingSection,
    AgeOf,
    BufferSection,
    Replacement,
    StaleGroups,
)
from forgeasync.plugins.simulator import Distribution, Lengths, RunSimulation
from tests.support.buffer_world import make_task
from tests.support.profiles import simple_profile, small_run

WEIGHT = AccountingSection(replacement=Replacement.WEIGHT, max_weight=3.0)


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
    ledger = AccountingLedger(AccountingSection(policy=AccountingPolicy.NONE))
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
    for _ in range(1000):
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


def test_load_goes_up_where_the_bound_starves_the_trainer_and_down_where_batches_lie_ready() -> None:
    load = LoadController(groups_per_step=8, max_groups=40)

    def step(wait: float, ready: int, *, bound: bool) -> int:
        load.step(trainer_wait_share=wait, num_ready=ready, is_bound=bound)
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


K, GROUPS_PER_STEP, LONGEST = 8, 24, 1000.0
NONE, EXACT = AccountingSection(policy=AccountingPolicy.NONE), AccountingSection()
DROP = BufferSection(stale_groups=StaleGroups.DROP)


def lengths_around(median: float) -> Lengths:
    """Lognormal lengths from 16 to 1,000 tokens; half of the variance is the prompt's."""
    logarithm = NormalDist(math.log(median), 1.0)
    quantiles = tuple(
        min(max(math.exp(logarithm.inv_cdf((index + 0.5) / 100)), 16.0), LONGEST) for index in range(100)
    )
    response = Distribution(mean=fmean(quantiles), quantiles=quantiles)
    return Lengths(prompt=Distribution.point(0.0), response=response, prompt_share=0.5)


class Outcome:
    """The end of a simulated run of 100 steps; the metrics of accounting are those of all its groups."""

    def __init__(
        self, buffer: BufferSection, accounting: AccountingSection, *, train_s: float, seed: int = 0
    ) -> None:
        run = small_run(
            num_steps=100,
            groups_per_step=GROUPS_PER_STEP,
            group_size=8,
            max_off_policy_steps=K,
            buffer=buffer,
            accounting=accounting,
            max_num_seqs=100_000,
            source_weights={"easy": 1.0, "hard": 1.0},
            num_prompts=10_000,
            seed=seed,
        )
        lengths = {"easy": lengths_around(64.0), "hard": lengths_around(160.0)}
        profile = simple_profile(decode_s=1.0, token_s=0.0, fixed_s=train_s, publish_s=10.0)
        simulation = RunSimulation(run, profile.model_copy(update={"lengths": lengths}))
        steps = simulation.simulate().steps
        self.end_s = steps[-1].end_s
        self.trainer_waited_s = sum(step.wait_s for step in steps)
        self.largest_age = max(age for step in steps for age, _ in step.ages)
        self.num_dropped = simulation.buffer.num_dropped
        metrics = simulation.buffer.metrics()
        self.length_distance = metrics["accounting/length_distance"]
        self.source_distance = metrics["accounting/source_distance"]
        self.mean_length_ratio = metrics["accounting/mean_length_ratio"]


def test_nothing_is_dropped_where_the_longest_take_fewer_than_k_steps() -> None:
    """The longest response takes 6.4 of the 8 steps, and batches take first what is due first."""
    dropping = Outcome(DROP, NONE, train_s=LONGEST / 6.4)
    assert dropping.num_dropped.total() == 0 and dropping.largest_age == K
    assert dropping.length_distance == dropping.source_distance == 0.0


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_where_the_longest_take_more_than_k_steps_waiting_and_token_ages_stay_exact(seed: int) -> None:
    none, wait, weight, token = (
        Outcome(buffer, accounting, train_s=LONGEST / 9.3, seed=seed)
        for buffer, accounting in (
            (DROP, NONE),
            (BufferSection(), EXACT),
            (DROP, WEIGHT),
            (BufferSection(age_of=AgeOf.TOKEN), EXACT),
        )
    )
    assert wait.length_distance == token.length_distance == 0.0
    assert wait.num_dropped.total() == token.num_dropped.total() == 0
    assert max(one.largest_age for one in (none, wait, weight)) <= K
    assert wait.trainer_waited_s > token.trainer_waited_s
    assert token.end_s < 1.03 * none.end_s
    assert weight.length_distance < 0.7 * none.length_distance
