"""Engines in the form that they have on GPUs, in processes of their own, Triton's kernels interpreted.

What is the GPU's: our engine's arguments and worker extension, vLLM's GPU model runner with its sampler, its
native records of experts and kept tokens, the worker that CPU and GPU workers have in common, and adapters
with their kernels. What is the CPU's: attention, linear layers and, without adapters, experts, and so the
layout of weights. With adapters the experts are Triton's.
"""

import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import TypeVar

import torch

from tests.support.engines import schedule_asynchronously
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
    from vllm import _custom_ops
    from vllm.lora.ops.triton_ops import lora_expand_op, lora_shrink_op
    from vllm.platforms import current_platform

    from forgeasync.generator import engine
    from forgeasync.generator.workarounds import served_adapters

    # The one kernel that the interpreter does not run ("'int' object has no attribute 'to'").
    sampler.apply_top_k_top_p = truncation.apply_top_k_top_p_pytorch
    for operator in (topk_softmax, moe_align_block_size, moe_lora_align_block_size, moe_sum):
        setattr(_custom_ops, operator.__name__, operator)
    configs = lora_shrink_op.get_lora_op_configs
    # Of 64 parts of a product all but one are empty at the sizes of tests, and each takes a millisecond.
    lora_shrink_op.get_lora_op_configs = lambda *sizes, **named: configs(*sizes, **named) | {"split_k": 1}
    # These refuse float32, in which alone results can be compared closely.
    for module in (lora_expand_op, lora_shrink_op):
        module.torch = _Float32ForFloat16()
    # The choice of vllm.platforms.cuda, which the CPU build cannot import.
    wrapper = "vllm.lora.punica_wrapper.punica_gpu.PunicaWrapperGPU"
    type(current_platform).get_punica_wrapper = classmethod(lambda _: wrapper)
    # What our own code asks the platform; vLLM goes on seeing a CPU.
    for module in (engine, served_adapters):
        module.current_platform = SimpleNamespace(is_cpu=lambda: False)
    schedule_asynchronously()
    return function(*arguments)


class _Float32ForFloat16:
    """What vLLM's kernels for adapters of linear layers know as torch."""

    float16 = torch.float32

    def __getattr__(self, name: str) -> object:
        return getattr(torch, name)


# CUDA operators that vLLM's adapters of experts call between Triton's kernels, in PyTorch, written to what
# vLLM's callers say of their results. For vLLM 0.32, whose CPU build has none of them.


def topk_softmax(
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    token_expert_indices: torch.Tensor,
    gating_output: torch.Tensor,
    renormalize: bool = False,
    e_score_correction_bias: torch.Tensor | None = None,
    is_padding: torch.Tensor | None = None,
) -> None:
    assert e_score_correction_bias is None and (is_padding is None or not is_padding.any())
    logits = gating_output.float()
    # Not torch's softmax, which vLLM's batch-invariant mode replaces in an engine's process.
    shares = (logits - logits.amax(-1, keepdim=True)).exp()
    weights, ids = (shares / shares.sum(-1, keepdim=True)).topk(topk_ids.shape[1], dim=-1)
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    topk_weights.copy_(weights)
    topk_ids.copy_(ids)


def moe_align_block_size(
    topk_ids: torch.Tensor,
    num_experts: int,
    block_size: int,
    sorted_token_ids: torch.Tensor,
    experts_ids: torch.Tensor,
    num_tokens_post_pad: torch.Tensor,
    expert_map: torch.Tensor | None = None,
    scatter_idx: torch.Tensor | None = None,
) -> None:
    """Rows of ``topk_ids`` by expert, filled up to whole blocks with a row that does not exist."""
    assert expert_map is None and scatter_idx is None
    _align(topk_ids.flatten(), num_experts, block_size, sorted_token_ids, experts_ids, num_tokens_post_pad)


def _align(
    expert_of_R: torch.Tensor,
    num_experts: int,
    block_size: int,
    sorted_rows: torch.Tensor,
    expert_of_block: torch.Tensor,
    num_padded: torch.Tensor,
) -> None:
    sorted_rows.fill_(len(expert_of_R))
    end = 0
    for expert in range(num_experts):
        rows = torch.nonzero(expert_of_R == expert).flatten()
        sorted_rows[end : end + len(rows)] = rows.to(sorted_rows.dtype)
        num_blocks = -(-len(rows) // block_size)
        expert_of_block[end // block_size : end // block_size + num_blocks] = expert
        end += num_blocks * block_size
    num_padded.fill_(end)


def moe_lora_align_block_size(
    topk_ids: torch.Tensor,
    token_lora_mapping: torch.Tensor,
    num_experts: int,
    block_size: int,
    max_loras: int,
    max_num_tokens_padded: int,
    max_num_m_blocks: int,
    sorted_token_ids: torch.Tensor,
    experts_ids: torch.Tensor,
    num_tokens_post_pad: torch.Tensor,
    adapter_enabled: torch.Tensor,
    lora_ids: torch.Tensor,
    expert_map: torch.Tensor | None = None,
) -> None:
    """The same for each adapter in use, with the rows of its tokens."""
    assert expert_map is None
    sorted_LP = sorted_token_ids.view(max_loras, max_num_tokens_padded)
    expert_of_block_LB = experts_ids.view(max_loras, max_num_m_blocks)
    for slot in lora_ids.tolist():
        if slot == -1 or not adapter_enabled[slot]:
            continue
        is_served_T = token_lora_mapping[: len(topk_ids)] == slot
        expert_of_TK = torch.where(is_served_T[:, None], topk_ids, -1)
        _align(
            expert_of_TK.flatten(),
            num_experts,
            block_size,
            sorted_LP[slot],
            expert_of_block_LB[slot],
            num_tokens_post_pad[slot],
        )


def moe_sum(
    input: torch.Tensor,
    output: torch.Tensor,
    topk_ids: torch.Tensor | None = None,
    expert_map: torch.Tensor | None = None,
) -> None:
    torch.sum(input, dim=1, out=output)
