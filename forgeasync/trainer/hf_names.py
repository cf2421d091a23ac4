"""TorchTitan's parameter names in Hugging Face terms, by TorchTitan's own state-dict adapter.

TorchTitan keeps all experts of a layer in one parameter [E, ...]; Hugging Face files have one tensor per
expert. Adapters have the names that peft gives them, where every expert is a module of its own.
"""

import functools
import re

import torch

from forgeasync.config.model_facts import ModelFacts
from forgeasync.trainer.families import TITAN_FAMILIES
from forgeasync.trainer.lora import adapted_parameter, is_adapter
from forgeasync.trainer.model import titan_config

_WRAPPERS = re.compile(r"_checkpoint_wrapped_module\.|_orig_mod\.")


@functools.cache
def _templates(facts: ModelFacts) -> dict[str, str]:
    """Hugging Face name template by TorchTitan name template."""
    adapter = TITAN_FAMILIES[facts.model_type].adapter(titan_config(facts), None)
    return {titan: hf for hf, titan in adapter.from_hf_map.items() if titan is not None}


def is_experts(name: str) -> bool:
    """Whether a TorchTitan parameter stacks a layer's experts."""
    return ".inner_experts." in name


def canonical_name(name: str) -> str:
    """A TorchTitan parameter name without what activation checkpointing and compile put into it."""
    return _WRAPPERS.sub("", name)


def hf_names(name: str, facts: ModelFacts) -> list[str]:
    """The Hugging Face (or peft) tensors that make up a TorchTitan parameter: one, or one per expert."""
    if is_adapter(name):
        base, side = adapted_parameter(name)
        modules = (hf_name.removesuffix(".weight") for hf_name in hf_names(base, facts))
        return [f"base_model.model.{module}.lora_{side}.weight" for module in modules]
    layer_ids = re.findall(r"layers\.(\d+)\.", name)
    key = re.sub(r"layers\.\d+\.", "layers.{}.", canonical_name(name))
    if facts.tie_word_embeddings and key == "lm_head.weight":
        # One tensor under two names; the files have it under the embedding's.
        key = "tok_embeddings.weight"
    template = _templates(facts)[key]
    if is_experts(name):
        return [template.format(*layer_ids, expert) for expert in range(facts.num_experts)]
    return [template.format(*layer_ids)]


def stack_experts(tensors: list[torch.Tensor], name: str) -> torch.Tensor:
    """Hugging Face tensors as one TorchTitan parameter."""
    return torch.stack(tensors) if is_experts(name) else tensors[0]


def unstack_experts(tensor: torch.Tensor, name: str) -> list[torch.Tensor]:
    """One TorchTitan parameter as Hugging Face tensors."""
    return list(tensor.unbind(0)) if is_experts(name) else [tensor]
