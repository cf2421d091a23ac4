"""``fidelity: bitwise`` on GPUs: trainer and engine call the same kernels, and get the same bits of them.

Both run vLLM's batch-invariant mode in bfloat16. Triton's kernels are interpreted, and CUDA's operators are
stand-ins (below). So this shows that both sides call what they should with the same
constants, and that neither batches nor packing change the order of a kernel's sums; not that a GPU does.
"""

import importlib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist

from forgeasync.config import Dtype, GeneratorSection, ParallelSection, SamplingSection
from forgeasync.models import read_model_facts
from forgeasync.rollouts import CaptureSpec, Rollout
from tests.generator.conftest import make_prompts
from tests.support.engines import sample_all, start_engine
from tests.support.families import write_family
from tests.support.gpu_runner import run_on_gpu_runner
from tests.support.trainers import make_trainer
from tests.trainer.test_bitwise import _rows

ASKING = (
    "layers.linear",
    "layers.vocab_parallel_embedding",
    "layers.fused_moe.oracle.unquantized",
    "layers.fused_moe.experts.triton_moe",
    "layers.fused_moe.unquantized_fused_moe_method",
    "layers.fused_moe.modular_kernel",
    "layers.fused_moe.router.router_factory",
)
"""Modules of vLLM that choose their kernel by the platform."""

OPERATORS = ("fused_add_rms_norm", "rotary_embedding", "topk_softmax", "moe_align_block_size", "moe_sum")

CONSTANTS = ("BLOCK_", "TILE_", "GROUP_", "SPLIT_", "IS_", "MUL_", "compute_type", "num_warps", "num_stages")
"""Beginnings of the names of constants that the order of a kernel's sums may depend on."""


class Call(NamedTuple):
    """A kernel or an operator that was called."""

    name: str
    constants: tuple[tuple[str, str], ...] = ()


class _Gpu:
    """The platform as these modules see it."""

    def __init__(self, platform: object) -> None:
        self._platform = platform

    def __getattr__(self, name: str) -> object:
        return getattr(self._platform, name)

    def is_cpu(self) -> bool:
        return False

    def is_cuda(self) -> bool:
        return True

    is_cuda_alike = is_cuda


def pretend() -> set[Call]:
    """Return a set that gets the calls."""
    from vllm import _custom_ops
    from vllm.model_executor.determinism import batch_invariant
    from vllm.model_executor.layers.activation import SiluAndMul
    from vllm.model_executor.layers.layernorm import RMSNorm
    from vllm.platforms import current_platform
    from vllm.v1.worker.workspace import init_workspace_manager

    found: set[Call] = set()
    for name in OPERATORS:
        setattr(_custom_ops, name, _noting(found, name, getattr(_custom_ops, name)))
    torch.ops._C.silu_and_mul = SiluAndMul.op = _noting(found, "silu_and_mul", torch.ops._C.silu_and_mul)
    for name in ASKING:
        importlib.import_module(f"vllm.model_executor.{name}").current_platform = _Gpu(current_platform)
    RMSNorm.forward_cpu = RMSNorm.forward_cuda
    SiluAndMul.forward_cpu = SiluAndMul.forward_cuda
    batch_invariant.num_compute_units = lambda *_: 2
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    type(current_platform).get_attn_backend_cls = classmethod(lambda _, chosen, *__, **___: chosen.get_path())
    init_workspace_manager(torch.device("cpu"))
    _interpret(found)
    return found


def _noting(found: set[Call], name: str, operator: Callable[..., object]) -> Callable[..., object]:
    def call(*arguments: object, **named: object) -> object:
        found.add(Call(name))
        return operator(*arguments, **named)

    # What is set on a class is no method then.
    return staticmethod(call)


def _interpret(found: set[Call]) -> None:
    """Note kernels, and let the interpreter multiply in bfloat16, which it keeps as integers."""
    import triton.language as tl
    from triton.runtime.interpreter import GridExecutor, InterpreterBuilder, TensorHandle

    run, dot = GridExecutor.__call__, InterpreterBuilder.create_dot

    def note(self: GridExecutor, *arguments: object, **named: object) -> None:
        kernel = f"{self.fn.__module__}.{self.fn.__name__}"
        given = dict(zip(inspect.signature(self.fn).parameters, arguments, strict=False)) | named
        if kernel.endswith("kernel_unified_attention"):
            # Tokens of a block of the KV cache, of which CPUs have larger ones.
            del given["BLOCK_SIZE"]
        constants = ((name, str(value)) for name, value in given.items() if name.startswith(CONSTANTS))
        found.add(Call(kernel, tuple(sorted(constants))))
        run(self, *arguments, **named)

    def widened(one: TensorHandle) -> TensorHandle:
        if one.dtype.scalar != tl.bfloat16:
            return one
        return TensorHandle((one.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def multiply(self: InterpreterBuilder, a: TensorHandle, b: TensorHandle, *rest: object) -> TensorHandle:
        return dot(self, widened(a), widened(b), *rest)

    GridExecutor.__call__, InterpreterBuilder.create_dot = note, multiply


SAMPLING = SamplingSection(temperature=0.8, top_k=9, max_response_tokens=4)
GENERATOR = GeneratorSection(
    dtype=Dtype.BFLOAT16,
    max_num_seqs=8,
    # Prompts are computed in parts.
    max_num_batched_tokens=24,
    kv_cache_gib=0.002,
    batch_invariant=True,
)

BESIDE_THE_MODEL = ("vllm.v1.worker.gpu.", "vllm.model_executor.determinism.batch_invariant._softmax_kernel")
"""Beginnings of the names of kernels that prepare batches, cut the vocabulary and draw."""


async def _sample(folder: Path) -> tuple[list[Rollout], set[Call]]:
    calls = pretend()
    records = CaptureSpec(routing=read_model_facts(str(folder)).num_experts > 0, kept_tokens=True)
    engine = await start_engine(folder, GENERATOR, records=records)
    prompts = make_prompts(engine.vocab_size, (3, 40), num_shared=0)
    rollouts = await sample_all(engine, prompts, SAMPLING, num_samples=2)
    engine.shutdown()
    return rollouts, calls


def _step(folder: Path, rollouts: list[Rollout]) -> tuple[dict[str, float], set[Call]]:
    """A step's metrics."""
    calls = pretend()
    from forgeasync.trainer import generator_forward

    generator_forward.DEVICE_TYPE = "cuda"
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    torch.autograd.set_multithreading_enabled(False)
    trainer = make_trainer(
        folder,
        ParallelSection(),
        dtype=Dtype.BFLOAT16,
        tokens_per_row=512,
        temperature=SAMPLING.temperature,
        is_bitwise=True,
    )
    metrics = trainer.train_step(_rows(rollouts, share=True, per_row=4, rank=0, num_ranks=1)).metrics
    dist.destroy_process_group()
    return metrics, calls


@pytest.mark.parametrize("variant", ["qwen3_moe", pytest.param("llama3_rope", marks=pytest.mark.exhaustive)])
def test_trainer_and_engine_compute_with_the_same_kernels(tmp_path: Path, variant: str) -> None:
    folder = write_family(tmp_path / "model", variant)
    rollouts, of_engine = run_on_gpu_runner(_sample, folder)
    assert all(np.isfinite(one.logprobs_T).all() and one.logprobs_T.any() for one in rollouts)
    metrics, of_trainer = run_on_gpu_runner(_step, folder, rollouts)
    assert of_trainer <= of_engine
    others = {call for call in of_engine - of_trainer if not call.name.startswith(BESIDE_THE_MODEL)}
    assert not others
    assert metrics["mismatch/logprob_abs_max"] == 0.0
