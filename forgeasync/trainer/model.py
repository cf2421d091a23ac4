"""The trained model: a TorchTitan family, sized by a Hugging Face config, in a parallel layout."""

import dataclasses
from dataclasses import dataclass

import torch
from torchtitan.config import TORCH_DTYPE_MAP, CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as dist_utils
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.models.common import Embedding, Linear
from torchtitan.models.common.decoder import Decoder, TransformerBlock
from torchtitan.models.common.param_init import skip_param_init
from torchtitan.models.common.rope import RoPE
from torchtitan.models.gpt_oss.model import Attention as GptOssAttention
from torchtitan.models.gpt_oss.moe import GptOssGroupedExperts
from torchtitan.protocols.module import Module
from torchtitan.protocols.sharding import ShardingConfig

# Importing this changes every process group that is made afterwards.
import forgeasync.trainer.workarounds.gloo_threads as _gloo_threads  # noqa: F401
from forgeasync.config import ActivationCheckpointing, LoraSection, ModelFacts, TrainerSection
from forgeasync.models import (
    DEVICE_TYPE,
    FAMILIES,
    LINEAR_INIT,
    allow_gloo_reduction,
    choose_flash_attention,
    unpin_offloaded,
)
from forgeasync.trainer.logprobs import Predictions, Targets, chunked_predictions
from forgeasync.trainer.lora import initialize_adapters, store_base_in, with_adapters
from forgeasync.trainer.replay_router import ReplayRouter
from forgeasync.trainer.workarounds.attention import (
    FULL_WINDOW,
    GatheredKeysAttention,
    PackedAttention,
    SinkAttention,
    UndividedBiasLinear,
    WholeRowAttention,
)
from forgeasync.trainer.workarounds.experts import (
    ClampedExperts,
    TrainingDtypeExperts,
    lay_out_experts,
    prepare_compiled_layers,
)
from forgeasync.trainer.workarounds.low_precision_sums import (
    CpuEmbedding,
    Float32Gate,
    SummingDispatcher,
    as_config,
)
from forgeasync.trainer.workarounds.rms_norm import use_cpu_norms


class LogprobHead(Linear):
    """Output layer that returns log-probabilities instead of logits.

    They are computed in ``forward``, so that FSDP2 gathers and frees its weight as for any other layer.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        pass

    def forward(
        self, hidden_TD: torch.Tensor, targets: Targets, temperature: float, with_entropies: bool
    ) -> Predictions:
        """Return predictions in float32 [T], with entropies if ``with_entropies``."""
        return chunked_predictions(
            hidden_TD, self.weight, targets, temperature, with_entropies=with_entropies
        )


def titan_config(facts: ModelFacts, *, has_whole_rows: bool = True) -> Decoder.Config:
    """Return TorchTitan's config of the family with the sizes of a Hugging Face folder.

    ``has_whole_rows`` is false with context parallelism or shared prefixes: attention depends on it.
    """
    family = FAMILIES[facts.model_type].titan()
    layers = family.layers(facts, "varlen")
    for layer in layers:
        _adapt_layer(layer, has_whole_rows=has_whole_rows)
    config = family.model.Config(
        dim=facts.hidden_size,
        vocab_size=facts.vocab_size,
        norm=family.last_norm(facts),
        enable_weight_tying=facts.tie_word_embeddings,
        tok_embeddings=(CpuEmbedding if DEVICE_TYPE == "cpu" else Embedding).Config(
            num_embeddings=facts.vocab_size,
            embedding_dim=facts.hidden_size,
            # A tied embedding is initialized as the output layer.
            param_init={"weight": skip_param_init} if facts.tie_word_embeddings else LINEAR_INIT,
        ),
        lm_head=LogprobHead.Config(
            in_features=facts.hidden_size, out_features=facts.vocab_size, param_init=LINEAR_INIT
        ),
        layers=layers,
    )
    if DEVICE_TYPE == "cpu":
        use_cpu_norms(config)
    return config


def _adapt_layer(layer: TransformerBlock.Config, *, has_whole_rows: bool) -> None:
    """Change a TorchTitan layer's router, experts' dtype and sums, and attention."""
    if layer.moe is not None:
        layer.moe.router.gate = as_config(Float32Gate, layer.moe.router.gate)
        layer.moe.router = as_config(ReplayRouter, layer.moe.router)
        experts = layer.moe.routed_experts.inner_experts
        kind = ClampedExperts if isinstance(experts, GptOssGroupedExperts.Config) else TrainingDtypeExperts
        layer.moe.routed_experts.inner_experts = as_config(kind, experts)
        dispatcher = layer.moe.routed_experts.token_dispatcher
        layer.moe.routed_experts.token_dispatcher = as_config(SummingDispatcher, dispatcher)
    if layer.attention is not None:
        layer.attention.inner_attention = inner_attention(
            DEVICE_TYPE,
            has_whole_rows=has_whole_rows,
            window_size=layer.attention.inner_attention.window_size,
        )
        if isinstance(layer.attention, GptOssAttention.Config):
            layer.attention = as_config(SinkAttention, layer.attention)
            layer.attention.wo = as_config(UndividedBiasLinear, layer.attention.wo)


def build_meta_model(facts: ModelFacts) -> Decoder:
    """Build the whole model on the meta device, without memory, to count its parameters."""
    with torch.device("meta"):
        return titan_config(facts).build()


def inner_attention(
    device_type: str, *, has_whole_rows: bool, window_size: tuple[int, int] = FULL_WINDOW
) -> Module.Config:
    """Return the config of attention; ``has_whole_rows`` as in ``titan_config``."""
    if device_type == "cpu":
        return PackedAttention.Config(window_size=window_size)
    kind = WholeRowAttention if has_whole_rows else GatheredKeysAttention
    return kind.Config(window_size=window_size)


_CHECKPOINTING = {ActivationCheckpointing.SELECTIVE: SelectiveAC, ActivationCheckpointing.FULL: FullAC}


@dataclasses.dataclass(slots=True, kw_only=True)
class _TitanRun:
    """The two sections that TorchTitan's ``update_from_config`` reads."""

    parallelism: ParallelismConfig
    training: TrainingConfig


def build_parallel_dims(section: TrainerSection, *, world_size: int) -> ParallelDims:
    """Build the device meshes of the trainer. torch.distributed must be initialized."""
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
) -> Decoder:
    """Build, shard and randomly initialize the model on this rank.

    Trained weights are float32 masters; FSDP2 casts them to ``section.dtype`` for compute. With ``lora`` only
    the adapters are trained. Frozen weights (all of them with ``is_frozen``) are stored in ``section.dtype``.
    """
    parallelism = _parallelism(section)
    training = TrainingConfig(
        seq_len=section.tokens_per_row,
        mixed_precision_param=section.dtype.value,
        dtype="float32",
        enable_cpu_offload=section.cpu_offload,
    )
    choose_flash_attention(section.flash_attention)
    has_whole_rows = section.parallel.context == 1 and not section.shares_prefixes
    model_config = titan_config(facts, has_whole_rows=has_whole_rows)
    model_config.update_from_config(config=_TitanRun(parallelism=parallelism, training=training))
    lay_out_experts(
        model_config,
        enable_ep=section.parallel.expert > 1,
        enable_sp=parallelism.enable_sequence_parallel,
    )
    head = model_config.lm_head
    if head.sharding_config is not None:
        # The head's weight stays sharded over the vocabulary, but log-probabilities are equal on all ranks.
        head.sharding_config = ShardingConfig(state_shardings=head.sharding_config.state_shardings)
    if lora is not None:
        model_config = with_adapters(model_config, lora)
    with torch.device("meta"):
        model = model_config.build()
    if is_frozen:
        model.requires_grad_(False)
    store_base_in(model, TORCH_DTYPE_MAP[section.dtype.value])
    checkpointing = ActivationCheckpointing.NONE if is_frozen else section.activation_checkpointing
    FAMILIES[facts.model_type].titan().parallelize(
        model,
        parallel_dims=parallel_dims,
        training=training,
        parallelism=parallelism,
        compile_config=CompileConfig(enable=section.compile, components=["model"]),
        ac_config=_CHECKPOINTING[checkpointing].Config() if checkpointing in _CHECKPOINTING else None,
        dump_folder="",
    )
    if section.compile:
        prepare_compiled_layers(model)
    unpin_offloaded(model)
    model.to_empty(device="cpu" if section.cpu_offload else DEVICE_TYPE)
    torch.manual_seed(seed)
    with torch.no_grad():
        model.init_states(buffer_device=None)
    # FSDP2 moves offloaded parameters to the device layer by layer, but no buffers.
    move_buffers(model, DEVICE_TYPE)
    share_rotary_caches(model)
    initialize_adapters(model, seed)
    allow_gloo_reduction(model)
    # RowForward calls the head separately, with the row's targets.
    model._skip_lm_head = True
    model.train(not is_frozen)
    return model


def move_buffers(model: torch.nn.Module, device: str) -> None:
    """Move all buffers to a device, in place."""
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = buffer.to(device)


def share_rotary_caches(model: Decoder) -> None:
    """Share one cache of cosines and sines; TorchTitan 0.3.0 gives every layer its own, for all positions.

    Separate caches would take 12 GiB for 262,144 positions and 48 layers with heads of 128.
    """
    first = None
    for module in model.modules():
        if isinstance(module, RoPE):
            if first is None:
                first = module
            assert module.config == first.config, "layers rotate alike in every family"
            module._buffers["cache"] = first.cache
