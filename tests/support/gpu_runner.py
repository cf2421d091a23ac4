"""Engines in the form that they have on GPUs, in processes of their own, Triton's kernels interpreted.

What is the GPU's: our engine's arguments and worker extension, vLLM's GPU model runner with its sampler, its
native records of experts and kept tokens, the worker that CPU and GPU workers have in common, and adapters
with their kernels. What is the CPU's: attention, linear layers and, without adapters, experts, and so the
layout of weights. With adapters the experts are Triton's.
"""

import os
from collections.abc import Callable
from typing import TypeVar

import torch

from tests.support.processes import call_in_processes
from tests.support.tiers import Starts, starts

R = TypeVar("R")


@starts(Starts.ENGINE)
def run_on_gpu_runner(function: Callable[..., R], *arguments: object) -> R:
    """The result of ``function(*arguments)`` in a process whose engines take the way of GPUs.

    The function may start ``GeneratorEngine`` as ever, one or several after another.
    """
    call = (function, arguments)
    return call_in_processes("vllm_of_gpus", _as_on_a_gpu, call, environments=[dict(os.environ)])[0]


def _as_on_a_gpu(function: Callable[..., R], arguments: tuple[object, ...]) -> R:
    import vllm.v1.sample.ops.topk_topp_sampler as truncation
    import vllm.v1.worker.gpu.sample.sampler as sampler
    from vllm.lora.ops.triton_ops import lora_expand_op, lora_shrink_op
    from vllm.platforms import current_platform

    from forgeasync.generator import engine
    from forgeasync.generator.workarounds import served_adapters
    from tests.support import cuda_operators

    # The one kernel that the interpreter does not run ("'int' object has no attribute 'to'").
    sampler.apply_top_k_top_p = truncation.apply_top_k_top_p_pytorch
    cuda_operators.stand_in()
    configs = lora_shrink_op.get_lora_op_configs
    # Of 64 parts of a product all but one are empty at the sizes of tests, and each takes a millisecond.
    lora_shrink_op.get_lora_op_configs = lambda *sizes, **named: configs(*sizes, **named) | {"split_k": 1}
    # These refuse float32, in which alone results can be compared closely.
    for module in (lora_expand_op, lora_shrink_op):
        module.torch = _Float32ForFloat16()
    # The choice of vllm.platforms.cuda, which the CPU build cannot import.
    wrapper = "vllm.lora.punica_wrapper.punica_gpu.PunicaWrapperGPU"
    type(current_platform).get_punica_wrapper = classmethod(lambda _: wrapper)
    for module in (engine, served_adapters):
        module.current_platform = _Gpu()
    return function(*arguments)


class _Gpu:
    """What our own code asks the platform; vLLM goes on seeing a CPU."""

    @staticmethod
    def is_cpu() -> bool:
        return False


class _Float32ForFloat16:
    """What vLLM's kernels for adapters of linear layers know as torch."""

    float16 = torch.float32

    def __getattr__(self, name: str) -> object:
        return getattr(torch, name)
