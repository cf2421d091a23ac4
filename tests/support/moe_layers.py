"""A layer of experts without a model around it."""

import torch

from forgeasync.config import ModelFacts
from forgeasync.trainer import titan_config

FACTS = ModelFacts(
    model_type="qwen3_moe",
    num_layers=2,
    hidden_size=32,
    num_heads=2,
    num_kv_heads=2,
    head_dim=32,
    num_experts=8,
    top_k=3,
    vocab_size=40,
    expert_hidden_size=48,
    max_position_embeddings=64,
    tie_word_embeddings=False,
    rope_theta=10000.0,
    rms_norm_eps=1e-6,
)


def make_moe() -> torch.nn.Module:
    torch.manual_seed(0)
    moe = titan_config(FACTS).layers[0].moe.build()
    with torch.no_grad():
        for parameter in moe.parameters():
            parameter.normal_(std=0.3)
    return moe


def random_ids(*shape: int) -> torch.Tensor:
    return torch.rand(*shape, FACTS.num_experts).argsort(-1)[..., : FACTS.top_k]
