"""The replay router against TorchTitan's own, and the formula of an MoE layer, evaluated densely."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from forgeasync.config import BiasedRouting, LatentAttention
from forgeasync.rollouts import NO_RECORD
from forgeasync.trainer import ReplayRouter, replay, replay_routers, titan_config
from tests.support.references import FACTS, exact_moe, make_moe, moe_weights, random_ids


def run(router: ReplayRouter, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Scores and ids of the chosen experts, and the gate's gradient of a fixed function of the scores."""
    scores, ids, _ = router(x)
    by_expert = torch.zeros(*x.shape[:2], FACTS.num_experts).scatter(-1, ids, scores)
    weights = torch.linspace(-1, 1, by_expert.numel()).view_as(by_expert)
    (gradient,) = torch.autograd.grad((by_expert * weights).sum(), router.gate.weight)
    return by_expert.detach(), ids, gradient


def test_own_choices_in_any_order_change_no_bit() -> None:
    router = make_moe().router
    x = torch.randn(2, 50, FACTS.hidden_size)
    scores, ids, gradient = run(router, x)
    for order in ([0, 1, 2], [2, 0, 1], [1, 2, 0]):
        with router.replay(ids[..., order].to(torch.uint8).to(torch.int16)):
            replayed_scores, replayed_ids, replayed_gradient = run(router, x)
        assert torch.equal(replayed_ids, ids[..., order])
        assert torch.equal(replayed_scores, scores) and torch.equal(replayed_gradient, gradient)
        assert router.replay_counts.tolist() == [100, 0]


def test_recorded_tokens_take_their_experts_and_the_others_choose() -> None:
    router = make_moe().router
    x = torch.randn(2, 50, FACTS.hidden_size)
    own_scores, own_ids, _ = router(x)
    forced = random_ids(2, 50)
    forced[0, :10] = NO_RECORD
    forced[1, 7, 1] = NO_RECORD
    with router.replay(forced):
        scores, ids, _ = router(x)
    has_record = (forced >= 0).all(-1)
    assert torch.equal(ids[has_record], forced[has_record])
    assert torch.equal(ids[~has_record], own_ids[~has_record])
    assert torch.equal(scores[~has_record], own_scores[~has_record])
    probabilities = F.softmax(router.gate(x).double(), -1).gather(-1, ids)
    expected = probabilities / probabilities.sum(-1, keepdim=True)
    torch.testing.assert_close(scores.double(), expected, atol=1e-6, rtol=1e-5)
    same = (forced.sort(-1).values == own_ids.sort(-1).values).all(-1)
    assert router.replay_counts.tolist() == [89, int((has_record & ~same).sum())]


@pytest.mark.parametrize("scale", [1.0, 6.0, 30.0])
@pytest.mark.parametrize("own_choice", [True, False], ids=["own", "other"])
def test_a_layer_with_replay_on_large_inputs(scale: float, own_choice: bool) -> None:
    """Other experts than the router's own can have scores of exactly 0 in float32."""
    moe = make_moe()
    torch.manual_seed(1)
    x_BLD = (torch.randn(1, 40, FACTS.hidden_size) * scale).requires_grad_()
    ids_BLK = moe.router(x_BLD)[1] if own_choice else random_ids(1, 40)
    with moe.router.replay(ids_BLK):
        out_BLD = moe(x_BLD)
    grad_BLD = torch.randn(out_BLD.shape)
    inputs = [x_BLD, *moe_weights(moe)]
    ours = (out_BLD[0], *torch.autograd.grad(out_BLD, inputs, grad_BLD))
    x_LD, *weights = (tensor.double() for tensor in (x_BLD[0], *inputs[1:]))
    exact_LD = exact_moe(x_LD, *weights, ids_BLK[0])
    exact = (exact_LD, *torch.autograd.grad(exact_LD, inputs, grad_BLD[0].double()))
    for one, other in zip(ours, exact, strict=True):
        largest = other.abs().max().item()
        torch.testing.assert_close(one.double(), other.double(), atol=1e-5 * scale * largest, rtol=0)


def test_the_context_ends_with_an_error_too() -> None:
    router = make_moe().router
    x = torch.randn(1, 4, FACTS.hidden_size)
    before = router(x)
    with pytest.raises(KeyError), router.replay(random_ids(1, 4)):
        raise KeyError
    assert all(torch.equal(a, b) for a, b in zip(router(x), before, strict=True))


def test_every_layer_replays_its_own_ids() -> None:
    model = titan_config(FACTS).build()
    routers = replay_routers(model)
    assert len(routers) == FACTS.num_layers
    x = torch.randn(1, 6, FACTS.hidden_size)
    ids = random_ids(1, 6, FACTS.num_layers)
    with replay(routers, ids):
        for layer, router in enumerate(routers):
            assert torch.equal(router(x)[1], ids[:, :, layer])


def biased_router() -> ReplayRouter:
    facts = dataclasses.replace(
        FACTS,
        model_type="deepseek_v3",
        num_kv_heads=FACTS.num_heads,
        latent=LatentAttention(
            query_rank=0, kv_rank=16, nope_head_dim=16, rope_head_dim=16, value_head_dim=24
        ),
        routing=BiasedRouting(
            num_groups=4, num_limited_groups=2, normalizes=True, scale=2.5, num_shared_experts=1
        ),
    )
    torch.manual_seed(0)
    router = titan_config(facts).layers[0].moe.router.build()
    with torch.no_grad():
        router.gate.weight.normal_(std=0.3)
    return router


def test_a_bias_chooses_and_does_not_weigh() -> None:
    """Chosen and replayed experts weigh what their sigmoids say (DeepSeek-V3, 2024, equations 12 to 16)."""
    router, x = biased_router(), torch.randn(2, 50, FACTS.hidden_size)
    bias_E = torch.tensor([0.0, 0.0, 5.0, 5.0, 0.0, 0.0, 0.0, 5.0])
    sigmoids = torch.sigmoid(F.linear(x.double(), router.gate.weight.double()))
    scores, ids, _ = router(x, bias_E)
    # Of groups (0,1) (2,3) (4,5) (6,7) the second and the last are the best for every token.
    assert torch.equal(ids.sort(-1).values.unique(dim=1), torch.tensor([[[2, 3, 7]]] * 2))
    replayed_ids = random_ids(2, 50)
    with router.replay(replayed_ids):
        replayed_scores, _, _ = router(x, bias_E)
    for found, of in ((scores, ids), (replayed_scores, replayed_ids)):
        chosen = sigmoids.gather(-1, of)
        expected = 2.5 * chosen / chosen.sum(-1, keepdim=True)
        torch.testing.assert_close(found.double(), expected, atol=1e-6, rtol=1e-5)
    with router.replay(ids[..., [2, 0, 1]]):
        own_scores, _, _ = router(x, bias_E)
    assert torch.equal(own_scores, scores[..., [2, 0, 1]])
    (gradient,) = torch.autograd.grad(replayed_scores.square().sum(), router.gate.weight)
    assert gradient.abs().max() > 1e-3


def test_counted_tokens_are_counted_by_the_experts_they_take() -> None:
    router, x = biased_router(), torch.randn(2, 50, FACTS.hidden_size)
    ids, is_counted = random_ids(2, 50), torch.rand(2, 50) < 0.6
    ids[:, :5] = NO_RECORD
    with router.replay(ids, is_counted):
        _, taken, _ = router(x)
    expected = torch.bincount(taken[is_counted].flatten(), minlength=FACTS.num_experts)
    assert torch.equal(router.expert_counts_E, expected)
