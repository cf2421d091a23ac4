"""A layer of experts without a model around it."""

import dataclasses

import torch

from forgeasync.trainer import titan_config
from tests.support import config_samples

FACTS = dataclasses.replace(
    config_samples.FACTS,
    hidden_size=32,
    num_heads=2,
    top_k=3,
    vocab_size=40,
    expert_hidden_size=48,
    max_position_embeddings=64,
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
