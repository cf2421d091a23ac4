"""Which of a row's replayed decisions the trainer's own gates agree with, token by token and layer by layer.

Each rank notes what it computes of the row; together the ranks of the row have all of it.

Shape suffixes: L packed row length, M MoE layers.
"""

import torch
import torch.distributed as dist
from torchtitan.distributed import ParallelDims

from forgeasync.models import DEVICE_TYPE
from forgeasync.trainer.packing import PackedRow


class ReplayedDecisions:
    """Makes the notes of rows, and puts those of a row's ranks together."""

    def __init__(self, parallel_dims: ParallelDims, *, num_layers: int) -> None:
        meshes = [parallel_dims.get_optional_mesh(name) for name in ("cp", "tp")]
        self._groups = [mesh.get_group() for mesh in meshes if mesh is not None]
        self.is_first = all(mesh is None or mesh.get_local_rank() == 0 for mesh in meshes)
        """Whether this is the first of the ranks that share its rows."""
        self._num_layers = num_layers

    def note(self, row: PackedRow) -> torch.Tensor | None:
        """Return an empty note for a row, uint8 [M, L]; None where nothing is replayed or nobody asks."""
        if not row.sources or row.expert_ids_LMK is None:
            return None
        return torch.zeros((self._num_layers, len(row.token_ids_L)), dtype=torch.uint8, device=DEVICE_TYPE)

    def whole(self, noted_ML: torch.Tensor | None) -> torch.Tensor | None:
        """Put the notes of a row's ranks together; collective over them."""
        if noted_ML is not None:
            # A rank that has not computed a decision has ``Decision.OWN``, the smallest, there.
            for group in self._groups:
                dist.all_reduce(noted_ML, op=dist.ReduceOp.MAX, group=group)
        return noted_ML
