"""The tool's side of ``chaos_inside/sitecustomize.py``: orders to processes, and what they answer."""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import REPOSITORY

VARIABLE = "FORGEASYNC_CHAOS"
INSIDE = Path(__file__).resolve().parent / "chaos_inside"


@dataclass(frozen=True, slots=True)
class Order:
    """An order that was given."""

    file: Path

    def taken(self) -> dict[str, Any] | None:
        """What the process says of it once it was carried out: ``time_s``, and more by kind."""
        return _read(self.file.with_suffix(".taken"))

    def result(self) -> dict[str, Any] | None:
        """What it says of an order that lasted, once that was ended."""
        return _read(self.file.with_suffix(".result"))

    def end(self) -> None:
        """End an order that lasts; one that was not taken yet never will be."""
        self.file.with_suffix(".end").touch()


def _read(file: Path) -> dict[str, Any] | None:
    if not file.exists():
        return None
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found


class Orders:
    """Orders to the processes of one run."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._num_given = 0

    def environment(self) -> dict[str, str]:
        """Variables that a run is started with so that its processes take orders."""
        path = [str(INSIDE), str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
        return {"PYTHONPATH": os.pathsep.join(path), VARIABLE: str(self._folder)}

    def give(self, pid: int, kind: str, **more: object) -> Order:
        """Order something of a process; ``more`` is what the kind asks for."""
        self._num_given += 1
        file = self._folder / f"{pid}-{self._num_given}.json"
        partial = file.with_suffix(".given")
        partial.write_text(json.dumps({"kind": kind, **more}), encoding="utf-8")
        partial.rename(file)
        return Order(file)
