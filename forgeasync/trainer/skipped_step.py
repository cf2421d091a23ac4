"""What is kept of a step that was skipped, for looking at: the rows of every rank, as a file of arrays."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from forgeasync.trainer.packing import PackedRow


def write_skipped_rows(folder: Path, rows: Sequence[PackedRow], *, step: int, rank: int, reason: str) -> Path:
    """Write ``step-<step>-rank-<rank>.npz``, to be read with ``numpy.load``.

    It holds ``reason``, every array of each ``PackedRow`` as ``row<i>.<name>``, and the kept sets as
    ``row<i>.kept_offsets`` and ``row<i>.kept_ids``.
    """
    arrays: dict[str, np.ndarray] = {"reason": np.asarray(reason)}
    for index, row in enumerate(rows):
        for field in dataclasses.fields(row):
            value = getattr(row, field.name)
            if isinstance(value, np.ndarray):
                arrays[f"row{index}.{field.name}"] = value
        arrays[f"row{index}.kept_offsets"] = row.kept_tokens.offsets
        arrays[f"row{index}.kept_ids"] = row.kept_tokens.ids_N
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"step-{step:08d}-rank-{rank}.npz"
    np.savez_compressed(file, allow_pickle=False, **arrays)
    return file
