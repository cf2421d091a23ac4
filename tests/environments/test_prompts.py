"""How the prompt of a task becomes tokens."""

from dataclasses import replace

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from forgeasync.rollouts import PromptEncoder
from tests.support.buffer_world import make_task

TEMPLATE = (
    "{% if messages[0].role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "<bos> {% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}"
    "{% if thinking %}think {% endif %}{% if add_generation_prompt %}model{% endif %}"
)


def make_tokenizer(template: str | None) -> PreTrainedTokenizerFast:
    words = ["<unk>", "<bos>", "system", "user", "model", "one", "two", "think", "be", "brief"]
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<bos>", unk_token="<unk>")
    tokenizer.chat_template = template
    return tokenizer


@pytest.mark.parametrize(
    ("template", "options", "words"),
    [
        # Raw text gets no special tokens.
        (None, {}, "one two"),
        (TEMPLATE, {}, "<bos> user one two model"),
        (
            TEMPLATE,
            {"system_prompt": "be brief", "template_arguments": {"thinking": True}},
            "<bos> system be brief user one two think model",
        ),
    ],
)
def test_a_prompt_ends_where_the_response_begins(
    template: str | None, options: dict[str, object], words: str
) -> None:
    tokenizer = make_tokenizer(template)
    ids = PromptEncoder(tokenizer, chat_template=template is not None, **options).encode("one two")
    assert ids.dtype == np.int32 and tokenizer.convert_ids_to_tokens(ids) == words.split()


@pytest.mark.parametrize(
    ("template", "options", "said"),
    [
        (None, {}, r"data\.chat_template"),
        (
            TEMPLATE,
            {"template_arguments": {"thinkin": True}},
            r"data\.template_arguments\.thinkin = True: .*it reads .*thinking",
        ),
        (
            "{% if messages[0].role != 'user' %}{{ raise_exception('user first') }}{% endif %}x",
            {"system_prompt": "be brief"},
            r"data\.system_prompt = 'be brief': .*user first",
        ),
        (
            "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}",
            {"system_prompt": "be brief"},
            r"data\.system_prompt = 'be brief': .*leaves",
        ),
    ],
)
def test_a_template_that_cannot_render_what_the_config_asks_for_is_refused(
    template: str | None, options: dict[str, object], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        PromptEncoder(make_tokenizer(template), chat_template=True, **options)


def test_prompts_must_leave_room_for_a_response() -> None:
    encoder = PromptEncoder(make_tokenizer(None), chat_template=False)
    task = replace(make_task(7), prompt="one two one")
    encoder.check_length(task, max_context_length=10, max_response_tokens=7)
    with pytest.raises(ValueError, match=rf"'{task.task_id}' has 3 tokens"):
        encoder.check_length(task, max_context_length=10, max_response_tokens=8)
