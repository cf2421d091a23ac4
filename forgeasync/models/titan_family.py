"""The trainer's side of a model family: TorchTitan's classes for it, and how to size them."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch.nn as nn
from torchtitan.models.common.decoder import Decoder, TransformerBlock
from torchtitan.models.common.nn_modules import RMSNorm
from torchtitan.protocols.state_dict_adapter import StateDictAdapter

from forgeasync.config import ModelFacts

LINEAR_INIT: dict[str, Callable[..., object]] = {"weight": partial(nn.init.normal_, std=0.02)}

NORM_INIT: dict[str, Callable[..., object]] = {"weight": nn.init.ones_}


@dataclass(frozen=True, slots=True, kw_only=True)
class TitanFamily:
    """TorchTitan's side of a family."""

    model: type[Decoder]
    layers: Callable[[ModelFacts, str], list[TransformerBlock.Config]]
    """Configs of all layers in the shape of the Hugging Face files, for an attention backend."""
    parallelize: Callable[..., object]
    adapter: type[StateDictAdapter]
    """Knows TorchTitan's names of the Hugging Face tensors."""


def norm_config(size: int, facts: ModelFacts) -> RMSNorm.Config:
    return RMSNorm.Config(normalized_shape=size, eps=facts.rms_norm_eps, param_init=NORM_INIT)


def set_norm_eps(layer: TransformerBlock.Config, facts: ModelFacts) -> None:
    """TorchTitan's builders have an epsilon of their own."""
    layer.attention_norm = replace(layer.attention_norm, eps=facts.rms_norm_eps)
    layer.ffn_norm = replace(layer.ffn_norm, eps=facts.rms_norm_eps)
