"""TorchTitan's part of Qwen3.5: its text decoder, with layers whose parameters are those of the files.

On CPUs, linear attention is that of ``forgeasync.models.cpu_kernels``. On GPUs it is that of
flash-linear-attention, which TorchTitan 0.3.0 imports.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torchtitan.models.common import Conv1d, Linear
from torchtitan.models.common.attention import VarlenMetadata
from torchtitan.models.common.decoder import Decoder, TransformerBlock
from torchtitan.protocols.module import Module

from forgeasync.config import LinearAttention, ModelFacts
from forgeasync.models.cpu_kernels import causal_convolution, fla_for_cpus
from forgeasync.models.titan_family import TitanFamily, rope_config
from forgeasync.models.workarounds.titan_utils import DEVICE_TYPE

with fla_for_cpus() if DEVICE_TYPE == "cpu" else nullcontext():
    from torchtitan.models import qwen3_5 as titan
    from torchtitan.models.qwen3_5 import model as titan_model


class GatedDeltaNet(titan_model.GatedDeltaNet):
    """TorchTitan's layer with one matrix and one convolution for queries, keys and values."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        sizes: LinearAttention
        in_proj_qkv: Linear.Config
        in_proj_z: Linear.Config
        in_proj_a: Linear.Config
        in_proj_b: Linear.Config
        conv1d: Conv1d.Config
        kernel: titan_model.GatedDeltaKernel.Config
        norm: titan_model.RMSNormGated.Config
        out_proj: Linear.Config

    def __init__(self, config: Config) -> None:
        # Skip the other layout's parameters.
        Module.__init__(self)
        self._sizes = config.sizes
        self.in_proj_qkv = config.in_proj_qkv.build()
        self.in_proj_z = config.in_proj_z.build()
        self.in_proj_a = config.in_proj_a.build()
        self.in_proj_b = config.in_proj_b.build()
        self.conv1d = config.conv1d.build()
        self.A_log = torch.nn.Parameter(torch.empty(config.sizes.num_value_heads))
        self.dt_bias = torch.nn.Parameter(torch.empty(config.sizes.num_value_heads))
        self.kernel = config.kernel.build()
        self.norm = config.norm.build()
        self.out_proj = config.out_proj.build()

    def forward(self, x_BLD: torch.Tensor, attention_masks: VarlenMetadata) -> torch.Tensor:
        """Return the output for one row, whose sequences ``attention_masks`` separates."""
        sizes, host = self._sizes, attention_masks.cu_seq_q_host
        assert len(x_BLD) == 1 and host is not None
        # As in TorchTitan: fla caches by identity, which a recomputed forward pass must not find.
        starts = attention_masks.cu_seq_q.clone()
        starts_on_host = torch.tensor(host, dtype=starts.dtype)
        qkv_BLD = self.in_proj_qkv(x_BLD)
        if DEVICE_TYPE == "cpu":
            qkv_BLD = causal_convolution(qkv_BLD[0], self.conv1d.weight, list(host))[0][None]
        else:
            weight = self.conv1d.weight
            qkv_BLD = titan_model._causal_conv1d_varlen(qkv_BLD, weight, starts, starts_on_host)
        keys = sizes.num_key_heads * sizes.key_head_dim
        q_BLD, k_BLD, v_BLD = qkv_BLD.split([keys, keys, sizes.num_channels - 2 * keys], dim=-1)
        decay_BLN = -self.A_log.float().exp() * F.softplus(self.in_proj_a(x_BLD).float() + self.dt_bias)
        out_BLNV = self.kernel(
            q_BLD.unflatten(-1, (-1, sizes.key_head_dim)),
            k_BLD.unflatten(-1, (-1, sizes.key_head_dim)),
            v_BLD.unflatten(-1, (-1, sizes.value_head_dim)),
            decay_BLN,
            self.in_proj_b(x_BLD).sigmoid(),
            cu_seqlens=starts,
            cu_seqlens_cpu=starts_on_host,
        )
        gate_BLNV = self.in_proj_z(x_BLD).unflatten(-1, (-1, sizes.value_head_dim))
        return self.out_proj(self.norm(out_BLNV, gate_BLNV).flatten(-2))


class TextModel(Decoder):
    """TorchTitan's model without its vision tower, of which only the layers are Qwen3.5's own."""

    @dataclass(kw_only=True, slots=True)
    class Config(Decoder.Config):
        pass

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        # TorchTitan's function that parallelizes the model looks for it.
        self.vision_encoder = None


class Adapter(titan.Qwen35StateDictAdapter):
    """Names of the decoder's tensors, as in files without a vision tower."""

    from_hf_map: dict[str, str]

    def __init__(self, model_config: Decoder.Config, hf_assets_path: str | None) -> None:
        super().__init__(model_config, hf_assets_path)
        layer, experts = "layers.{}.", "moe.routed_experts.inner_experts."
        self.from_hf_map = {
            hf.replace("model.language_model.", "model."): name
            for hf, name in self.from_hf_map.items()
            if name is not None and "visual" not in hf and "experts.down_proj" not in hf
        } | {
            f"model.{layer}{hf}": f"{layer}{name}"
            for hf, name in {
                "linear_attn.in_proj_qkv.weight": "attn.in_proj_qkv.weight",
                "linear_attn.conv1d.weight": "attn.conv1d.weight",
                "mlp.experts.{}.gate_proj.weight": f"{experts}w1_EFD",
                "mlp.experts.{}.down_proj.weight": f"{experts}w2_EDF",
                "mlp.experts.{}.up_proj.weight": f"{experts}w3_EFD",
            }.items()
        }


def _layers(facts: ModelFacts, attention_backend: str) -> list[TransformerBlock.Config]:
    linear = facts.linear
    assert linear is not None
    common = {
        "n_layers": facts.num_layers,
        "dim": facts.hidden_size,
        "n_heads": facts.num_heads,
        "n_kv_heads": facts.num_kv_heads,
        "head_dim": facts.head_dim,
        "rotary_dim": facts.rotary_dim,
        "rope": rope_config(titan.MRoPE, facts),
        "n_key_heads": linear.num_key_heads,
        "n_value_heads": linear.num_value_heads,
        "key_head_dim": linear.key_head_dim,
        "value_head_dim": linear.value_head_dim,
        "attn_backend": attention_backend,
    }
    build: Callable[..., list[TransformerBlock.Config]] = titan._build_qwen35_layers
    own = {"hidden_dim": facts.dense_hidden_size}
    if facts.num_experts:
        build = titan._build_qwen35_moe_layers
        own = {
            "moe_hidden_dim": facts.expert_hidden_size,
            "num_experts": facts.num_experts,
            "top_k": facts.top_k,
            "shared_expert_hidden_dim": facts.gated_hidden_size,
        }
    # Layers of both kinds, of which each place takes one.
    intervals = (1, facts.num_layers + 1)
    full, hybrid = (build(**common, **own, full_attention_interval=every) for every in intervals)
    layers = [(full if index in linear.full_layers else hybrid)[index] for index in range(facts.num_layers)]
    for layer in layers:
        layer.attention_norm = replace(layer.attention_norm, eps=facts.rms_norm_eps)
        layer.ffn_norm = replace(layer.ffn_norm, eps=facts.rms_norm_eps)
        if layer.attention is not None:
            layer.attention.q_norm = replace(layer.attention.q_norm, eps=facts.rms_norm_eps)
            layer.attention.k_norm = replace(layer.attention.k_norm, eps=facts.rms_norm_eps)
        else:
            layer.delta_net = _one_matrix(layer.delta_net, linear, facts)
        if layer.moe is not None:
            # As for Qwen3: the generator could not use a trained bias for load balancing.
            layer.moe.load_balance_coeff = None
    return layers


def _one_matrix(
    net: titan_model.GatedDeltaNet.Config, linear: LinearAttention, facts: ModelFacts
) -> GatedDeltaNet.Config:
    return GatedDeltaNet.Config(
        sizes=linear,
        in_proj_qkv=replace(net.in_proj_q, out_features=linear.num_channels),
        in_proj_z=net.in_proj_z,
        in_proj_a=net.in_proj_a,
        in_proj_b=net.in_proj_b,
        conv1d=Conv1d.Config(
            in_channels=linear.num_channels,
            out_channels=linear.num_channels,
            kernel_size=linear.width,
            groups=linear.num_channels,
            bias=False,
        ),
        kernel=net.kernel,
        norm=replace(net.norm, eps=facts.rms_norm_eps),
        out_proj=net.out_proj,
        param_init=net.param_init,
    )


def titan_family() -> TitanFamily:
    return TitanFamily(
        model=TextModel,
        layers=_layers,
        parallelize=titan.parallelize_qwen3_5,
        adapter=Adapter,
        last_norm=lambda facts: replace(titan._offset_norm(facts.hidden_size), eps=facts.rms_norm_eps),
    )
