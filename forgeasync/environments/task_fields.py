"""What of a task is sent to an environment that runs elsewhere."""

from collections.abc import Mapping
from typing import Any

from forgeasync.rollouts import Task


def task_fields(task: Task, fields: Mapping[str, str], *, where: str) -> dict[str, Any]:
    """Return the values of ``fields``, whose own values name what of the task each is (``TaskColumn``).

    Raises:
        ValueError: the task's record lacks a column; names ``where``, the config field that asks for it.
    """
    return {name: _column(task, column, f"{where}.{name}") for name, column in fields.items()}


def _column(task: Task, column: str, where: str) -> Any:
    match column:
        case "task_id":
            return task.task_id
        case "prompt":
            return task.prompt
        case "answer":
            return task.answer
        case "index":
            return task.source_index
    name = column.removeprefix("record.")
    if name not in task.record:
        known = ", ".join(sorted(task.record)) or "none"
        raise ValueError(
            f"{where} = {column!r}, but the record of task {task.task_id} has no such column; it has {known}"
        )
    return task.record[name]
