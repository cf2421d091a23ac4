"""A small valid run, a small model and its config.json, for the tests of forgeasync.config."""

from pathlib import Path

from forgeasync.config import ModelFacts, NamedSource, PythonSource, RewardSection, RunConfig, load_config
from forgeasync.schema import Problem

CONFIGS = Path(__file__).resolve().parents[2] / "configs"

MINIMAL_FILE = Path(__file__).with_name("minimal.yaml")
"""A small valid run. Its model is nowhere."""
MINIMAL = MINIMAL_FILE.read_text()

WARMUP = (
    "warmup={shape: {num_layers: 1, hidden_size: 64, num_heads: 2, num_kv_heads: 1, head_dim: 32, "
    "num_experts: 4, top_k: 2, expert_hidden_size: 32}, num_steps: 1, examples_per_step: 1, "
    "optimizer: {learning_rate: 1e-3}}"
)

FACTS = ModelFacts(
    model_type="qwen3_moe",
    num_layers=2,
    hidden_size=64,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    num_experts=8,
    top_k=2,
    vocab_size=100,
    expert_hidden_size=96,
    max_position_embeddings=256,
    tie_word_embeddings=False,
    rope_theta=10000.0,
    rms_norm_eps=1e-6,
)

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

HF_CONFIG: dict[str, object] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 100,
    "moe_intermediate_size": 96,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "norm_topk_prob": True,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
}


SMALL_RUN = (
    "data.num_train=64",
    "data.source.options={min_terms: 2, max_terms: 4, min_digits: 1, max_digits: 1}",
    "algorithm.group_size=4",
    "algorithm.groups_per_step=2",
    "sampling.max_response_tokens=16",
    "generator.kv_cache_gib=0.05",
    "trainer.parallel={num_procs: 1, expert: 1}",
    "trainer.tokens_per_row=512",
)
"""Overrides that make a shipped CPU config small enough for a test."""


def minimal_config(*overrides: str) -> RunConfig:
    return load_config(MINIMAL_FILE, overrides)


def source_with(*rewards: RewardSection, name: str = "s") -> NamedSource:
    """A source of three problems of a test's own, with these rewards."""
    return NamedSource(
        name=name,
        source=PythonSource(factory="tests.support.own_rewards.three"),
        weight=1.0,
        rewards=rewards,
        num_train=1,
        num_held_out=1,
        field="data.source",
        reward_field="data.reward",
        num_held_out_field="data.num_held_out",
    )


def only(problems: list[Problem]) -> str:
    """The text of the one problem there is."""
    assert len(problems) == 1, "\n".join(map(str, problems))
    return str(problems[0])
