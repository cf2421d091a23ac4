"""vLLM's batch-invariant mode of GPUs on this machine, its Triton kernels interpreted.

Call ``pretend`` in a process of ``run_on_gpu_runner``. Modules of vLLM then choose as on a GPU, for linear
layers, norms, activations, experts and attention, and every kernel and operator that they call is noted. CUDA
operators are those of the CPU build or, where it has none, of ``gpu_runner``. For vLLM 0.32, Triton 3.7.
"""

import importlib
import inspect
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

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
