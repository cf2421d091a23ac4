"""The memory plan against what trainer ranks, engines, their files and payloads take."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GptOssConfig, Qwen3_5MoeTextConfig, Qwen3_5TextConfig

from forgeasync.config import BiasedRouting, LatentAttention, ModelFacts, RunConfig, load_config
from forgeasync.models import (
    SHIPPED_MODELS,
    largest_group_payload_bytes,
    num_adapter_parameters,
    parse_model_facts,
    read_model_facts,
)
from forgeasync.planning import (
    Machine,
    count_parameters,
    generator_memory,
    group_payload_bytes,
    host_memory,
    step_moments,
    trainer_memory,
)
from forgeasync.rollouts import (
    CaptureSpec,
    FinishReason,
    KeptTokens,
    PayloadWriter,
    Rollout,
    RoutedExperts,
    VersionSpan,
    encode_group,
)
from forgeasync.testing import write_tiny_model
from forgeasync.trainer import build_meta_model
from tests.support.config_samples import CONFIGS, FACTS, SMOLLM2
from tests.support.engines import start_engine
from tests.support.families import config_json, transformers_config
from tests.support.measured_memory import Case, measure
from tests.support.processes import run_alone, run_ranks
from tests.support.weight_service import FolderPublisher

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

GLM = dataclasses.replace(
    parse_model_facts(config_json("glm4_moe") | {"vocab_size": 32, "n_group": 1, "topk_group": 1}, "glm"),
    hidden_size=128,
    expert_hidden_size=128,
    dense_hidden_size=256,
)

GPT_OSS = dataclasses.replace(
    parse_model_facts(config_json("gpt_oss") | {"vocab_size": 32}, "gpt_oss"),
    hidden_size=128,
    expert_hidden_size=128,
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
        *((GLM, num_procs, choice) for num_procs, choice in ((1, "none"), (2, "selective"), (2, "full"))),
        *((GPT_OSS, num_procs, choice) for num_procs, choice in ((1, "none"), (2, "full"))),
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


@pytest.mark.parametrize("facts", [TINY, SMOLLM2, DEEPSEEK, GLM, GPT_OSS], ids=lambda facts: facts.model_type)
def test_parameters_are_those_that_torchtitan_builds(facts: ModelFacts) -> None:
    model = build_meta_model(facts)
    counts = count_parameters(facts)
    assert counts.total == sum(parameter.numel() for parameter in model.parameters())
    experts = [p.numel() for n, p in model.named_parameters() if ".inner_experts." in n]
    assert counts.experts == sum(experts)


KIMI_K2 = config_json("kimi_k2") | {
    "num_hidden_layers": 61,
    "hidden_size": 7168,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 384,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "intermediate_size": 18432,
    "vocab_size": 163840,
    "max_position_embeddings": 131072,
}


GLM_AIR = json.loads((SHIPPED_MODELS / "zai-org--GLM-4.5-Air" / "config.json").read_text())


GPT_OSS_120B, GPT_OSS_20B = (
    json.loads(GptOssConfig(num_hidden_layers=num_layers, num_local_experts=num_experts).to_json_string())
    | {"architectures": ["GptOssForCausalLM"]}
    for num_layers, num_experts in ((36, 128), (24, 32))
)


@pytest.mark.parametrize(
    ("raw", "billions"),
    [(KIMI_K2, 1026), (GLM_AIR, 106), (GPT_OSS_120B, 116), (GPT_OSS_20B, 20)],
    ids=["kimi_k2", "glm_air", "gpt_oss_120b", "gpt_oss_20b"],
)
def test_parameters_of_published_sizes_are_those_of_transformers(raw: dict[str, Any], billions: int) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(transformers_config(raw))
    counts = count_parameters(parse_model_facts(raw, "published"))
    assert counts.total == sum(parameter.numel() for parameter in model.parameters())
    assert counts.total // 10**9 == billions


PUBLISHED = {
    "qwen3_5": Qwen3_5TextConfig(),
    "qwen3_5_moe": Qwen3_5MoeTextConfig(num_hidden_layers=8, num_experts=64),
}
"""The defaults are the sizes of a published model, here with fewer layers and experts."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_of_qwen3_5_are_those_of_transformers(name: str) -> None:
    config = PUBLISHED[name]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    raw = json.loads(config.to_json_string()) | {"architectures": [type(model).__name__]}
    facts = parse_model_facts(raw, name)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    assert count_parameters(facts).total == num_parameters
    assert sum(parameter.numel() for parameter in build_meta_model(facts).parameters()) == num_parameters


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


def test_patches_take_a_quarter_more_of_the_buffers_of_weights() -> None:
    def host(*changes: str) -> dict[str, int]:
        config = _case(TINY, "trainer.parallel={num_procs: 2, expert: 1}", *changes).config
        return {item.name: item.num_bytes for item in host_memory(config, TINY, Machine.CPU)}

    whole, delta = host(), host("weights.delta=exact")
    for name in ("staging buffers, all ranks", "receive buffer, each host"):
        assert delta[name] == pytest.approx(1.25 * whole[name])
    archived = host("weights={delta: exact, archive: true}")
    assert archived["archive, all ranks"] == delta["staging buffers, all ranks"] // 2


# --- engines, their files and payloads ---


def small_engine(*changes: str) -> RunConfig:
    changes = ("generator.max_num_seqs=8", "generator.max_num_batched_tokens=256", *changes)
    return load_config(CONFIGS / "tiny_moe_cpu.yaml", list(changes))


def _worker_bytes(worker: Any) -> dict[str, int]:
    """By item of the plan; every storage counts once."""

    def total(tensors: list[torch.Tensor]) -> int:
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        return sum(storages.values())

    runner, weights = worker.model_runner, worker._weights
    return {
        "weights": total(list(runner.get_model().parameters())),
        "KV cache": total(list(runner.kv_caches)),
        "shadow weights": total([*weights._shadows.values(), weights._scratch]),
    }


async def _measure_engine(folder: Path, out: Path, config: RunConfig, facts: ModelFacts) -> dict[str, int]:
    """Bytes of an engine of one process, and of the files that bring it a version."""
    engine = await start_engine(
        folder,
        config.generator,
        config.weights,
        records=CaptureSpec(routing=facts.num_experts > 0, kept_tokens=False),
    )
    try:
        publisher = FolderPublisher(folder, out)
        receive_buffer = out / "receive-buffer"
        receiver = await publisher.connect(engine, receive_buffer)
        await receiver.begin(publisher.stage(1, 1, load_file(folder / "model.safetensors")))
        await receiver.stage()
        await receiver.finish()
        (worker,) = await engine.between_steps(lambda core: core.collective_rpc(_worker_bytes))
        staged = sum(map(_allocated, publisher.buffers.paths))
        received = _allocated(receive_buffer)
        return worker | {"staging buffers, all ranks": staged, "receive buffer, each host": received}
    finally:
        engine.shutdown()


def _allocated(path: Path) -> int:
    return path.stat().st_blocks * 512


def test_an_engine_allocates_what_was_planned(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "hf")
    facts = read_model_facts(str(folder))
    config = small_engine("generator.kv_cache_gib=0.05")
    measured = run_alone(_measure_engine, folder, tmp_path, config, facts)
    items = [*generator_memory(config, facts, count_parameters(facts), Machine.CPU)]
    items += host_memory(config, facts, Machine.CPU)
    planned = {item.name: item.num_bytes for item in items}
    assert {name: planned[name] for name in measured} == pytest.approx(measured, rel=TOLERANCE)


@pytest.mark.parametrize("has_environment", [False, True])
@pytest.mark.parametrize("has_experts", [True, False])
def test_a_group_takes_what_was_planned(has_experts: bool, has_environment: bool, tmp_path: Path) -> None:
    """Responses as long as can be, kept sets of top_k tokens, one record of the prompt for all.

    Episodes fill the context after a prompt of one token, and one token between their turns is given.
    """
    config = small_engine(*(["environment={kind: python, factory: a.B}"] if has_environment else []))
    folder = write_tiny_model(tmp_path / "hf", num_experts=8, top_k=2)
    facts = read_model_facts(str(folder))
    if not has_experts:
        facts = dataclasses.replace(facts, num_experts=0, top_k=0, num_dense_layers=facts.num_layers)
    context = config.model.max_context_length
    response = context - 1 if has_environment else config.sampling.max_response_tokens
    prompt = context - response
    is_sampled_T = np.arange(response) != 5 if has_environment else None
    rng = np.random.default_rng(0)

    def record(first: int) -> RoutedExperts | None:
        if not has_experts:
            return None
        num_tokens = prompt + response
        ids_SMK = rng.integers(0, 8, (num_tokens, facts.num_moe_layers, 2)).astype(np.uint8)
        ids_SMK[:prompt] = first
        return RoutedExperts.from_rows(ids_SMK, num_tokens=num_tokens, num_experts=8)

    rollouts = [
        Rollout(
            prompt_ids_P=np.zeros(prompt, np.int32),
            response_ids_T=rng.integers(0, 8, response).astype(np.int32),
            logprobs_T=np.zeros(response, np.float32),
            version_spans=(VersionSpan(version=0, start=0, end=response),),
            text="",
            finish_reason=FinishReason.LENGTH,
            routed_experts=record(1),
            kept_tokens=KeptTokens.from_rows([list(range(config.sampling.top_k))] * response, vocab_size=30),
            is_sampled_T=is_sampled_T,
        )
        for _ in range(config.algorithm.group_size)
    ]
    payload = encode_group(rollouts)
    assert len(payload.prompts) == 1
    writer = PayloadWriter(tmp_path, "host", 2**30)
    writer.write_group([*payload.prompts, *payload.responses])
    assert group_payload_bytes(config, facts) == pytest.approx(writer.num_bytes_held, rel=TOLERANCE)
    assert writer.num_bytes_held <= largest_group_payload_bytes(config, facts)
