"""Values with smaller heads than queries, as latent attention has them, for FlashAttention 2. For torch 2.13.

FlashAttention 2 has one head size for queries, keys and values; 3 and 4 take values of another one. Zeros
that fill values up add zeros to the output, which are cut off again: nothing else changes. Can go when
torch's FlashAttention 2 takes two sizes.

Shape suffixes: those of ``context_attention``; V size of a head of values.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.nn.attention import current_flash_attention_impl
from torchtitan.models.common.attention import VarlenAttention, VarlenMetadata


def with_equal_heads(
    attend: Callable[[torch.Tensor], torch.Tensor], q: torch.Tensor, v: torch.Tensor
) -> torch.Tensor:
    """Output of ``attend(v)`` [..., V], with values that are as large as queries where that is needed."""
    missing = q.shape[-1] - v.shape[-1]
    if not missing or current_flash_attention_impl() not in (None, "FA2"):
        return attend(v)
    return attend(F.pad(v, (0, missing)))[..., : v.shape[-1]]


class WholeRowAttention(VarlenAttention):
    """TorchTitan's attention over packed rows, for heads of any two sizes."""

    @dataclass(kw_only=True, slots=True)
    class Config(VarlenAttention.Config):
        pass

    def forward(
        self,
        q_BLNH: torch.Tensor,
        k_BLNH: torch.Tensor,
        v_BLNH: torch.Tensor,
        *,
        attention_masks: VarlenMetadata,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        """Output [B, L, N, V]; the parameters' names are the ones that the tensor-parallel plan looks up."""

        def attend(v: torch.Tensor) -> torch.Tensor:
            return super(WholeRowAttention, self).forward(
                q_BLNH, k_BLNH, v, attention_masks=attention_masks, scale=scale, enable_gqa=enable_gqa
            )

        return with_equal_heads(attend, q_BLNH, v_BLNH)
