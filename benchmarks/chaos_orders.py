"""Sends orders to processes and reads their answers; ``chaos_inside/sitecustomize.py`` is the other side."""

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
    """An order to a process."""

    file: Path

    def taken(self) -> dict[str, Any] | None:
        """Answer of the process after it has carried out the order: ``time_s``, and more by kind."""
        return _read(self.file.with_suffix(".taken"))

    def result(self) -> dict[str, Any] | None:
        """Answer of the process after a lasting order has ended; None before."""
        return _read(self.file.with_suffix(".result"))

    def end(self) -> None:
        """End a lasting order, or withdraw an order that the process has not accepted yet."""
        self.file.with_suffix(".end").touch()


def _read(file: Path) -> dict[str, Any] | None:
    if not file.exists():
        return None
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found


class Orders:
    """Sends orders to the processes of one run."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._num_given = 0

    def environment(self) -> dict[str, str]:
        """Return the environment variables of a run whose processes accept orders."""
        path = [str(INSIDE), str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
        return {"PYTHONPATH": os.pathsep.join(path), VARIABLE: str(self._folder)}

    def give(self, pid: int, kind: str, **more: object) -> Order:
        """Send an order to a process; ``more`` are the arguments of its kind."""
        self._num_given += 1
        file = self._folder / f"{pid}-{self._num_given}.json"
        partial = file.with_suffix(".given")
        partial.write_text(json.dumps({"kind": kind, **more}), encoding="utf-8")
        partial.rename(file)
        return Order(file)
