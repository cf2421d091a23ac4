"""The rows of a batch with a bad step, written to a file for looking at."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from forgeasync.trainer.packing import PackedRow


def write_rows(folder: Path, rows: Sequence[PackedRow], *, rank: int, reason: str) -> None:
    """Write ``rank-<rank>.npz``, to be read with ``numpy.load``.

    It holds ``reason``, every array of each ``PackedRow`` as ``row<i>.<name>``, the kept sets as
    ``row<i>.kept_offsets`` and ``row<i>.kept_ids``, and what a teacher gave as ``row<i>.teacher_<name>``.

    Raises:
        OSError: the disk is full or fails.
    """
    arrays: dict[str, np.ndarray] = {"reason": np.asarray(reason)}
    for index, row in enumerate(rows):
        for field in dataclasses.fields(row):
            value = getattr(row, field.name)
            if isinstance(value, np.ndarray):
                arrays[f"row{index}.{field.name}"] = value
        arrays[f"row{index}.kept_offsets"] = row.kept_tokens.offsets
        arrays[f"row{index}.kept_ids"] = row.kept_tokens.ids_N
        if row.teacher is not None:
            arrays |= {f"row{index}.{name}": array for name, array in row.teacher.arrays().items()}
    folder.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(folder / f"rank-{rank}.npz", allow_pickle=False, **arrays)
