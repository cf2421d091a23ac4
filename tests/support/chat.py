"""A tokenizer of single characters with chat templates as models have them, and a model that is scripted."""

import string

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

START, END = "<|im_start|>", "<|im_end|>"

CHATML = (
    "{% for m in messages %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
STRIPPING = CHATML.replace("m['content']", "(m['content'] | trim)")
"""As Llama 3 does."""
SPACED = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}{{ ' ' + m['content'] + '<|im_end|>' }}"
    "{% else %}{{ '[INST] ' + m['content'] + ' [/INST]' }}{% endif %}{% endfor %}"
)
"""As Mistral does: no generation prompt, but a space before a turn."""
FORGETFUL = CHATML.replace(
    "m['content']", "(m['content'] if loop.last else m['content'].split('</think>')[-1])"
)
"""As Qwen3 does: without the reasoning of earlier turns."""
LAST_ONLY = CHATML.replace("messages %}", "messages[-2:] %}")
NUMBERED = CHATML.replace("m['role']", "m['role'] + (messages | length | string)")
PICKY = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + CHATML


def make_tokenizer(template: str | None, *, newline: bool = True) -> PreTrainedTokenizerFast:
    """Characters and the two special tokens of ChatML."""
    characters = sorted(set(string.printable) - (set() if newline else {"\n"}))
    vocabulary = {token: index for index, token in enumerate(["<unk>", *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(START, special=True), AddedToken(END, special=True)])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token=END)
    fast.chat_template = template
    return fast
