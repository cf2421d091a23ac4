"""A problem to solve."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One problem.

    ``task_id`` is unique within a source and stable across runs; ``prompt`` is the text before any
    chat template; ``answer`` is the reference; ``source_index`` finds the problem again in its source, whose
    name is ``source``; ``record`` has all columns of its record that JSON can hold (``json_values``).
    """

    task_id: str
    prompt: str
    answer: str
    source_index: int
    source: str
    record: Mapping[str, Any] = field(default_factory=dict, hash=False)
