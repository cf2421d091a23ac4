"""Chooses the renderer of a run."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

from renderers import config_from_name

from forgeasync.config import RendererName
from forgeasync.environments.messages import ASSISTANT, show
from forgeasync.environments.rendering.family import FamilyRenderer
from forgeasync.environments.rendering.plain import PlainRenderer
from forgeasync.environments.rendering.probes import fixed_dialogues
from forgeasync.environments.rendering.renderer import MessageRenderer
from forgeasync.environments.rendering.template import TemplateRenderer
from forgeasync.rollouts import text_of_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TemplateArguments = Mapping[str, int | float | bool | str]

_NOT_BY_ITSELF = frozenset(
    # deepseek-v4 has no chat template to be compared with; gpt-oss downloads a vocabulary when it is built.
    {RendererName.AUTO, RendererName.TEMPLATE, RendererName.DEEPSEEK_V4, RendererName.GPT_OSS}
)
_NO_REASONING = re.compile(r"<think>\s*</think>\s*")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenRenderer:
    """The renderer of a run, and why it is this one."""

    renderer: MessageRenderer
    name: str
    """``plain``, or a name that ``data.renderer`` may have."""
    reason: str


def build_renderer(
    tokenizer: "PreTrainedTokenizerBase",
    *,
    chat_template: bool,
    name: RendererName = RendererName.AUTO,
    template_arguments: TemplateArguments | None = None,
) -> MessageRenderer:
    """Return the renderer that ``choose_renderer`` chooses; raises what it raises."""
    return choose_renderer(
        tokenizer, chat_template=chat_template, name=name, template_arguments=template_arguments
    ).renderer


def choose_renderer(
    tokenizer: "PreTrainedTokenizerBase",
    *,
    chat_template: bool,
    name: RendererName = RendererName.AUTO,
    template_arguments: TemplateArguments | None = None,
) -> ChosenRenderer:
    """Choose the renderer for a tokenizer; the arguments are the keys of the section ``data``.

    Raises:
        ValueError: there is no template although one is needed, or the tokenizer does not have what the named
            renderer needs, or the renderer does not know an argument; names the field.
    """
    if not chat_template:
        return ChosenRenderer(
            renderer=PlainRenderer(tokenizer), name="plain", reason="data.chat_template is false"
        )
    arguments = template_arguments or {}
    if name is RendererName.AUTO:
        return _by_comparison(tokenizer, arguments)
    reason = f"data.renderer = {name.value}"
    if name is RendererName.TEMPLATE:
        return ChosenRenderer(renderer=TemplateRenderer(tokenizer, arguments), name=name.value, reason=reason)
    try:
        family = FamilyRenderer(tokenizer, name.value, arguments)
    except ValueError as error:
        raise ValueError(f"{reason}: {error}") from error
    return ChosenRenderer(renderer=family, name=name.value, reason=reason)


def _by_comparison(tokenizer: "PreTrainedTokenizerBase", arguments: TemplateArguments) -> ChosenRenderer:
    """Choose the first family that renders a few conversations as the tokenizer's own template does."""
    template = TemplateRenderer(tokenizer, arguments)
    nearest = (-1, "")
    for name in RendererName:
        if name in _NOT_BY_ITSELF:
            continue
        for given in _variants(name, arguments):
            try:
                family = FamilyRenderer(tokenizer, name.value, given)
            except ValueError:
                # Most tokenizers lack what most families need.
                continue
            difference = first_difference(tokenizer, family, template)
            if difference is None:
                reason = "it renders as the chat template does"
                return ChosenRenderer(renderer=family, name=name.value, reason=reason)
            nearest = max(nearest, (difference[0], f"; {name.value} {difference[1]}"), key=lambda one: one[0])
    reason = f"no family that is known has this chat template{nearest[1]}"
    return ChosenRenderer(renderer=template, name=RendererName.TEMPLATE.value, reason=reason)


def _variants(name: RendererName, arguments: TemplateArguments) -> list[TemplateArguments]:
    """The arguments, and with those that templates of one family set differently where they are not told."""
    fields = type(config_from_name(name.value)).template_field_names()
    variants = [arguments]
    if "date_string" in fields and "date_string" not in arguments:
        # transformers 5.19 (utils/chat_template_utils.py, strftime_now) takes the local date.
        variants.append({**arguments, "date_string": datetime.now().strftime("%d %b %Y")})
    if "enable_thinking" in fields and "enable_thinking" not in arguments:
        variants += [{**arguments, "enable_thinking": thinks} for thinks in (False, True)]
    return variants


def first_difference(
    tokenizer: "PreTrainedTokenizerBase", family: FamilyRenderer, template: TemplateRenderer
) -> tuple[int, str] | None:
    """Return how a family renders a fixed conversation otherwise than a template, and before it how many
    alike; None: it renders all of them alike.

    An empty block of reasoning in earlier turns is no difference: families keep it where the prompt of a turn
    writes it, as what was sampled keeps it.
    """
    for number, dialogue in enumerate(fixed_dialogues()):
        try:
            expected = template.rendered_ids(dialogue.messages, dialogue.tools)
        except ValueError:
            # The template has no form for it, so the family cannot differ.
            continue
        try:
            found = family.rendered_ids(dialogue.messages, dialogue.tools)
        except ValueError as error:
            return number, f"does not render {dialogue.name}, as the template does: {error}"
        if found == expected:
            continue
        ours, theirs = (text_of_ids(tokenizer, ids) for ids in (found, expected))
        has_answers = any(message["role"] == ASSISTANT for message in dialogue.messages)
        if has_answers and _NO_REASONING.sub("", ours) == _NO_REASONING.sub("", theirs):
            continue
        start = next(
            (i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b),
            min(len(ours), len(theirs)),
        )
        start = max(0, start - 10)
        difference = f"renders {show(ours[start:])} where the template has {show(theirs[start:])}"
        return number, f"{difference} ({dialogue.name})"
    return None
