"""Low-rank adapters of a frozen model: y = W x + (alpha / rank) B A x (Hu et al., "LoRA", 2021, section 4.1).

TorchTitan's ``LoRAConverter`` gives linear layers their adapters, freezes everything else and derives the
adapters' tensor-parallel layout. This module adds what the converter does not support: separate adapters of
k_proj and v_proj, which TorchTitan builds from one config, and adapters of experts, which are not linear
layers. Each expert has its own adapter, computed by the same grouped products as the experts.

Shape suffixes: E experts on this rank, F expert hidden size, D model dim, R tokens routed to this rank; I and
O the input and output size of one projection, r the rank of its adapter.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import spmd_types as spmd
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor
from torchtitan.components.lora import LoRAConverter
from torchtitan.models.common.attention import QKVLinear
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.common.linear import Linear
from torchtitan.models.common.moe_sharding import expert_param_placement_dense, expert_param_placement_sparse
from torchtitan.protocols.module import Module, ModuleDict
from torchtitan.protocols.sharding import ShardingConfig, SpmdLayout

from forgeasync.config import LoraSection
from forgeasync.trainer.workarounds.experts import TrainingDtypeExperts, grouped_mm

ATTENTION_MODULES = {"q_proj": "wq", "k_proj": "wk", "v_proj": "wv", "o_proj": "wo"}
"""TorchTitan's name of a linear layer by the last part of its Hugging Face name."""

NETWORK_MODULES = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
"""Names of the matrices of a feed-forward network without experts."""

EXPERT_PARAMETERS = {"gate_proj": "w1_EFD", "up_proj": "w3_EFD", "down_proj": "w2_EDF"}
"""TorchTitan's name of a projection of all experts by the last part of its Hugging Face name."""

_GROUPED_STRIDE_BYTES = 16
"""Alignment in bytes of the rows of operands of a grouped product."""

_ADAPTER = re.compile(
    r"(?P<linear>.*)\.lora_(?P<linear_side>[ab])\.weight|"
    r"(?P<experts>.*)\.adapters\.(?P<parameter>\w+)\.lora_(?P<experts_side>[ab])_\w+"
)


class GroupedAdapter(Module):
    """Low-rank adapter of each expert: maps x [R, I], tokens sorted by expert, to B A x [R, O].

    Source: Hu et al., "LoRA", 2021, section 4.1.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        num_experts: int
        in_features: int
        out_features: int
        rank: int

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.lora_a_ErI = nn.Parameter(torch.empty(config.num_experts, config.rank, config.in_features))
        self.lora_b_EOr = nn.Parameter(torch.empty(config.num_experts, config.out_features, config.rank))

    def forward(self, x_RI: torch.Tensor, offsets_E: torch.Tensor) -> torch.Tensor:
        """Return B A x [R, O] of tokens [R, I]; offsets_E has the end of each expert's tokens."""
        a_ErI, b_EOr = _own_part(self.lora_a_ErI), _own_part(self.lora_b_EOr)
        # Pad with zeros to a rank that grouped products accept; zeros add nothing.
        padding = -a_ErI.shape[1] % (_GROUPED_STRIDE_BYTES // a_ErI.element_size())
        a_ErI, b_EOr = F.pad(a_ErI, (0, 0, 0, padding)), F.pad(b_EOr, (0, padding))
        hidden_Rr = grouped_mm(x_RI, a_ErI.transpose(-2, -1), offsets_E)
        return grouped_mm(hidden_Rr, b_EOr.transpose(-2, -1), offsets_E)


def _own_part(parameter: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a parameter, as a plain tensor.

    With tensor parallelism inside experts, A or B is whole on every rank but multiplies only this rank's part
    of the other one: its gradient is a partial sum.
    """
    if not isinstance(parameter, DTensor):
        return parameter
    gradients = [Partial() if isinstance(p, Replicate) else p for p in parameter.placements]
    return parameter.to_local(grad_placements=gradients)


def adapter_sharding(base: SpmdLayout) -> ShardingConfig:
    """Return the layout of the adapters of an expert parameter [E, O, I], given the parameter's layout."""
    a_layout = b_layout = base
    if base != expert_param_placement_sparse():
        whole = expert_param_placement_dense(tp_placement=spmd.R)
        # If the parameter is split over its output, every rank needs all of A; if over its input, all of B.
        if base == expert_param_placement_dense(tp_placement=spmd.S(1)):
            a_layout = whole
        else:
            assert base == expert_param_placement_dense(tp_placement=spmd.S(2)), base
            b_layout = whole
    return ShardingConfig(state_shardings={"lora_a_ErI": a_layout, "lora_b_EOr": b_layout})


class LoraExperts(TrainingDtypeExperts):
    """Experts with adapters of some projections."""

    @dataclass(kw_only=True, slots=True)
    class Config(TrainingDtypeExperts.Config):
        adapters: dict[str, GroupedAdapter.Config]
        """Adapters by the name of the parameter that they adapt."""
        scaling: float

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._lora_scaling = config.scaling
        self.adapters = ModuleDict({name: adapter.build() for name, adapter in config.adapters.items()})

    def _project(self, name: str, x_RI: torch.Tensor, offsets_E: torch.Tensor) -> torch.Tensor:
        base_RO = super()._project(name, x_RI, offsets_E)
        if name not in self.adapters:
            return base_RO
        return base_RO + self._lora_scaling * self.adapters[name](x_RI, offsets_E)

    def _down(self, gate_RF: torch.Tensor, up_RF: torch.Tensor, offsets_E: torch.Tensor) -> torch.Tensor:
        if "w2_EDF" not in self.adapters:
            return super()._down(gate_RF, up_RF, offsets_E)
        return self._project("w2_EDF", F.silu(gate_RF) * up_RF, offsets_E)


class SeparateQKVLinear(QKVLinear):
    """TorchTitan's projections, with separate configs for k and v."""

    @dataclass(kw_only=True, slots=True)
    class Config(QKVLinear.Config):
        wk: Linear.Config
        wv: Linear.Config

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.wk = config.wk.build()
        self.wv = config.wv.build()


def with_adapters(model: Decoder.Config, lora: LoraSection) -> Decoder.Config:
    """Return the config of the same model, frozen and with adapters. Its shardings must be set already."""
    for layer in model.layers:
        qkv = layer.attention.qkv_linear
        layer.attention.qkv_linear = SeparateQKVLinear.Config(
            head_dim=qkv.head_dim, wq=qkv.wq, wkv=qkv.wkv, wk=replace(qkv.wkv), wv=replace(qkv.wkv)
        )
        if layer.moe is not None and EXPERT_PARAMETERS.keys() & lora.targets:
            routed = layer.moe.routed_experts
            routed.inner_experts = _experts_with_adapters(routed.inner_experts, lora)
    # The converter ignores experts, which are not linear layers.
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
    """Return whether a TorchTitan parameter belongs to an adapter."""
    return _ADAPTER.fullmatch(name) is not None


def adapted_parameter(name: str) -> tuple[str, str]:
    """Return the TorchTitan parameter that an adapter's parameter adapts, and the side: "A" or "B"."""
    match = _ADAPTER.fullmatch(name)
    assert match is not None, name
    if match["linear"] is not None:
        return f"{match['linear']}.weight", match["linear_side"].upper()
    return f"{match['experts']}.{match['parameter']}", match["experts_side"].upper()


def adapter_parameters(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yield the parameters of all adapters, in the order of the model."""
    return ((name, parameter) for name, parameter in model.named_parameters() if is_adapter(name))


@contextmanager
def without_adapters(model: torch.nn.Module) -> Iterator[None]:
    """Run the block with the base model, without its adapters."""
    # TorchTitan creates the classes of adapted layers dynamically: only this attribute identifies them.
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
    """Store frozen weights in the compute dtype, without float32 masters. Call it on the meta device."""
    for parameter in model.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)


@torch.no_grad()
def initialize_adapters(model: torch.nn.Module, seed: int) -> None:
    """Set B to zero and A uniformly within +-1/sqrt(inputs), as peft does.

    The result is the same for every parallel layout.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in adapter_parameters(model):
        _, side = adapted_parameter(name)
        if side == "B":
            parameter.zero_()
            continue
        # Equals kaiming_uniform_(a=sqrt(5)) of one expert's or layer's matrix.
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
