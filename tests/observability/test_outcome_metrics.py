"""pass@k and its intervals against enumeration, formulas by hand and simulation."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forgeasync.observability import ProblemScores, mean_score, pass_at_k, proportion, summarize


@given(st.integers(1, 9).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_is_the_share_of_draws_with_a_correct_one(case: tuple[int, int, int]) -> None:
    num_samples, num_correct, k = case
    draws = list(itertools.combinations([True] * num_correct + [False] * (num_samples - num_correct), k))
    assert pass_at_k(num_samples, num_correct, k) == pytest.approx(sum(map(any, draws)) / len(draws))


def test_pass_at_k_of_many_samples_is_exact() -> None:
    """Binomial coefficients of these numbers are beyond floats."""
    exact = 1 - math.comb(4000 - 7, 1024) / math.comb(4000, 1024)
    assert pass_at_k(4000, 7, 1024) == pytest.approx(exact, rel=1e-9)
    assert pass_at_k(4000, 0, 4000) == 0.0 and pass_at_k(4000, 1, 4000) == 1.0


@pytest.mark.parametrize(
    ("num_solved", "low", "high"), [(0, 0.0, 0.2775), (3, 0.1078, 0.6032), (10, 0.7225, 1.0)]
)
def test_with_one_sample_it_is_wilsons_interval(num_solved: int, low: float, high: float) -> None:
    """Of ten problems; the figures are those of R's binom::binom.confint(method = "wilson")."""
    found = proportion([1.0] * num_solved + [0.0] * (10 - num_solved), num_responses=10)
    assert (found.value, found.low, found.high) == pytest.approx((num_solved / 10, low, high), abs=1e-4)


def test_resembling_samples_do_not_count_as_many() -> None:
    """Eight samples of each problem: all alike, or as different as they can be."""
    alike = proportion([1.0, 0.0] * 20, num_responses=320)
    once = proportion([1.0, 0.0] * 20, num_responses=40)
    assert (alike.low, alike.high) == (once.low, once.high)
    different = proportion([0.5] * 40, num_responses=320)
    each = proportion([1.0, 0.0] * 160, num_responses=320)
    assert (different.low, different.high) == pytest.approx((each.low, each.high))


@pytest.mark.parametrize("num_samples", [1, 8])
def test_intervals_hold_the_truth_as_often_as_they_say(num_samples: int) -> None:
    """Problems' chances are from a Beta distribution with mean 0.3."""
    rng = np.random.default_rng(0)
    num_runs = 600
    held_proportion = held_mean = 0
    for run in range(num_runs):
        chances = rng.beta(0.6, 1.4, 60)
        shares = rng.binomial(num_samples, chances) / num_samples
        found = proportion(shares.tolist(), num_responses=60 * num_samples)
        held_proportion += found.low <= 0.3 <= found.high
        if run < 20:
            score = mean_score((10.0 * shares).tolist())
            held_mean += score.low <= 3.0 <= score.high
    assert 0.91 < held_proportion / num_runs < 0.985
    assert held_mean >= 16


def test_scores_of_any_scale_have_an_interval() -> None:
    found = mean_score([100.0, -50.0, 25.0, 25.0])
    assert found.value == 25.0 and -50.0 <= found.low < 25.0 < found.high <= 100.0
    assert mean_score([100.0, -50.0, 25.0, 25.0]) == found, "the same in every process"
    alone = mean_score([3.0])
    assert (alone.value, alone.low, alone.high) == (3.0, None, None) and str(alone) == "3.000"


def test_what_was_not_scored_counts_for_nothing() -> None:
    """Four samples were asked for; the second problem has two scores, the third none."""
    problems = [
        ProblemScores(num_correct=1, values=(2.0, 0.0, 0.0, 0.0)),
        ProblemScores(num_correct=1, values=(4.0, 0.0)),
        ProblemScores(num_correct=0, values=()),
    ]
    summary = summarize(problems, num_samples=4)
    assert (summary.num_problems, summary.num_unscored) == (3, 6)
    assert summary.accuracy.value == pytest.approx((0.25 + 0.5) / 2)
    assert summary.score.value == pytest.approx((0.5 + 2.0) / 2)
    found = {k: (one.value, one.num_problems) for k, one in summary.pass_at.items()}
    assert found == {1: (pytest.approx(0.375), 2), 2: (pytest.approx((0.5 + 1.0) / 2), 2), 4: (1.0, 1)}
    assert summary.record["pass_at"]["4"]["num_problems"] == 1
    nothing = summarize([ProblemScores(num_correct=0, values=())] * 2, num_samples=2)
    assert nothing.accuracy is None and nothing.pass_at == {} and nothing.num_unscored == 4
