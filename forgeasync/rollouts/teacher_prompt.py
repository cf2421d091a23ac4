"""The prompt that a teacher reads, with what the policy does not know.

That is a hint, a demonstration, an answer, a response of the same group that was correct, or what the reward
has said about the response. Only what comes before a response differs: the response's own tokens are the
policy's, one by one. What a model or its code wrote is filled in as it is, and no template within it.
"""

import string
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from forgeasync.config import FEEDBACK, SIBLING, TeacherSection
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


def teacher_prompt(
    template: str, task: Task, *, sibling: str | None = None, feedback: str | None = None
) -> str:
    """Fill in ``$prompt``, ``$answer``, columns of the task's record and, where given, the other two.

    Raises:
        ValueError: the template names something that the task does not have.
    """
    known = {name: str(value) for name, value in task.record.items()}
    known |= {"prompt": task.prompt, "answer": task.answer}
    for name, text in ((SIBLING, sibling), (FEEDBACK, feedback)):
        if text is not None:
            known[name] = text
    try:
        return string.Template(template).substitute(known)
    except KeyError as error:
        always = ("prompt", "answer", SIBLING, FEEDBACK)
        columns = sorted(set(task.record) - set(always))
        names = ", ".join(f"${name}" for name in (*always, *columns))
        remedy = f"has ${error.args[0]}, which task {task.task_id} does not; must be of {names}"
        raise ValueError(remedy) from None
    except ValueError as error:
        raise ValueError(f"is no template: {error}; write $$ for a dollar sign") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """What decides whether a response can be shown, and what a prompt before it may be."""

    text: str
    num_tokens: int
    is_correct: bool
    feedback: str = ""
    """What the reward has said about it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherPrompts:
    """What one teacher reads before the responses of a group."""

    encoder: PromptEncoder
    max_tokens: int
    """Most tokens of a prompt and a response together."""

    def of_task(self, template: str | None, task: Task) -> TeacherReads:
        """What it reads before every response to a task; for templates that no score changes."""
        return Instead.POLICYS if template is None else self.encoder.encode(teacher_prompt(template, task))

    def of_group(
        self, section: TeacherSection, task: Task, responses: Sequence[Response]
    ) -> tuple[TeacherReads, ...]:
        """What it reads before each of the responses to a task; for prompts that depend on scores.

        A response is shown the next correct one behind it, in a circle, whose prompt leaves room for it, and
        what the reward has said about itself. Texts that contain a mark of the chat template are not shown:
        who wrote them could end their quotation with it. Where something cannot be shown the teacher reads
        ``Instead.NOTHING``.
        """
        return tuple(self._before(section, task, index, responses) for index in range(len(responses)))

    def can_show(self, feedback: str) -> bool:
        """Whether there is a feedback, in which nothing ends its quotation."""
        return bool(feedback) and not self.encoder.has_special_text(feedback)

    def _before(
        self, section: TeacherSection, task: Task, index: int, responses: Sequence[Response]
    ) -> TeacherReads:
        assert section.prompt is not None, "it shows something"
        own = responses[index]
        feedback = own.feedback if section.shows_feedback else None
        if feedback is not None and not self.can_show(feedback):
            return Instead.NOTHING
        for sibling in self._siblings(index, responses) if section.shows_sibling else (None,):
            text = teacher_prompt(section.prompt, task, sibling=sibling, feedback=feedback)
            prompt_ids_P = self.encoder.encode(text)
            if len(prompt_ids_P) + own.num_tokens <= self.max_tokens:
                return prompt_ids_P
        return Instead.NOTHING

    def _siblings(self, index: int, responses: Sequence[Response]) -> Iterator[str]:
        for step in range(1, len(responses)):
            other = responses[(index + step) % len(responses)]
            if other.is_correct and not self.encoder.has_special_text(other.text):
                yield other.text
