"""A parameter under the names that generators know it by, and a base weight with its adapter folded in."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedWeight:
    """A tensor (or this rank's shard of one, as a DTensor) and what generators call it.

    Several ``names`` mean that the tensor stacks that many tensors along its first dimension (experts).
    """

    names: tuple[str, ...]
    tensor: torch.Tensor


def merged(base: torch.Tensor, lora_a: torch.Tensor, lora_b: torch.Tensor, scaling: float) -> torch.Tensor:
    """``base + scaling * lora_b @ lora_a``, computed in float32, in the dtype of ``base``.

    Shapes: base [..., out, in], lora_a [..., rank, in], lora_b [..., out, rank]; leading dimensions (experts)
    are the same in all three. W = W0 + (alpha / rank) B A: Hu et al., "LoRA", 2021, section 4.1.
    """
    delta = lora_b.float() @ lora_a.float()
    return torch.add(base.float(), delta, alpha=scaling).to(base.dtype)
