"""The Triton kernels that vLLM launches for us on GPUs compile for these, with their real arguments.

Launches are recorded from engines whose kernels are interpreted, with a vocabulary as large as Qwen3's. What
the interpreter cannot run is launched by vLLM's functions with tensors that have a shape and no data.
"""

import functools
import importlib
import json
import pkgutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from forgeasync.config import ADAPTABLE, Dtype, GeneratorSection, LoraSection, SamplingSection
from forgeasync.testing import write_tiny_model
from tests.support.engines import NO_RECORDS, RECORDS, start_engine
from tests.support.gpu_runner import run_on_gpu_runner
from tests.support.processes import run_apart


@dataclass(frozen=True, slots=True)
class Pointer:
    """A tensor as the compiler sees it."""

    dtype: torch.dtype
    is_aligned: bool

    def data_ptr(self) -> int:
        return 0 if self.is_aligned else 1


@dataclass(frozen=True, slots=True)
class Launch:
    """A launch of a kernel; integers and constants have the launch's own values."""

    module: str
    kernel: str
    arguments: tuple[object, ...]
    named: tuple[tuple[str, object], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """The result for one kernel and chip."""

    kernel: str
    arch: int
    shared_bytes: int = 0
    error: str = ""


def record_launches(*, passed_over: tuple[str, ...]) -> set[Launch]:
    """Return a set that gets the launches of interpreted kernels.

    The kernels still run, except those in modules whose names begin with one of ``passed_over``.
    """
    from triton.runtime.interpreter import GridExecutor

    found: set[Launch] = set()
    run = GridExecutor.__call__

    def record(self: GridExecutor, *arguments: object, **named: object) -> None:
        described = tuple(map(_describe, arguments))
        constants = tuple((name, _describe(value)) for name, value in named.items())
        module = self.fn.__globals__["__name__"]
        found.add(Launch(module, self.fn.__name__, described, constants))
        if not module.startswith(passed_over):
            run(self, *arguments, **named)

    GridExecutor.__call__ = record
    return found


def _describe(value: object) -> object:
    if not isinstance(value, torch.Tensor):
        return value
    # Tensors without data are those that an allocator returns.
    has_data = value.device.type == "cpu"
    return Pointer(value.dtype, not has_data or value.data_ptr() % 16 == 0)


@dataclass(slots=True)
class Compiler:
    """Compiles every kernel that this process launches, for the chip ``arch``, and runs none.

    Create it before vLLM is imported.
    """

    arch: int = 0
    compiled: list[Compiled] = field(default_factory=list)
    used: set[str] = field(default_factory=set)
    """Kernels, and functions that they call, which were compiled."""

    def __post_init__(self) -> None:
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler.code_generator import CodeGenerator
        from triton.runtime.jit import JITFunction

        driver = SimpleNamespace(
            is_active=lambda: True,
            get_current_device=lambda: self.arch,
            get_current_stream=lambda device: 0,
            get_current_target=lambda: GPUTarget("cuda", self.arch, 32),
        )
        # vLLM's CPU build takes Triton for usable if it has a backend "cpu".
        no_target = SimpleNamespace(supports_target=lambda target: False)
        triton.backends.backends["cpu"] = SimpleNamespace(driver=driver, compiler=no_target)
        triton.runtime.driver.set_active(driver)
        launch, call = JITFunction.run, CodeGenerator.call_JitFunction

        def compile_only(kernel: JITFunction, *arguments: object, **named: object) -> None:
            name = name_of(kernel)
            self.used.add(name)
            described = {name: _describe(value) for name, value in named.items()}
            try:
                found = launch(
                    kernel, *map(_describe, arguments), **described | {"grid": None, "warmup": True}
                )
                assert found.asm["cubin"].startswith(b"\x7fELF")
                one = Compiled(kernel=name, arch=self.arch, shared_bytes=found.metadata.shared)
            except Exception as error:
                one = Compiled(kernel=name, arch=self.arch, error=f"{error}\n{error.__cause__ or ''}")
            self.compiled.append(one)

        def note_called(
            generator: CodeGenerator, function: JITFunction, *rest: object, **named: object
        ) -> object:
            self.used.add(name_of(function))
            return call(generator, function, *rest, **named)

        JITFunction.run, CodeGenerator.call_JitFunction = compile_only, note_called


def name_of(kernel: object) -> str:
    return f"{kernel.__module__}.{kernel.fn.__qualname__}"


def known_kernels() -> set[str]:
    """Return names of all functions with ``@triton.jit`` in the modules that this process has imported."""
    from triton.runtime.jit import _triton_jit_function_registry

    return {name_of(kernel) for kernel in _triton_jit_function_registry.values()}


pytestmark = pytest.mark.exhaustive

# Qwen3-30B-A3B, and the generator of configs/qwen3_30b_a3b.yaml.
VOCAB, EXPERTS, TOP_K, HIDDEN, EXPERT_HIDDEN = 151936, 128, 8, 2048, 768
GENERATOR = GeneratorSection(
    dtype=Dtype.BFLOAT16, max_num_seqs=96, max_num_batched_tokens=8192, kv_cache_gib=0.002
)
SAMPLED = tuple(
    SamplingSection(temperature=0.8, max_response_tokens=2, **cut)
    for cut in ({}, {"top_k": 20, "top_p": 0.9}, {"min_p": 0.1})
)
NUM_SCORED = 20

# A layer of the same model, with experts as they are on one of four GPUs, and its adapters.
ADAPTER = LoraSection(rank=16, alpha=32.0, targets=ADAPTABLE)
WIDTH = EXPERT_HIDDEN // 4
HEADS = {"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128}
SIZES = {
    "q_proj": (4096, HIDDEN),
    "k_proj": (512, HIDDEN),
    "v_proj": (512, HIDDEN),
    "o_proj": (HIDDEN, 4096),
    "gate_proj": (WIDTH, HIDDEN),
    "up_proj": (WIDTH, HIDDEN),
    "down_proj": (HIDDEN, WIDTH),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    arch: int
    max_shared_kib: int
    """Shared memory of a block: CUDA C++ Programming Guide, table "Technical Specifications per Compute
    Capability"."""
    num_multiprocessors: int
    experts: tuple[tuple[str, int], ...]
    """Names of such GPUs, and numbers of them that share experts. vLLM has tuned sizes of blocks for some of
    these pairs, and takes its default ones for the others."""


CHIPS = (
    Chip(
        arch=80,
        max_shared_kib=163,
        num_multiprocessors=108,
        experts=(("NVIDIA_A100-SXM4-80GB", 1), ("NVIDIA_A100-SXM4-80GB", 4)),
    ),
    Chip(
        arch=90,
        max_shared_kib=227,
        num_multiprocessors=132,
        experts=(("NVIDIA_H100_80GB_HBM3", 1), ("NVIDIA_H100_80GB_HBM3", 2), ("NVIDIA_H200", 1)),
    ),
    Chip(
        arch=100,
        max_shared_kib=227,
        num_multiprocessors=148,
        experts=(("NVIDIA_B200", 1), ("NVIDIA_B200", 2)),
    ),
)

GPU_RUNNER = "vllm.v1.worker.gpu"
TRUNCATION = "vllm.v1.sample.ops.topk_topp_triton"
MOE = "vllm.model_executor.layers.fused_moe.fused_moe"
ADAPTERS = "vllm.lora.ops.triton_ops"
COVERED = (GPU_RUNNER, TRUNCATION, MOE, ADAPTERS)
"""Modules, and packages with all modules in them, whose kernels are compiled or in ``NOT_LAUNCHED``."""

NOT_LAUNCHED = {
    f"{ADAPTERS}.fp8_kernel_utils.": "quantized adapters",
    f"{ADAPTERS}.fused_moe_lora_fp8_op.": "quantized adapters",
    f"{ADAPTERS}.fused_moe_lora_op._fused_moe_lora_kernel": "adapters of experts with ranks above 128",
    f"{ADAPTERS}.fused_moe_lora_op._get_": "adapters of experts with ranks above 128",
    f"{ADAPTERS}.lora_expand_fp8_op.": "quantized adapters",
    f"{ADAPTERS}.lora_shrink_fp8_op.": "quantized adapters",
    f"{ADAPTERS}.lora_shrink_op._lora_shrink_reduce_kernel": "batch_invariant",
    f"{GPU_RUNNER}.cp_utils.": "context parallelism of engines",
    f"{GPU_RUNNER}.input_batch._expand_idx_mapping_kernel": "speculative decoding",
    f"{GPU_RUNNER}.input_batch._post_update_num_computed_tokens_kernel": "pooling",
    f"{GPU_RUNNER}.metrics.logits.": "VLLM_COMPUTE_NANS_IN_LOGITS",
    f"{GPU_RUNNER}.mm.": "images and sound",
    f"{GPU_RUNNER}.model_states.mamba_hybrid.": "models with Mamba layers",
    f"{GPU_RUNNER}.model_states.prompt_embeds.": "prompts of embeddings",
    f"{GPU_RUNNER}.model_states.recoverssm.": "models with Mamba layers",
    f"{GPU_RUNNER}.sample.batch_shard.": "enable_batch_sharded_sampling",
    f"{GPU_RUNNER}.sample.gumbel._uniform64_from_random53": "noise in float64",
    f"{GPU_RUNNER}.sample.gumbel.murmur3_uniform64": "noise in float64",
    f"{GPU_RUNNER}.sample.gumbel.tl_rand32": "speculative decoding",
    f"{GPU_RUNNER}.sample.logprob._fill_logprob_token_ids_kernel": "logprob_token_ids of requests",
    f"{GPU_RUNNER}.sample.thinking_budget.": "thinking_token_budget of requests",
    f"{GPU_RUNNER}.sample.trace_replay.": "enable_trace_replay",
    f"{GPU_RUNNER}.sample.watermark.": "watermarks",
    f"{GPU_RUNNER}.spec_decode.": "speculative decoding",
    f"{GPU_RUNNER}.structured_outputs.": "grammars",
    f"{MOE}.compute_identity_kernel": "models with experts that compute nothing",
    f"{MOE}.fused_moe_kernel_gptq_awq": "quantized experts",
}
"""First parts of the names of kernels that our engines do not launch, and what the kernels are for."""


async def record_engines(folder: Path, wide: Path) -> set[Launch]:
    """Return launches of three engines: the first records, the second scores, the third has adapters."""
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.lora.ops.triton_ops import lora_shrink_op, utils

    from forgeasync.generator import AdapterSetup, score_given_ids, score_tokens

    AsyncEngineArgs.__init__ = functools.partialmethod(AsyncEngineArgs.__init__, load_format="dummy")
    lora_shrink_op.get_lora_op_configs = utils.get_lora_op_configs
    launches = record_launches(passed_over=(ADAPTERS, MOE))
    ids_S = np.arange(3, 11, dtype=np.int32)
    engine = await start_engine(folder, GENERATOR, records=RECORDS)
    for sampling in SAMPLED:
        await engine.generate(prompt_ids_P=ids_S, num_samples=1, seed=0, sampling=sampling)
    engine.shutdown()
    # Room for each scored token beside the ids.
    engine = await start_engine(folder, GENERATOR, records=NO_RECORDS, num_scored_ids=NUM_SCORED + 1)
    await score_tokens(engine, ids_S, num_prompt=5, num_ids=NUM_SCORED)
    given_TK = np.tile(np.arange(NUM_SCORED, dtype=np.int32), (len(ids_S) - 5, 1))
    await score_given_ids(engine, ids_S, given_TK, num_prompt=5)
    await engine.generate(prompt_ids_P=ids_S, num_samples=1, seed=0, sampling=SAMPLED[1])
    # Options that our sections do not have.
    params = SamplingParams(
        max_tokens=2,
        repetition_penalty=1.1,
        frequency_penalty=0.1,
        logit_bias={7: 1.0},
        min_tokens=2,
        bad_words=["1", "2+"],
        logprobs=5,
    )
    await engine.run_request(ids_S.tolist(), params)
    engine.shutdown()
    names = (name for name in load_file(wide / "model.safetensors") if ".layers.0." in name)
    shapes = {name: SIZES[part] for name in names if (part := name.split(".")[-2]) in SIZES}
    adapters = AdapterSetup(lora=ADAPTER, shapes=shapes, folder=wide / "adapter")
    engine = await start_engine(wide, GENERATOR, records=NO_RECORDS, adapters=adapters)
    for num_samples in (1, 24):
        await engine.generate(prompt_ids_P=ids_S, num_samples=num_samples, seed=0, sampling=SAMPLED[0])
    engine.shutdown()
    return launches


def truncate(num_multiprocessors: int) -> None:
    """Launch the kernels of top-k and top-p for one request and for many."""
    from vllm.v1.sample.ops import topk_topp_triton

    topk_topp_triton.num_compute_units = lambda _: num_multiprocessors
    with torch.device("meta"):
        for num_requests in (1, GENERATOR.max_num_seqs):
            logits, top_p = torch.empty(num_requests, VOCAB), torch.empty(num_requests)
            top_k = torch.empty(num_requests, dtype=torch.int32)
            for k, p in ((top_k, None), (None, top_p), (top_k, top_p)):
                # On a GPU, the second function calls the first.
                is_split = p is not None and num_requests <= topk_topp_triton._SPLIT_MAX_BATCH
                if is_split:
                    topk_topp_triton._apply_topp_split(logits, k, p, float("-inf"), num_multiprocessors)
                if k is not None or not is_split:
                    topk_topp_triton.apply_top_k_top_p_triton(logits, k, p)


def compute_experts(num_ranks: int) -> None:
    """Launch the kernels of experts for batches of all sizes, on one of ``num_ranks`` GPUs."""
    from vllm.model_executor.layers.fused_moe import fused_moe

    fused_moe.get_moe_configs.cache_clear()
    with torch.device("meta"):
        new = functools.partial(torch.empty, dtype=torch.bfloat16)
        width = EXPERT_HIDDEN // num_ranks
        gate_up, down = new(EXPERTS, 2 * width, HIDDEN), new(EXPERTS, HIDDEN, width)
        # The sizes of vLLM's files, and one beyond them.
        for num in (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024, 1536, 2048, 3072, 4096, 8192):
            weights, ids = torch.empty(num, TOP_K), torch.empty(num, TOP_K, dtype=torch.int32)
            fused_moe.fused_experts_impl(new(num, HIDDEN), gate_up, down, weights, ids)


def compile_all(launches: set[Launch]) -> tuple[list[Compiled], set[str]]:
    """Return the results for all kernels, and names of covered modules' kernels that were not launched."""
    compiler = Compiler()
    from vllm import _custom_ops
    from vllm.model_executor.layers.fused_moe import fused_moe
    from vllm.v1.sample.ops import topk_topp_triton

    topk_topp_triton.current_platform = SimpleNamespace(is_cuda_alike=lambda: True)
    # CUDA kernels between those of Triton.
    _custom_ops.moe_sum = _custom_ops.moe_align_block_size = fused_moe.apply_moe_activation = _nothing
    for chip in CHIPS:
        compiler.arch = chip.arch
        for launch in launches:
            kernel = getattr(importlib.import_module(launch.module), launch.kernel)
            kernel[(1,)](*launch.arguments, **dict(launch.named))
        truncate(chip.num_multiprocessors)
        for name, num_ranks in chip.experts:
            fused_moe.get_device_name_as_file_name = lambda name=name: name
            compute_experts(num_ranks)
    for name in COVERED:
        path = getattr(importlib.import_module(name), "__path__", [])
        for module in pkgutil.walk_packages(path, f"{name}."):
            importlib.import_module(module.name)
    covered = {name for name in known_kernels() if name.startswith(tuple(f"{one}." for one in COVERED))}
    return compiler.compiled, covered - compiler.used


def _nothing(*arguments: object, **named: object) -> None:
    """Stands for a CUDA kernel."""


def _edit(folder: Path, **values: int) -> None:
    """Change the config of a model, whose weights are not read."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[list[Compiled], set[str]]]:
    new = functools.partial(write_tiny_model, num_experts=EXPERTS, top_k=TOP_K)
    folder, wide = (new(tmp_path_factory.mktemp("model") / "hf") for _ in range(2))
    _edit(folder, vocab_size=VOCAB)
    _edit(wide, num_hidden_layers=1, hidden_size=HIDDEN, moe_intermediate_size=WIDTH, **HEADS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(folder.parent / "cache"))
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        yield run_apart(compile_all, run_on_gpu_runner(record_engines, folder, wide))


def test_kernels_compile_and_fit(results: tuple[list[Compiled], set[str]]) -> None:
    compiled, _ = results
    limits = {chip.arch: chip.max_shared_kib * 1024 for chip in CHIPS}
    failed = {one for one in compiled if one.error or one.shared_bytes > limits[one.arch]}
    assert not failed, "\n".join(sorted(map(str, failed)))
    kernels = {one.kernel for one in compiled}
    assert len(kernels) > 20
    assert {(one.kernel, one.arch) for one in compiled} == {
        (name, arch) for name in kernels for arch in limits
    }


def test_no_kernel_is_overlooked(results: tuple[list[Compiled], set[str]]) -> None:
    _, not_launched = results
    assert {name for name in not_launched if not name.startswith(tuple(NOT_LAUNCHED))} == set()
    assert {one for one in NOT_LAUNCHED if not any(name.startswith(one) for name in not_launched)} == set()
