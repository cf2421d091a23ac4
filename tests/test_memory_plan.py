"""The memory plan of a trainer against what its ranks allocate, item by item and in sum."""

import dataclasses

import pytest

from forgeasync.config.load import load_config
from forgeasync.config.model_facts import ModelFacts
from forgeasync.config.schema import RunConfig
from forgeasync.planning.memory.items import Machine, total_bytes
from forgeasync.planning.memory.moments import step_moments
from forgeasync.planning.memory.parameters import count_parameters
from forgeasync.planning.memory.trainer import trainer_memory
from forgeasync.trainer.model import build_meta_model
from tests.config_samples import CONFIGS, FACTS
from tests.support.measured_memory import Case, Measured, measure_all
from tests.support.processes import run_ranks

TOLERANCE = 0.1

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

SMOLLM2 = ModelFacts(
    model_type="llama",
    num_layers=30,
    hidden_size=576,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    num_experts=0,
    top_k=0,
    vocab_size=49152,
    expert_hidden_size=0,
    max_position_embeddings=8192,
    tie_word_embeddings=True,
    rope_theta=100000.0,
    rms_norm_eps=1e-5,
    num_dense_layers=30,
    dense_hidden_size=1536,
)
"""SmolLM2-135M."""


def _case(name: str, facts: ModelFacts, *, length: int, tokens: int, changes: tuple[str, ...] = ()) -> Case:
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
    return Case(name=name, config=config, facts=facts)


def _cases(num_procs: int) -> list[Case]:
    tiny = [f"trainer.parallel={{num_procs: {num_procs}, expert: {num_procs}}}"]
    smollm2 = [f"trainer.parallel={{num_procs: {num_procs}}}"]
    cases = [
        _case(
            f"tiny_{choice}",
            TINY,
            length=160,
            tokens=1920,
            changes=(*tiny, f"trainer.activation_checkpointing={choice}"),
        )
        for choice in ("none", "selective", "full")
    ]
    choices = ("none", "selective", "full") if num_procs == 1 else ("none",)
    return cases + [
        _case(
            f"smollm2_{choice}",
            SMOLLM2,
            length=64,
            tokens=64,
            changes=(*smollm2, f"trainer.activation_checkpointing={choice}"),
        )
        for choice in choices
    ]


ALL = {f"{case.name}-{num_procs}": (case, num_procs) for num_procs in (1, 2) for case in _cases(num_procs)}


@pytest.fixture(scope="module")
def measured() -> dict[str, list[Measured]]:
    """By case and number of procs: every rank's."""
    found: dict[str, list[Measured]] = {}
    for num_procs in (1, 2):
        ranks = run_ranks(num_procs, measure_all, _cases(num_procs))
        found |= {f"{name}-{num_procs}": [rank[name] for rank in ranks] for name in ranks[0]}
    return found


def _plan(config: RunConfig, facts: ModelFacts) -> dict[str, int]:
    items = trainer_memory(config, facts, count_parameters(facts), Machine.CPU)
    return {item.name: item.num_bytes for item in items} | {"total": total_bytes(items)}


@pytest.mark.parametrize("name", ALL)
def test_a_trainer_rank_allocates_what_was_planned(name: str, measured: dict[str, list[Measured]]) -> None:
    case, _ = ALL[name]
    plan = _plan(case.config, case.facts)
    moments = step_moments(case.config, case.facts, count_parameters(case.facts), Machine.CPU)
    head = moments[0]
    for rank in measured[name]:
        assert plan["parameters"] == pytest.approx(rank.parameters, rel=TOLERANCE)
        assert plan["gradients"] == pytest.approx(rank.gradients, rel=TOLERANCE)
        assert plan["optimizer"] == pytest.approx(rank.optimizer, rel=TOLERANCE)
        come_and_go = plan["total"] - plan["parameters"] - plan["optimizer"]
        assert come_and_go == pytest.approx(rank.peak, rel=TOLERANCE), (head, rank)
        assert plan["total"] == pytest.approx(rank.parameters + rank.optimizer + rank.peak, rel=TOLERANCE)
