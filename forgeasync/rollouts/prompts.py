"""Turns a problem's text into the token ids that a generator is prompted with."""

from collections.abc import Mapping, Sequence

import jinja2
import jinja2.ext
import jinja2.meta
import numpy as np
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from forgeasync.config import DataSection
from forgeasync.rollouts.task import Task


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
