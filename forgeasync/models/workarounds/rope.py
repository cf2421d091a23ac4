"""Llama 3's rotary frequencies in the rotate-half layout of Hugging Face files.

TorchTitan 0.3.0 scales the frequencies only in ``ComplexRoPE``, which rotates adjacent dimensions. With it,
the rows of query and key weights would have to be permuted when they are read or published. This module can
go when ``CosSinRoPE`` supports ``scaling="llama"``.
"""

from dataclasses import dataclass

import torch
from torchtitan.models.common.rope import ComplexRoPE, CosSinRoPE


class Llama3CosSinRoPE(CosSinRoPE):
    """``CosSinRoPE`` with the frequencies of ``ComplexRoPE``."""

    @dataclass(kw_only=True, slots=True)
    class Config(CosSinRoPE.Config):
        pass

    def _precompute_cache(self) -> torch.Tensor:
        """Return cosines and sines, [max_seq_len, 2 * dim]."""
        cis = ComplexRoPE._precompute_cache(self)
        return torch.cat([cis.real, cis.real, cis.imag, cis.imag], dim=-1)
