"""The prompt that a teacher reads, with what the policy does not know: a hint, a demonstration, an answer."""

import string

from forgeasync.rollouts.task import Task


def teacher_prompt(template: str, task: Task) -> str:
    """Fill in ``$prompt``, ``$answer`` and columns of the task's record.

    Raises:
        ValueError: the template names something that the task does not have.
    """
    known = {name: str(value) for name, value in task.record.items()}
    try:
        return string.Template(template).substitute(known | {"prompt": task.prompt, "answer": task.answer})
    except KeyError as error:
        names = ", ".join(f"${name}" for name in ("prompt", "answer", *sorted(task.record)))
        remedy = f"has ${error.args[0]}, which task {task.task_id} does not; must be of {names}"
        raise ValueError(remedy) from None
    except ValueError as error:
        raise ValueError(f"is no template: {error}; write $$ for a dollar sign") from None
