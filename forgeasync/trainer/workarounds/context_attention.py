"""Attention over packed rows on GPUs with context parallelism, which TorchTitan 0.3.0 refuses there.

``VarlenAttention`` takes as many keys as queries and is refused by ``apply_cp_to_forward``; flex attention,
which is not, compiles a kernel for its masks. Can go when TorchTitan's varlen attention has context
parallelism.

Shape suffixes: B batch, L tokens of a row (of queries: of this rank's part), N heads, H head size, Q queries
of all rows, K keys that they may see.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torchtitan.tools.utils as titan_utils
from torch.nn.attention import activate_flash_attention_impl, current_flash_attention_impl
from torch.nn.attention.varlen import varlen_attn
from torchtitan.models.common.attention import FlexAttention
from torchtitan.protocols.module import Module

from forgeasync.trainer.context_parts import part_offsets
from forgeasync.trainer.workarounds.value_heads import with_equal_heads


class PartMetadata(NamedTuple):
    """``PartOffsets`` with offsets on the device; a tuple, as compiled layers and DTensor's plans take it."""

    cu_seq_q: torch.Tensor
    cu_seq_k: torch.Tensor
    max_q: int
    max_k: int
    key_starts_B: tuple[int, ...]
    key_stop: int


def part_metadata(positions_BL: np.ndarray, *, start: int, stop: int, device: str) -> PartMetadata:
    """Find the sequences of whole rows [B, L] that overlap the part; see ``part_offsets``."""
    found = part_offsets(positions_BL, start=start, stop=stop)
    return PartMetadata(
        cu_seq_q=torch.from_numpy(found.cu_seq_q).to(device),
        cu_seq_k=torch.from_numpy(found.cu_seq_k).to(device),
        max_q=found.max_q,
        max_k=found.max_k,
        key_starts_B=found.key_starts_B,
        key_stop=found.key_stop,
    )


class ContextAttention(FlexAttention):
    """Causal attention of a part's queries to the keys of its sequences, through ``varlen_attn``.

    It is a ``FlexAttention`` by name only, so that TorchTitan gathers keys and values for it:
    ``flex_cp_allgather`` of torch 2.13, whose backward pass is a reduce-scatter of sums by functional
    collectives, which NCCL and gloo both have. The parameter names of ``forward`` are the ones that the
    tensor-parallel plan looks up. Nothing is cast: the kernel refuses anything but bfloat16 and float16.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        pass

    def __init__(self, config: Config) -> None:
        # Without FlexAttention's own state; with the kernel that TorchTitan's VarlenAttention takes.
        Module.__init__(self)
        wanted = titan_utils.get_cuda_flash_attention_impl()
        if wanted is not None and current_flash_attention_impl() != wanted:
            activate_flash_attention_impl(wanted)

    def forward(
        self,
        q_BLNH: torch.Tensor,
        k_BLNH: torch.Tensor,
        v_BLNH: torch.Tensor,
        *,
        attention_masks: PartMetadata,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        """Output [B, L, N, H] of the part's queries; keys and values [B, whole L, N, H] are of whole rows."""
        k_KNH, v_KNH = (
            _seen(x, attention_masks.key_starts_B, attention_masks.key_stop) for x in (k_BLNH, v_BLNH)
        )
        # TorchTitan's choice: FlashAttention 2 must not split keys by a guess of its own (pytorch 179760).
        is_second = current_flash_attention_impl() in (None, "FA2") and torch.version.hip is None

        def attend(v: torch.Tensor) -> torch.Tensor:
            # A tuple only where auxiliary outputs are asked for.
            return varlen_attn(  # type: ignore[return-value]
                q_BLNH.flatten(0, 1),
                k_KNH,
                v,
                attention_masks.cu_seq_q,
                attention_masks.cu_seq_k,
                attention_masks.max_q,
                attention_masks.max_k,
                scale=scale,
                window_size=(-1, 0),
                enable_gqa=enable_gqa,
                num_splits=1 if is_second else None,
            )

        out_QNH = with_equal_heads(attend, q_BLNH, v_KNH)
        return out_QNH.view(*q_BLNH.shape[:3], v_BLNH.shape[3])


def _seen(x_BLNH: torch.Tensor, starts_B: tuple[int, ...], stop: int) -> torch.Tensor:
    """Keys or values [K, N, H] that a query of the part may see; a single row is not copied."""
    rows = [x_LNH[start:stop] for x_LNH, start in zip(x_BLNH.unbind(0), starts_B, strict=True)]
    return rows[0] if len(rows) == 1 else torch.cat(rows)
