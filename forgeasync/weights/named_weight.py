"""A parameter of the trained model under the names that generators know it by."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedWeight:
    """A tensor (or this rank's shard of one, as a DTensor) and what generators call it.

    Several ``names`` mean that the tensor stacks that many tensors along its first dimension (experts).
    """

    names: tuple[str, ...]
    tensor: torch.Tensor
