"""A base weight with its adapter folded in."""

import torch


def merged(base: torch.Tensor, lora_a: torch.Tensor, lora_b: torch.Tensor, scaling: float) -> torch.Tensor:
    """``base + scaling * lora_b @ lora_a``, computed in float32, in the dtype of ``base``.

    Shapes: base [..., out, in], lora_a [..., rank, in], lora_b [..., out, rank]; leading dimensions (experts)
    are the same in all three. W = W0 + (alpha / rank) B A: Hu et al., "LoRA", 2021, section 4.1.
    """
    delta = lora_b.float() @ lora_a.float()
    return torch.add(base.float(), delta, alpha=scaling).to(base.dtype)
