"""TorchTitan's part of a model family: its classes, and the configs of its layers."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn as nn
from torchtitan.models.common.decoder import Decoder, TransformerBlock
from torchtitan.models.common.nn_modules import RMSNorm
from torchtitan.models.common.rope import ComplexRoPE, CosSinRoPE
from torchtitan.protocols.state_dict_adapter import StateDictAdapter

from forgeasync.config import ModelFacts

LINEAR_INIT: dict[str, Callable[..., object]] = {"weight": partial(nn.init.normal_, std=0.02)}

NORM_INIT: dict[str, Callable[..., object]] = {"weight": nn.init.ones_}


@dataclass(frozen=True, slots=True, kw_only=True)
class TitanFamily:
    """TorchTitan's classes and functions for one family."""

    model: type[Decoder]
    layers: Callable[[ModelFacts, str], list[TransformerBlock.Config]]
    """Function that returns the configs of all layers for an attention backend.

    Parameters have the shapes of the Hugging Face files.
    """
    parallelize: Callable[..., object]
    """TorchTitan's function that parallelizes the model."""
    adapter: type[StateDictAdapter]
    """Mapping from Hugging Face tensors to TorchTitan's names."""


def norm_config(size: int, facts: ModelFacts) -> RMSNorm.Config:
    return RMSNorm.Config(normalized_shape=size, eps=facts.rms_norm_eps, param_init=NORM_INIT)


def set_norm_eps(layer: TransformerBlock.Config, facts: ModelFacts) -> None:
    """Set the model's norm epsilon, because TorchTitan's builders use their own."""
    layer.attention_norm = replace(layer.attention_norm, eps=facts.rms_norm_eps)
    layer.ffn_norm = replace(layer.ffn_norm, eps=facts.rms_norm_eps)


class Llama3CosSinRoPE(CosSinRoPE):
    """Llama 3's rotary frequencies in the rotate-half layout of Hugging Face files.

    TorchTitan 0.3.0 scales the frequencies only in ``ComplexRoPE``, which rotates adjacent dimensions: rows
    of query and key weights would have to be permuted. Can go when ``CosSinRoPE`` supports it.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(CosSinRoPE.Config):
        pass

    def _precompute_cache(self) -> torch.Tensor:
        """Return cosines and sines, [max_seq_len, 2 * dim]."""
        cis = ComplexRoPE._precompute_cache(self)
        return torch.cat([cis.real, cis.real, cis.imag, cis.imag], dim=-1)
