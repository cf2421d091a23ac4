"""The memory plan of generators and hosts against what an engine, its weights' travel and payloads take."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig

from forgeasync.config import ModelFacts, RunConfig, load_config
from forgeasync.models import build_tokenizer, largest_group_payload_bytes, read_model_facts, save_tokenizer
from forgeasync.planning import Machine, count_parameters, generator_memory, group_payload_bytes, host_memory
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
from tests.support.config_samples import CONFIGS
from tests.support.engines import start_engine
from tests.support.processes import run_alone
from tests.support.weight_service import FolderPublisher

TOLERANCE = 0.1
CONTEXT = 160


def _config(*changes: str) -> RunConfig:
    changes = ("generator.max_num_seqs=8", "generator.max_num_batched_tokens=256", *changes)
    return load_config(CONFIGS / "tiny_moe_cpu.yaml", list(changes))


def write_smollm2(folder: Path) -> Path:
    """A random model of SmolLM2-135M's shape."""
    config = LlamaConfig(
        architectures=["LlamaForCausalLM"],
        num_hidden_layers=30,
        hidden_size=576,
        num_attention_heads=9,
        num_key_value_heads=3,
        intermediate_size=1536,
        vocab_size=49152,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        dtype=torch.float32,
    )
    AutoModelForCausalLM.from_config(config).float().save_pretrained(folder)
    save_tokenizer(build_tokenizer(["0123456789+=#"]), folder)
    return folder


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Bytes of one engine of one process, and of the files that bring it a version."""

    weights: int
    kv_cache: int
    shadow_weights: int
    staging: int
    receive_buffer: int


def _worker_bytes(worker: Any) -> tuple[int, int, int]:
    """Weights, KV cache and shadows of a worker; every storage once."""

    def total(tensors: list[torch.Tensor]) -> int:
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        return sum(storages.values())

    runner, weights = worker.model_runner, worker._weights
    return (
        total(list(runner.get_model().parameters())),
        total(list(runner.kv_caches)),
        total([*weights._shadows.values(), weights._scratch]),
    )


async def _measure(folder: Path, out: Path, config: RunConfig, facts: ModelFacts) -> Measured:
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
        weights, kv_cache, shadows = worker
        return Measured(
            weights=weights,
            kv_cache=kv_cache,
            shadow_weights=shadows,
            staging=sum(_allocated(path) for path in publisher.buffers.paths),
            receive_buffer=_allocated(receive_buffer),
        )
    finally:
        engine.shutdown()


def _allocated(path: Path) -> int:
    return path.stat().st_blocks * 512


@pytest.mark.parametrize("name", ["tiny", pytest.param("smollm2", marks=pytest.mark.exhaustive)])
def test_an_engine_allocates_what_was_planned(name: str, tmp_path: Path) -> None:
    write = {"tiny": write_tiny_model, "smollm2": write_smollm2}[name]
    folder = write(tmp_path / "hf")
    facts = read_model_facts(str(folder))
    config = _config("generator.kv_cache_gib=0.05")
    measured = run_alone(_measure, folder, tmp_path, config, facts)
    generator = {
        item.name: item.num_bytes
        for item in generator_memory(config, facts, count_parameters(facts), Machine.CPU)
    }
    host = {item.name: item.num_bytes for item in host_memory(config, facts, Machine.CPU)}
    planned = Measured(
        weights=generator["weights"],
        kv_cache=generator["KV cache"],
        shadow_weights=generator["shadow weights"],
        staging=host["staging buffers, all ranks"],
        receive_buffer=host["receive buffer, each host"],
    )
    for item, found in dataclasses.asdict(measured).items():
        assert dataclasses.asdict(planned)[item] == pytest.approx(found, rel=TOLERANCE), item


@pytest.mark.parametrize("has_environment", [False, True])
@pytest.mark.parametrize("has_experts", [True, False])
def test_a_group_takes_what_was_planned(has_experts: bool, has_environment: bool, tmp_path: Path) -> None:
    """Responses as long as can be, kept sets of top_k tokens, one record of the prompt for all.

    Episodes fill the context after a prompt of one token, and one token between their turns is given.
    """
    config = _config(*(["environment={kind: python, factory: a.B}"] if has_environment else []))
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
