"""Values of single tokens that a step reports, against a computation in float64 by another implementation."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from forgeasync.models import read_model_facts
from forgeasync.rollouts import (
    NUM_WORST,
    BranchKey,
    Decision,
    RolloutKey,
    TokenReport,
    TokenValues,
    WorstToken,
    merged_reports,
)
from forgeasync.trainer import StepResult, TrainingSequence, pack_row
from tests.support.layouts import own_choices
from tests.support.processes import run_ranks
from tests.support.references import reference, reference_entropies
from tests.support.trainers import make_sequences, make_trainer, named_tensors

TEMPERATURE = 0.7
VERSION = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    sequences: list[TrainingSequence]
    own: StepResult
    """Of a step through the trainer's own experts, on rows of three and two sequences."""
    replayed: StepResult
    """The same through recorded experts."""
    weights: dict[str, torch.Tensor]
    """After the second one."""
    weights_unasked: dict[str, torch.Tensor]
    """After the same step where nobody asks about tokens."""


def _observe(folder: Path) -> Observed:
    sequences = []
    for index, one in enumerate(make_sequences(5, read_model_facts(str(folder)))):
        # Every other token of the first one was given by an environment.
        is_sampled_T = np.arange(len(one.response_ids_T)) % 2 == 0 if index == 0 else None
        ages_T = np.arange(len(one.response_ids_T), dtype=np.int32)[::-1] // 20
        sequences.append(dataclasses.replace(one, is_sampled_T=is_sampled_T, ages_T=ages_T))
    own = [dataclasses.replace(one, expert_ids_SMK=None) for one in sequences]
    choosing = make_trainer(folder)
    for one in sequences:
        assert one.expert_ids_SMK is not None
        # Every third token's record is the trainer's own choice.
        own_SMK = own_choices(choosing, pack_row([one]))[: one.num_tokens]
        one.expert_ids_SMK[::3, 0] = own_SMK[::3, 0]
    unasked = [dataclasses.replace(one, source=None) for one in sequences]
    results, weights = [], []
    for some in (own, sequences, unasked):
        trainer = make_trainer(folder, temperature=TEMPERATURE)
        trainer.state.policy_version = VERSION
        results.append(trainer.train_step([pack_row(some[:3]), pack_row(some[3:])]))
        weights.append(named_tensors(trainer))
    assert results[2].tokens == TokenReport()
    return Observed(
        sequences=sequences,
        own=results[0],
        replayed=results[1],
        weights=weights[1],
        weights_unasked=weights[2],
    )


@pytest.fixture(scope="module")
def observed(folder: Path) -> Observed:
    return run_ranks(1, _observe, folder)[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    logprobs_T: np.ndarray
    entropies_T: np.ndarray
    own_experts: list[set[int]]
    """By position of the sequence: what the first layer's gate chooses."""


def _expected(folder: Path, sequence: TrainingSequence) -> Expected:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, experts_implementation="eager")
    ids = torch.from_numpy(np.concatenate([sequence.prompt_ids_P, sequence.response_ids_T])).long()
    with torch.no_grad():
        out = model(ids[None], output_router_logits=True)
    assert sequence.kept_tokens is not None
    logits_TV = out.logits[0][len(sequence.prompt_ids_P) - 1 : -1]
    kept = (torch.from_numpy(sequence.kept_tokens.offsets), torch.from_numpy(sequence.kept_tokens.ids_N))
    response_ids_T = torch.from_numpy(sequence.response_ids_T)
    top = out.router_logits[0].topk(3, dim=-1).indices
    return Expected(
        logprobs_T=reference(logits_TV, response_ids_T, *kept, TEMPERATURE).numpy(),
        entropies_T=reference_entropies(logits_TV, *kept, TEMPERATURE).numpy(),
        own_experts=[set(one.tolist()) for one in top],
    )


def _sampled(sequence: TrainingSequence) -> np.ndarray:
    if sequence.is_sampled_T is None:
        return np.arange(len(sequence.response_ids_T))
    return sequence.is_sampled_T.nonzero()[0]


def test_values_are_those_of_a_computation_in_float64(folder: Path, observed: Observed) -> None:
    found = {one.key: one for one in observed.own.tokens.branches}
    asked = [one for one in observed.sequences if one.source is not None and one.source.is_recorded]
    assert len(found) == len(asked) == 2
    for sequence in asked:
        assert sequence.source is not None and sequence.kept_tokens is not None
        branch = found[sequence.source.key]
        values, expected, at = branch.values, _expected(folder, sequence), _sampled(sequence)
        np.testing.assert_array_equal(branch.prompt_ids_P, sequence.prompt_ids_P)
        np.testing.assert_array_equal(branch.response_ids_T, sequence.response_ids_T)
        np.testing.assert_array_equal(values.positions_N, at)
        np.testing.assert_array_equal(values.token_ids_N, sequence.response_ids_T[at])
        np.testing.assert_allclose(values.logprobs_N, expected.logprobs_T[at], atol=1e-4)
        np.testing.assert_allclose(values.entropies_N, expected.entropies_T[at], atol=1e-4)
        behavior_T = sequence.behavior_logprobs_T.astype(np.float64)
        np.testing.assert_array_equal(values.behavior_logprobs_N, sequence.behavior_logprobs_T[at])
        np.testing.assert_allclose(values.mismatch_N, (expected.logprobs_T - behavior_T)[at], atol=1e-4)
        np.testing.assert_allclose(values.ratios_N, np.exp(expected.logprobs_T - behavior_T)[at], rtol=2e-4)
        np.testing.assert_allclose(values.advantages_N, sequence.advantage, rtol=1e-6)
        np.testing.assert_array_equal(values.versions_N, VERSION - sequence.ages_T[at])
        widths = np.diff(sequence.kept_tokens.offsets)[at]
        np.testing.assert_array_equal(values.num_kept_N, widths)
        assert values.decisions_MN is None, "nothing was replayed"
        assert expected.logprobs_T.std() > 0.3, "a nearly uniform model would hide mistakes"
    assert 0 in np.concatenate([one.values.num_kept_N for one in found.values()]), "some kept everything"


def test_the_worst_of_all_tokens(folder: Path, observed: Observed) -> None:
    """By float64, over all sequences: also of those that nobody asked for."""
    sizes = []
    for sequence in observed.sequences:
        assert sequence.source is not None
        mismatch_T = _expected(folder, sequence).logprobs_T - sequence.behavior_logprobs_T
        sizes += [(-abs(mismatch_T[at]), sequence.source.key, int(at)) for at in _sampled(sequence)]
    expected = sorted(sizes)[:NUM_WORST]
    worst = observed.own.tokens.worst
    assert [one.rank[1:] for one in worst] == [one[1:] for one in expected]
    assert [one.rank[0] for one in worst] == pytest.approx([one[0] for one in expected], abs=1e-4)
    assert observed.own.metrics["mismatch/logprob_abs_max"] == pytest.approx(-worst[0].rank[0])


def test_decisions_of_the_first_layer(folder: Path, observed: Observed) -> None:
    """What its gate sees does not depend on what is replayed: transformers chooses the same experts."""
    seen = set()
    for branch in observed.replayed.tokens.branches:
        (sequence,) = [s for s in observed.sequences if s.source is not None and s.source.key == branch.key]
        own_experts = _expected(folder, sequence).own_experts
        assert branch.values.decisions_MN is not None and sequence.expert_ids_SMK is not None
        for place, decision in zip(branch.values.positions_N, branch.values.decisions_MN[0], strict=True):
            predicts = len(sequence.prompt_ids_P) - 1 + int(place)
            record = set(sequence.expert_ids_SMK[predicts, 0].tolist())
            same = Decision.SAME if record == own_experts[predicts] else Decision.OTHER
            has_record = -1 not in record
            assert decision == (same if has_record else Decision.OWN)
            seen.add(Decision(decision))
    assert seen == set(Decision)


def test_asking_changes_no_bit_of_the_step(observed: Observed) -> None:
    assert observed.weights.keys() == observed.weights_unasked.keys()
    for name, weight in observed.weights.items():
        assert torch.equal(weight, observed.weights_unasked[name]), name


def _worst_token(group_id: int, mismatch: float) -> WorstToken:
    float_N, int_N = np.zeros(1, np.float32), np.zeros(1, np.int32)
    values = TokenValues(
        positions_N=int_N,
        token_ids_N=int_N,
        logprobs_N=np.array([mismatch], np.float32),
        behavior_logprobs_N=float_N,
        ratios_N=float_N,
        advantages_N=float_N,
        entropies_N=float_N,
        versions_N=int_N,
        num_kept_N=int_N,
        decisions_MN=None,
    )
    key = BranchKey(rollout=RolloutKey(group_id=group_id, episode=0, agent=0), branch=0)
    return WorstToken(key=key, values=values)


def test_what_is_no_number_is_the_worst_and_equal_ones_are_in_their_order() -> None:
    reports = [
        TokenReport(worst=tuple(_worst_token(group_id, -1.0) for group_id in range(first, 20, 2)))
        for first in (1, 0)
    ]
    odd = TokenReport(worst=(_worst_token(99, float("nan")), _worst_token(50, 0.5), _worst_token(51, 3.0)))
    merged = merged_reports([*reports, odd])
    assert [one.key.rollout.group_id for one in merged.worst] == [99, 51, 0, 1, 2, 3, 4, 5, 6, 7]
