"""The trained model: TorchTitan's Qwen3-MoE, sized by a Hugging Face config, under a parallel layout."""

import dataclasses

import torch
import torch.nn as nn
from torch.distributed.fsdp import FSDPModule
from torchtitan.config import TORCH_DTYPE_MAP, CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as dist_utils
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.models.common import CosSinRoPE, Embedding
from torchtitan.models.common.attention import AttentionMasksType
from torchtitan.models.common.nn_modules import RMSNorm
from torchtitan.models.qwen3 import (
    _EMBEDDING_INIT,
    _EMBEDDING_SKIP_INIT,
    _LINEAR_INIT,
    Qwen3Model,
    _build_qwen3_moe_layers,
    parallelize_qwen3,
)
from torchtitan.protocols.sharding import ShardingConfig

from forgeasync.config.model_facts import ModelFacts
from forgeasync.config.schema import ActivationCheckpointing, LoraSection, TrainerSection
from forgeasync.trainer.attention import PackedAttention, PackedSequences, packed_sequences
from forgeasync.trainer.experts import TrainingDtypeExperts
from forgeasync.trainer.head import LogprobHead
from forgeasync.trainer.lora import initialize_adapters, store_base_in, with_adapters
from forgeasync.trainer.replay_router import replay_config
from forgeasync.trainer.titan_cpu import DEVICE_TYPE, allow_gloo_reduction

_NORM_INIT = {"weight": nn.init.ones_}


def titan_config(facts: ModelFacts, *, attention_backend: str = "varlen") -> Qwen3Model.Config:
    """TorchTitan's own Qwen3-MoE config with the sizes of a Hugging Face folder.

    On a machine without an accelerator the attention is ``PackedAttention``, whatever the backend.
    """
    rope = CosSinRoPE.Config(
        dim=facts.head_dim, max_seq_len=facts.max_position_embeddings, theta=facts.rope_theta
    )
    layers = _build_qwen3_moe_layers(
        n_layers=facts.num_layers,
        dim=facts.hidden_size,
        n_heads=facts.num_heads,
        n_kv_heads=facts.num_kv_heads,
        head_dim=facts.head_dim,
        moe_hidden_dim=facts.expert_hidden_size,
        num_experts=facts.num_experts,
        top_k=facts.top_k,
        # Separate q, k, v: the parameters then have the shapes and names of the Hugging Face files.
        fuse_qkv=False,
        attn_backend=attention_backend,
        moe_comm_backend="standard",
        rope=rope,
    )
    for layer in layers:
        _adapt_layer(layer, facts)
    norm = RMSNorm.Config(normalized_shape=facts.hidden_size, eps=facts.rms_norm_eps, param_init=_NORM_INIT)
    return Qwen3Model.Config(
        dim=facts.hidden_size,
        vocab_size=facts.vocab_size,
        norm=norm,
        enable_weight_tying=facts.tie_word_embeddings,
        tok_embeddings=Embedding.Config(
            num_embeddings=facts.vocab_size,
            embedding_dim=facts.hidden_size,
            param_init=_EMBEDDING_SKIP_INIT if facts.tie_word_embeddings else _EMBEDDING_INIT,
        ),
        lm_head=LogprobHead.Config(
            in_features=facts.hidden_size, out_features=facts.vocab_size, param_init=_LINEAR_INIT
        ),
        layers=layers,
    )


def _adapt_layer(layer: object, facts: ModelFacts) -> None:
    """What differs from TorchTitan's Qwen3: norm epsilon, router, expert dtype, CPU attention."""
    layer.attention_norm = dataclasses.replace(layer.attention_norm, eps=facts.rms_norm_eps)
    layer.ffn_norm = dataclasses.replace(layer.ffn_norm, eps=facts.rms_norm_eps)
    layer.attention.qk_norm = dataclasses.replace(layer.attention.qk_norm, eps=facts.rms_norm_eps)
    # Qwen3 has no load-balancing bias: one that moved in training would not exist in the sampler.
    layer.moe.load_balance_coeff = None
    layer.moe.router = replay_config(layer.moe.router)
    experts = layer.moe.routed_experts.inner_experts
    layer.moe.routed_experts.inner_experts = TrainingDtypeExperts.Config(
        dim=experts.dim,
        hidden_dim=experts.hidden_dim,
        num_experts=experts.num_experts,
        param_init=experts.param_init,
    )
    if DEVICE_TYPE == "cpu":
        layer.attention.inner_attention = PackedAttention.Config()


def build_meta_model(facts: ModelFacts) -> Qwen3Model:
    """The whole model without memory (meta device), for counting its parameters."""
    with torch.device("meta"):
        return titan_config(facts).build()


@dataclasses.dataclass(slots=True, kw_only=True)
class _TitanRun:
    """The two sections that TorchTitan's ``update_from_config`` reads."""

    parallelism: ParallelismConfig
    training: TrainingConfig


def build_parallel_dims(section: TrainerSection, *, world_size: int) -> ParallelDims:
    """The device meshes of the trainer; torch.distributed is up already."""
    parallel = section.parallel
    if parallel.context > 1 and DEVICE_TYPE != "cpu":
        raise ValueError(
            f"trainer.parallel.context = {parallel.context}: TorchTitan 0.3.0 has no context parallelism for "
            "varlen attention, which packed rows use on an accelerator; must be 1 there"
        )
    parallelism = _parallelism(section)
    parallel_dims = ParallelDims.from_config(parallelism, world_size)
    dist_utils.set_spmd_backend(parallelism.spmd_backend)
    parallel_dims.build_mesh()
    return parallel_dims


def _parallelism(section: TrainerSection) -> ParallelismConfig:
    parallel = section.parallel
    return ParallelismConfig(
        data_parallel_replicate_degree=parallel.data_replicate,
        data_parallel_shard_degree=parallel.data_shard,
        tensor_parallel_degree=parallel.tensor,
        enable_sequence_parallel=parallel.sequence,
        context_parallel_degree=parallel.context,
        expert_parallel_degree=parallel.expert,
        # The default backend, spmd_types, fails under FSDP2 on torch 2.13.
        spmd_backend="partial_dtensor",
    )


def build_parallel_model(
    facts: ModelFacts,
    section: TrainerSection,
    *,
    parallel_dims: ParallelDims,
    lora: LoraSection | None = None,
    seed: int = 0,
    is_frozen: bool = False,
) -> Qwen3Model:
    """Build, shard and randomly initialize the model on this rank.

    Trained weights are float32 masters; FSDP2 casts to ``section.dtype`` for compute. With ``lora`` those are
    the adapters', and the rest is frozen and kept in ``section.dtype``, as is all of it with ``is_frozen``.
    """
    parallelism = _parallelism(section)
    training = TrainingConfig(
        seq_len=section.tokens_per_row, mixed_precision_param=section.dtype.value, dtype="float32"
    )
    model_config = titan_config(facts)
    model_config.update_from_config(config=_TitanRun(parallelism=parallelism, training=training))
    head = model_config.lm_head
    if head.sharding_config is not None:
        # Its weight stays sharded over the vocabulary, but it returns log-probabilities, the same everywhere.
        head.sharding_config = ShardingConfig(state_shardings=head.sharding_config.state_shardings)
    if lora is not None:
        model_config = with_adapters(model_config, lora)
    with torch.device("meta"):
        model = model_config.build()
    if is_frozen:
        model.requires_grad_(False)
    # Where all is trained, nothing changes.
    store_base_in(model, TORCH_DTYPE_MAP[section.dtype.value])
    checkpointing = ActivationCheckpointing.NONE if is_frozen else section.activation_checkpointing
    parallelize_qwen3(
        model,
        parallel_dims=parallel_dims,
        training=training,
        parallelism=parallelism,
        compile_config=CompileConfig(enable=section.compile, components=["model"]),
        ac_config=_activation_checkpointing(checkpointing),
        dump_folder="",
    )
    model.to_empty(device=DEVICE_TYPE)
    torch.manual_seed(seed)
    with torch.no_grad():
        model.init_states(buffer_device=None)
    initialize_adapters(model, seed)
    allow_gloo_reduction(model)
    # The head is called by itself, with the tokens whose log-probabilities are wanted.
    model._skip_lm_head = True
    model.train(not is_frozen)
    return model


def reshard(model: torch.nn.Module) -> None:
    """After a forward pass without a backward pass: until then FSDP2 keeps the last layers gathered, which
    hides from them what the optimizer does to their shards.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # Otherwise it refuses for those very layers. They are gathered once more in a backward pass then.
            module.set_reshard_after_forward(True, recurse=False)
            module.reshard()


def _activation_checkpointing(choice: ActivationCheckpointing) -> object | None:
    match choice:
        case ActivationCheckpointing.NONE:
            return None
        case ActivationCheckpointing.SELECTIVE:
            return SelectiveAC.Config()
        case ActivationCheckpointing.FULL:
            return FullAC.Config()


def attention_masks(
    model: Qwen3Model, positions_BL: torch.Tensor, *, query_start: int
) -> AttentionMasksType | PackedSequences:
    """What the model's attention needs to keep the packed sequences of whole rows apart."""
    if isinstance(model.config.first_attention.inner_attention, PackedAttention.Config):
        return packed_sequences(positions_BL, query_start=query_start)
    return model.get_attention_masks(positions_BL)
