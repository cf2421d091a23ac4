"""Small Hugging Face tokenizers that need no training.

``build_tokenizer`` is for templated tasks. It has one token for each digit or sign, and one for each run of
words. The fixed sentence around a problem becomes one token, so prompts are short. ``character_tokenizer`` is
for any text, with one token for each character.
"""

import string
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

END = "<eos>"

PADDING = "<pad>"

UNKNOWN = "<unk>"

TURN_START, TURN_END = "<|im_start|>", "<|im_end|>"
"""Start and end marks of a turn in ChatML. The end mark ends a response."""

NUM_CHARACTER_TOKENS = 128
"""Size of the vocabulary of ``character_tokenizer``."""

_TOKEN = Regex(r"[A-Za-z][A-Za-z ]*[A-Za-z]|[A-Za-z]| ?[-+=:] ?|[0-9]|[^A-Za-z0-9]")


def build_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """Build a tokenizer whose vocabulary are the pieces of the texts. The same texts give the same ids."""
    split = pre_tokenizers.Split(_TOKEN, behavior="isolated")
    found = {piece for text in texts for piece, _ in split.pre_tokenize_str(text)}
    vocabulary = {token: index for index, token in enumerate([PADDING, END, UNKNOWN, *sorted(found)])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = split
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, pad_token=PADDING, unk_token=UNKNOWN
    )


def character_tokenizer(
    *, chat_template: bool, template_arguments: Iterable[str] = ()
) -> PreTrainedTokenizerFast:
    """Build a tokenizer of printable ASCII characters. All other characters become one unknown token.

    With ``chat_template``, the template is ChatML. It accepts ``template_arguments`` and ignores them.
    """
    ordinary = [UNKNOWN, PADDING, *sorted(set(string.printable))]
    # A model with this vocabulary can sample every id, so each id needs a text.
    fillers = [f"<|unused_{index}|>" for index in range(NUM_CHARACTER_TOKENS - len(ordinary) - 2)]
    vocabulary = {token: index for index, token in enumerate([*ordinary, *fillers])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in (TURN_START, TURN_END)])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=TURN_END, pad_token=PADDING, unk_token=UNKNOWN
    )
    if chat_template:
        read = "".join(f"{{% if {name} %}}{{% endif %}}" for name in template_arguments)
        fast.chat_template = read + _CHATML
    return fast


_CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json."""
    tokenizer.save_pretrained(str(folder))
