"""A random Qwen3-MoE small enough for every test, as a Hugging Face folder written by transformers itself."""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from forgeasync.models.tokenizer import build_tokenizer, save_tokenizer

TEXTS = (
    "State the final answer to the following arithmetic problem: 0123456789 + 4 - 5 =",
    "0123456789+1=2;3-4=5#6",
)


def write_random_model(
    folder: Path,
    *,
    seed: int = 0,
    tie: bool = False,
    scale: float = 1.0,
    num_experts: int = 4,
    top_k: int = 2,
) -> Path:
    """Two layers; ``scale`` widens the random weights for less uniform outputs."""
    tokenizer = build_tokenizer(TEXTS)
    config = Qwen3MoeConfig(
        architectures=["Qwen3MoeForCausalLM"],
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=64,
        moe_intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=num_experts,
        num_experts_per_tok=top_k,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        max_position_embeddings=160,
        tie_word_embeddings=tie,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    torch.manual_seed(seed)
    model = Qwen3MoeForCausalLM(config).float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                # Anew, since transformers leaves the padding token's embedding at zero.
                parameter.normal_(std=0.02 * scale)
    model.save_pretrained(folder)
    generation = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    save_tokenizer(tokenizer, folder)
    return folder


def write_versions(root: Path, *, num: int = 3) -> list[Path]:
    """Models of one shape, each with random weights of its own: by version, what an engine is updated to."""
    return [
        write_random_model(root / str(seed), seed=seed, scale=12.0, num_experts=8, top_k=3)
        for seed in range(num)
    ]


def load_versions(folders: Sequence[Path]) -> dict[int, torch.nn.Module]:
    """transformers' models of the folders, by version."""
    return {
        version: AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        for version, folder in enumerate(folders)
    }
