"""The dry-run table: counted parameters, the mesh, memory and bounds; no GPU."""

import io
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table

from forgeasync.config import ModelFacts, RunConfig, load_config
from forgeasync.controller import check_plan
from forgeasync.models import SHIPPED_MODELS, check_config, parse_model_facts, read_model_facts
from forgeasync.planning import (
    Machine,
    TrainerMemory,
    count_parameters,
    dry_run_report,
    generator_memory,
    generator_parameters_per_rank,
    host_memory,
    memory_plan,
    memory_table,
    trainer_memory,
    trainer_parameters_per_rank,
)
from forgeasync.schema import ConfigError
from tests.support.chat import PICKY, make_tokenizer
from tests.support.config_samples import CONFIGS, HF_CONFIG, SMOLLM2, minimal_config

PLANNED = {"qwen3_30b_a3b": "Qwen--Qwen3-30B-A3B", "qwen3_32b": "Qwen--Qwen3-32B"}
"""Configs of published models, and the folders of their shapes."""

CONFIG_FILE = CONFIGS / "qwen3_30b_a3b.yaml"
SHAPE_FOLDER = SHIPPED_MODELS / "Qwen--Qwen3-30B-A3B"


@pytest.fixture(scope="module")
def facts() -> ModelFacts:
    return read_model_facts(str(SHAPE_FOLDER))


@pytest.fixture(scope="module")
def config() -> RunConfig:
    return load_config(CONFIG_FILE, [])


def render(config: RunConfig, facts: ModelFacts, shape_from: Path | None = None) -> str:
    return shown(dry_run_report(config, facts, shape_from=shape_from))


def shown(table: Table) -> str:
    console = Console(file=io.StringIO(), width=200)
    console.print(table)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize(
    ("name", "flavor", "num_parameters"),
    [
        ("Qwen--Qwen3-30B-A3B", "30B-A3B", 30_532_122_624),
        ("Qwen--Qwen3-235B-A22B", "235B-A22B", 235_093_634_560),
        ("Qwen--Qwen3-8B", "8B", 8_190_735_360),
        ("Qwen--Qwen3-32B", "32B", 32_762_123_264),
    ],
)
def test_shipped_shapes_are_torchtitans(name: str, flavor: str, num_parameters: int) -> None:
    facts = read_model_facts(str(SHIPPED_MODELS / name))
    assert count_parameters(facts).total == num_parameters

    from torchtitan.models.qwen3 import qwen3_configs

    titan = qwen3_configs[flavor](attn_backend="flex")
    layer = titan.layers[0]
    assert len(titan.layers) == facts.num_layers
    assert (titan.dim, titan.vocab_size) == (facts.hidden_size, facts.vocab_size)
    attention = layer.attention
    assert (attention.n_heads, attention.qkv_linear.n_kv_heads) == (facts.num_heads, facts.num_kv_heads)
    # Of 235B-A22B it has the base of the release of July 2025; max_position_embeddings are the first one's.
    theta = facts.rope_theta * (5 if flavor == "235B-A22B" else 1)
    assert attention.rope.theta == theta
    assert attention.rope.max_seq_len == facts.max_position_embeddings
    if not facts.num_experts:
        assert layer.feed_forward.w1.out_features == facts.dense_hidden_size
        return
    assert layer.moe.router.top_k == facts.top_k
    assert layer.moe.num_experts == facts.num_experts
    assert layer.moe.routed_experts.inner_experts.hidden_dim == facts.expert_hidden_size


@pytest.mark.parametrize("tied", [False, True])
def test_counts_of_a_tiny_model(tied: bool) -> None:
    sizes = {"num_hidden_layers": 3, "vocab_size": 64, "moe_intermediate_size": 32}
    facts = parse_model_facts(HF_CONFIG | sizes | {"tie_word_embeddings": tied}, "tiny")
    counts = count_parameters(facts)
    assert counts.experts == 3 * 8 * 3 * 64 * 32
    assert counts.vocabulary == 64 * 64 and counts.vocabulary_tensors == (1 if tied else 2)
    assert counts.replicated == 3 * (2 * 32 + 2 * 64 + 8 * 64) + 64


def test_ranks_share_the_parameters(config: RunConfig, facts: ModelFacts) -> None:
    counts = count_parameters(facts)
    assert trainer_parameters_per_rank(config, counts) == -(-counts.total // 16)
    per_generator = generator_parameters_per_rank(config, facts, counts)
    assert per_generator == (counts.experts + counts.split) // 2 + counts.replicated

    # Tensor parallelism leaves norms and gates whole; replicas share nothing.
    changes = ["trainer.parallel.tensor=2", "trainer.parallel.data_replicate=2"]
    changed = load_config(CONFIG_FILE, changes)
    expected = (counts.experts + counts.split) / 8 + counts.replicated / 4
    assert trainer_parameters_per_rank(changed, counts) == expected


def sizes(items: Iterable[Any]) -> dict[str, float]:
    return {item.name: item.num_bytes for item in items}


def test_memory_follows_the_config(config: RunConfig, facts: ModelFacts) -> None:
    counts = count_parameters(facts)

    def trainer(*changes: str) -> TrainerMemory:
        return trainer_memory(load_config(CONFIG_FILE, list(changes)), facts, counts, Machine.GPU)

    always = sizes(trainer().always)
    owned = trainer_parameters_per_rank(config, counts)
    assert always == {"parameters": 4 * owned, "gradients": 4 * owned, "optimizer": 8 * owned}
    come_and_go = sizes(trainer().come_and_go)
    # The output layer is the largest unit: 311M in bfloat16.
    assert come_and_go["gathered weights"] == 151936 * 2048 * 2
    assert come_and_go["logits chunk"] == 4 * 4 * 1024 * 151936

    offloaded = trainer("trainer.cpu_offload=true")
    assert {item.name: item.num_bytes for item in offloaded.always} == always
    assert all(item.how.startswith("in host memory: ") for item in offloaded.always)
    assert trainer().total_bytes - offloaded.total_bytes == sum(always.values())

    activations = []
    for choice in ("full", "selective", "none"):
        items = trainer(f"trainer.activation_checkpointing={choice}").come_and_go
        activations.append(sizes(items)["activations"])
    assert activations[0] < activations[1] < activations[2]

    generator = sizes(generator_memory(config, facts, counts, Machine.GPU))
    assert generator["KV cache"] == 36 * 2**30
    assert generator["weights"] == 2 * generator_parameters_per_rank(config, facts, counts)
    assert "shadow weights" not in generator
    host = sizes(host_memory(config, facts, Machine.GPU))
    assert host["staging buffers, all ranks"] == 2 * 2 * counts.total
    assert host["trainer snapshots, all ranks"] >= 2 * 12 * counts.total
    without = load_config(CONFIG_FILE, ["trainer.recovery.snapshot_every_steps=null"])
    assert "trainer snapshots, all ranks" not in sizes(host_memory(without, facts, Machine.GPU))
    small = load_config(CONFIG_FILE, ["payload.capacity_gib=2.5"])
    assert sizes(host_memory(small, facts, Machine.GPU))["payload store"] == 2.5 * 2**30


@pytest.mark.parametrize("name", PLANNED)
def test_the_dry_run_and_the_memory_command_print_the_same(name: str) -> None:
    config = load_config(CONFIGS / f"{name}.yaml", [f"model.path={SHIPPED_MODELS / PLANNED[name]}"])
    facts = read_model_facts(config.model.path)
    assert check_config(config, facts) == []
    tables = [shown(memory_table(config)), render(config, facts)]
    for section in memory_plan(config, facts):
        for item in section.items:
            rows = [
                [line for line in table.splitlines() if f" {section.owner}: {item.name} " in line]
                for table in tables
            ]
            cells = [[cell.strip() for cell in row.strip("│").split("│")] for (row,) in rows]
            assert cells[0] == cells[1] and cells[0][2] == item.how


def test_the_plan_of_a_model_without_experts() -> None:
    config = load_config(CONFIGS / "tiny_moe_cpu.yaml", ["trainer.parallel={num_procs: 1, expert: 1}"])
    text = render(config, SMOLLM2)
    assert "134,515,008" in text and "a dense model" in text
    assert "generator rank: shadow weights" in text, "a float32 plan is one for CPUs"


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
    assert rows["tokens per step"][0] == "<= 8,388,608"
    assert rows["rows per step"] == ("<= 256", "of 32,768 tokens; 16 a data-parallel rank")
    assert rows["max_off_policy_steps"][0] == "8"
    assert rows["groups outstanding"][0] == "<= 144"
    assert rows["trainer rank: total"][0].endswith("GiB")


EPISODES = "episodes={num_workers: 3, max_live_per_worker: 32}; sandbox={kind: bubblewrap, memory_mib: 512}"
SERVERS = "{a: {kind: stdio, command: [x]}, b: {kind: http, url: 'http://h'}}"


@pytest.mark.parametrize(
    ("name", "overrides", "rows"),
    [
        (
            "qwen3_30b_a3b",
            f"environment={{kind: coding}}; {EPISODES}",
            [
                r"CPU processes +│ +6 │ controller, scorer, buffer, 3 environment workers",
                r"boxes +│ +1 │ for every live episode; sandbox.kind bubblewrap, up to 512 MiB",
                r"live episodes +│ +<= 96 │ coding; 3 workers x episodes.max_live_per_worker",
            ],
        ),
        (
            "qwen3_30b_a3b",
            f"environment={{kind: mcp, servers: {SERVERS}}}; {EPISODES}",
            [r"MCP servers +│ +2 │ for every live episode; started 1, reached over HTTP 1"],
        ),
        *(
            ("qwen3_30b_a3b", f"max_steps=400; trainer.optimizer.{change}", [rf"│ learning rate +│.*{words}"])
            for change, words in (
                ("warmup_steps=0", "from step 1 on, of 400"),
                ("decay_steps=[200, 500]", "falls to 0 from step 200 to 500"),
                ("warmup_steps=401", "never reached: of 401 warm-up steps the run makes 400"),
            )
        ),
        *(
            ("qwen3_30b_a3b", overrides, [rf"sampling mask +│ +{words}"])
            for overrides, words in (
                ("seed=0", "not needed │ temperature 1, nothing is cut"),
                ("sampling.temperature=0.7", "not needed │ temperature 0.7, nothing is cut"),
                (
                    "sampling.top_p=0.9; sampling.top_k=50",
                    "recorded │ sampling.top_k = 50, sampling.top_p = 0.9",
                ),
                (
                    "sampling.min_p=0.1; trainer.keep_sampling_mask=false",
                    "not recorded │ sampling.min_p = 0.1, and trainer.keep_sampling_mask is false",
                ),
            )
        ),
        ("qwen3_30b_a3b", "max_off_policy_steps=0", ["strictly synchronous"]),
        *(
            (
                name,
                "seed=0",
                [
                    rf"hosts, trainer +│ +{num_trainer} │ assumed, of 8 GPUs; 8 processes each",
                    rf"hosts, generators +│ +{num_generators} │ assumed, of 8 GPUs; {replicas} each",
                    "configs/launchers/ssh.yaml",
                ],
            )
            for name, num_trainer, num_generators, replicas in (
                ("qwen3_235b_a22b", 8, 16, "1 replicas of 8"),
                ("qwen3_30b_a3b", 2, 2, "4 replicas of 2"),
                ("qwen3_32b", 2, 2, "2 replicas of 4"),
            )
        ),
    ],
)
def test_the_plan_says_what_follows_from_the_config(name: str, overrides: str, rows: list[str]) -> None:
    config = load_config(CONFIGS / f"{name}.yaml", overrides.split("; "))
    text = render(config, read_model_facts(config.model.path))
    for row in rows:
        assert re.search(row, text), text


def test_a_config_for_cpus_and_one_for_a_host_are_planned_on_this_machine(facts: ModelFacts) -> None:
    on_cpus = load_config(CONFIGS / "tiny_moe_cpu.yaml", ["generator.num_replicas=16"])
    one_host = load_config(CONFIGS / "qwen3_8b.yaml")
    assert "hosts, " not in render(on_cpus, facts)
    assert "hosts, " not in render(one_host, read_model_facts(one_host.model.path))


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("data.template_arguments={enable_thinking: true}", "data.template_arguments.enable_thinking = True"),
        ("data.system_prompt=Be brief.", "data.system_prompt = 'Be brief.'"),
    ],
)
def test_the_template_of_a_model_that_is_there_is_checked(tmp_path: Path, override: str, words: str) -> None:
    """Without starting the run: its tokenizer lies beside its config.json."""
    make_tokenizer(PICKY).save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text(json.dumps(HF_CONFIG | {"vocab_size": 128}))
    overrides = [
        f"model.path={tmp_path / 'model'}",
        f"run_dir={tmp_path / 'run'}",
        "data.chat_template=true",
    ]
    check_plan(minimal_config(*overrides))
    with pytest.raises(ConfigError) as refused:
        check_plan(minimal_config(*overrides, override))
    assert words in str(refused.value)
