"""Random Qwen3-MoE models of several sizes, and runs that sync their weights, for ``weight_sync.py``."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from forgeasync.config import (
    AlgorithmSection,
    DataSection,
    Dtype,
    EvaluationSection,
    GeneratorSection,
    ModelSection,
    OptimizerSection,
    ParallelSection,
    PayloadSection,
    ReasoningGymSource,
    RunConfig,
    SamplingSection,
    TrainerSection,
)
from forgeasync.models import build_tokenizer, save_tokenizer

MAX_CONTEXT = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """One model and how many sequences are decoded while its weights are synced."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_experts: int
    expert_hidden_size: int
    dtype: Dtype
    """Dtype of the generator; the trainer's master weights are float32."""
    num_sequences: int
    memory_gib: float
    """Most memory that a run of the model takes in all procs, in GiB."""


SIZES = {
    "2M": ModelSize(
        hidden_size=128,
        num_layers=4,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        num_experts=8,
        expert_hidden_size=128,
        dtype=Dtype.FLOAT32,
        num_sequences=8,
        memory_gib=5.0,
    ),
    "50M": ModelSize(
        hidden_size=512,
        num_layers=7,
        num_heads=8,
        num_kv_heads=4,
        head_dim=64,
        num_experts=16,
        expert_hidden_size=256,
        dtype=Dtype.FLOAT32,
        num_sequences=8,
        memory_gib=8.0,
    ),
    "500M": ModelSize(
        hidden_size=1024,
        num_layers=6,
        num_heads=8,
        num_kv_heads=4,
        head_dim=128,
        num_experts=32,
        expert_hidden_size=768,
        dtype=Dtype.BFLOAT16,
        num_sequences=4,
        memory_gib=18.0,
    ),
}


def write_model(folder: Path, size: ModelSize) -> int:
    """Write a Hugging Face folder in the generator's dtype; the number of parameters."""
    tokenizer = build_tokenizer(["0123456789+-=#"])
    config = Qwen3MoeConfig(
        architectures=["Qwen3MoeForCausalLM"],
        vocab_size=len(tokenizer),
        hidden_size=size.hidden_size,
        intermediate_size=size.expert_hidden_size,
        moe_intermediate_size=size.expert_hidden_size,
        num_hidden_layers=size.num_layers,
        num_attention_heads=size.num_heads,
        num_key_value_heads=size.num_kv_heads,
        head_dim=size.head_dim,
        num_experts=size.num_experts,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        max_position_embeddings=MAX_CONTEXT,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype=size.dtype.value,
    )
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(config).to(getattr(torch, size.dtype.value))
    model.save_pretrained(folder)
    generation = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    save_tokenizer(tokenizer, folder)
    return sum(parameter.numel() for parameter in model.parameters())


def sync_config(folder: Path, size: ModelSize) -> RunConfig:
    """Two trainer procs (FSDP2 with expert parallelism 2) and one generator."""
    return RunConfig(
        name="weight_sync",
        max_steps=1,
        model=ModelSection(path=str(folder), max_context_length=MAX_CONTEXT),
        data=DataSection(
            source=ReasoningGymSource(kind="reasoning_gym", task="chain_sum", answer_prefix="#"),
            num_train=8,
            num_held_out=8,
        ),
        sampling=SamplingSection(max_response_tokens=MAX_CONTEXT - 16),
        generator=GeneratorSection(
            dtype=size.dtype, max_num_seqs=16, max_num_batched_tokens=512, kv_cache_gib=0.25
        ),
        trainer=TrainerSection(
            parallel=ParallelSection(num_procs=2, expert=2),
            tokens_per_row=MAX_CONTEXT,
            optimizer=OptimizerSection(learning_rate=1e-4),
        ),
        algorithm=AlgorithmSection(group_size=4, groups_per_step=2),
        payload=PayloadSection(capacity_gib=0.02),
        evaluation=EvaluationSection(num_problems=8),
    )
