"""Outputs and gradients in bfloat16 against plain formulas in float64, on the same rounded inputs.

bfloat16 has 8 significant bits: rounding a result once costs at most 2^-9, 0.2 %, of it. The bounds leave
room for the roundings of values that one layer hands to the next, and for no sum that is rounded as it grows.
"""

import dataclasses
from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torchtitan.components.lora import LoRAConverter
from torchtitan.models.common.linear import Linear
from torchtitan.models.common.moe import MoE

from forgeasync.trainer import (
    CpuRMSNorm,
    GroupedAdapter,
    LogprobHead,
    LoraExperts,
    PackedAttention,
    Targets,
    chunked_predictions,
    packed_sequences,
    titan_config,
)
from forgeasync.trainer import logprobs as logprobs_module
from tests.support.config_samples import FACTS
from tests.support.live_tensors import LiveTensors
from tests.support.references import (
    ALWAYS_GATHER,
    NEVER_GATHER,
    exact_moe,
    masked_attention,
    moe_weights,
    targets_of,
)

VOCAB_SIZE, DIM, NUM_TARGETS = 2048, 128, 256

SIGNS = pytest.mark.parametrize("sign", ["both signs", "one sign"])

SEEDS = pytest.mark.parametrize("seed", range(3))


def error(ours: torch.Tensor, exact: torch.Tensor) -> float:
    """Norm of the difference, in shares of the exact one."""
    assert ours.dtype is torch.bfloat16 and exact.dtype is torch.float64
    return float((ours.double() - exact).norm() / exact.norm())


def assert_gradients(
    out: torch.Tensor,
    inputs: Sequence[torch.Tensor],
    right: torch.Tensor,
    exact: Sequence[torch.Tensor],
    grad: torch.Tensor,
    *,
    bounds: Sequence[float],
) -> None:
    """Those of the exact inputs, within a bound for each."""
    found = torch.autograd.grad(out, inputs, grad)
    wanted = torch.autograd.grad(right, exact, grad.double())
    for one, other, bound in zip(found, wanted, bounds, strict=True):
        assert error(one, other) < bound


def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(shape) * scale).bfloat16()


def factors(num: int, sign: str) -> torch.Tensor:
    values = torch.randn(num, dtype=torch.float64)
    return values.abs() if sign == "one sign" else values


def leaves(*tensors: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The same values as leaves in bfloat16 and in float64."""
    return (
        [tensor.detach().clone().requires_grad_() for tensor in tensors],
        [tensor.detach().double().requires_grad_() for tensor in tensors],
    )


# The output layer


def shared_sets(num_kept: int, num_shared: int, *, every: int = 1) -> list[list[int]]:
    """Sets of which ``num_shared`` ids are in all; only each ``every``-th token has one."""
    sets = []
    for token in range(NUM_TARGETS):
        others = (num_shared + torch.randperm(VOCAB_SIZE - num_shared)[: num_kept - num_shared]).tolist()
        sets.append([*range(num_shared), *others] if token % every == 0 else [])
    return sets


KEPT_SETS = {
    "most ids in every set": lambda: shared_sets(24, 16),
    "one id in every set": lambda: shared_sets(8, 1),
    "the same ids in all sets": lambda: shared_sets(20, 20),
    "ids of their own": lambda: shared_sets(12, 0),
    "half the tokens uncut": lambda: shared_sets(24, 16, every=2),
    "wide": lambda: shared_sets(300, 150),
    "everything": lambda: [list(range(VOCAB_SIZE))] * NUM_TARGETS,
    "of 1 to 40 ids": lambda: [list(range(1 + token % 40)) for token in range(NUM_TARGETS)],
    "none": lambda: [[]] * NUM_TARGETS,
}


def exact_logprobs(
    hidden_TD: torch.Tensor, weight_VD: torch.Tensor, tokens: list[int], sets: list[list[int]]
) -> torch.Tensor:
    is_kept_TV = torch.zeros(len(sets), len(weight_VD), dtype=torch.bool)
    for token, kept in enumerate(sets):
        is_kept_TV[token, kept or slice(None)] = True
    logits_TV = (hidden_TD @ weight_VD.T).masked_fill(~is_kept_TV, -torch.inf)
    return logits_TV.log_softmax(-1)[torch.arange(len(tokens)), tokens]


def offsets_and_ids(sets: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    widths = torch.tensor([0, *map(len, sets)])
    return widths.cumsum(0), torch.tensor([one for kept in sets for one in kept], dtype=torch.int32)


@pytest.mark.parametrize("seed", range(2))
@SIGNS
@pytest.mark.parametrize("chunk_tokens", [32, NUM_TARGETS])
@pytest.mark.parametrize("cost", [ALWAYS_GATHER, NEVER_GATHER], ids=["read-row-by-row", "dense"])
@pytest.mark.parametrize("kind", KEPT_SETS)
def test_the_output_layer(
    kind: str, cost: int, chunk_tokens: int, sign: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if cost == ALWAYS_GATHER and kind == "everything":
        pytest.skip("a quarter of a gigabyte of rows, which are never gathered at a real cost")
    monkeypatch.setattr(logprobs_module, "GATHER_COST", cost)
    torch.manual_seed(seed)
    sets = KEPT_SETS[kind]()
    tokens = [(kept or range(VOCAB_SIZE))[torch.randint(len(kept) or VOCAB_SIZE, ())] for kept in sets]
    ours, exact = leaves(normal(NUM_TARGETS, DIM), normal(VOCAB_SIZE, DIM, scale=DIM**-0.5))
    factors_T = factors(NUM_TARGETS, sign)
    found = chunked_predictions(
        *ours, targets_of(torch.tensor(tokens), *offsets_and_ids(sets)), chunk_tokens=chunk_tokens
    ).logprobs_T
    hidden, weight = torch.autograd.grad((found * factors_T).sum(), ours)
    logprobs_T = exact_logprobs(*exact, tokens, sets)
    assert found.dtype is torch.float32
    torch.testing.assert_close(found.double(), logprobs_T, atol=0.05, rtol=0.02)
    exact_hidden, exact_weight = torch.autograd.grad((logprobs_T * factors_T).sum(), exact)
    assert error(hidden, exact_hidden) < 0.006
    assert error(weight, exact_weight) < 0.006
    # Rows that most tokens have a share in, by themselves, and one by one.
    shared = sorted(range(VOCAB_SIZE), key=lambda row: -float(exact_weight[row].norm()))[:16]
    assert error(weight[shared], exact_weight[shared]) < 0.006
    assert max(error(weight[row], exact_weight[row]) for row in shared) < 0.012


@SIGNS
@pytest.mark.parametrize("has_sets", [True, False])
def test_terms_over_the_full_vocabulary(has_sets: bool, sign: str) -> None:
    """Policy gradient and a divergence of many ids in eight chunks each, all with the same sign or not."""
    torch.manual_seed(0)
    num_tokens, vocab_size, dim = 8192, 64, 32
    head = LogprobHead.Config(in_features=dim, out_features=vocab_size, param_init={}).build().bfloat16()
    (hidden, weight), exact = leaves(normal(num_tokens, dim), normal(vocab_size, dim, scale=dim**-0.5))
    head.weight = torch.nn.Parameter(weight.detach())
    tokens = torch.randint(8, (num_tokens,))
    sets = [[*range(8), 8 + token % 50] if has_sets else [] for token in range(num_tokens)]
    offsets, ids = offsets_and_ids(sets)
    extra_ids_TK = torch.randint(vocab_size, (num_tokens, 5))
    targets = Targets(token_ids_T=tokens, kept_offsets=offsets, kept_ids=ids, extra_ids_TK=extra_ids_TK)
    factors_T = factors(num_tokens, sign)
    factors_TK = factors(num_tokens * 5, sign).view(-1, 5)
    found = head(hidden, targets, 1.0, False)
    loss = (found.logprobs_T * factors_T).sum() + (found.extra_logprobs_TK * factors_TK).sum()
    ours = torch.autograd.grad(loss, (hidden, head.weight))
    logprobs_T = exact_logprobs(*exact, tokens.tolist(), sets)
    logprobs_TK = (exact[0] @ exact[1].T).log_softmax(-1).gather(1, extra_ids_TK)
    loss = (logprobs_T * factors_T).sum() + (logprobs_TK * factors_TK).sum()
    for one, right in zip(ours, torch.autograd.grad(loss, exact), strict=True):
        assert error(one, right) < 0.006


def test_rows_that_no_set_names_take_no_memory_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprobs_module, "GATHER_COST", ALWAYS_GATHER)
    ours, _ = leaves(normal(NUM_TARGETS, DIM), normal(8 * VOCAB_SIZE, DIM))
    sets = shared_sets(2, 1)
    tokens = torch.zeros(NUM_TARGETS, dtype=torch.int64)
    offsets, ids = offsets_and_ids(sets)
    with torch.autograd.set_multithreading_enabled(False):
        with LiveTensors([*ours, tokens, offsets, ids]) as live:
            loss = chunked_predictions(
                *ours, targets_of(tokens, offsets, ids), chunk_tokens=32
            ).logprobs_T.sum()
            torch.autograd.grad(loss, ours)
    # The weight's gradient itself, in bfloat16.
    assert live.peak_bytes < 1.5 * ours[1].nbytes


def test_a_gradient_that_nobody_took_is_not_in_the_next() -> None:
    """Another backward pass through the same products, after one for the hidden states alone."""
    ours, _ = leaves(normal(NUM_TARGETS, DIM), normal(VOCAB_SIZE, DIM))
    sets = shared_sets(8, 4)
    tokens = torch.zeros(NUM_TARGETS, dtype=torch.int64)
    loss = chunked_predictions(
        *ours, targets_of(tokens, *offsets_and_ids(sets)), chunk_tokens=32
    ).logprobs_T.sum()
    torch.autograd.grad(loss, ours[0], retain_graph=True)
    first = torch.autograd.grad(loss, ours, retain_graph=True)
    assert all(torch.equal(*pair) for pair in zip(first, torch.autograd.grad(loss, ours), strict=True))


# Experts and their router

MOE_FACTS = dataclasses.replace(FACTS, num_experts=16, top_k=8)


def make_moe() -> MoE:
    moe = titan_config(MOE_FACTS).layers[0].moe.build()
    moe._init_self_buffers()
    with torch.no_grad():
        for parameter in moe.parameters():
            parameter.normal_(std=parameter.shape[-1] ** -0.5)
    return moe.bfloat16()


@SEEDS
@SIGNS
@pytest.mark.parametrize("is_replayed", [False, True], ids=["own", "replayed"])
def test_an_moe_layer(is_replayed: bool, sign: str, seed: int) -> None:
    torch.manual_seed(seed)
    moe, num_tokens = make_moe(), 600
    weights = moe_weights(moe)
    (x, *_), exact = leaves(normal(num_tokens, FACTS.hidden_size), *weights)
    grad = factors(num_tokens * FACTS.hidden_size, sign).view(num_tokens, -1).bfloat16()
    if is_replayed:
        ids_LK = torch.stack([torch.randperm(16)[:8] for _ in range(num_tokens)])
        with moe.router.replay(ids_LK[None]):
            out = moe(x[None])[0]
    else:
        ids_LK = moe.router(x[None])[1][0]
        out = moe(x[None])[0]
    right = exact_moe(*exact, ids_LK)
    assert error(out, right) < 0.006
    bounds = [0.006, 0.008, 0.006, 0.006, 0.006]
    assert_gradients(out, [x, *weights], right, exact, grad, bounds=bounds)


@SEEDS
def test_a_routers_scores(seed: int) -> None:
    """Scores are in float32, as is all between the gate's input and them."""
    torch.manual_seed(seed)
    router = make_moe().router
    (x, _), exact = leaves(normal(500, FACTS.hidden_size, scale=3.0), router.gate.weight)
    scores_BLK, ids_BLK, _ = router(x[None])
    right_LK = (exact[0] @ exact[1].T).softmax(-1).gather(-1, ids_BLK[0])
    right_LK = right_LK / right_LK.sum(-1, keepdim=True)
    torch.testing.assert_close(scores_BLK[0].double(), right_LK, rtol=1e-5, atol=1e-6)
    grad_LK = torch.randn(500, 8)
    assert_gradients(scores_BLK[0], (x, router.gate.weight), right_LK, exact, grad_LK, bounds=[0.003] * 2)


# Adapters


@SEEDS
@SIGNS
def test_adapters_of_a_linear_layer(sign: str, seed: int) -> None:
    torch.manual_seed(seed)
    converter = LoRAConverter.Config(rank=5, alpha=10.0, target_modules=["linear"]).build()
    linear = converter._make_lora_config(Linear.Config(in_features=96, out_features=64, param_init={}))
    layer = linear.build().bfloat16()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(std=parameter.shape[-1] ** -0.5)
    weights = [layer.lora_a.weight, layer.lora_b.weight]
    (x, *_), (x64, a64, b64) = leaves(normal(1500, 96), *weights)
    grad = factors(1500 * 64, sign).view(1500, 64).bfloat16()
    right = x64 @ layer.weight.double().T + 2.0 * (x64 @ a64.T) @ b64.T
    assert_gradients(layer(x), [x, *weights], right, (x64, a64, b64), grad, bounds=[0.006] * 3)


@SEEDS
@SIGNS
def test_adapters_of_experts(sign: str, seed: int) -> None:
    torch.manual_seed(seed)
    sizes = {"w1_EFD": (64, 32), "w3_EFD": (64, 32), "w2_EDF": (32, 64)}
    experts = LoraExperts.Config(
        dim=64,
        hidden_dim=32,
        num_experts=4,
        adapters={
            name: GroupedAdapter.Config(num_experts=4, in_features=i, out_features=o, rank=3, param_init={})
            for name, (i, o) in sizes.items()
        },
        scaling=2.0,
        param_init={},
    ).build()
    experts = experts.bfloat16()
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.normal_(std=parameter.shape[-1] ** -0.5)
    counts = [900, 0, 7, 400]
    parameters = dict(experts.named_parameters())
    (x, *_), exact = leaves(normal(sum(counts), 64), *parameters.values())
    x64, by_name = exact[0], dict(zip(parameters, exact[1:], strict=True))

    def matrix(name: str, expert: int) -> torch.Tensor:
        a, b = (by_name[f"adapters.{name}.lora_{side}"][expert] for side in ("a_ErI", "b_EOr"))
        return by_name[name][expert] + 2.0 * b @ a

    parts = []
    for expert, part in enumerate(x64.split(counts)):
        w1, w3, w2 = (matrix(name, expert) for name in sizes)
        parts.append((F.silu(part @ w1.T) * (part @ w3.T)) @ w2.T)
    right = torch.cat(parts)
    grad = factors(right.numel(), sign).view_as(right).bfloat16()
    out = experts(x, torch.tensor(counts))
    assert error(out, right) < 0.008
    assert_gradients(out, [x, *parameters.values()], right, exact, grad, bounds=[0.01] * len(exact))


# Attention, norms, embedding


@SIGNS
@pytest.mark.parametrize(
    ("lengths", "num_heads", "num_kv_heads"),
    [([1200], 8, 1), ([900, 3, 300, 290], 4, 2), ([1, 700, 17], 2, 2)],
    ids=str,
)
def test_attention_over_packed_sequences(
    lengths: list[int], num_heads: int, num_kv_heads: int, sign: str
) -> None:
    torch.manual_seed(0)
    length, size = sum(lengths), 32
    ours, exact = leaves(*(normal(length, heads, size) for heads in (num_heads, num_kv_heads, num_kv_heads)))
    positions_L = torch.cat([torch.arange(one) for one in lengths])
    grad = factors(length * num_heads * size, sign).view(length, num_heads, size).bfloat16()
    masks = packed_sequences(torch.tensor(lengths).cumsum(0).repeat_interleave(torch.tensor(lengths)))
    out = PackedAttention.Config().build()(*(x[None] for x in ours), attention_masks=masks)[0]
    right = masked_attention([x[None] for x in exact], positions_L[None])[0]
    assert error(out, right) < 0.004
    assert_gradients(out, ours, right, exact, grad, bounds=[0.003] * 3)


@SEEDS
@SIGNS
@pytest.mark.parametrize("num_tokens", [1, 40, 4000])
def test_norms(num_tokens: int, sign: str, seed: int) -> None:
    torch.manual_seed(seed)
    norm = CpuRMSNorm.Config(normalized_shape=128, eps=1e-6).build().bfloat16()
    with torch.no_grad():
        norm.weight.normal_()
    (x, _), exact = leaves(normal(num_tokens, 128), norm.weight)
    # With one sign all summands of the weight's gradient have it.
    grad = factors(num_tokens * 128, sign).view_as(x)
    grad = (grad * x.detach().sign() if sign == "one sign" else grad).bfloat16()
    right = exact[0] * (exact[0].square().mean(-1, keepdim=True) + 1e-6).rsqrt() * exact[1]
    out = norm(x)
    assert error(out, right) < 0.004
    assert_gradients(out, (x, norm.weight), right, exact, grad, bounds=[0.004] * 2)


@SEEDS
@SIGNS
def test_the_embedding(sign: str, seed: int) -> None:
    """Tokens that come up once and one that comes up in half of all places."""
    torch.manual_seed(seed)
    embedding = titan_config(FACTS).tok_embeddings.build().bfloat16()
    ids = torch.randint(FACTS.vocab_size, (2, 1500))
    ids[:, ::2] = 5
    grad = factors(3000 * FACTS.hidden_size, sign).view(2, 1500, -1).bfloat16()
    out = embedding(ids)
    assert torch.equal(out, embedding.weight[ids])
    (found,) = torch.autograd.grad(out, embedding.weight, grad)
    wanted = F.one_hot(ids.flatten(), FACTS.vocab_size).double().T @ grad.double().flatten(0, 1)
    assert error(found, wanted) < 0.003
    assert error(found[5], wanted[5]) < 0.003
