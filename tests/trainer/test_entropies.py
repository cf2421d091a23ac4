"""Entropies over kept sets against the definition in float64."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forgeasync.trainer import chunked_predictions
from forgeasync.trainer import logprobs as logprobs_module
from tests.support.references import ALWAYS_GATHER, NEVER_GATHER, make_case, reference_entropies, targets_of


@settings(deadline=None, max_examples=80)
@given(
    seed=st.integers(0, 2**31),
    num_tokens=st.integers(0, 12),
    vocab_size=st.integers(1, 40),
    largest_set=st.integers(0, 40),
    temperature=st.sampled_from([0.3, 1.0, 1.7]),
    scale=st.sampled_from([0.0, 0.1, 1.0, 10.0]),
    cost=st.sampled_from([ALWAYS_GATHER, 4, NEVER_GATHER]),
    chunk_tokens=st.sampled_from([1, 5, 1000]),
    block_bytes=st.sampled_from([1, 300, 2**20]),
)
def test_entropies_are_the_definitions(
    seed: int,
    num_tokens: int,
    vocab_size: int,
    largest_set: int,
    temperature: float,
    scale: float,
    cost: int,
    chunk_tokens: int,
    block_bytes: int,
) -> None:
    """At all scales of logits, read in every way, for every width of the kept sets (0: none is cut)."""
    logits, tokens, offsets, ids = make_case(seed, num_tokens, vocab_size, largest_set=largest_set)
    logits *= scale
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logprobs_module, "GATHER_COST", cost)
        patch.setattr(logprobs_module, "CPU_BLOCK_BYTES", block_bytes)
        for dtype, tolerance in ((torch.float64, 1e-14), (torch.float32, 1e-6)):
            # Products with unit vectors: the logits are these very numbers.
            logits_TV = logits.to(dtype)
            found = chunked_predictions(
                logits_TV,
                torch.eye(vocab_size, dtype=dtype, requires_grad=True),
                targets_of(tokens, offsets, ids),
                temperature,
                with_entropies=True,
                chunk_tokens=chunk_tokens,
            ).entropies_T
            assert found is not None and found.dtype is dtype and not found.requires_grad
            expected = reference_entropies(logits_TV, offsets, ids, temperature)
            assert (found[offsets.diff() == 1] == 0.0).all(), "one kept token leaves no choice"
            # A scaled logit is rounded by its size; no entropy moves by more than log(V) times that.
            largest = float(logits.abs().max()) / temperature if num_tokens else 0.0
            torch.testing.assert_close(
                found.double(), expected, atol=tolerance * (10.0 + 4.0 * largest), rtol=0
            )


@pytest.mark.parametrize("cost", [ALWAYS_GATHER, NEVER_GATHER], ids=["read-row-by-row", "dense"])
def test_entropies_change_no_bit_of_the_rest(cost: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprobs_module, "GATHER_COST", cost)
    _, tokens, offsets, ids = make_case(3, 23, 64, largest_set=8)
    generator = torch.Generator().manual_seed(0)
    hidden_TD = torch.randn(23, 16, generator=generator, requires_grad=True)
    weight_VD = torch.randn(64, 16, generator=generator, requires_grad=True)
    results = []
    for with_entropies in (False, True):
        found = chunked_predictions(
            hidden_TD,
            weight_VD,
            targets_of(tokens, offsets, ids),
            with_entropies=with_entropies,
            chunk_tokens=10,
        )
        assert (found.entropies_T is not None) is with_entropies
        gradients = torch.autograd.grad(found.logprobs_T.sum(), (hidden_TD, weight_VD))
        results.append((found.logprobs_T, *gradients))
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_logits_that_are_not_numbers_have_no_entropy() -> None:
    """Nothing hides them: the step is skipped, and its value is counted as not finite."""
    logits_TV, tokens = torch.tensor([[math.nan, 0.0], [1.0, 2.0]]), torch.zeros(2, dtype=torch.int64)
    for kept in ([], [0, 1]):
        offsets, ids = torch.arange(3) * len(kept), torch.tensor(kept * 2, dtype=torch.int32)
        found = chunked_predictions(
            logits_TV, torch.eye(2), targets_of(tokens, offsets, ids), with_entropies=True
        )
        assert found.entropies_T is not None and found.entropies_T.isnan().tolist() == [True, False]
