"""Log-probabilities and entropies over kept sets against their definitions in float64."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from forgeasync.models import GATHER_COST
from forgeasync.trainer import Predictions, chunked_predictions, head_weight
from forgeasync.trainer import logprobs as logprobs_module
from tests.support.live_tensors import LiveTensors
from tests.support.processes import run_ranks
from tests.support.references import ALWAYS_GATHER, NEVER_GATHER, make_case

DIM = 6

COSTS = pytest.mark.parametrize("cost", [ALWAYS_GATHER, NEVER_GATHER], ids=["read-row-by-row", "dense"])


def definition(
    hidden_TD: torch.Tensor,
    weight_VD: torch.Tensor,
    tokens_T: torch.Tensor,
    offsets: torch.Tensor,
    ids: torch.Tensor,
    temperature: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and entropies in float64 by a softmax over the whole vocabulary, the rest masked."""
    logits_TV = hidden_TD.double() @ weight_VD.double().T / temperature
    is_kept_TV = torch.zeros(logits_TV.shape, dtype=torch.bool)
    for token, (start, end) in enumerate(itertools.pairwise(offsets.tolist())):
        is_kept_TV[token, ids[start:end].long() if end > start else slice(None)] = True
    logs_TV = logits_TV.masked_fill(~is_kept_TV, -torch.inf).log_softmax(-1)
    entropies_T = -(logs_TV.exp() * logs_TV).where(is_kept_TV, 0.0).sum(-1)
    return logs_TV.gather(1, tokens_T[:, None])[:, 0], entropies_T.detach()


@settings(max_examples=150)
@given(
    seed=st.integers(0, 2**31),
    num_tokens=st.integers(0, 12),
    vocab_size=st.integers(1, 40),
    largest_set=st.integers(0, 40),
    temperature=st.sampled_from([0.3, 1.0, 1.7]),
    scale=st.sampled_from([0.0, 0.1, 1.0, 30.0]),
    cost=st.sampled_from([ALWAYS_GATHER, 4, NEVER_GATHER]),
    chunk_tokens=st.sampled_from([1, 5, 1000]),
    entropy_bytes=st.sampled_from([1, 300, 2**20]),
    gather_bytes=st.sampled_from([3 * 2 * 8 * DIM, 2**20]),
)
def test_values_and_gradients_are_the_definitions(
    seed: int,
    num_tokens: int,
    vocab_size: int,
    largest_set: int,
    temperature: float,
    scale: float,
    cost: int,
    chunk_tokens: int,
    entropy_bytes: int,
    gather_bytes: int,
) -> None:
    """At all scales of logits, read in every way, for every width of the kept sets (0: none is cut)."""
    _, tokens, offsets, ids = make_case(seed, num_tokens, vocab_size, largest_set=largest_set)
    generator = torch.Generator().manual_seed(seed)
    drawn = [torch.randn(num, DIM, generator=generator).double() for num in (num_tokens, vocab_size)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logprobs_module, "GATHER_COST", cost)
        patch.setattr(logprobs_module, "CPU_BLOCK_BYTES", entropy_bytes)
        patch.setattr(head_weight, "GATHER_BLOCK_BYTES", gather_bytes)
        for dtype, tolerance in ((torch.float64, 1e-14), (torch.float32, 1e-6)):
            ours = [(scale * one).to(dtype).requires_grad_() for one in drawn]
            found = chunked_predictions(
                *ours, tokens, offsets, ids, temperature, with_entropies=True, chunk_tokens=chunk_tokens
            )
            assert found.logprobs_T.dtype is dtype
            assert found.entropies_T is not None and not found.entropies_T.requires_grad
            logprobs_T, entropies_T = definition(*ours, tokens, offsets, ids, temperature)
            factors_T = torch.linspace(-1, 2, num_tokens, dtype=torch.float64)
            gradients = torch.autograd.grad((found.logprobs_T * factors_T).sum(), ours)
            exact = torch.autograd.grad((logprobs_T * factors_T).sum(), ours)
            # A scaled logit is rounded by its size; no value moves by more than log(V) times that.
            products = ours[0].detach().abs() @ ours[1].detach().abs().T
            largest = float(products.amax()) / temperature if num_tokens else 0.0
            atol = tolerance * (10.0 + 4.0 * largest)
            torch.testing.assert_close(found.logprobs_T.double(), logprobs_T, atol=atol, rtol=0)
            torch.testing.assert_close(found.entropies_T.double(), entropies_T, atol=atol, rtol=0)
            for one, right in zip(gradients, exact, strict=True):
                bound = atol * (1.0 + float(right.abs().sum()) + scale)
                torch.testing.assert_close(one, right, atol=bound, rtol=0)


def predictions_of(hidden_TD: torch.Tensor, weight_VD: torch.Tensor, kept: list[list[int]]) -> Predictions:
    """Of each set's first id at temperature 0.7; an empty set is the whole vocabulary."""
    offsets = torch.tensor([0, *map(len, kept)]).cumsum(0)
    ids = torch.tensor([one for row in kept for one in row], dtype=torch.int32)
    tokens = torch.tensor([row[0] if row else 0 for row in kept])
    return chunked_predictions(hidden_TD, weight_VD, tokens, offsets, ids, 0.7, with_entropies=True)


@COSTS
def test_where_one_token_is_kept_value_gradient_and_entropy_are_exactly_zero(
    cost: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logprobs_module, "GATHER_COST", cost)
    for dtype in (torch.float32, torch.bfloat16):
        leaves = [(torch.randn(num, 8) * 20).to(dtype).requires_grad_() for num in (4, 33)]
        found = predictions_of(*leaves, [[7], [0], [32], [5]])
        assert not found.logprobs_T.any() and not found.entropies_T.any()
        assert not any(gradient.any() for gradient in torch.autograd.grad(found.logprobs_T.sum(), leaves))


@COSTS
def test_a_token_outside_of_its_set_is_impossible(cost: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprobs_module, "GATHER_COST", cost)
    sets = (torch.tensor([0, 2, 3]), torch.tensor([0, 1, 1]))
    found = chunked_predictions(torch.zeros(2, 3), torch.zeros(4, 3), torch.tensor([3, 1]), *sets)
    assert found.logprobs_T.tolist() == [-torch.inf, 0.0]


@COSTS
def test_entropies_are_computed_once_and_change_no_bit_of_the_rest(
    cost: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Log-probabilities are computed again for the backward pass, entropies are not."""
    monkeypatch.setattr(logprobs_module, "GATHER_COST", cost)
    calls = []
    slice_entropies = logprobs_module._slice_entropies
    monkeypatch.setattr(
        logprobs_module, "_slice_entropies", lambda *parts: calls.append(1) or slice_entropies(*parts)
    )
    _, *case = make_case(3, 23, 64, largest_set=8)
    leaves = [torch.randn(num, DIM, requires_grad=True) for num in (23, 64)]
    results = []
    for with_entropies in (False, True):
        found = chunked_predictions(*leaves, *case, with_entropies=with_entropies, chunk_tokens=10)
        assert (found.entropies_T is not None) is with_entropies
        results.append((found.logprobs_T, *torch.autograd.grad(found.logprobs_T.sum(), leaves)))
    assert len(calls) == 3, "one call for each chunk"
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_logits_that_are_not_numbers_have_no_entropy() -> None:
    """Nothing hides them: the step is skipped, and its value is counted as not finite."""
    hidden_TD = torch.tensor([[math.nan, 0.0], [1.0, 2.0]])
    for kept in ([[], []], [[0, 1], [0, 1]]):
        entropies_T = predictions_of(hidden_TD, torch.eye(2), kept).entropies_T
        assert entropies_T.isnan().tolist() == [True, False]


@pytest.mark.parametrize("num_uncut", [0, 40])
def test_memory_is_bounded_however_wide_the_sets_are(num_uncut: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the memory plan counts (``forgeasync.planning.trainer_memory``), on both sides of the choice."""
    num_tokens, vocab_size, dim, block_bytes = 128, 4096, 64, 2**18
    monkeypatch.setattr(head_weight, "GATHER_BLOCK_BYTES", block_bytes)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(num_tokens, dim, generator=generator, requires_grad=True)
    weight = torch.randn(vocab_size, dim, generator=generator, requires_grad=True)
    logits_bytes = 4 * num_tokens * vocab_size
    boundary = vocab_size // GATHER_COST
    for width in (1, boundary - 1, boundary, vocab_size // 16 - 1, vocab_size // 2, vocab_size - 1):
        ids = torch.arange(width, dtype=torch.int32).repeat(num_tokens - num_uncut)
        widths = torch.tensor([width] * (num_tokens - num_uncut) + [0] * num_uncut)
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), widths.cumsum(0)])
        tokens = torch.zeros(num_tokens, dtype=torch.int64)
        with torch.autograd.set_multithreading_enabled(False):
            with LiveTensors([hidden, weight, tokens, offsets, ids]) as live:
                ours = chunked_predictions(
                    hidden, weight, tokens, offsets, ids, with_entropies=True
                ).logprobs_T
                gradients = torch.autograd.grad(ours.sum(), (hidden, weight))
        logits = 4.25 * logits_bytes if width >= boundary else 4 * logits_bytes * num_uncut / num_tokens
        lists = logits_bytes / 4
        spare = 4 * hidden.nbytes
        assert live.peak_bytes <= logits + lists + weight.nbytes + block_bytes + spare, width
        expected, _ = definition(hidden, weight, tokens, offsets, ids)
        torch.testing.assert_close(ours.double(), expected, atol=2e-5, rtol=1e-5)
        for one, exact in zip(gradients, torch.autograd.grad(expected.sum(), (hidden, weight)), strict=True):
            torch.testing.assert_close(one, exact, atol=1e-4, rtol=1e-4)


def test_the_logits_of_a_whole_row_never_exist_together() -> None:
    num_tokens, vocab_size = 64, 512
    _, tokens, offsets, ids = make_case(0, num_tokens, vocab_size, largest_set=0)
    leaves = [torch.randn(num, 4, requires_grad=True) for num in (num_tokens, vocab_size)]
    with torch.autograd.set_multithreading_enabled(False), LiveTensors(leaves) as live:
        found = chunked_predictions(*leaves, tokens, offsets, ids, with_entropies=True, chunk_tokens=4)
        torch.autograd.grad(found.logprobs_T.sum(), leaves)
    assert live.peak_bytes < 4 * num_tokens * vocab_size / 2


def _sharded(seed: int, vocab_size: int, cost: int) -> None:
    """Values and gradients with the vocabulary split over two ranks."""
    logprobs_module.GATHER_COST = cost
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    _, *case = make_case(seed, 17, vocab_size, largest_set=8)
    generator = torch.Generator().manual_seed(seed)
    hidden, weight = (torch.randn(n, DIM, dtype=torch.float64, generator=generator) for n in (17, vocab_size))
    sharded = DTensor.from_local(weight, mesh, [Replicate()]).redistribute(placements=[Shard(0)])
    ours = (hidden.requires_grad_(), sharded.detach().requires_grad_())
    whole = (hidden, weight.requires_grad_())
    logprobs, entropies, _ = chunked_predictions(*ours, *case, 0.6, with_entropies=True, chunk_tokens=5)
    expected, exact_entropies = definition(*whole, *case, 0.6)
    factors = torch.linspace(-1, 1, 17, dtype=torch.float64)
    of_hidden, of_weight = torch.autograd.grad((logprobs * factors).sum(), ours)
    found = [logprobs, entropies, of_hidden, of_weight.full_tensor()]
    exact = [expected, exact_entropies, *torch.autograd.grad((expected * factors).sum(), whole)]
    torch.testing.assert_close(found, exact, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize(
    ("vocab_size", "cost"), [(40, ALWAYS_GATHER), (33, ALWAYS_GATHER), (33, NEVER_GATHER)]
)
def test_a_vocabulary_over_two_ranks_gives_the_same(vocab_size: int, cost: int) -> None:
    run_ranks(2, _sharded, 5, vocab_size, cost)
