"""What a step's rows add up to."""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from forgeasync.algorithms import MAX_LOG_RATIO
from forgeasync.config import ROW_ALIGNMENT
from forgeasync.rollouts import NO_RECORD
from forgeasync.trainer import StepSums, pack_row
from tests.support.trainers import make_row, make_sequence

pytestmark = pytest.mark.usefixtures("one_rank")


def sums_of(
    ages: Sequence[list[int]] = (), differences: Sequence[float] = (), num_layers: int = 1
) -> StepSums:
    """As in every step: what there is to say of mismatches, by default of no tokens."""
    sums = StepSums(num_layers=num_layers, device="cpu")
    is_trained_T = torch.ones(len(differences), dtype=torch.bool)
    sums.add_mismatch(
        torch.tensor(differences), torch.zeros(len(differences)), is_trained_T, make_row(list(ages))
    )
    return sums


def test_only_responses_of_the_newest_weights_alone_are_fresh() -> None:
    metrics = sums_of([[0, 0], [1, 0, 0], [0]], [0.1, 0.3, 5.0, 5.0, 5.0, 0.2]).metrics(6, mesh=None)
    assert metrics["mismatch/fresh_logprob_abs_mean"] == pytest.approx(0.2)
    assert metrics["mismatch/logprob_abs_mean"] == pytest.approx(15.6 / 6)
    assert metrics["mismatch/logprob_abs_max"] == 5.0
    stale = sums_of([[1, 0], [2]], [0.1, 0.2, 0.3]).metrics(3, mesh=None)
    assert "mismatch/fresh_logprob_abs_mean" not in stale


def test_tokens_after_a_swap_in_their_turn_have_a_state_of_older_weights() -> None:
    turns = make_sequence([2, 1, 1, 1, 0, 0])
    # The third token is text between two turns.
    episode = dataclasses.replace(turns, is_sampled_T=np.arange(6) != 2)
    row = pack_row([make_sequence([1, 1]), episode, make_sequence([0])])
    differences_T = torch.tensor([8.0, 8.0, 8.0, -0.5, 8.0, 0.25, 9.0, 8.0])
    is_trained_T = torch.tensor([True] * 6 + [False, True])
    for has_states, found in ((True, 0.375), (False, None)):
        sums = StepSums(num_layers=1, device="cpu", has_states=has_states)
        sums.add_mismatch(differences_T, torch.zeros(8), is_trained_T, row)
        assert sums.metrics(7, mesh=None).get("mismatch/recurrent_state") == found


ONE_TOKEN = np.full((2, 1, 1), NO_RECORD, np.int16)
"""A prompt of two tokens, the first of them recorded."""
ONE_TOKEN[0] = 0


def k3(difference: float) -> float:
    return math.exp(difference) - 1 - difference


def test_means_of_a_step_by_hand() -> None:
    """Two rows; the second one's last token is masked out."""
    sums = StepSums(num_layers=1, device="cpu")
    differences, old = [0.5, -0.25, 1.0], [0.125, 9.0]
    first, second = make_row([[0], [0, 0]]), make_row([[1, 1]])
    for values, row, mask in ((differences, first, [True] * 3), (old, second, [True, False])):
        behavior_T = torch.linspace(-3.0, -1.0, len(values))
        sums.add_mismatch(behavior_T + torch.tensor(values), behavior_T, torch.tensor(mask), row)
    sums.add_loss(torch.tensor(1.5))
    sums.add_loss(torch.tensor(-0.25))
    sums.add({"objective/clipped_share": torch.tensor(1)})
    sums.add({"objective/clipped_share": torch.tensor(2)})
    metrics = sums.metrics(4, mesh=None)
    trained = [*differences, 0.125]
    ratios = [math.exp(one) for one in trained]
    expected = {
        "loss": 1.25,
        "objective/clipped_share": 0.75,
        "mismatch/logprob_abs_mean": 1.875 / 4,
        "mismatch/fresh_logprob_abs_mean": 1.75 / 3,
        "mismatch/logprob_abs_max": 1.0,
        "mismatch/kl": sum(map(k3, trained)) / 4,
        "off_policy/effective_sample_share": sum(ratios) ** 2 / (4 * sum(r * r for r in ratios)),
    }
    assert {key: metrics.get(key) for key in expected} == pytest.approx(expected, rel=1e-5)
    assert not [key for key in metrics if key.startswith("correction/")]
    assert "mismatch/num_fresh" not in metrics


def test_weights_of_corrections() -> None:
    sums = sums_of()
    for weights in ([0.5, 2.0], [1.0], []):
        sums.add_correction(torch.tensor(weights))
    metrics = sums.metrics(3, mesh=None)
    assert metrics["correction/weight_mean"] == pytest.approx(3.5 / 3)
    assert metrics["correction/weight_max"] == 2.0
    assert metrics["correction/effective_sample_share"] == pytest.approx(3.5**2 / (3 * 5.25))


def test_one_token_is_divided_by_one() -> None:
    sums = StepSums(num_layers=1, device="cpu")
    row = make_row([[0]])
    sums.add_mismatch(torch.tensor([-0.5]), torch.tensor([-0.25]), torch.tensor([True]), row)
    sums.add_coverage(pack_row([dataclasses.replace(make_sequence([]), expert_ids_SMK=ONE_TOKEN)]))
    sums.add_routing([torch.tensor([1, 1])])
    metrics = sums.metrics(1, mesh=None)
    assert metrics["mismatch/logprob_abs_mean"] == 0.25
    assert metrics["routing/recorded_share"] == metrics["routing/disagreement_share_layer_00"] == 1.0


def test_a_ratio_that_overflows_leaves_a_share() -> None:
    """Differences of 1000 nats: without a bound their ratios are infinite, or 0."""
    for differences, share in (([1000.0, 0.0], 0.5), ([-1000.0, -1000.0], 1.0)):
        metrics = sums_of([[0, 0]], differences).metrics(2, mesh=None)
        found = metrics["off_policy/effective_sample_share"]
        assert found == pytest.approx(share, rel=1e-3)


def test_metrics_of_a_difference_that_overflows_are_finite() -> None:
    differences = [300.0, -300.0, 0.0]
    sums = sums_of([[0, 0, 0]], differences)
    sums.add_probe("with_replay", torch.tensor(differences))
    metrics = sums.metrics(3, mesh=None)
    assert all(map(math.isfinite, metrics.values())), metrics
    assert metrics["mismatch/logprob_abs_max"] == 300.0, "the difference itself is as it was"
    # By hand: k3 of the bound on one side, 300 - 1 on the other.
    by_hand = (k3(MAX_LOG_RATIO) + 299) / 3
    for name in ("mismatch/kl", "mismatch/with_replay_kl"):
        assert metrics[name] == pytest.approx(by_hand, rel=1e-5)


def test_sums_do_not_lose_what_is_small_beside_them() -> None:
    sums = sums_of()
    for weight, counts in ((2.0**25, [2**24, 0]), (1.0, [1, 1])):
        sums.add_correction(torch.tensor([weight]))
        sums.add_routing([torch.tensor(counts)])
    metrics = sums.metrics(2, mesh=None)
    assert metrics["correction/weight_mean"] == (2.0**25 + 1.0) / 2
    assert metrics["routing/disagreement_share"] == 1 / (2**24 + 1)


def test_where_all_weights_are_zero_nothing_is_left() -> None:
    sums = sums_of()
    sums.add_correction(torch.zeros(2))
    assert sums.metrics(2, mesh=None)["correction/effective_sample_share"] == 0.0


def test_coverage_counts_what_was_fed_to_the_generator() -> None:
    """Sequences of 3 and 4 tokens, whose last ones were not; one token has no record, the rest is padding."""
    ids_SMK = np.ones((4, 2, 3), np.int16)
    ids_SMK[[1, 3]] = NO_RECORD
    recorded = dataclasses.replace(make_sequence([0, 0]), expert_ids_SMK=ids_SMK)
    row = pack_row([dataclasses.replace(make_sequence([0]), expert_ids_SMK=ids_SMK[:3]), recorded])
    sums = sums_of(num_layers=2)
    sums.add_coverage(row)
    sums.add_coverage(make_row([[0]]))
    # Decisions that were replayed, and those that the gate would have made otherwise.
    sums.add_routing([torch.tensor([8, 2]), torch.tensor([8, 0])])
    sums.add_routing([torch.tensor([2, 1]), torch.tensor([0, 0])])
    metrics = sums.metrics(1, mesh=None)
    assert metrics["routing/recorded_share"] == pytest.approx(4 / 7)
    assert metrics["routing/num_without_record"] == 3
    assert metrics["routing/disagreement_share"] == pytest.approx(3 / 18)
    assert metrics["routing/disagreement_share_layer_00"] == pytest.approx(0.3)
    assert metrics["routing/disagreement_share_layer_01"] == 0.0
    assert sums.num_padding_tokens == 2 * ROW_ALIGNMENT - 7 - 3


def test_without_replay_there_is_no_disagreement() -> None:
    metrics = sums_of(num_layers=2).metrics(1, mesh=None)
    assert not [key for key in metrics if "disagreement" in key]
    assert metrics["routing/recorded_share"] == 0.0
    dense = sums_of(num_layers=0).metrics(1, mesh=None)
    assert {key: value for key, value in dense.items() if key.startswith("routing/")} == {
        "routing/num_moe_layers": 0.0
    }


def test_probes_have_means_of_their_own() -> None:
    sums = sums_of()
    sums.add_probe("with_replay", torch.tensor([0.5, -0.5]))
    sums.add_probe("with_replay", torch.tensor([1.0]))
    sums.add_probe("without_replay", torch.tensor([]))
    metrics = sums.metrics(100, mesh=None)
    assert metrics["mismatch/with_replay_logprob_abs_mean"] == pytest.approx(2 / 3)
    assert metrics["mismatch/with_replay_kl"] == pytest.approx((k3(0.5) + k3(-0.5) + k3(1.0)) / 3)
    assert not [key for key in metrics if "without_replay" in key]


def test_a_step_without_a_trained_token_has_zeros() -> None:
    metrics = sums_of().metrics(0, mesh=None)
    assert metrics["mismatch/kl"] == metrics["loss"] == metrics["off_policy/effective_sample_share"] == 0.0
