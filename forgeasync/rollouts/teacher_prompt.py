"""The prompt that a teacher reads, with what the policy does not know.

That is a hint, a demonstration, an answer, or a response of the same group that was correct. Only what comes
before a response differs: the response's own tokens are the policy's, one by one.
"""

import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from forgeasync.config.teachers import SIBLING
from forgeasync.rollouts.prompts import PromptEncoder
from forgeasync.rollouts.task import Task


class Instead(StrEnum):
    """What a teacher reads before a response where it has no prompt of its own."""

    POLICYS = "policys"
    """What the policy read."""
    NOTHING = "nothing"
    """The teacher is not asked about the response, and no term of the loss that needs it counts there."""


TeacherReads = np.ndarray | Instead
"""Token ids [P], int32, or what takes their place."""


def teacher_prompt(template: str, task: Task, *, sibling: str | None = None) -> str:
    """Fill in ``$prompt``, ``$answer``, columns of the task's record and, if there is one, ``$sibling``.

    Raises:
        ValueError: the template names something that the task does not have.
    """
    known = {name: str(value) for name, value in task.record.items()}
    known |= {"prompt": task.prompt, "answer": task.answer}
    if sibling is not None:
        known[SIBLING] = sibling
    try:
        return string.Template(template).substitute(known)
    except KeyError as error:
        columns = sorted(set(task.record) - {"prompt", "answer", SIBLING})
        names = ", ".join(f"${name}" for name in ("prompt", "answer", SIBLING, *columns))
        remedy = f"has ${error.args[0]}, which task {task.task_id} does not; must be of {names}"
        raise ValueError(remedy) from None
    except ValueError as error:
        raise ValueError(f"is no template: {error}; write $$ for a dollar sign") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """What decides whether a response can be shown, and how long a prompt before it may be."""

    text: str
    num_tokens: int
    is_correct: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherPrompts:
    """What one teacher reads before the responses of a group."""

    encoder: PromptEncoder
    max_tokens: int
    """Most tokens of a prompt and a response together."""

    def of_task(self, template: str | None, task: Task) -> TeacherReads:
        """What it reads before every response to a task; for templates without ``$sibling``."""
        return Instead.POLICYS if template is None else self.encoder.encode(teacher_prompt(template, task))

    def of_group(self, template: str, task: Task, responses: Sequence[Response]) -> tuple[TeacherReads, ...]:
        """What it reads before each of the responses to a task; for templates with ``$sibling``.

        A response is shown the next correct one behind it, in a circle, whose prompt leaves room for it.
        Correct responses whose text has a mark of the chat template are not shown: a model could end its own
        quotation with it. Where nothing can be shown the teacher reads ``Instead.NOTHING``.
        """
        prompts: Mapping[int, np.ndarray] = {
            index: self.encoder.encode(teacher_prompt(template, task, sibling=one.text))
            for index, one in enumerate(responses)
            if one.is_correct and not self.encoder.has_special_text(one.text)
        }
        return tuple(self._before(index, one, prompts, len(responses)) for index, one in enumerate(responses))

    def _before(
        self, index: int, response: Response, prompts: Mapping[int, np.ndarray], num_responses: int
    ) -> TeacherReads:
        room = self.max_tokens - response.num_tokens
        others = ((index + step) % num_responses for step in range(1, num_responses))
        fitting = (prompts[other] for other in others if other in prompts and len(prompts[other]) <= room)
        return next(fitting, Instead.NOTHING)
