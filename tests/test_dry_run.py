"""The dry-run table: counted parameters, the mesh, memory and bounds; no GPU."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from forgeasync.config.load import load_config
from forgeasync.config.model_facts import SHIPPED_MODELS, ModelFacts, parse_model_facts, read_model_facts
from forgeasync.config.schema import RunConfig
from forgeasync.planning.memory import (
    count_parameters,
    generator_memory,
    generator_parameters_per_rank,
    staging_memory,
    trainer_memory,
    trainer_parameters_per_rank,
)
from forgeasync.planning.report import dry_run_report

CONFIG_FILE = Path(__file__).resolve().parents[1] / "configs" / "qwen3_30b_a3b.yaml"
SHAPE_FOLDER = SHIPPED_MODELS / "Qwen--Qwen3-30B-A3B"


@pytest.fixture(scope="module")
def facts() -> ModelFacts:
    return read_model_facts(str(SHAPE_FOLDER))


@pytest.fixture(scope="module")
def config() -> RunConfig:
    return load_config(CONFIG_FILE, [])


def tiny_facts(*, tied: bool) -> ModelFacts:
    raw = {
        "model_type": "qwen3_moe",
        "num_hidden_layers": 3,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "vocab_size": 64,
        "moe_intermediate_size": 32,
        "max_position_embeddings": 128,
        "tie_word_embeddings": tied,
        "norm_topk_prob": True,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6,
    }
    return parse_model_facts(raw, "tiny")


def parameters_by_hand(facts: ModelFacts) -> int:
    hidden, head = facts.hidden_size, facts.head_dim
    attention = 2 * hidden * facts.num_heads * head + 2 * hidden * facts.num_kv_heads * head + 2 * head
    experts = facts.num_experts * 3 * hidden * facts.expert_hidden_size
    layer = attention + experts + facts.num_experts * hidden + 2 * hidden
    vocabulary = facts.vocab_size * hidden * (1 if facts.tie_word_embeddings else 2)
    return facts.num_layers * layer + vocabulary + hidden


def render(config: RunConfig, facts: ModelFacts, shape_from: Path | None = None) -> str:
    console = Console(file=io.StringIO(), width=200)
    console.print(dry_run_report(config, facts, shape_from=shape_from))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_shipped_shape_is_torchtitans_30b(facts: ModelFacts) -> None:
    counts = count_parameters(facts)
    assert counts.total == parameters_by_hand(facts) == 30_532_122_624

    from torchtitan.models.qwen3 import qwen3_configs

    titan = qwen3_configs["30B-A3B"](attn_backend="flex")
    layer = titan.layers[0]
    assert len(titan.layers) == facts.num_layers
    assert (titan.dim, titan.vocab_size) == (facts.hidden_size, facts.vocab_size)
    assert layer.attention.rope.theta == facts.rope_theta
    assert layer.attention.rope.max_seq_len == facts.max_position_embeddings
    assert layer.moe.router.top_k == facts.top_k
    assert layer.moe.routed_experts.inner_experts.hidden_dim == facts.expert_hidden_size


@pytest.mark.parametrize("tied", [False, True])
def test_counts_of_a_tiny_model(tied: bool) -> None:
    facts = tiny_facts(tied=tied)
    counts = count_parameters(facts)
    assert counts.total == parameters_by_hand(facts)
    assert counts.experts == 3 * 8 * 3 * 64 * 32
    assert counts.vocabulary == 64 * 64
    assert counts.replicated == 3 * (2 * 32 + 2 * 64 + 8 * 64) + 64


def test_ranks_share_the_parameters(config: RunConfig, facts: ModelFacts) -> None:
    counts = count_parameters(facts)
    assert trainer_parameters_per_rank(config, counts) == -(-counts.total // 16)
    per_generator = generator_parameters_per_rank(config, counts)
    assert per_generator == (counts.experts + counts.split) // 2 + counts.replicated

    # Tensor parallelism leaves norms and gates whole; replicas share nothing.
    changes = ["trainer.parallel.tensor=2", "trainer.parallel.data_replicate=2"]
    changed = load_config(CONFIG_FILE, changes)
    expected = (counts.experts + counts.split) / 8 + counts.replicated / 4
    assert trainer_parameters_per_rank(changed, counts) == expected


def test_memory_follows_the_config(config: RunConfig, facts: ModelFacts) -> None:
    counts = count_parameters(facts)
    trainer = {item.name: item.num_bytes for item in trainer_memory(config, facts, counts)}
    owned = trainer_parameters_per_rank(config, counts)
    assert trainer["master weights"] == trainer["gradients"] == 4 * owned
    assert trainer["Adam state"] == 8 * owned
    # The output layer is the largest unit: 311M in bfloat16, twice.
    assert trainer["gathered weights"] == 2 * 151936 * 2048 * 2
    assert trainer["logits"] == 1024 * 151936 * 14

    activations = []
    for choice in ("full", "selective", "none"):
        changed = load_config(CONFIG_FILE, [f"trainer.activation_checkpointing={choice}"])
        items = {item.name: item.num_bytes for item in trainer_memory(changed, facts, counts)}
        activations.append(items["activations"])
    assert activations[0] < activations[1] < activations[2]

    assert "reference model" not in trainer
    penalty = "algorithm.kl={estimator: k3, coefficient: 0.01}"
    penalized = trainer_memory(load_config(CONFIG_FILE, [penalty]), facts, counts)
    assert {item.name: item.num_bytes for item in penalized}["reference model"] == 2 * owned
    adapters = "lora={rank: 8, alpha: 16, targets: [q_proj]}"
    adapted = trainer_memory(load_config(CONFIG_FILE, [penalty, adapters]), facts, counts)
    assert "reference model" not in {item.name for item in adapted}

    generator = {item.name: item.num_bytes for item in generator_memory(config, facts, counts)}
    assert generator["KV cache"] == 32 * 2**30
    assert generator["weights"] == 2 * generator_parameters_per_rank(config, counts)
    staging = {item.name: item.num_bytes for item in staging_memory(config, counts)}
    assert staging["staged weights"] == 2 * 2 * counts.total


def test_30b_plan_fits_80_gb_gpus(config: RunConfig, facts: ModelFacts) -> None:
    counts = count_parameters(facts)
    for items in (trainer_memory(config, facts, counts), generator_memory(config, facts, counts)):
        assert sum(item.num_bytes for item in items) < 0.9 * 80e9


def test_30b_table(config: RunConfig, facts: ModelFacts) -> None:
    text = render(config, facts, SHAPE_FOLDER / "config.json")
    rows = {}
    for line in text.splitlines():
        if line.startswith("│"):
            name, value, what = (cell.strip() for cell in line.strip("│").split("│"))
            rows[name] = (value, what)
    assert rows["GPUs, all"][0] == "32"
    assert rows["GPUs, trainer"][0] == "16"
    assert rows["GPUs, generators"] == ("16", "8 replicas x 2 tensor-parallel")
    degrees = {name: rows[name][0] for name in ("dp_replicate", "dp_shard", "tp", "cp", "ep")}
    assert degrees == {"dp_replicate": "1", "dp_shard": "16", "tp": "1", "cp": "1", "ep": "8"}
    shipped = "shape from configs/models/Qwen--Qwen3-30B-A3B/config.json"
    assert rows["model"] == ("Qwen/Qwen3-30B-A3B", shipped)
    assert rows["parameters"][0] == "30,532,122,624"
    assert rows["active per token"][0] == "3,353,032,704"
    assert rows["tokens per step"][0] == "<= 5,242,880"
    assert rows["rows per step"] == ("<= 512", "of 10,240 tokens; 32 a data-parallel rank")
    assert rows["max_off_policy_steps"][0] == "4"
    assert rows["groups outstanding"][0] == "<= 160"
    assert rows["trainer rank: total"][0].endswith("GiB")


def test_synchronous_run_says_so(facts: ModelFacts) -> None:
    config = load_config(CONFIG_FILE, ["max_off_policy_steps=0"])
    assert "strictly synchronous" in render(config, facts)
