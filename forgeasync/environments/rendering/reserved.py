"""Keeps text that comes from outside from being read as the tokens that structure a conversation.

Tokenizers turn ``<|im_end|>`` into the token that ends a turn wherever it stands, in a tool's output or a
user's question too: whoever writes it there could end the message and speak for the model. In such messages
every text of an added token gets a word joiner (U+2060) behind its first character. It cannot be seen, and
the text no longer is the token's.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from forgeasync.environments.messages import TOOL, Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

WORD_JOINER = "\u2060"
_FROM_OUTSIDE = frozenset({"user", TOOL})


def reserved_texts(tokenizer: "PreTrainedTokenizerBase") -> tuple[str, ...]:
    """Return the texts of all added tokens, the longest first; those of one character cannot be divided."""
    texts = [text for text in tokenizer.get_added_vocab() if len(text) > 1 and not text.isspace()]
    return tuple(sorted(texts, key=lambda text: (-len(text), text)))


def without_reserved(messages: Sequence[Message], reserved: Sequence[str]) -> tuple[tuple[Message, ...], int]:
    """Return the messages with the reserved texts of outsiders divided, and how many of them there were."""
    changed, num_found = [], 0
    for message in messages:
        content = message["content"]
        if message["role"] in _FROM_OUTSIDE:
            for text in reserved:
                num_found += content.count(text)
                content = content.replace(text, text[0] + WORD_JOINER + text[1:])
        changed.append({**message, "content": content} if content != message["content"] else message)
    return tuple(changed), num_found
