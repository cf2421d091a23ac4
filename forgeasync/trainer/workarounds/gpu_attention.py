"""Attention over packed rows on GPUs: values with another head size, and context parallelism.

FlashAttention 2 in torch 2.13 has one head size for queries, keys and values; latent attention has smaller
values. Values are padded with zeros, and the zeros that these add to the output are dropped. Can go when
torch's FlashAttention 2 supports two sizes; 3 and 4 do.

TorchTitan 0.3.0 refuses varlen attention with context parallelism, and flex attention, which it accepts,
compiles a kernel for its masks. ``ContextAttention`` runs varlen attention on the part of every row that a
rank has. Can go when TorchTitan's varlen attention supports context parallelism.

A context-parallel rank has the queries of one part of every row, and keys and values of whole rows. The
queries of a sequence attend to its keys from its first token to the end of the part, so that keys and queries
of every sequence end at the same token: the causal mask of varlen attention is aligned there (bottom-right),
and no query sees a later key. Keys before the first overlapping sequence and after the part are left out.

Shape suffixes: B batch (rows), L tokens of a row (of queries: of this rank's part), N heads, H head size, V
size of a head of values, S sequences that overlap the part, Q queries of all rows, K keys that they may see.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
import torchtitan.tools.utils as titan_utils
from torch.nn.attention import activate_flash_attention_impl, current_flash_attention_impl
from torch.nn.attention.varlen import varlen_attn
from torchtitan.models.common.attention import FlexAttention, VarlenAttention, VarlenMetadata
from torchtitan.protocols.module import Module


def with_equal_heads(
    attend: Callable[[torch.Tensor], torch.Tensor], q: torch.Tensor, v: torch.Tensor
) -> torch.Tensor:
    """Return ``attend(v)`` [..., V], with values padded to the size of queries if the kernel needs it."""
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
        """Return the output [B, L, N, V]. The tensor-parallel plan looks up the names of the parameters."""

        def attend(v: torch.Tensor) -> torch.Tensor:
            return super(WholeRowAttention, self).forward(
                q_BLNH, k_BLNH, v, attention_masks=attention_masks, scale=scale, enable_gqa=enable_gqa
            )

        return with_equal_heads(attend, q_BLNH, v_BLNH)


class PartMetadata(NamedTuple):
    """Sequences of a part, in the order of rows; offsets count from the first kept token.

    A tuple, because compiled layers and DTensor's plans accept one.
    """

    cu_seq_q: torch.Tensor
    """Offsets of each sequence's queries among the part's queries of all rows, end to end, int32 [S + 1]."""
    cu_seq_k: torch.Tensor
    """Offsets of each sequence's keys among the kept keys, int32 [S + 1].

    The kept keys of a row are those from ``key_starts_B`` to ``key_stop``.
    """
    max_q: int
    max_k: int
    key_starts_B: tuple[int, ...]
    key_stop: int


def part_metadata(positions_BL: np.ndarray, *, start: int, stop: int, device: str) -> PartMetadata:
    """Find the sequences of whole rows that overlap the positions from ``start`` to ``stop``.

    ``positions_BL`` are integers [B, L] that restart at 0 with every sequence (padding is a sequence too).
    """
    length = positions_BL.shape[1]
    assert 0 <= start < stop <= length, f"a part {start}:{stop} of rows of {length} tokens"
    num_queries, num_keys, key_starts = [], [], []
    for positions_L in positions_BL:
        assert positions_L[0] == 0, "a row begins with a sequence"
        firsts = np.flatnonzero(positions_L == 0)
        ends = np.append(firsts[1:], length)
        is_here = (firsts < stop) & (ends > start)
        firsts, ends = firsts[is_here], np.minimum(ends[is_here], stop)
        num_queries.append(ends - np.maximum(firsts, start))
        num_keys.append(ends - firsts)
        key_starts.append(int(firsts[0]))
    num_queries_S, num_keys_S = np.concatenate(num_queries), np.concatenate(num_keys)

    def offsets(lengths_S: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.concatenate([[0], np.cumsum(lengths_S)]).astype(np.int32)).to(device)

    return PartMetadata(
        cu_seq_q=offsets(num_queries_S),
        cu_seq_k=offsets(num_keys_S),
        max_q=int(num_queries_S.max()),
        max_k=int(num_keys_S.max()),
        key_starts_B=tuple(key_starts),
        key_stop=stop,
    )


class ContextAttention(FlexAttention):
    """Causal attention of a part's queries to the keys of its sequences, through ``varlen_attn``.

    It is a subclass of ``FlexAttention`` only so that TorchTitan gathers keys and values for it with
    ``flex_cp_allgather`` of torch 2.13. The backward pass of that is a reduce-scatter of sums by functional
    collectives, which NCCL and gloo both support. The tensor-parallel plan looks up the parameter names of
    ``forward``. Nothing is cast: the kernel refuses dtypes other than bfloat16 and float16.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        pass

    def __init__(self, config: Config) -> None:
        # Skip FlexAttention's own state, and choose the kernel as TorchTitan's VarlenAttention does.
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
        """Return the output [B, L, N, V] of the part's queries; keys and values [B, whole L, N, H or V]."""
        k_KNH, v_KNH = (
            _seen(x, attention_masks.key_starts_B, attention_masks.key_stop) for x in (k_BLNH, v_BLNH)
        )
        # As in TorchTitan: FlashAttention 2 must not choose the number of splits itself (pytorch 179760).
        is_second = current_flash_attention_impl() in (None, "FA2") and torch.version.hip is None

        def attend(v: torch.Tensor) -> torch.Tensor:
            # The result is a tuple only if auxiliary outputs are requested.
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
    """Return keys or values [K, N, H] that a query of the part may see; a single row is not copied."""
    rows = [x_LNH[start:stop] for x_LNH, start in zip(x_BLNH.unbind(0), starts_B, strict=True)]
    return rows[0] if len(rows) == 1 else torch.cat(rows)
