"""Which attention the trainer's layers have on a device, and what tells it the packed sequences apart."""

import numpy as np
import torch
from torchtitan.models.common.attention import AttentionMasksType
from torchtitan.models.common.decoder import Decoder
from torchtitan.protocols.module import Module

from forgeasync.models import DEVICE_TYPE
from forgeasync.trainer.workarounds.attention import PackedAttention, PackedSequences, packed_sequences
from forgeasync.trainer.workarounds.context_attention import ContextAttention, PartMetadata, part_metadata
from forgeasync.trainer.workarounds.value_heads import WholeRowAttention


def inner_attention(device_type: str, *, context: int) -> Module.Config:
    """Config of the attention over packed rows for a context-parallel degree."""
    if device_type == "cpu":
        return PackedAttention.Config()
    return WholeRowAttention.Config() if context == 1 else ContextAttention.Config()


def attention_masks(
    model: Decoder, positions_BL: np.ndarray, *, part: slice
) -> AttentionMasksType | PackedSequences | PartMetadata:
    """Build what attention needs to keep the packed sequences of whole rows (int64 [B, L]) apart.

    ``part`` says which positions of each row this rank computes.
    """
    match model.config.first_attention.inner_attention:
        case PackedAttention.Config():
            return packed_sequences(torch.from_numpy(positions_BL), query_start=part.start)
        case ContextAttention.Config():
            return part_metadata(positions_BL, start=part.start, stop=part.stop, device=DEVICE_TYPE)
    return model.get_attention_masks(torch.from_numpy(positions_BL).to(DEVICE_TYPE))
