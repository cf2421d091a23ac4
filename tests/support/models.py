"""A random Qwen3-MoE small enough for every test, as a Hugging Face folder written by transformers itself."""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import (
    AutoModelForCausalLM,
    Qwen2Config,
    Qwen2Model,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from forgeasync.models import build_tokenizer, character_tokenizer, save_tokenizer

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


STEP_TAG = "<extra_0>"
"""What ends a step for ``write_process_reward_model``."""


def write_process_reward_model(
    folder: Path, *, architecture: str = "Qwen2ForProcessRewardModel", nan_at: str | None = None
) -> Path:
    """Two layers of a random Qwen2 with a head that scores steps, one token per character.

    A text with the character ``nan_at`` makes its scores NaN.
    """
    tokenizer = character_tokenizer(chat_template=True)
    tokenizer.add_special_tokens({"additional_special_tokens": [STEP_TAG]})
    config = Qwen2Config(
        architectures=[architecture],
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        dtype="float32",
    )
    torch.manual_seed(0)
    num_classes = 2 if architecture == "Qwen2ForProcessRewardModel" else 1
    model = Qwen2Model(config).float()
    head = process_reward_head(num_classes)
    with torch.no_grad():
        for parameter in (*model.parameters(), *head.parameters()):
            if parameter.dim() > 1:
                parameter.normal_(std=0.2)
        if nan_at is not None:
            model.embed_tokens.weight[tokenizer.convert_tokens_to_ids(nan_at)] = float("nan")
    tensors = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    tensors |= {f"score.{name}": tensor for name, tensor in head.state_dict().items()}
    config.save_pretrained(folder)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    save_tokenizer(tokenizer, folder)
    return folder


def process_reward_head(num_classes: int) -> torch.nn.Sequential:
    """The head of ``Qwen2ForProcessRewardModel``, as Qwen's own modeling_qwen2_rm.py has it."""
    return torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, num_classes))


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
