"""The dry-run table: counted parameters, the mesh, memory, times and bounds; no GPU."""

import io
import json
import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table

from forgeasync.config import ModelFacts, RunConfig, load_config
from forgeasync.controller import check_plan
from forgeasync.models import SHIPPED_MODELS, read_model_facts
from forgeasync.planning import (
    Machine,
    TimeTerm,
    TrainerMemory,
    count_parameters,
    dry_run_report,
    generator_memory,
    generator_parameters_per_rank,
    memory_plan,
    trainer_memory,
    trainer_parameters_per_rank,
    weight_times,
)
from forgeasync.schema import ConfigError
from forgeasync.trainer import build_meta_model
from tests.support.chat import PICKY, make_tokenizer
from tests.support.config_samples import CONFIGS, HF_CONFIG, SMOLLM2, minimal_config

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
    ("name", "num_parameters"),
    [
        ("Qwen--Qwen3-30B-A3B", 30_532_122_624),
        ("Qwen--Qwen3-235B-A22B", 235_093_634_560),
        ("Qwen--Qwen3-8B", 8_190_735_360),
        ("Qwen--Qwen3-32B", 32_762_123_264),
        ("Qwen--Qwen3.5-35B-A3B", 34_660_610_688),
    ],
)
def test_parameters_of_shipped_shapes(name: str, num_parameters: int) -> None:
    facts = read_model_facts(str(SHIPPED_MODELS / name))
    assert count_parameters(facts).total == num_parameters
    model = build_meta_model(facts)
    assert sum(parameter.numel() for parameter in model.parameters()) == num_parameters


def test_states_take_their_part_of_the_cache() -> None:
    """Of 30 layers, twice, in float32: a matrix for each of 32 heads, and three inputs of the convolution."""
    config = load_config(CONFIGS / "qwen3_5_35b_a3b.yaml")
    state = 2 * 30 * 4 * (32 * 128 * 128 + 3 * (2 * 16 + 32) * 128)
    num_seqs, of_token = config.generator.max_num_seqs, 2 * 10 * 2 * 256 * 2
    held = (config.generator.kv_cache_gib * 2**30 - num_seqs * state) // of_token
    text = render(config, read_model_facts(str(SHIPPED_MODELS / "Qwen--Qwen3.5-35B-A3B")))
    assert f"{held:,.0f}" in text and f"beside {num_seqs * state / 2**30:.3g} GiB of states" in text


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


def test_the_dry_run_prints_the_memory_plan(config: RunConfig, facts: ModelFacts) -> None:
    text = render(config, facts)
    for section in memory_plan(config, facts):
        for item in section.items:
            (line,) = (one for one in text.splitlines() if f" {section.owner}: {item.name} " in one)
            assert item.how in line


def test_30b_table(config: RunConfig, facts: ModelFacts) -> None:
    text = render(config, facts, SHAPE_FOLDER / "config.json")
    rows = {}
    for line in text.splitlines():
        if line.startswith("│"):
            name, value, what = (cell.strip() for cell in line.strip("│").split("│"))
            rows[name] = (value, what)
    assert rows["GPUs, all"][0] == "32"
    assert rows["GPUs, trainer"][0] == "16"
    assert rows["GPUs, generators"] == ("16", "num_replicas 8 x tensor_parallel 2")
    sizes = "dp_replicate x dp_shard x cp x tp; ep 8, each expert then sharded over 2"
    assert rows["trainer mesh"] == ("1 x 16 x 1 x 1", sizes)
    shipped = "shape from configs/models/Qwen--Qwen3-30B-A3B/config.json"
    assert rows["model"] == ("Qwen/Qwen3-30B-A3B", shipped)
    assert rows["parameters"][0] == "30,532,122,624"
    assert rows["active per token"][0] == "3,353,032,704"
    assert rows["tokens per step"][0] == "<= 8,388,608"
    assert rows["rows per step"] == ("<= 256", "of 32,768 tokens; 16 a data-parallel rank")
    assert rows["groups outstanding"][0] == "<= 144"
    assert rows["trainer rank: total"][0].endswith("GiB")


def test_shared_prompts_are_counted_once() -> None:
    """24 groups of 8 sequences of 32 + 128 tokens; two groups fit in a row."""
    overrides = ["trainer.parallel={num_procs: 1, expert: 1}"]

    def row(name: str, *more: str) -> list[str]:
        text = render(load_config(CONFIGS / "tiny_moe_cpu.yaml", [*overrides, *more]), SMOLLM2)
        return [cell.strip() for line in text.splitlines() if f" {name} " in line for cell in line.split("│")]

    num = 24 * (32 + 8 * 128)
    what = "82.5% of these: a row has a prompt of 32 tokens once (trainer.share_prefixes)"
    assert row("computed tokens")[2:4] == [f"<= {num:,}", what]
    assert row("rows per step")[2] == "<= 12"
    assert row("computed tokens", "trainer.share_prefixes=false") == []
    assert row("rows per step", "trainer.share_prefixes=false")[2] == f"<= {-(-192 // (3072 // 160))}"
    assert row("computed tokens", "environment={kind: python_tool}")[2] == f"<= {192 * 160:,}"
    # Layers with windows share none.
    windows = load_config(CONFIGS / "tiny_moe_cpu.yaml", overrides)
    assert "share_prefixes" not in render(windows, replace(SMOLLM2, window=128))


def test_keys_of_shared_prompts_take_memory_on_gpus(facts: ModelFacts) -> None:
    """Of 16 sequences in a row of 64 Ki tokens: with one prompt, which is computed once."""
    config = ["sampling.max_response_tokens=2048", "trainer.tokens_per_row=65536"]

    def added(machine: Machine, *more: str) -> float:
        with_and_without = (
            trainer_memory(
                load_config(CONFIG_FILE, [*config, *more, f"trainer.share_prefixes={share}"]),
                facts,
                count_parameters(facts),
                machine,
            )
            for share in ("true", "false")
        )
        shared, separate = (sizes(memory.come_and_go)["activations"] for memory in with_and_without)
        return shared - separate

    of_layer = 16 * 30_720 * 2 * facts.num_kv_heads * facts.head_dim * 2
    assert added(Machine.GPU) == of_layer
    assert added(Machine.GPU, "trainer.activation_checkpointing=none") == facts.num_layers * of_layer
    assert added(Machine.CPU) == 0


EPISODES = "episodes={num_workers: 3, max_live_per_worker: 32}; sandbox={kind: bubblewrap, memory_mib: 512}"
SERVERS = "{a: {kind: stdio, command: [x]}, b: {kind: http, url: 'http://h'}}"


CODING = f"environment={{kind: coding}}; {EPISODES}"
MCP = f"environment={{kind: mcp, servers: {SERVERS}}}; {EPISODES}"
RATE = "max_steps=400; trainer.optimizer"


@pytest.mark.parametrize(
    ("overrides", "row"),
    [
        (CODING, r"CPU processes +│ +6 │ controller, scorer, buffer, 3 environment workers"),
        (CODING, r"sandboxes +│ +1 │ for every live episode; sandbox.kind bubblewrap, up to 512 MiB"),
        (CODING, r"live episodes +│ +<= 96 │ coding; 3 workers x episodes.max_live_per_worker"),
        (MCP, r"MCP servers +│ +2 │ for every live episode; started 1, reached over HTTP 1"),
        (f"{RATE}.warmup_steps=0", r"learning rate +│.*from step 1 on, of 400"),
        (f"{RATE}.decay_steps=[200, 500]", r"learning rate +│.*falls to 0 from step 200 to 500"),
        (f"{RATE}.warmup_steps=401", r"learning rate +│.*never reached: of 401 warm-up steps .* 400"),
    ],
)
def test_the_plan_says_what_follows_from_the_config(facts: ModelFacts, overrides: str, row: str) -> None:
    text = render(load_config(CONFIG_FILE, overrides.split("; ")), facts)
    assert re.search(row, text), text


def test_hosts_that_no_launcher_names_are_assumed() -> None:
    config = load_config(CONFIGS / "qwen3_235b_a22b.yaml")
    text = render(config, read_model_facts(config.model.path))
    assert re.search(r"hosts, trainer +│ +8 │ assumed, of 8 GPUs; 8 processes each", text), text
    assert re.search(r"hosts, generators +│ +16 │ assumed, of 8 GPUs; 1 replicas of 8 each", text)
    assert "configs/launchers/ssh.yaml" in text


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
    paths = [f"model.path={tmp_path / 'model'}", f"run_dir={tmp_path / 'run'}"]
    overrides = [*paths, "data.chat_template=true"]
    check_plan(minimal_config(*overrides))
    with pytest.raises(ConfigError) as refused:
        check_plan(minimal_config(*overrides, override))
    assert words in str(refused.value)


# --- times of a version ---

VERSION = 30_532_122_624 * 2
"""Bytes of Qwen3-30B-A3B in bfloat16, by the size that its model card gives: 30.5 billion parameters."""


def terms(*overrides: str) -> dict[str, TimeTerm]:
    config = load_config(["configs/qwen3_30b_a3b.yaml"], list(overrides))
    return {term.name: term for term in weight_times(config, read_model_facts(config.model.path))}


HOSTS = (
    "trainer.parallel.num_procs=16",
    "generator.num_replicas=8",
    "generator.tensor_parallel=2",
    "launcher.kind=process",
    "launcher.hosts.trainer=2",
    "launcher.hosts.generators=2",
)


def test_a_version_crosses_the_network_once_for_each_generator_host() -> None:
    found = terms(*HOSTS)
    assert found["publish: copy"].seconds == pytest.approx(VERSION / 16 / 50e9, rel=0.01)
    # Two hosts receive all of it; two send half of it to each of them.
    assert found["fetch: network"].seconds == pytest.approx(VERSION / 50e9, rel=0.01)
    (lonely,) = [terms(*HOSTS, "launcher.hosts.trainer=1")["fetch: network"]]
    assert lonely.seconds == pytest.approx(2 * VERSION / 50e9, rel=0.01)
    assert "out of a trainer host" in lonely.how
    # Four replicas a host share the checking.
    assert found["fetch: checksums"].seconds == pytest.approx(VERSION / 4 / 15e9, rel=0.01)


def test_with_a_delta_the_changed_elements_cross_the_network() -> None:
    whole, delta = terms(*HOSTS), terms(*HOSTS, "weights.delta=exact")
    ratio = delta["fetch: network"].seconds / whole["fetch: network"].seconds
    assert ratio == pytest.approx(0.02)
    assert "2% of a version's" in delta["fetch: network"].how
    assert delta["publish: patches"].seconds == pytest.approx(VERSION / 16 / 2.5e9, rel=0.01)
    assert delta["fetch: checksums"] == whole["fetch: checksums"], "every block is compared"


def test_pauses_by_route() -> None:
    found = terms(*HOSTS)
    per_gpu = VERSION / 2
    # Eight GPUs of a host together take more than the host's memory gives.
    assert found["pause, shadow: host"].seconds == pytest.approx(8 * per_gpu / 300e9, rel=0.01)
    assert "(weights.shadow)" in found["pause, shadow: host"].how
    assert found["pause, shadow: device"].seconds == pytest.approx(2 * per_gpu / 3.35e12, rel=0.01)
    # 48 layers of 128 experts of 3 matrices, 4 of attention, a router and 4 norms, embedding, head, norm.
    assert found["pause, reloading"].seconds == pytest.approx(2 * (48 * (128 * 3 + 9) + 3) * 0.0005)
    device = terms(*HOSTS, "weights.shadow=device")
    assert "(weights.shadow)" in device["pause, shadow: device"].how
    assert device["stage"].seconds > 4 * found["stage"].seconds, "each replica stages all of it"


def test_adapters_that_are_served_have_no_swap_in_the_model() -> None:
    found = terms(*HOSTS, "lora.rank=16", "lora.alpha=32", "lora.targets=[q_proj]")
    assert set(found) == {"publish: copy", "publish: checksums", "fetch: network", "fetch: checksums"}
    assert found["fetch: network"].seconds < 0.1
