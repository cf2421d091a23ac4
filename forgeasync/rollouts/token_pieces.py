"""The text of every token of a response, decoded as the generator does; nothing is ever tokenized again.

Shape suffixes: P prompt tokens, T response tokens.
"""

import json
from collections.abc import Iterator

import numpy as np
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream
from tokenizers.pre_tokenizers import ByteLevel

INVALID_PREFIX = "Invalid prefix encountered"
"""Beginning of an error that tokenizers raise, as in ``vllm.v1.engine.detokenizer``."""

Piece = str | dict[str, str]
"""A token in JSON. A text: what the token adds to the response. ``{"bytes": hex, "text": text}``: its bytes
are no whole characters by themselves, and what it adds is another text, often none. ``{"special": name}``: it
adds no text."""


def decoded(tokenizer: Tokenizer, prompt_ids_P: np.ndarray, response_ids_T: np.ndarray) -> Iterator[str]:
    """Yield what each token adds to the text of the response; together that is the text.

    A character whose bytes are spread over several tokens is added by the last of them; special tokens add
    nothing.
    """
    # As vLLM does: the prompt's tokens decide about a space before the first word.
    stream = DecodeStream(ids=prompt_ids_P.tolist(), skip_special_tokens=True)
    for token in response_ids_T.tolist():
        try:
            text = stream.step(tokenizer, token)
        except Exception as error:
            if not str(error).startswith(INVALID_PREFIX):
                raise
            # Bytes that are no text can break a stream; vLLM begins another one, too.
            stream = DecodeStream(skip_special_tokens=True)
            text = stream.step(tokenizer, token)
        yield text or ""


class TokenPieces:
    """Says what each token of a response is, for one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._special = {number: token.content for number, token in added.items() if token.special}
        # Added tokens are texts, whatever the others are.
        self._plain = added.keys() - self._special.keys()
        # What it is pickled as: the whole tokenizer as text would have its vocabulary in it.
        decoder = {} if tokenizer.decoder is None else json.loads(tokenizer.decoder.__getstate__())
        kinds = {one["type"] for one in decoder.get("decoders", [decoder]) if "type" in one}
        self._byte_of = _byte_alphabet() if "ByteLevel" in kinds else None
        self._falls_back = "ByteFallback" in kinds

    def of_response(self, prompt_ids_P: np.ndarray, response_ids_T: np.ndarray) -> list[Piece]:
        """Return each token of a response; the texts together are the response's text."""
        texts = decoded(self._tokenizer, prompt_ids_P, response_ids_T)
        return [self._piece(token, text) for token, text in zip(response_ids_T.tolist(), texts, strict=True)]

    def of_token(self, token: int) -> Piece:
        """Return a token by itself, wherever it stands."""
        (piece,) = self.of_response(np.zeros(0, np.int32), np.array([token], np.int32))
        return piece

    def _piece(self, token: int, text: str) -> Piece:
        if token in self._special and not text:
            return {"special": self._special[token]}
        own = self._bytes(token)
        if own is None or own == text.encode():
            return text
        return {"bytes": own.hex(), "text": text}

    def _bytes(self, token: int) -> bytes | None:
        """The bytes that a token stands for; None where the vocabulary has texts."""
        if token in self._special or token in self._plain:
            return None
        name = self._tokenizer.id_to_token(token)
        if name is None:
            return None
        if self._byte_of is not None:
            known = [self._byte_of.get(character) for character in name]
            return None if None in known else bytes(one for one in known if one is not None)
        if self._falls_back and len(name) == 6 and name.startswith("<0x") and name.endswith(">"):
            return bytes.fromhex(name[3:5])
        return None


def _byte_alphabet() -> dict[str, int]:
    """The byte that each character of a byte-level vocabulary stands for.

    Bytes that are printable characters of Latin-1 stand for themselves, the others are 256, 257 and so on:
    Radford et al., "Language Models are Unsupervised Multitask Learners", 2019, ``bytes_to_unicode``.
    """
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in own]
    alphabet = {chr(byte): byte for byte in own} | {
        chr(256 + index): byte for index, byte in enumerate(others)
    }
    assert alphabet.keys() == set(ByteLevel.alphabet()), "the alphabet of tokenizers"
    return alphabet
