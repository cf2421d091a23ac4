"""Prompts as token ids: what the policy reads before a response, and what a teacher reads in its place.

A teacher's prompt can show what the policy does not know: a hint, a demonstration, the answer, a correct
response of the same group, or the reward's feedback on the response. Only the tokens before a response
differ; the response's own tokens are the policy's. Texts of models and of their code are filled in as they
are: a template inside them is not expanded.
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
    """Return the text of one sequence of tokens."""
    text = tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)
    assert isinstance(text, str), "a list of texts is that of several sequences"
    return text


class PromptEncoder:
    """Encodes prompts as they are, or as one user turn of the tokenizer's chat template."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        *,
        chat_template: bool,
        system_prompt: str | None = None,
        template_arguments: Mapping[str, int | float | bool | str] | None = None,
    ) -> None:
        """``system_prompt`` and ``template_arguments`` are for the template.

        Raises:
            ValueError: the tokenizer has no template although one is needed, or the template does not know an
                argument or refuses a system message; names the field.
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
        """The tokenizer that prompts and responses are made of."""
        return self._tokenizer.backend_tokenizer

    @classmethod
    def of_section(cls, tokenizer: PreTrainedTokenizerFast, data: DataSection) -> "PromptEncoder":
        """Build the encoder that a run's ``data`` section describes."""
        return cls(
            tokenizer,
            chat_template=data.chat_template,
            system_prompt=data.system_prompt,
            template_arguments=data.template_arguments,
        )

    def encode(self, prompt: str) -> np.ndarray:
        """Return the token ids of ``prompt``, int32, up to where the response begins."""
        if self._chat_template:
            # Rendered first and tokenized after: the template writes its special tokens itself.
            prompt = self._render(prompt)
        return np.asarray(self._tokenizer(prompt, add_special_tokens=False)["input_ids"], dtype=np.int32)

    def has_special_text(self, text: str) -> bool:
        """Whether ``text`` contains the text of a special token, as which ``encode`` would read it."""
        marks = self._tokenizer.added_tokens_decoder.values()
        return any(mark.special and mark.content in text for mark in marks)

    def text_of(self, token_id: int) -> str:
        """Return the text of one token by itself."""
        return text_of_ids(self._tokenizer, [token_id])

    def check_length(self, task: Task, *, max_context_length: int, max_response_tokens: int) -> None:
        """Raise ValueError naming ``task`` unless it leaves room for a full response (lengths in tokens)."""
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
            # Variables of the template, which its signature has no types for.
            **self._arguments,  # type: ignore[arg-type]
        )
        assert isinstance(rendered, str), "not tokenized"
        return rendered

    def _check_arguments(self) -> None:
        """Refuse an argument that the template never reads; rendering would silently ignore it."""
        # Hugging Face's renderer knows these extensions and one for the tag "generation".
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
            # Templates raise any exception for a role that they do not support.
            raise ValueError(
                f"data.system_prompt = {system_prompt[:80]!r}: the chat template refuses a system message "
                f"({type(error).__name__}: {error})"
            ) from error
        if system_prompt.strip() not in rendered:
            raise ValueError(
                f"data.system_prompt = {system_prompt[:80]!r}: the chat template leaves system messages out"
            )


class _Generation(jinja2.ext.Extension):
    """Reads the block that marks what an assistant says as its content."""

    tags = {"generation"}  # noqa: RUF012  # as jinja2 declares it

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


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
