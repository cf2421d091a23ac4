"""Low-rank adapters of a frozen model: y = W x + (alpha / rank) B A x (Hu et al., "LoRA", 2021, section 4.1).

Attention projections get TorchTitan's own adapters, by its ``LoRAConverter``, which also freezes everything
else and derives the adapters' tensor-parallel layout. Two things it cannot do are done here: adapt k_proj and
v_proj apart (its model builds both from one config), and adapt experts (it knows linear layers only).
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch.distributed.tensor import DTensor, distribute_tensor
from torchtitan.components.lora import LoRAConverter
from torchtitan.models.common.attention import QKVLinear
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.common.linear import Linear

from forgeasync.config import LoraSection
from forgeasync.trainer.lora_experts import GroupedAdapter, LoraExperts, adapter_sharding
from forgeasync.trainer.workarounds.experts import TrainingDtypeExperts

ATTENTION_MODULES = {"q_proj": "wq", "k_proj": "wk", "v_proj": "wv", "o_proj": "wo"}
"""TorchTitan's name of a linear layer by the last part of its Hugging Face name."""

NETWORK_MODULES = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
"""Names of the matrices of a feed-forward network without experts."""

EXPERT_PARAMETERS = {"gate_proj": "w1_EFD", "up_proj": "w3_EFD", "down_proj": "w2_EDF"}
"""TorchTitan's name of a projection of all experts by the last part of its Hugging Face name."""

_ADAPTER = re.compile(
    r"(?P<linear>.*)\.lora_(?P<linear_side>[ab])\.weight|"
    r"(?P<experts>.*)\.adapters\.(?P<parameter>\w+)\.lora_(?P<experts_side>[ab])_\w+"
)


class SeparateQKVLinear(QKVLinear):
    """TorchTitan's projections, with configs of their own for k and v."""

    @dataclass(kw_only=True, slots=True)
    class Config(QKVLinear.Config):
        wk: Linear.Config
        wv: Linear.Config

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.wk = config.wk.build()
        self.wv = config.wv.build()


def with_adapters(model: Decoder.Config, lora: LoraSection) -> Decoder.Config:
    """The config of the same model, frozen and with adapters; its shardings are set already."""
    for layer in model.layers:
        qkv = layer.attention.qkv_linear
        layer.attention.qkv_linear = SeparateQKVLinear.Config(
            head_dim=qkv.head_dim, wq=qkv.wq, wkv=qkv.wkv, wk=replace(qkv.wkv), wv=replace(qkv.wkv)
        )
        if layer.moe is not None:
            routed = layer.moe.routed_experts
            routed.inner_experts = _experts_with_adapters(routed.inner_experts, lora)
    # Experts are no linear layers: the converter leaves them alone.
    linear = ATTENTION_MODULES | NETWORK_MODULES
    modules = [module for target, module in linear.items() if target in lora.targets]
    converter = LoRAConverter.Config(rank=lora.rank, alpha=lora.alpha, target_modules=modules).build()
    return converter.convert(model)


def _experts_with_adapters(experts: TrainingDtypeExperts.Config, lora: LoraSection) -> LoraExperts.Config:
    adapters = {}
    for target, name in EXPERT_PARAMETERS.items():
        if target in lora.targets:
            sizes = (experts.dim, experts.hidden_dim)
            in_features, out_features = reversed(sizes) if target == "down_proj" else sizes
            adapters[name] = GroupedAdapter.Config(
                num_experts=experts.num_experts,
                in_features=in_features,
                out_features=out_features,
                rank=lora.rank,
                param_init={"lora_a_ErI": torch.nn.init.zeros_, "lora_b_EOr": torch.nn.init.zeros_},
                sharding_config=adapter_sharding(experts.sharding_config.state_shardings[name]),
            )
    return LoraExperts.Config(
        dim=experts.dim,
        hidden_dim=experts.hidden_dim,
        num_experts=experts.num_experts,
        param_init=experts.param_init,
        sharding_config=experts.sharding_config,
        adapters=adapters,
        scaling=lora.alpha / lora.rank,
    )


def is_adapter(name: str) -> bool:
    """Whether a TorchTitan parameter belongs to an adapter."""
    return _ADAPTER.fullmatch(name) is not None


def adapted_parameter(name: str) -> tuple[str, str]:
    """The TorchTitan parameter that an adapter's parameter adapts, and which side it is: "A" or "B"."""
    match = _ADAPTER.fullmatch(name)
    assert match is not None, name
    if match["linear"] is not None:
        return f"{match['linear']}.weight", match["linear_side"].upper()
    return f"{match['experts']}.{match['parameter']}", match["experts_side"].upper()


def adapter_parameters(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """The parameters of all adapters, in the order of the model."""
    return ((name, parameter) for name, parameter in model.named_parameters() if is_adapter(name))


@contextmanager
def without_adapters(model: torch.nn.Module) -> Iterator[None]:
    """Run the block with the base model, without its adapters."""
    # TorchTitan makes the classes of its adapted layers as it goes: the attribute is what they share.
    adapted = [module for module in model.modules() if "_lora_scaling" in vars(module)]
    scalings = [module._lora_scaling for module in adapted]
    for module in adapted:
        # torch types every other attribute of a module as a tensor or a module.
        module._lora_scaling = 0.0  # type: ignore[assignment]
    try:
        yield
    finally:
        for module, scaling in zip(adapted, scalings, strict=True):
            module._lora_scaling = scaling


def store_base_in(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Keep frozen weights in the compute dtype: they need no float32 masters. On the meta device."""
    for parameter in model.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)


@torch.no_grad()
def initialize_adapters(model: torch.nn.Module, seed: int) -> None:
    """B zero and A uniform in +-1/sqrt(inputs), as peft does; the same under every parallel layout."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in adapter_parameters(model):
        _, side = adapted_parameter(name)
        if side == "B":
            parameter.zero_()
            continue
        # kaiming_uniform_(a=sqrt(5)) of one expert's or layer's matrix.
        bound = parameter.shape[-1] ** -0.5
        full = torch.empty(parameter.shape).uniform_(-bound, bound, generator=generator)
        copy_whole(parameter, full)


@torch.no_grad()
def copy_whole(parameter: torch.nn.Parameter, full: torch.Tensor) -> None:
    """Fill this rank's shard of a parameter from the whole tensor, which every rank has."""
    full = full.to(device=parameter.device, dtype=parameter.dtype)
    if isinstance(parameter, DTensor):
        # Every rank has the same bytes: no broadcast.
        full = distribute_tensor(full, parameter.device_mesh, parameter.placements, src_data_rank=None)
    parameter.copy_(full)
