"""What a vLLM engine is started with."""

from pathlib import Path

from vllm.config import CacheConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform

from forgeasync.config import GeneratorSection
from forgeasync.generator.workarounds.served_adapters import AdapterSetup, engine_modules, engine_rank
from forgeasync.rollouts import CaptureSpec

CPU_WORKER = "forgeasync.generator.workarounds.cpu_worker.UpdatableCPUWorker"

GPU_WORKER_EXTENSION = "forgeasync.generator.gpu_worker.UpdatableGPUWorker"


def engine_args(
    *,
    model_path: Path,
    generator: GeneratorSection,
    max_context_length: int,
    seed: int,
    records: CaptureSpec,
    adapters: AdapterSetup | None,
    is_cpu: bool,
    num_scored_ids: int = 0,
    gpu_bytes: int | None = None,
) -> AsyncEngineArgs:
    """Return vLLM's arguments for an engine of the CPU build or of another.

    Raises:
        ValueError: see ``gpu_share``.
    """
    return AsyncEngineArgs(
        model=str(model_path),
        dtype=generator.dtype.value,
        max_model_len=max_context_length,
        max_num_seqs=generator.max_num_seqs,
        max_num_batched_tokens=generator.max_num_batched_tokens,
        tensor_parallel_size=generator.tensor_parallel,
        enable_expert_parallel=generator.expert_parallel,
        worker_cls=CPU_WORKER if is_cpu else "auto",
        worker_extension_cls="" if is_cpu else GPU_WORKER_EXTENSION,
        kv_cache_memory_bytes=int(generator.kv_cache_gib * 2**30),
        gpu_memory_utilization=gpu_share(gpu_bytes),
        enforce_eager=not generator.compile,
        # The distribution really drawn from: after temperature, top-k, top-p and min-p.
        logprobs_mode="processed_logprobs",
        max_logprobs=num_scored_ids,
        # Step outputs then belong to the weights of that very step, which makes version labels exact.
        async_scheduling=False,
        seed=seed,
        enable_return_routed_experts=records.routing and not is_cpu,
        return_sampling_mask=records.kept_tokens and not is_cpu,
        enable_lora=adapters is not None,
        max_lora_rank=16 if adapters is None else engine_rank(adapters.lora.rank),
        lora_target_modules=None if adapters is None else engine_modules(adapters),
    )


def gpu_share(num_bytes: int | None) -> float:
    """Share of each GPU that vLLM is to find free before it loads a model; None: vLLM's default, 92 %.

    vLLM asks for that share (``request_memory`` of 0.32) although the size of the KV cache is given.

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
