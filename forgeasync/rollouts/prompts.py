"""Encodes the prompts of the policy, and the prompts that teachers read in place of the policy's.

A teacher's prompt can show what the policy does not know: a hint, a demonstration, the answer, a correct
response of the same group, or the reward's feedback on the response. Policy and teacher differ only in the
tokens before a response; the response's own tokens are the same. Texts from models are inserted verbatim:
template placeholders inside them are not expanded.
"""

import string
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import jinja2
import jinja2.ext
import jinja2.meta
import numpy as np
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from forgeasync.config import FEEDBACK, SIBLING, DataSection, TeacherSection
from forgeasync.rollouts.score import Task


def text_of_ids(
    tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], *, skip_special_tokens: bool = False
) -> str:
    """Decode one sequence of tokens."""
    text = tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)
    assert isinstance(text, str), "a list of texts is that of several sequences"
    return text


class PromptEncoder:
    """Encodes prompts verbatim, or as a user turn of the tokenizer's chat template."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        *,
        chat_template: bool,
        system_prompt: str | None = None,
        template_arguments: Mapping[str, int | float | bool | str] | None = None,
    ) -> None:
        """Create an encoder, and check that the template fits the other arguments.

        Args:
            tokenizer: The model's tokenizer.
            chat_template: Whether to render prompts with the tokenizer's chat template.
            system_prompt: System message of the rendered conversation, if any.
            template_arguments: Further variables of the template.

        Raises:
            ValueError: The tokenizer has no template although one is needed, or the template does not read a
                variable, refuses system messages or leaves them out. The message names the config's field.
        """
        if chat_template and tokenizer.chat_template is None:
            raise ValueError(
                f"data.chat_template = true: the tokenizer of {tokenizer.name_or_path!r} has no template; "
                "must be false, or the model folder must have a chat template"
            )
        self._tokenizer = tokenizer
        self._chat_template = chat_template
        self._arguments = dict(template_arguments or {})
        self._system = [] if system_prompt is None else [{"role": "system", "content": system_prompt}]
        if chat_template and self._arguments:
            self._check_arguments()
        if chat_template and system_prompt is not None:
            self._try_system_prompt(system_prompt)

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of prompts and responses."""
        return self._tokenizer.backend_tokenizer

    @classmethod
    def from_section(cls, tokenizer: PreTrainedTokenizerFast, data: DataSection) -> "PromptEncoder":
        """Build the encoder that a run's ``data`` section describes."""
        return cls(
            tokenizer,
            chat_template=data.chat_template,
            system_prompt=data.system_prompt,
            template_arguments=data.template_arguments,
        )

    def encode(self, prompt: str) -> np.ndarray:
        """Return the ids of all tokens before the response, int32 [P]."""
        if self._chat_template:
            # Rendered as text and then tokenized, because the template writes its special tokens itself.
            prompt = self._render(prompt)
        return np.asarray(self._tokenizer(prompt, add_special_tokens=False)["input_ids"], dtype=np.int32)

    def has_special_text(self, text: str) -> bool:
        """Whether ``text`` contains the text of a special token, as which ``encode`` would encode it."""
        marks = self._tokenizer.added_tokens_decoder.values()
        return any(mark.special and mark.content in text for mark in marks)

    def text_of(self, token_id: int) -> str:
        """Decode one token by itself."""
        return text_of_ids(self._tokenizer, [token_id])

    def check_length(self, task: Task, *, max_context_length: int, max_response_tokens: int) -> None:
        """Check that the prompt of ``task`` leaves room for a full response. Lengths are in tokens.

        Raises:
            ValueError: The prompt is empty or too long. The message names the task.
        """
        num_tokens = len(self.encode(task.prompt))
        limit = max_context_length - max_response_tokens
        if num_tokens == 0:
            raise ValueError(f"the prompt of task {task.task_id!r} has no tokens; must have at least one")
        if num_tokens > limit:
            raise ValueError(
                f"the prompt of task {task.task_id!r} has {num_tokens} tokens; must have at most {limit}, "
                f"which is model.max_context_length = {max_context_length} less "
                f"sampling.max_response_tokens = {max_response_tokens}"
            )

    def _render(self, prompt: str) -> str:
        rendered = self._tokenizer.apply_chat_template(
            [*self._system, {"role": "user", "content": prompt}],
            tokenize=False,
            add_generation_prompt=True,
            # The signature has no types for variables of templates.
            **self._arguments,  # type: ignore[arg-type]
        )
        assert isinstance(rendered, str), "not tokenized"
        return rendered

    def _check_arguments(self) -> None:
        """Raise ValueError for an argument that the template never reads, which rendering would ignore."""
        # Hugging Face's renderer has these extensions and one for the tag "generation".
        environment = jinja2.Environment(extensions=[jinja2.ext.loopcontrols, jinja2.ext.do, _Generation])
        template = environment.parse(self._tokenizer.get_chat_template())
        known = jinja2.meta.find_undeclared_variables(template)
        for name, value in self._arguments.items():
            if name not in known:
                raise ValueError(
                    f"data.template_arguments.{name} = {value!r}: the chat template reads no such variable; "
                    f"it reads {', '.join(sorted(known))}"
                )

    def _try_system_prompt(self, system_prompt: str) -> None:
        try:
            rendered = self._render("1 + 1 =")
        except Exception as error:
            # Templates raise arbitrary exceptions for a role that they do not support.
            raise ValueError(
                f"data.system_prompt = {system_prompt[:80]!r}: the chat template refuses a system message "
                f"({type(error).__name__}: {error})"
            ) from error
        if system_prompt.strip() not in rendered:
            raise ValueError(
                f"data.system_prompt = {system_prompt[:80]!r}: the chat template leaves system messages out"
            )


class _Generation(jinja2.ext.Extension):
    """Jinja2 extension that parses the block ``{% generation %}`` as its content."""

    tags = {"generation"}  # noqa: RUF012  # as jinja2 declares it

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class WithoutPrompt(StrEnum):
    """Alternatives to a prompt of the teacher's own."""

    POLICYS = "policys"
    """The teacher reads the policy's prompt."""
    NOTHING = "nothing"
    """The teacher does not score the response, and loss terms that need its record skip the response."""


TeacherReads = np.ndarray | WithoutPrompt
"""Token ids of a teacher's own prompt, int32 [P], or an alternative to it."""


def teacher_prompt(
    template: str, task: Task, *, sibling: str | None = None, feedback: str | None = None
) -> str:
    """Fill in the template of a teacher's prompt.

    Placeholders are ``$prompt``, ``$answer``, the columns of the task's record, and the sibling's text and
    the feedback if they are given.

    Raises:
        ValueError: The template is malformed, or has a placeholder without a value.
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
        raise ValueError(f"is not a template: {error}; write $$ for a dollar sign") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """A scored response, from which the prompts of a teacher for its group are made."""

    text: str
    num_tokens: int
    is_correct: bool
    feedback: str = ""
    """Feedback of the reward on the response; empty if there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherPrompts:
    """Makes the prompts of one teacher for the responses of a group."""

    encoder: PromptEncoder
    max_tokens: int
    """Maximum number of tokens of a prompt and a response together."""

    def of_task(self, template: str | None, task: Task) -> TeacherReads:
        """Return the teacher's prompt for all responses to a task, from a template that uses no scores."""
        return (
            WithoutPrompt.POLICYS if template is None else self.encoder.encode(teacher_prompt(template, task))
        )

    def of_group(
        self, section: TeacherSection, task: Task, responses: Sequence[Response]
    ) -> tuple[TeacherReads, ...]:
        """Return the teacher's prompt for each response to a task, from a template that uses scores.

        The sibling is the next correct response in circular order for which the prompt and the response fit
        into ``max_tokens``. The feedback is that on the response itself. Texts that contain a special token
        are not shown, because their author could use it to end the quotation. If a text that the template
        needs cannot be shown, the result is ``WithoutPrompt.NOTHING``.
        """
        return tuple(self._before(section, task, index, responses) for index in range(len(responses)))

    def can_show(self, feedback: str) -> bool:
        """Whether the feedback is not empty and contains no special token, which could end its quotation."""
        return bool(feedback) and not self.encoder.has_special_text(feedback)

    def _before(
        self, section: TeacherSection, task: Task, index: int, responses: Sequence[Response]
    ) -> TeacherReads:
        assert section.prompt is not None, "it shows something"
        own = responses[index]
        feedback = own.feedback if section.shows_feedback else None
        if feedback is not None and not self.can_show(feedback):
            return WithoutPrompt.NOTHING
        for sibling in self._siblings(index, responses) if section.shows_sibling else (None,):
            text = teacher_prompt(section.prompt, task, sibling=sibling, feedback=feedback)
            prompt_ids_P = self.encoder.encode(text)
            if len(prompt_ids_P) + own.num_tokens <= self.max_tokens:
                return prompt_ids_P
        return WithoutPrompt.NOTHING

    def _siblings(self, index: int, responses: Sequence[Response]) -> Iterator[str]:
        for step in range(1, len(responses)):
            other = responses[(index + step) % len(responses)]
            if other.is_correct and not self.encoder.has_special_text(other.text):
                yield other.text
