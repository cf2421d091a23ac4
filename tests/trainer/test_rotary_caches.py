"""Layers share one cache of cosines and sines, which long contexts make large."""

import torch
from torchtitan.models.common.rope import RoPE

from forgeasync.trainer import share_rotary_caches, titan_config
from tests.support.config_samples import FACTS


def test_layers_share_one_cache() -> None:
    model = titan_config(FACTS).build()
    ropes = [module for module in model.modules() if isinstance(module, RoPE)]
    before = [rope.cache for rope in ropes]
    assert len(ropes) == FACTS.num_layers and len({cache.data_ptr() for cache in before}) == len(ropes)
    share_rotary_caches(model)
    assert len({rope.cache.data_ptr() for rope in ropes}) == 1
    assert all(torch.equal(rope.cache, cache) for rope, cache in zip(ropes, before, strict=True))
