"""Torch's dtypes by their names in a config."""

import torch

from forgeasync.config.schema import Dtype

TORCH_DTYPES = {Dtype.FLOAT32: torch.float32, Dtype.BFLOAT16: torch.bfloat16}
