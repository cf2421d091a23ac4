"""What a process reward model reads: a task and the steps of a response, in the model's own tokens.

The policy's tokens are not the model's, so the text is tokenized anew here; scores go back to characters of
the text, and from there to the policy's tokens (``forgeasync.trainer.batch``).

A model wrote the response, and somebody else the task: neither may write a step tag or another token with a
meaning. Both are tokenized without any added token, so that ``<extra_0>`` in a text is a few ordinary
tokens. The tags that count are those at the places where they were put, whatever else has the same id.
"""

import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tokenizers import Tokenizer

from forgeasync.config import ProcessRewardModel

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class TagRefused(ValueError):
    """``step_tag`` is no single token."""


class TemplateRefused(ValueError):
    """``chat_template`` cannot be used with this tokenizer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaggedTokens:
    """Tokens for the model."""

    ids: tuple[int, ...]
    counted_tags: tuple[int, ...]
    """Which of the tokens with the tag's id end a step, by their number among them."""


class StepTokenizer:
    """The tokenizer of a process reward model, as its section says how to use it."""

    def __init__(self, section: ProcessRewardModel) -> None:
        """Load it.

        Raises:
            TagRefused, TemplateRefused: the section does not fit the tokenizer.
            OSError, ValueError: the folder has no tokenizer that can be read.
        """
        # transformers takes a second to import.
        from transformers import PreTrainedTokenizerFast

        # As tokenizer.json says: AutoTokenizer would build a Qwen2 tokenizer anew and drop what differs.
        whole = PreTrainedTokenizerFast.from_pretrained(section.model_path)
        self._plain = _without_added_tokens(whole.backend_tokenizer)
        tag = whole.encode(section.step_tag, add_special_tokens=False)
        if len(tag) != 1 or tag[0] == whole.unk_token_id:
            found = "no token" if whole.unk_token_id in tag else f"{len(tag)} tokens"
            raise TagRefused(f"must be one token of the model's tokenizer, where it is {found}")
        (self.tag_id,) = tag
        """Id of the step tag."""
        self._before: list[int] = []
        self._between: list[int] = []
        if section.chat_template:
            before, between = _template_parts(whole, section.system_prompt)
            self._before = whole.encode(before, add_special_tokens=False)
            self._between = whole.encode(between, add_special_tokens=False)

    def tagged(self, prompt: str, steps: Sequence[str]) -> TaggedTokens:
        """The tokens of a task and the steps of a response, a tag behind each step.

        What the chat template has behind the response is left out: scores do not depend on later tokens.
        """
        ids = [*self._before, *self._encode(prompt), *self._between]
        counted = []
        num_tags = ids.count(self.tag_id)
        for step in steps:
            of_step = self._encode(step)
            num_tags += of_step.count(self.tag_id)
            counted.append(num_tags)
            num_tags += 1
            ids += [*of_step, self.tag_id]
        return TaggedTokens(ids=tuple(ids), counted_tags=tuple(counted))

    def _encode(self, text: str) -> list[int]:
        return self._plain.encode(text, add_special_tokens=False).ids


def _without_added_tokens(tokenizer: Tokenizer) -> Tokenizer:
    """The same tokenizer, for which marks such as ``<|im_end|>`` are ordinary text."""
    described = json.loads(tokenizer.to_str())
    return Tokenizer.from_str(
        json.dumps(described | {"added_tokens": [], "post_processor": None, "truncation": None})
    )


def _template_parts(tokenizer: "PreTrainedTokenizerFast", system_prompt: str | None) -> tuple[str, str]:
    """What the chat template has before the task, and between task and response."""
    task, response = (f"content{secrets.token_hex(16)}" for _ in range(2))
    messages = [{"role": "user", "content": task}, {"role": "assistant", "content": response}]
    if system_prompt is not None:
        messages.insert(0, {"role": "system", "content": system_prompt})
    try:
        rendered = tokenizer.apply_chat_template(messages, tokenize=False)
    except Exception as error:  # any type: a template is a program
        raise TemplateRefused(f"needs a chat template that renders: {error}") from error
    assert isinstance(rendered, str), "of one conversation, not tokenized"
    before, has_task, rest = rendered.partition(task)
    between, has_response, after = rest.partition(response)
    if not has_task or not has_response or task in after or response in before + after:
        raise TemplateRefused("needs a chat template that has task and response once each, in this order")
    return before, between
