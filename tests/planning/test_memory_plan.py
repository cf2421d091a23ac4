"""The memory plan of a trainer against what its ranks allocate, item by item and in sum."""

import dataclasses
import math

import pytest

from forgeasync.config import BiasedRouting, LatentAttention, ModelFacts, load_config
from forgeasync.models import num_adapter_parameters
from forgeasync.planning import Machine, count_parameters, host_memory, step_moments, trainer_memory
from forgeasync.trainer import build_meta_model
from tests.support.config_samples import CONFIGS, FACTS, SMOLLM2
from tests.support.measured_memory import Case, measure
from tests.support.processes import run_ranks

TOLERANCE = 0.1

DEEPSEEK = dataclasses.replace(
    FACTS,
    model_type="deepseek_v3",
    num_layers=3,
    num_dense_layers=1,
    dense_hidden_size=96,
    num_heads=4,
    num_kv_heads=4,
    head_dim=64,
    latent=LatentAttention(query_rank=48, kv_rank=32, nope_head_dim=32, rope_head_dim=32, value_head_dim=48),
    routing=BiasedRouting(
        num_groups=4, num_limited_groups=2, normalizes=True, scale=2.5, num_shared_experts=2
    ),
)

TINY = dataclasses.replace(
    FACTS,
    num_layers=4,
    hidden_size=128,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    num_experts=8,
    top_k=2,
    expert_hidden_size=128,
    vocab_size=32,
)
"""configs/tiny_moe_cpu.yaml's model."""


def _case(facts: ModelFacts, *changes: str, length: int = 160, tokens: int = 1920) -> Case:
    config = load_config(
        CONFIGS / "tiny_moe_cpu.yaml",
        [
            f"model.max_context_length={length}",
            f"sampling.max_response_tokens={length - 8}",
            f"trainer.tokens_per_row={tokens}",
            "trainer.replay_probe_share=0",
            *changes,
        ],
    )
    return Case(name=facts.model_type, config=config, facts=facts)


@pytest.mark.parametrize(
    ("facts", "num_procs", "checkpointing"),
    [
        *((TINY, num_procs, choice) for num_procs in (1, 2) for choice in ("none", "selective", "full")),
        # A step of 135M parameters takes its time.
        pytest.param(SMOLLM2, 1, "none", marks=pytest.mark.exhaustive),
        pytest.param(SMOLLM2, 2, "selective", marks=pytest.mark.exhaustive),
    ],
    ids=lambda value: value.model_type if isinstance(value, ModelFacts) else str(value),
)
def test_a_trainer_rank_allocates_what_was_planned(
    facts: ModelFacts, num_procs: int, checkpointing: str
) -> None:
    case = _case(
        facts,
        f"trainer.parallel={{num_procs: {num_procs}, expert: {num_procs if facts.num_experts else 1}}}",
        f"trainer.activation_checkpointing={checkpointing}",
        **({} if facts is TINY else {"length": 64, "tokens": 64}),
    )
    counts = count_parameters(facts)
    plan = trainer_memory(case.config, facts, counts, Machine.CPU)
    output_layer = step_moments(case.config, facts, counts, Machine.CPU)[0]
    planned = {item.name: item.num_bytes for item in plan.always} | {
        "kept": output_layer.activations + output_layer.gathered_weights,
        "peak": plan.fullest.total + sum(i.num_bytes for i in plan.always if i.name == "gradients"),
    }
    for rank in run_ranks(num_procs, measure, case):
        found = dataclasses.asdict(rank)
        assert planned.keys() == found.keys()
        wrong = {
            item: (round(planned[item]), found[item])
            for item in found
            if abs(planned[item] - found[item]) > TOLERANCE * found[item]
        }
        assert not wrong, f"(planned, allocated) bytes, fullest: {plan.fullest}"
        assert plan.total_bytes == pytest.approx(rank.parameters + rank.optimizer + rank.peak, rel=TOLERANCE)


@pytest.mark.parametrize("facts", [TINY, SMOLLM2, DEEPSEEK], ids=lambda facts: facts.model_type)
def test_parameters_are_those_that_torchtitan_builds(facts: ModelFacts) -> None:
    model = build_meta_model(facts)
    counts = count_parameters(facts)
    assert counts.total == sum(parameter.numel() for parameter in model.parameters())
    experts = [p.numel() for n, p in model.named_parameters() if ".inner_experts." in n]
    assert counts.experts == sum(experts)


def test_kept_sets_are_counted() -> None:
    """By hand: 1,024 tokens of 4 x float32 logits and a mask; then 2 x, and a block of gathered rows."""
    facts = dataclasses.replace(TINY, vocab_size=4096)
    logits = 1024 * 4096 * 4
    for cut, mask, block in (("sampling.top_k=20", logits / 4, 8 * 2**20), ("sampling.top_k=0", 0.0, 0.0)):
        changes = (cut, "sampling.top_p=1.0", "sampling.min_p=0.0")
        case = _case(facts, *changes)
        first, second, *_ = step_moments(case.config, facts, count_parameters(facts), Machine.CPU)
        assert (first.logits, second.logits) == (4 * logits + mask, 2 * logits + block)


def test_adapters_are_counted_and_the_base_model_is_frozen() -> None:
    """By hand: 4 layers, rank 8; q 128 -> 128, k 128 -> 64, and down projections of 8 experts, 128 -> 128."""
    lora = "lora={rank: 8, alpha: 16, targets: [q_proj, k_proj, down_proj]}"
    case = _case(TINY, lora, "trainer.parallel={num_procs: 2, expert: 1}")
    by_hand = 4 * 8 * ((128 + 128) + (128 + 64) + 8 * (128 + 128))
    assert num_adapter_parameters(TINY, case.config.lora) == by_hand
    counts = count_parameters(TINY)
    plan = trainer_memory(case.config, TINY, counts, Machine.CPU)
    always = {item.name: item.num_bytes for item in plan.always}
    assert always["parameters"] == 4 * math.ceil(counts.total / 2)
    assert always["adapters"] == always["gradients"] == always["optimizer"] / 2 == 4 * by_hand / 2
    # q, k and v are one parameter of vLLM's, so are gate and up: those two are left alone.
    merged = 4 * 4 * (128 * (128 + 2 * 64) + 8 * 128 * 128)
    host = {item.name: item.num_bytes for item in host_memory(case.config, TINY, Machine.CPU)}
    assert host["staging buffers, all ranks"] == 2 * 4 * by_hand
    assert host["merged weights, each replica"] == merged
    assert host["trainer snapshots, all ranks"] == 2 * 3 * 4 * by_hand
    served = host_memory(case.config, TINY, Machine.GPU)
    assert "merged weights, each replica" not in {item.name for item in served}


def test_a_penalty_on_moving_away_takes_a_second_model() -> None:
    kl = "algorithm.kl={estimator: k3, coefficient: 0.01}"
    case = _case(TINY, kl, "trainer.parallel={num_procs: 2, expert: 1}")
    plan = trainer_memory(case.config, TINY, count_parameters(TINY), Machine.CPU)
    always = {item.name: item.num_bytes for item in plan.always}
    assert always["reference model"] == always["parameters"]
