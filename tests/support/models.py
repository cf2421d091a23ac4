"""Random models small enough for a test, as Hugging Face folders, and transformers' models of them."""

from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import (
    Qwen2Config,
    Qwen2Model,
)

from forgeasync.models import character_tokenizer, save_tokenizer

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
