"""CUDA operators that vLLM's adapters of experts call between Triton's kernels, in PyTorch. For vLLM 0.32.

Written to what vLLM's callers say of their results; the CPU build has none of them.
"""

import torch


def stand_in() -> None:
    """Take the operators' place in this process."""
    from vllm import _custom_ops as ops

    ops.topk_softmax = topk_softmax
    ops.moe_align_block_size = moe_align_block_size
    ops.moe_lora_align_block_size = moe_lora_align_block_size
    ops.moe_sum = moe_sum


def topk_softmax(
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    token_expert_indices: torch.Tensor,
    gating_output: torch.Tensor,
    renormalize: bool = False,
    e_score_correction_bias: torch.Tensor | None = None,
) -> None:
    assert e_score_correction_bias is None
    weights, ids = gating_output.float().softmax(-1).topk(topk_ids.shape[1], dim=-1)
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
