"""A small Hugging Face tokenizer for templated tasks: one token per digit or sign, one per run of words.

The fixed sentence around a problem becomes a single token, so that prompts are as short as what varies in
them.
"""

from collections.abc import Iterable
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

END = "<eos>"

PADDING = "<pad>"

UNKNOWN = "<unk>"


_TOKEN = Regex(r"[A-Za-z][A-Za-z ]*[A-Za-z]|[A-Za-z]| ?[-+=:] ?|[0-9]|[^A-Za-z0-9]")


def build_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """A tokenizer whose vocabulary is what occurs in the texts; the same texts give the same ids."""
    split = pre_tokenizers.Split(_TOKEN, behavior="isolated")
    found = {piece for text in texts for piece, _ in split.pre_tokenize_str(text)}
    vocabulary = {token: index for index, token in enumerate([PADDING, END, UNKNOWN, *sorted(found)])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = split
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, pad_token=PADDING, unk_token=UNKNOWN
    )


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json."""
    tokenizer.save_pretrained(str(folder))
