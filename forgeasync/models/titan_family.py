"""TorchTitan's part of a model family: its classes, and the configs of its layers."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn as nn
from torchtitan.models.common.config_utils import make_ffn_config
from torchtitan.models.common.decoder import Decoder, TransformerBlock
from torchtitan.models.common.feed_forward import FeedForward
from torchtitan.models.common.nn_modules import RMSNorm
from torchtitan.models.common.rope import CosSinRoPE, RoPE
from torchtitan.protocols.module import Module
from torchtitan.protocols.state_dict_adapter import StateDictAdapter

from forgeasync.config import Llama3Rope, ModelFacts, YarnRope

LINEAR_INIT: dict[str, Callable[..., object]] = {"weight": partial(nn.init.normal_, std=0.02)}
"""Initialization of the weights of linear layers, by parameter name."""

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
    adapter: Callable[..., StateDictAdapter]
    """Class or function that makes the mapping from Hugging Face tensors to TorchTitan's names."""
    last_norm: Callable[[ModelFacts], Module.Config] = lambda facts: norm_config(facts.hidden_size, facts)
    """Function that returns the config of the norm before the output layer."""


def norm_config(size: int, facts: ModelFacts) -> RMSNorm.Config:
    return RMSNorm.Config(normalized_shape=size, eps=facts.rms_norm_eps, param_init=NORM_INIT)


def rope_config(kind: type[RoPE], facts: ModelFacts) -> RoPE.Config:
    rope = kind.Config(
        dim=facts.rotary_dim, max_seq_len=facts.max_position_embeddings, theta=facts.rope_theta
    )
    match facts.rope_scaling:
        case None:
            return rope
        case YarnRope() as scaling:
            return replace(
                rope,
                scaling="yarn",
                rope_factor=scaling.factor,
                beta_fast=scaling.beta_fast,
                beta_slow=scaling.beta_slow,
                original_seq_len=scaling.original_max_position_embeddings,
                truncate=scaling.truncates,
            )
        case Llama3Rope() as scaling:
            return replace(
                rope,
                scaling="llama",
                scaling_factor=scaling.factor,
                low_freq_factor=scaling.low_freq_factor,
                high_freq_factor=scaling.high_freq_factor,
                original_max_position_embeddings=scaling.original_max_position_embeddings,
            )


def network_config(facts: ModelFacts, inner_size: int) -> FeedForward.Config:
    """Return the config of a gated feed-forward network."""
    return make_ffn_config(
        dim=facts.hidden_size,
        hidden_dim=inner_size,
        w1_param_init=LINEAR_INIT,
        w2w3_param_init=LINEAR_INIT,
    )


def set_norm_eps(layer: TransformerBlock.Config, facts: ModelFacts) -> None:
    """Set the model's norm epsilon, because TorchTitan's builders use their own."""
    layer.attention_norm = replace(layer.attention_norm, eps=facts.rms_norm_eps)
    layer.ffn_norm = replace(layer.ffn_norm, eps=facts.rms_norm_eps)


class PartialCosSinRoPE(CosSinRoPE):
    """Rotary embeddings of the first ``dim`` dimensions of each head, in the rotate-half layout."""

    @dataclass(kw_only=True, slots=True)
    class Config(CosSinRoPE.Config):
        pass

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        dim = self.config.dim
        rotated = super().forward(query[..., :dim], key[..., :dim], positions)
        query, key = (
            torch.cat([part, whole[..., dim:]], dim=-1)
            for part, whole in zip(rotated, (query, key), strict=True)
        )
        return query, key


class Llama3CosSinRoPE(CosSinRoPE):
    """Llama 3's rotary frequencies in the rotate-half layout of Hugging Face files.

    TorchTitan 0.3.0 scales the frequencies only in ``ComplexRoPE``, which rotates adjacent dimensions: rows
    of query and key weights would have to be permuted. Can go when ``CosSinRoPE`` supports it. Formula and
    order of operations are those of vLLM 0.32's ``Llama3RotaryEmbedding``: with ``fidelity: bitwise`` the
    generator's cosines are needed to the last bit.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(CosSinRoPE.Config):
        pass

    def _precompute_cache(self) -> torch.Tensor:
        """Return cosines and sines, [max_seq_len, 2 * dim]."""
        of = self.config
        own = 1.0 / (of.theta ** (torch.arange(0, of.dim, 2, dtype=torch.float) / of.dim))
        waves = 2 * math.pi / own
        low, high, length = of.low_freq_factor, of.high_freq_factor, of.original_max_position_embeddings
        smooth = (length / waves - low) / (high - low)
        between = (1 - smooth) * own / of.scaling_factor + smooth * own
        scaled = torch.where(waves > length / low, own / of.scaling_factor, between)
        frequencies = torch.where(waves < length / high, own, scaled)
        angles = torch.outer(torch.arange(of.max_seq_len, dtype=torch.float), frequencies)
        return torch.cat([angles.cos(), angles.cos(), angles.sin(), angles.sin()], dim=-1)
