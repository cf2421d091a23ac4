"""Files of a run that goes on from an earlier step: what is after it moves aside, nothing is deleted."""

import json
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """Lines that were moved into a side file."""

    num_lines: int
    file: Path


def put_aside(path: Path) -> Path:
    """Rename a file or folder to ``<stem>.cut-<n><suffix>``; its new path."""
    aside = _free_name(path)
    path.rename(aside)
    return aside


def cut_after(path: Path, step: int) -> Cut | None:
    """Move the lines of a .jsonl file whose ``step`` is later into a side file; None if there are none.

    A last line that was not written to its end counts as later.
    """
    lines = path.read_bytes().splitlines(keepends=True)
    kept = [line for line in lines if line.endswith(b"\n") and json.loads(line)["step"] <= step]
    if len(kept) == len(lines):
        return None
    cut = [line for line in lines if not line.endswith(b"\n") or json.loads(line)["step"] > step]
    aside = _free_name(path)
    aside.write_bytes(b"".join(cut))
    shortened = path.with_name(path.name + ".new")
    shortened.write_bytes(b"".join(kept))
    shortened.replace(path)
    return Cut(num_lines=len(cut), file=aside)


def _free_name(path: Path) -> Path:
    number = 1
    while (aside := path.with_name(f"{path.stem}.cut-{number}{path.suffix}")).exists():
        number += 1
    return aside
